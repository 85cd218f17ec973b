"""The table of refusals notices each way in which a row can be wrong, and names the row."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable.comm.backends import comm_of, world_group
from composable.comm.launch import Launch
from composable.errors import MeshError, PhaseError
from tests.helpers.world import Pool
from tests.refusals import table
from tests.refusals.table import Refusals, Row, annotating, run_on_ranks, says


def _raises(error: Exception) -> None:
    raise error


def _right() -> Refusals:
    yield lambda: _raises(PhaseError("one step, two steps")), "PhaseError: one ... steps"


def _other_words() -> Refusals:
    yield lambda: _raises(PhaseError("one step")), "PhaseError: two steps"


def _another_type() -> Refusals:
    yield lambda: _raises(MeshError("one step")), "PhaseError: one step"


def _nothing_refused() -> Refusals:
    yield lambda: None, "PhaseError: one step"


def _a_module_changed() -> Refusals:
    def verb(model: nn.Module) -> None:
        model.register_buffer("added", torch.ones(1))
        raise PhaseError("one step")

    yield annotating(verb, nn.Linear(1, 1)), "PhaseError: one step"


def _what_is_legal_fails() -> Refusals:
    yield from _right()
    raise ZeroDivisionError


def _no_call() -> Refusals:
    yield from ()


def _other_words_on_rank_1() -> Refusals:
    error = PhaseError("one step" if dist.get_rank() == 0 else "two steps")
    yield lambda: _raises(error), "PhaseError: one step"


def _launches_on_rank_1_alone() -> Refusals:
    comm = comm_of(world_group(), torch.device("cpu"))
    comm.all_reduce([torch.ones(1)], Launch("sum")).wait()
    if dist.get_rank() == 1:
        comm.all_reduce([torch.ones(1)], Launch("sum"))
    yield from _right()


WRONG = {
    "other_words": (_other_words, "said:     PhaseError: one step"),
    "another_type": (_another_type, "said:     MeshError: one step"),
    "nothing_refused": (_nothing_refused, "said:     nothing was refused"),
    "a_module_changed": (_a_module_changed, "has changed the model"),
    "what_is_legal_fails": (_what_is_legal_fails, "ZeroDivisionError"),
    "no_call": (_no_call, "no call is refused"),
}
ON_RANKS = {
    "other_words_on_rank_1": (_other_words_on_rank_1, "rank 1:\nexpected: PhaseError: one step"),
    "launches_on_rank_1_alone": (_launches_on_rank_1_alone, "different collectives"),
}
ROWS = {"right": Row(_right, 2)} | {
    name: Row(program, 2) for name, (program, _) in (WRONG | ON_RANKS).items()
}


def run(names: list[str]) -> dict[str, str]:
    return table.run(ROWS, names)


@pytest.mark.unsampled
@pytest.mark.parametrize("name", WRONG)
def test_a_row_that_is_wrong_is_named(name: str) -> None:
    (found,) = run(["right", name]).items()
    assert found[0] == name
    assert WRONG[name][1] in found[1]


def test_rows_that_are_wrong_on_ranks_are_named(pool: Pool) -> None:
    expected = WRONG | ON_RANKS
    found = run_on_ranks(pool, 2, "cpu", run, list(ROWS))
    assert list(found) == list(expected)
    for name, text in found.items():
        assert expected[name][1] in text, text


def test_what_is_left_out_is_only_what_the_dots_stand_for() -> None:
    assert says("A: b ... d", "A: b c d")
    assert says("A: ... c ...", "A: c")
    assert not says("A: b", "A: b c")
    assert not says("A: ... c", "A: c d")
