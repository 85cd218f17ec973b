"""The comms of `tests/helpers/communicators.py` move what the comms that they stand for move, as late or early as they say."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Final

import pytest
import torch

from composable.comm import Comm, comm_of, comms_wrapped_by, world_group
from tests.helpers.communicators import (
    Delayed,
    Impatient,
    LastMoment,
    Log,
    Recording,
    Slow,
    all_accelerators,
    all_ordered,
)
from tests.helpers.world import Pool, spmd

CPU = torch.device("cpu")
WRAPPERS: Final[dict[str, Callable[[Comm], Comm]]] = {
    "recording": partial(Recording, log=Log()),
    "slow": partial(Slow, rank=1, seconds=0.01),
    "impatient": Impatient,
    "last moment": LastMoment,
    "delayed": partial(Delayed, draw=random.Random(0)),
    "ordered": all_ordered,
    "accelerators": all_accelerators,
}


def _moves(name: str) -> None:
    with comms_wrapped_by(WRAPPERS[name]):
        comm = comm_of(world_group(), CPU)
    whole, out, total = torch.zeros(4), torch.zeros(2), torch.ones(3)
    work = comm.all_gather([(whole, torch.full((2,), comm.rank + 1.0))], "all-gather")
    again = comm.all_reduce([total], "sum", 0.25)
    work.wait()
    assert whole.tolist() == [1.0, 1.0, 2.0, 2.0]
    comm.reduce_scatter([(out, whole)], "reduction", 0.5).wait()
    again.wait()
    assert out.tolist() == [comm.rank + 1.0] * 2
    assert total.tolist() == [0.5] * 3
    assert comm.all_gather_ints([comm.rank], "") == [[0], [1]]
    comm.broadcast([out], "", src=1)
    assert out.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrapped_comms_move_the_same(pool: Pool, name: str) -> None:
    pool.run(2, _moves, name)


@spmd(ranks=2)
def test_a_log_tells_what_is_in_flight() -> None:
    log = Log()
    with comms_wrapped_by(lambda comm: Recording(comm, log)):
        comm = comm_of(world_group(), CPU)
    first = comm.all_reduce([torch.ones(1)], "a")
    comm.all_reduce([torch.ones(1)], "b").wait()
    first.wait()
    assert log.labels() == ["a", "b"]
    assert log.while_in_flight("a", "launch") == ["a", "b"]


@spmd(ranks=2)
def test_results_that_come_at_the_last_moment_are_nan_before() -> None:
    comm = LastMoment(comm_of(world_group(), CPU))
    whole = torch.zeros(2)
    work = comm.all_gather([(whole, torch.ones(1))], "")
    assert whole.isnan().all()
    work.wait()
    assert whole.tolist() == [1.0, 1.0]
