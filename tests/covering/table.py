"""The rows of the arrays, and what becomes of one on all ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import pytest

from composable.errors import ComposableError
from tests.covering.cover import covering, is_excluded
from tests.covering.options import ARRAYS, FAULTS, IMPOSSIBLE, REFUSED, Array, Refused
from tests.covering.run import Run
from tests.helpers.compare import anatomy
from tests.helpers.refusals import same_on_all
from tests.helpers.world import TIMEOUT, Pool

PATIENCE: Final = TIMEOUT / 2  # seconds until a row counts as hung


@dataclass(frozen=True)
class Line:
    """A row of an array, by its number there."""

    array: str
    number: int
    row: Mapping[str, str]

    @property
    def ranks(self) -> int:
        ranks: int = ARRAYS[self.array].options["mesh"][self.row["mesh"]].is_.ranks
        return ranks

    def __str__(self) -> str:
        """The values that are not the first ones."""
        usual = defaults(ARRAYS[self.array])
        others = [f"{name}: {value}" for name, value in self.row.items() if usual[name] != value]
        return f"{self.array} {self.number}: {'; '.join(others) or 'nothing else'}"


def defaults(array: Array) -> dict[str, str]:
    return {name: next(iter(values)) for name, values in array.options.items()}


def cases(name: str) -> list[Any]:
    """The rows, for a test."""
    found = []
    for line in lines(name):
        seen = fault_of(line)
        marks = [pytest.mark.xfail(reason=seen, run=False, strict=False)] if seen else []
        found.append(pytest.param(line, id=str(line), marks=marks))
    return found


@cache
def lines(name: str) -> tuple[Line, ...]:
    array = ARRAYS[name]
    options = {option: list(values) for option, values in array.options.items()}
    rows = covering(options, array.triples, exclusions(name))
    return tuple(Line(name, number, row) for number, row in enumerate(rows))


def fault_of(line: Line) -> str:
    """What is seen in a row that is not as in one process yet, or nothing."""
    faults = [each for each in FAULTS if line.array in each.arrays]
    return next((each.seen for each in faults if is_excluded(line.row, [each.values])), "")


def refusals(name: str) -> list[tuple[Line, Refused]]:
    """What is refused, each in a program that is about nothing else."""
    array = ARRAYS[name]
    rows = [each for each in REFUSED if name in each.arrays]
    return [
        (Line(name, -1 - number, {**defaults(array), **each.values}), each)
        for number, each in enumerate(rows)
    ]


def exclusions(name: str) -> list[Mapping[str, Sequence[str]]]:
    """What no row of an array has together."""
    found = [each.values for each in IMPOSSIBLE]
    found += [{n: (v,) for n, v in each.values.items()} for each in REFUSED if name in each.arrays]
    options = ARRAYS[name].options
    return [
        each
        for each in found
        if all(
            option in options and any(value in options[option] for value in of)
            for option, of in each.items()
        )
    ]


# --- on all ranks -------------------------------------------------------------------------------


def run_row(name: str, row: Mapping[str, str]) -> list[str]:
    """How a program differs from one process."""
    run = Run(ARRAYS[name], row)
    run.start()
    run.train()
    return run.found


class _Refused(Run):
    """Knows what the model was before the call that is refused."""

    def annotate(self, module: Any, **options: Any) -> None:
        self.before = self.now()
        super().annotate(module, **options)
        self.before = self.now()

    def now(self) -> Any:
        return anatomy(self.model), list(map(id, self.model.parameters()))


def run_refused(name: str, row: Mapping[str, str], late: bool) -> str:
    """The error of a program that must be refused, before it changed anything unless it is late."""
    run = _Refused(ARRAYS[name], row)
    try:
        run.start()
    except ComposableError as error:
        assert run.before == run.now()
        return f"{type(error).__name__}: {error}"
    try:
        run.train()
    except ComposableError as error:
        run.compare_parameters()
        assert late or not run.found, run.found
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was refused")


# --- from the process of tests ------------------------------------------------------------------


def failure(pool: Pool, line: Line) -> str:
    """Why a row fails, or nothing."""
    by_rank = pool.run(line.ranks, run_row, line.array, line.row, timeout=PATIENCE)
    return "\n".join(
        f"rank {rank}: {text}" for rank, found in enumerate(by_rank) for text in found[:4]
    )


def refusal(pool: Pool, line: Line, *, late: bool) -> str:
    """What all ranks say."""
    by_rank = pool.run(line.ranks, run_refused, line.array, line.row, late, timeout=PATIENCE)
    # a mesh beside others has other ranks elsewhere
    return same_on_all([re.sub(r"ranks \[[\d, ]+\]", "ranks [...]", text) for text in by_rank])
