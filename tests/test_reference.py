"""The API reference is complete, and so are the docstrings that it is made of."""

from __future__ import annotations

import inspect
import pkgutil
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
    public_errors,
    reference,
    signature_of,
)

NAMES: Final = [name for name in composable.__all__ if name not in (*MODULES, "__version__")]
OBVIOUS: Final = ("module", "self", "optimizer", "root")  # the first sentence says what they are
METHODS: Final = [
    f"{name}.{method}"
    for name in NAMES
    if isinstance(getattr(composable, name), type)
    for method, value in vars(getattr(composable, name)).items()
    if not method.startswith("_") and (inspect.isfunction(value) or isinstance(value, property))
]


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
    page = reference()
    for name in (*NAMES, *(f"fsdp2.{name}" for name in FSDP2)):
        assert page.count(f"### {name}\n") == 1, name
    for error in public_errors():
        assert f"| `{error.__name__}` |" in page


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


def test_methods_and_properties_are_among_what_is_checked() -> None:
    page = reference()
    for name in (
        "OptimizerInBackward.step",
        "OptimizerInBackward.remove",
        "HostOffload.restore",
        "Policy.select",
    ):
        assert name in METHODS
    for name in METHODS:
        assert f"**`{name}" in page, name


def test_signatures_say_what_is_a_keyword() -> None:
    assert signature_of(composable.unshard) == "(module, *, async_op=False, recurse=True)"
    assert signature_of(composable.Policy.select) == "(self, root)"
