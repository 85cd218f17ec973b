"""The API reference, made of signatures and docstrings: a list of names on `reference.md`, and a
page for each name on the site.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import composable
from composable import errors, forecast

CHAPTERS: Final[dict[str, tuple[str, ...]]] = {
    "Verbs": (
        "fully_shard",
        "replicate",
        "apply_tp_plan",
        "declare_part",
        "checkpoint",
        "offload_activations",
        "remove",
    ),
    "Around annotated modules": (
        "unshard",
        "reshard",
        "keep_unsharded",
        "register_forward_method",
        "reset",
    ),
    "Accumulation of gradients": ("no_sync", "reduce_gradients"),
    "Communication hooks": ("register_comm_hook",),
    "State": (
        "materialize",
        "summon_full_params",
        "full_state_dict",
        "stream_full",
        "Streamed",
        "offload_to_host",
        "HostOffload",
        "export",
        "load",
        "EMA",
        "rebind_optimizer",
        "refresh",
    ),
    "Inspection": ("describe", "registry"),
    "Policies": (
        "Policy",
        "ModuleWrapPolicy",
        "SizePolicy",
        "NamePolicy",
        "CustomPolicy",
        "ModelPolicy",
    ),
    "Precision and memory": ("MixedPrecisionPolicy", "CPUOffloadPolicy"),
    "Optimizers": (
        "step_on_shards",
        "step_on_matrices",
        "apply_optimizer_in_backward",
        "OptimizerInBackward",
        "clip_grad_norm_",
    ),
    "Ranks that are not alike": ("join", "joinable", "skipped"),
    "One rank raises": ("together",),
    "What goes wrong in a step": ("watch", "Watch"),
    "Ranks that train apart": (
        "average_parameters",
        "PeriodicAverager",
        "HierarchicalAverager",
        "local_steps",
        "LocalSteps",
    ),
    "Verbs of your own": ("contract", "on_undo"),
}
# of `composable.fsdp2`; its other names are torch's own
FSDP2: Final = (
    "fully_shard",
    "FSDPModule",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "install",
    "Installation",
)
MODULES: Final = ("errors", "traversal")  # the rest of the public names, with chapters of their own

_SECTION: Final = re.compile(r"^(Args|Returns|Raises|Attributes|Example|Examples)::?$")
_ENTRY: Final = re.compile(r"^(\w[\w.]*): (.*)$")


@dataclass(frozen=True)
class Entry:
    """A public name with a page of its own on the site."""

    name: str  # as users write it behind `composable.`
    thing: Any

    @property
    def file(self) -> str:
        """The page's name, which differs from all others also where case does not count."""
        alike = self.name.lower() in (name.lower() for name in _listed() if name != self.name)
        return f"{self.name}-class" if alike and isinstance(self.thing, type) else self.name

    @property
    def summary(self) -> str:
        return (inspect.getdoc(self.thing) or "").partition("\n")[0]


@cache
def _listed() -> tuple[str, ...]:
    return tuple(name for names in chapters().values() for name in names)


@cache
def chapters() -> dict[str, tuple[str, ...]]:
    """All names with a page, by the chapters of the reference."""
    return {
        **CHAPTERS,
        "traversal": tuple(f"traversal.{name}" for name in composable.traversal.__all__),
        "forecast": tuple(f"forecast.{name}" for name in forecast.__all__ if name != "DEVICES"),
        "fsdp2": tuple(f"fsdp2.{name}" for name in FSDP2),
    }


def entry(name: str) -> Entry:
    return Entry(name, attrgetter(name)(composable))


def entries() -> list[Entry]:
    """In the order of the reference."""
    return [entry(name) for name in _listed()]


def reference(target: Callable[[Entry], str] | None = None) -> str:
    """The page `reference.md` below its first paragraph: names and what they do.

    `target` says where the link of a name leads; None: to the file that holds the docstring.
    """
    lines: list[str] = []
    for title, names in chapters().items():
        module = vars(composable).get(title)
        lines += [f"## {title}", ""]
        if module is not None:
            lines += [*_paragraphs(module), ""]
        lines += ["| name | what it does |", "|---|---|"]
        for found in map(entry, names):
            link = (target or _source)(found)
            lines.append(f"| [`{found.name}`]({link}) | {_cell(found.summary)} |")
        lines.append("")
    lines += ["## errors", "", *_paragraphs(errors), ""]
    lines += ["| error | is also | meaning |", "|---|---|---|"]
    for error in public_errors():
        kinds = ", ".join(f"`{base}`" for base in _kinds(error))
        meaning = _cell((inspect.getdoc(error) or "").replace("\n", " "))
        lines.append(f"| `{error.__name__}` | {kinds or '`Exception`'} | {meaning} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _kinds(error: type[Exception]) -> list[str]:
    plain = (Exception, BaseException, object)
    return [base.__name__ for base in error.__mro__[1:] if base not in plain]


def _source(entry: Entry) -> str:
    file = Path(inspect.getsourcefile(inspect.unwrap(entry.thing)) or "").resolve()
    return f"../{file.relative_to(Path(composable.__file__).resolve().parent.parent)}"


def public_errors() -> list[type[Exception]]:
    """In the order of their file."""
    return [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, Exception)
    ]


