"""The API reference is complete, and so are the docstrings that it is made of; knows public names only."""

from __future__ import annotations

import inspect
from typing import Any, Final

import pytest

import composable
from docs.reference import CHAPTERS, MODULES, documented_arguments, public_errors, reference, signature_of

NAMES: Final = [name for name in composable.__all__ if name not in (*MODULES, "__version__")]
OBVIOUS: Final = ("module", "self", "optimizer")  # what they are stands in the first sentence


def test_the_reference_has_every_public_name_once() -> None:
    told = [name for names in CHAPTERS.values() for name in names]
    assert sorted(told) == sorted(NAMES)
    page = reference()
    for name in NAMES:
        assert page.count(f"### {name}\n") == 1, name
    for error in public_errors():
        assert f"| `{error.__name__}` |" in page


@pytest.mark.parametrize("name", NAMES)
def test_a_docstring_explains_every_argument(name: str) -> None:
    thing: Any = getattr(composable, name)
    assert inspect.getdoc(thing)
    arguments = [argument for argument in inspect.signature(thing).parameters if argument not in OBVIOUS]
    assert [argument for argument in arguments if argument not in documented_arguments(thing)] == []


def test_signatures_say_what_is_a_keyword() -> None:
    assert signature_of(composable.unshard) == "(module, *, async_op=False)"
    assert signature_of(composable.Policy.select) == "(self, root, *, ignored=())"
