"""When a unit's own messages land, and when those of the next one are launched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from composable import fully_shard
from composable.device.collectives import communicators_wrapped_by
from composable.device.memory import HOST_MEMORY
from composable.device.private import CAN_SWAP
from composable.plan.phases import Phase
from composable.plan.schedule import ForwardOrder
from composable.runtime.prefetch import gather_with_next
from tests.helpers.communicators import Impatient, LastMoment
from tests.helpers.world import Pool


class _Work:
    def __init__(self, come: bool) -> None:
        self._come = come

    def progress(self) -> bool:
        return self._come


class _Unit:
    """As much of a handle as gathers need."""

    def __init__(self, name: str, come: bool, log: list[str]) -> None:
        self.phase = Phase.SHARDED
        self._works: list[_Work] = []
        self._name, self._come, self._log = name, come, log

    def unshard_in_step(self) -> None:
        self.phase = Phase.GATHERING
        self._works = [_Work(True), _Work(self._come)]
        self._log.append(f"launch {self._name}")

    def wait_for_unshard(self) -> None:
        self.phase = Phase.UNSHARDED
        self._works = []
        self._log.append(f"wait for {self._name}")


@pytest.mark.parametrize("come", [True, False])
@pytest.mark.parametrize("saves_memory", [True, False])
def test_what_has_come_lands_first_and_what_has_not_holds_nobody_up(come: bool, saves_memory: bool) -> None:
    log: list[str] = []
    units: Any = [_Unit(name, come, log) for name in "abc"]
    order = ForwardOrder()
    for unit in range(3):
        order.record(unit)
    order.complete()
    for unit in range(3):
        order.record(unit)
        gather_with_next(units, unit, order, saves_memory=saves_memory)
    first = come or saves_memory
    both = [["wait for a", "launch b"], ["wait for b", "launch c"]]
    if not first:
        both = [list(reversed(each)) for each in both]
    assert log == ["launch a", *both[0], *both[1], "wait for c"]


def _blocks(come: bool) -> int:
    """How many blocks of host memory six units take turns in."""
    HOST_MEMORY.clear()
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(24, 24) for _ in range(6)])
    with communicators_wrapped_by(Impatient if come else LastMoment):
        fully_shard(model, policy={nn.Linear})
    for _ in range(3):
        model(torch.ones(2, 24)).sum().backward()
        model.zero_grad()
    return sum(len(free_list.blocks) for free_list in list(HOST_MEMORY._free_lists.values()))


@pytest.mark.beyond_sim("an accelerator's allocator keeps its memory")
@pytest.mark.skipif(not CAN_SWAP, reason="this torch cannot swap the memory of storages, so the allocator is the pool")
@pytest.mark.parametrize(("come", "blocks"), [(True, 5), (False, 6)])
def test_units_take_turns_in_few_blocks(pool: Pool, come: bool, blocks: int) -> None:
    """The fewer there are, the more of them stay in the caches: the parameters of the unit that computes and of the one that
    stays for backward, two reductions, and the message of the next unit, and of this one if that is still on its way."""
    assert pool.run(2, _blocks, come) == [blocks, blocks]
