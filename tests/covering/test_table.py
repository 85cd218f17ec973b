"""The tables are whole, and a program of them that is not as in one process is reported."""

from __future__ import annotations

from itertools import combinations
from typing import Any
from unittest.mock import patch

import pytest

from tests.covering.cover import covering, is_excluded, products
from tests.covering.options import ARRAYS, FAULTS, IMPOSSIBLE, REFUSED
from tests.covering.run import Run
from tests.covering.table import Line, defaults, exclusions, lines, refusal, refusals, run_row
from tests.helpers.world import Pool, spmd


@pytest.mark.parametrize("name", ARRAYS)
def test_all_values_of_two_options_meet_and_of_some_three(name: str) -> None:
    rows, array = [line.row for line in lines(name)], ARRAYS[name]
    options = {option: list(values) for option, values in array.options.items()}
    excluded = exclusions(name)
    assert not any(is_excluded(row, excluded) for row in rows)
    three = {option: options[option] for option in options if option in array.triples}
    for some, strength in ((options, 2), (three, 3)):
        met = {each for row in rows for each in combinations(sorted(row.items()), strength)}
        assert [each for each in products(some, strength, excluded) if each not in met] == []


def test_values_that_no_row_can_have_are_named() -> None:
    options = {"a": ["0", "1"], "b": ["0", "1"], "c": ["0"]}
    with pytest.raises(ValueError, match="no row has"):
        covering(options, (), [{"a": ["1"], "c": ["0"]}])


def test_what_is_excluded_names_options_and_values_that_there_are() -> None:
    known = [(n, v) for array in ARRAYS.values() for n, vs in array.options.items() for v in vs]
    named = [(n, v) for each in (*IMPOSSIBLE, *FAULTS) for n, vs in each.values.items() for v in vs]
    named += [pair for each in REFUSED for pair in each.values.items()]
    assert [pair for pair in named if pair not in known] == []


def _twice(gradient: Any) -> Any:
    return 2 * gradient


def _missing(gradient: Any) -> None:
    return None


@pytest.mark.parametrize("name", ["fully_shard", "replicate"])
@spmd(ranks=2)
def test_gradients_that_are_twice_too_large_or_missing_are_reported(
    name: str,
) -> None:
    backwards: Any = Run._backwards
    for spoil, words in (
        (_twice, "gradient of step 2 'first.weight': off by 1 of its norm, 2 times"),
        (_missing, "gradient of step 2 'first.weight': must be of norm"),
    ):

        def spoilt(run: Run, step: int, spoil: Any = spoil) -> None:
            backwards(run, step)
            if step == 2:
                weight = run.model.first.weight
                weight.grad = spoil(weight.grad)

        with patch.object(Run, "_backwards", spoilt):
            assert words in " ".join(run_row(name, defaults(ARRAYS[name])))


@pytest.mark.parametrize(
    ("line", "expected"),
    [each for name, array in ARRAYS.items() if array.device == "cpu" for each in refusals(name)],
    ids=str,
)
def test_what_is_refused_says_why_on_all_ranks_and_changes_nothing(
    pool: Pool, line: Line, expected: Any
) -> None:
    assert expected.words in refusal(pool, line, late=bool(expected.late))