def signature_of(thing: Any) -> str:
    """How it is called, without types: the text below has them."""
    parts, keyword_only = [], False
    for parameter in inspect.signature(thing).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            parts.append("*")
            keyword_only = True
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        keyword_only = keyword_only or parameter.kind is parameter.VAR_POSITIONAL
        parts.append(f"{stars}{parameter.name}{default}")
    return f"({', '.join(parts)})"


def documented_arguments(thing: Any) -> list[str]:
    """The names that its docstring explains."""
    text = inspect.getdoc(thing) or ""
    section = text.partition("\nArgs:\n")[2]
    names = []
    for line in section.splitlines():
        if line and not line.startswith(" "):
            break
        found = re.match(r"    (\w[\w, ]*): ", line)
        if found is not None:
            names += found[1].split(", ")
    return names


def page(entry: Entry, below: str = "") -> str:
    """The site's page of one name, in the Markdown of MyST; `below` stands at its end."""
    kind = "class" if isinstance(entry.thing, type) else "function"
    package, _, short = f"composable.{entry.name}".rpartition(".")
    lines = [
        f"# {entry.name}",
        "",
        "```python",
        f"from {package} import {short}",
        "```",
        "",
        *_directive(kind, f"composable.{entry.name}{signature_of(entry.thing)}", entry.thing),
    ]
    for name, value in methods(entry.thing):
        kind, called = "property", ""
        if inspect.isfunction(value):
            kind, called = "method", re.sub(r"^\(self(, )?", "(", signature_of(value))
        full = f"composable.{entry.name}.{name}"
        lines += _directive(kind, f"{full}{called}", getattr(entry.thing, name))
    return "\n".join([*lines, below])


def page_of_errors() -> str:
    """The site's page of all errors."""
    lines = ["# errors", "", *_paragraphs(errors), ""]
    for error in public_errors():
        kinds = ", ".join(f"`{base}`" for base in _kinds(error))
        lines += _directive("exception", f"composable.errors.{error.__name__}", error)
        lines[-2:-2] = ["", f"Is also: {kinds}."] if kinds else []
    return "\n".join(lines)


def _directive(kind: str, signature: str, thing: Any) -> list[str]:
    return [f":::::{{py:{kind}}} {signature}", "", *_paragraphs(thing), ":::::", ""]


def methods(thing: Any) -> list[tuple[str, Any]]:
    """The public methods and properties of a class, with those of its private bases."""
    if not isinstance(thing, type):
        return []
    bases = [base for base in reversed(thing.__mro__[1:]) if base.__name__.startswith("_")]
    table = {name: value for base in (*bases, thing) for name, value in vars(base).items()}
    return [
        (name, value)
        for name, value in table.items()
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, property))
    ]


def _paragraphs(thing: Any) -> list[str]:
    """A docstring as Markdown: arguments become lists, examples become code."""
    return list(_converted((inspect.getdoc(thing) or "").splitlines()))


def _converted(text: list[str]) -> Iterator[str]:
    index = 0
    while index < len(text):
        section = _SECTION.match(text[index])
        if section is None:
            yield text[index]
            index += 1
            continue
        body = []
        index += 1
        while index < len(text) and (not text[index] or text[index].startswith(" ")):
            body.append(text[index])
            index += 1
        yield from _section(section[1], inspect.cleandoc("\n" + "\n".join(body)).splitlines())
        if index < len(text):
            yield ""


def _section(title: str, body: list[str]) -> Iterator[str]:
    yield f"**{title}**"
    yield ""
    if title.startswith("Example"):
        yield "```pycon" if body[0].startswith(">>>") else "```python"
        yield from body
        yield "```"
        return
    for line in body:
        entry = None if line.startswith(" ") else _ENTRY.match(line)
        if entry is not None:
            yield f"* `{entry[1]}`: {entry[2]}"
        elif title == "Returns" or not line.startswith(" "):
            yield line
        else:
            yield f"  {line.strip()}"
