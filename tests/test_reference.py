"""The API reference is complete, and so are the docstrings that it is made of."""

from __future__ import annotations

import inspect
import pkgutil
import re
from importlib import import_module
from operator import attrgetter
from types import ModuleType
from typing import Any, Final

import pytest

import composable
import composable.fsdp2
from docs.reference import (
    CHAPTERS,
    FSDP2,
    MODULES,
    documented_arguments,
    entries,
    methods,
    public_errors,
    reference,
    signature_of,
)
from docs.site.build import composed, dead_links
from docs.site.states import picture

NAMES: Final = [name for name in composable.__all__ if name not in (*MODULES, "__version__")]
OBVIOUS: Final = ("module", "self", "optimizer", "root")  # the first sentence says what they are
METHODS: Final = [
    f"{entry.name}.{method}"
    for entry in entries()
    if entry.name in NAMES
    for method, _ in methods(entry.thing)
    if method in vars(entry.thing)
]


@pytest.fixture(scope="module")
def site() -> tuple[dict[str, str], set[str]]:
    """The pages of the site and their pictures."""
    return composed()


def test_public_names_are_not_hidden_by_modules_of_the_same_name() -> None:
    for found in pkgutil.walk_packages(composable.__path__, "composable."):
        if not found.name.endswith(".__main__"):
            import_module(found.name)
    below = {found.name for found in pkgutil.iter_modules(composable.__path__)}
    # `contract` is set after its package was imported; what is loaded later could not be
    assert below.intersection(composable.__all__) == {*MODULES, "contract"}
    for name in NAMES:
        value = getattr(composable, name)
        assert callable(value), name
        assert not isinstance(value, ModuleType), name


def test_the_reference_has_every_public_name_once() -> None:
    listed = [name for names in CHAPTERS.values() for name in names]
    assert sorted(listed) == sorted(NAMES)
    text = reference()
    for name in (*NAMES, *(f"fsdp2.{name}" for name in FSDP2)):
        assert text.count(f"| [`{name}`](") == 1, name
    for error in public_errors():
        assert f"| `{error.__name__}` |" in text


def test_the_site_has_a_page_for_every_public_name_and_no_link_on_it_is_dead(
    site: tuple[dict[str, str], set[str]],
) -> None:
    texts, pictures = site
    for entry in entries():
        kind = "class" if isinstance(entry.thing, type) else "function"
        text = texts[f"docs/reference/{entry.file}.md"]
        assert f"{{py:{kind}}} composable.{entry.name}(" in text
        for name, _ in methods(entry.thing):
            assert f"}} composable.{entry.name}.{name}" in text
    # also where case does not count, as on the disks of many
    assert len({file.lower() for file in texts}) == len(texts)
    assert dead_links(texts, pictures) == []
    broken = {**texts, "docs/tour.md": "[a](nowhere.md) [b](index.md)"}
    assert dead_links(broken, pictures) == ["docs/tour.md: nowhere.md"]


def test_the_index_leads_to_every_page(site: tuple[dict[str, str], set[str]]) -> None:
    texts, _ = site
    pages = [file for file in texts if re.match(r"docs/[\w/]+\.md", file)]
    alone = [file for file in pages if texts[file].startswith("---\norphan")]
    assert [file for file in alone if "docs/reference/" not in file] == []


def test_guides_and_names_lead_to_each_other(site: tuple[dict[str, str], set[str]]) -> None:
    texts, _ = site
    assert (
        "[`no_sync`](../reference/no_sync.md)"
        in texts["docs/guides/accumulation.md"].partition("In the reference: ")[2]
    )
    assert "../guides/accumulation.md" in texts["docs/reference/no_sync.md"]


def test_states_are_drawn() -> None:
    drawn = picture("stateDiagram-v2\n    A --> B: goes\n    B --> A: comes < back\n")
    assert drawn.count("<rect") == 2
    assert "goes" in drawn
    assert "comes &lt; back" in drawn


@pytest.mark.parametrize(
    "name",
    [
        *NAMES,
        *(f"traversal.{name}" for name in composable.traversal.__all__),
        *(f"fsdp2.{name}" for name in FSDP2 if name != "FSDPModule"),
        *METHODS,
    ],
)
def test_a_docstring_explains_every_argument(name: str) -> None:
    thing: Any = attrgetter(name)(composable)
    assert inspect.getdoc(thing)
    if not isinstance(thing, property):
        arguments = [
            argument for argument in inspect.signature(thing).parameters if argument not in OBVIOUS
        ]
        assert [
            argument for argument in arguments if argument not in documented_arguments(thing)
        ] == []


def test_signatures_say_what_is_a_keyword() -> None:
    assert signature_of(composable.unshard) == "(module, *, async_op=False, recurse=True)"
    assert signature_of(composable.Policy.select) == "(self, root)"
