"""The table of what is refused and with which words: short programs, by name.

A program yields each call that must be refused, with what it must say: the type of the error and
its message, in which `...` stands for what is left out. What the program does in between must work,
such as the nearest program that is legal.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import pytest
import torch
from torch import nn

from tests.helpers.refusals import text_of, unchanged
from tests.helpers.world import Pool, RanksFailed

Act = Callable[[], object]
Refusals = Iterator[tuple[Act, str]]


@dataclass(frozen=True)
class Row:
    """One program.

    Attributes:
        ranks: how many run it; None: the test's own process, without a group.
    """

    program: Callable[[], Refusals]
    ranks: int | None
    marks: tuple[pytest.MarkDecorator, ...] = ()


Table = dict[str, Row]
TABLE: Final[Table] = {}


def row(
    ranks: int | None = None, *marks: pytest.MarkDecorator
) -> Callable[[Callable[[], Refusals]], Callable[[], Refusals]]:
    """Let the decorated program be a row of the table."""

    def add(program: Callable[[], Refusals]) -> Callable[[], Refusals]:
        assert program.__name__ not in TABLE, program.__name__
        TABLE[program.__name__] = Row(program, ranks, marks)
        return program

    return add


def annotating(verb: Callable[..., Any], model: nn.Module, /, **options: Any) -> Act:
    """Call a verb that is to leave the module as it was."""
    return lambda: unchanged(model, lambda: verb(model, **options))


def says(expected: str, said: str) -> bool:
    parts = [re.escape(part) for part in re.split(r" ?\.\.\. ?", expected)]
    return re.fullmatch(r"[\s\S]*?".join(parts), said) is not None


def _said_by(act: Act) -> str:
    try:
        act()
    except Exception as error:
        return text_of(error)
    return "nothing was refused"


def _wrong(program: Callable[[], Refusals]) -> str:
    torch.manual_seed(0)
    count, found = 0, []
    try:
        for act, expected in program():
            count += 1
            if not says(expected, said := _said_by(act)):
                found.append(f"expected: {expected}\nsaid:     {said}")
    except Exception:
        found.append(traceback.format_exc())
    return "\n".join(found if count else ["no call is refused", *found])


def run(table: Table, names: Iterable[str]) -> dict[str, str]:
    """Of rows that are not as the table says, what is wrong."""
    wrong = {name: _wrong(table[name].program) for name in names}
    return {name: text for name, text in wrong.items() if text}


def run_on_ranks(
    pool: Pool, ranks: int, device: str, run: Callable[..., dict[str, str]], names: list[str]
) -> dict[str, str]:
    """Run all rows in one call of the workers. Where ranks hang or launch different collectives,
    run each by itself, to see in which rows they do.
    """
    try:
        of_ranks = pool.run(ranks, run, names, device=device)
    except RanksFailed as failed:
        if len(names) == 1:
            return {names[0]: str(failed)}
        alone = [run_on_ranks(pool, ranks, device, run, [name]) for name in names]
        return {name: text for each in alone for name, text in each.items()}
    wrong: dict[str, str] = {}
    for rank, found in enumerate(of_ranks):
        for name, text in found.items():
            wrong[name] = f"{wrong.get(name, '')}rank {rank}:\n{text}\n"
    return wrong
