"""Benchmarks that look into the library name what is there: a rename that forgets them is seen here, not when they run."""

from __future__ import annotations

import re
from functools import reduce
from importlib import import_module

import pytest

from docs.generate import ROOT

_PIECES = re.findall(r'"([a-z_]+\.[a-z_.]+):([A-Za-z_.]+)"', (ROOT / "benchmarks" / "inside.py").read_text())
_CONSTANTS = re.findall(
    r'^    "([A-Z_]+)": Constant\("composable\.([a-z_.]+)", "[a-z-]+", \(([\d <]+),',
    (ROOT / "benchmarks" / "constants.py").read_text(),
    re.M,
)


@pytest.mark.parametrize(("module", "path"), _PIECES, ids=[path for _, path in _PIECES])
def test_a_piece_that_is_timed_is_a_function_of_the_library(module: str, path: str) -> None:
    assert callable(reduce(getattr, path.split("."), import_module(f"composable.{module}")))


@pytest.mark.parametrize(("name", "module", "first"), _CONSTANTS, ids=[name for name, _, _ in _CONSTANTS])
def test_the_first_value_that_is_timed_is_the_library_s(name: str, module: str, first: str) -> None:
    number, _, shift = first.partition(" << ")
    assert getattr(import_module(f"composable.{module}"), name) == int(number) << int(shift or 0)


def test_there_is_something_to_check() -> None:
    assert len(_PIECES) > 10
    assert len(_CONSTANTS) > 3
