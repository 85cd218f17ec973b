"""The table of options that are refused together, made of what the tests check."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tests.covering.options import ARRAYS, REFUSED, Refused

_VERBS: Final = {
    "fully_shard": "`fully_shard`",
    "replicate": "`replicate`",
    "offloaded": "`fully_shard` with `offload_policy`",
}


def _named(values: Mapping[str, str]) -> str:
    return ", ".join(f"{option}: {value}" for option, value in values.items())


def _row(each: Refused) -> str:
    under = [n for n in each.arrays if n != "offloaded" or "fully_shard" not in each.arrays]
    verbs = " and ".join(_VERBS[name] for name in under)
    why = each.why + (f"; found after a backward, since {each.late}" if each.late else "")
    return f"| {_named(each.values)} | {verbs} | `… {each.words} …` | {why} |\n"


def refused() -> str:
    """Rows of all that all ranks refuse alike, of which each is a test."""
    head = "| together | under | error | reason |\n|---|---|---|---|\n"
    return head + "".join(map(_row, REFUSED))


def multiplied() -> str:
    """The options, with the values that they have in the tests."""
    head = "| option | values |\n|---|---|\n"
    options: dict[str, dict[str, None]] = {}
    for array in ARRAYS.values():
        for option, values in array.options.items():
            options.setdefault(option, {}).update(dict.fromkeys(values))
    return head + "".join(f"| {name} | {'; '.join(values)} |\n" for name, values in options.items())
