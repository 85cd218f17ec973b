"""The page of settings has every constant that tunes, and its value, and every environment variable; knows no reason."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from docs.generate import ROOT

_CONSTANT = re.compile(r"^(_?[A-Z][A-Z_]*): Final(?:\[\w+\])? = ([\d_]+(?:\.\d+| << \d+)?)(?:  #|$)", re.M)
_VARIABLE = re.compile(r"environ(?:\.get\(|\[)['\"](\w+)['\"]|\"(COMPOSABLE_[A-Z_]+)\"")
# What memory and messages look like: right or wrong, and neither fast nor slow.
_FORMATS = (
    "_ALIGN", "_ALIGNED", "_BOARD_AT", "_CACHE_LINE", "_DIGESTS", "_GRAIN", "_HALF", "_MODULUS", "_PADDING", "_PLACES",
    "_REGATHERS", "_ROOM", "_ROOM_FOR_ERRORS"
)  # fmt: skip
_PAGE = (ROOT / "docs" / "settings.md").read_text()


def _sources() -> Iterator[tuple[str, str]]:
    for path in sorted((ROOT / "composable").rglob("*.py")):
        room = path.relative_to(ROOT / "composable").as_posix()
        if not room.startswith("demo/"):
            yield room, path.read_text()


def _value(written: str) -> float:
    if "." in written:
        return float(written)
    number, _, shift = written.partition(" << ")
    return int(number) << int(shift or 0)


def as_words(value: float) -> str:
    """A number as the page has it: 2097152 is 2 MiB."""
    if isinstance(value, float):
        return str(value)
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if value >= 1 << shift and value % (1 << shift) == 0:
            return f"{value >> shift} {unit}"
    return str(value)


CONSTANTS = [
    (room, name, _value(value)) for room, text in _sources() for name, value in _CONSTANT.findall(text) if name not in _FORMATS
]


@pytest.mark.parametrize(("room", "name", "value"), CONSTANTS, ids=[f"{name} in {room}" for room, name, _ in CONSTANTS])
def test_the_page_has_a_constant_with_its_value(room: str, name: str, value: float) -> None:
    row = re.search(rf"^\| `{name}` in `{re.escape(room)}` \| ([^|]+) \|", _PAGE, re.M)
    assert row is not None, f"docs/settings.md does not tell of {name} in {room}"
    words = as_words(value)
    assert re.match(rf"(?:{re.escape(words)}|{value})\b", row[1]), f"{name} is {words}, the page says {row[1]}"


def test_the_page_tells_of_no_constant_that_is_gone() -> None:
    told = re.findall(r"^\| `([A-Z_]+)` in `([\w/.]+)` \|", _PAGE, re.M)
    assert sorted(told) == sorted((name, room) for room, name, _ in CONSTANTS)


def test_the_page_has_every_variable_of_the_environment() -> None:
    found = sorted({first or second for _, text in _sources() for first, second in _VARIABLE.findall(text)})
    assert found == ["COMPOSABLE_SEPARATE_REDUCTIONS", "COMPOSABLE_SHARED_MEMORY", "WORLD_SIZE"]
    assert all(f"`{name}`" in _PAGE for name in found)
