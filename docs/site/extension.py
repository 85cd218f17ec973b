"""What the site adds to the text of pages: names become links, composable's to their pages and
torch's to torch's, and diagrams of states become pictures.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any, Final

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.ext.intersphinx import InventoryAdapter

from docs.reference import entries, methods, public_errors
from docs.site.states import picture

_NAME: Final = re.compile(r"^@?([A-Za-z_][\w.]*)(\(.*\))?$", re.S)
# what pages write for names that stand in torch's inventory in full
_SHORT: Final = {
    "nn.": "torch.nn.",
    "dist.": "torch.distributed.",
    "DTensor": "torch.distributed.tensor.DTensor",
    "DeviceMesh": "torch.distributed.device_mesh.DeviceMesh",
    "init_device_mesh": "torch.distributed.device_mesh.init_device_mesh",
    "Shard": "torch.distributed.tensor.placement_types.Shard",
    "Replicate": "torch.distributed.tensor.placement_types.Replicate",
    "DistributedDataParallel": "torch.nn.parallel.DistributedDataParallel",
    "parallelize_module": "torch.distributed.tensor.parallel.parallelize_module",
}


@cache
def own() -> dict[str, tuple[str, str]]:
    """Page and anchor of each public name and of what belongs to it."""
    found: dict[str, tuple[str, str]] = {}
    for entry in entries():
        page = f"docs/reference/{entry.file}"
        for name in (entry.name, *(f"{entry.name}.{name}" for name, _ in methods(entry.thing))):
            found[name] = (page, "" if name == entry.name else f"composable.{name}")
    for error in public_errors():
        anchor = f"composable.errors.{error.__name__}"
        for name in (error.__name__, f"errors.{error.__name__}"):
            found[name] = ("docs/reference/errors", anchor)
    return found


def _of_torch(app: Sphinx, name: str) -> str:
    for short, full in _SHORT.items():
        if name == short or (short.endswith(".") and name.startswith(short)):
            name = full + name.removeprefix(short)
    inventory = InventoryAdapter(app.env).main_inventory
    for kind in ("class", "function", "method", "attribute", "module", "exception", "data"):
        item = inventory.get(f"py:{kind}", {}).get(name)
        if item is not None:
            return str(item.uri)
    return ""


def _link(app: Sphinx, docname: str, text: str) -> str:
    match = _NAME.match(text)
    if match is None:
        return ""
    name = match[1].removeprefix("composable.")
    if name not in own():
        return _of_torch(app, name)
    page, anchor = own()[name]
    assert app.builder is not None
    if page == docname:
        return ""
    return app.builder.get_relative_uri(docname, page) + (f"#{anchor}" if anchor else "")


def link_names(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """The first mention in each section. Other links to the list of names lead to the page, too."""
    seen: set[tuple[int, str]] = set()
    for literal in list(doctree.findall(nodes.literal)):
        uri = _link(app, docname, literal.astext())
        if not uri:
            continue
        around: Any = literal.parent
        if isinstance(around, nodes.reference):
            if re.search(r"(^|/)reference\.html#", around.get("refuri", "")):
                around["refuri"] = uri
            continue
        while around is not None and not isinstance(around, nodes.section):
            if isinstance(around, (nodes.title, nodes.reference, addnodes.desc_signature)):
                break
            around = around.parent
        if isinstance(around, (nodes.title, nodes.reference, addnodes.desc_signature)):
            continue
        if (id(around), uri) in seen:
            continue
        seen.add((id(around), uri))
        reference = nodes.reference("", "", refuri=uri, internal="://" not in uri)
        literal.replace_self(reference)
        reference += literal


def draw_states(app: Sphinx, doctree: nodes.document) -> None:
    for block in list(doctree.findall(nodes.literal_block)):
        if block.get("language") == "mermaid":
            svg = f'<div class="wide">{picture(block.astext())}</div>'
            block.replace_self(nodes.raw("", svg, format="html"))


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("doctree-read", draw_states)
    app.connect("doctree-resolved", link_names)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
