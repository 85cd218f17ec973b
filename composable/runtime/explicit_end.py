"""The end of a window without a backward: gradients that units hold are reduced at once. Knows no module, and no scope."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from composable.device.collectives import Communicator
from composable.device.host_home import wait_for_traffic
from composable.device.private import in_backward
from composable.errors import PhaseError, RanksDisagreeError
from composable.model.interrupts import calls_of
from composable.runtime.accumulation import Accumulation
from composable.runtime.backward_end import BackwardEnd
from composable.runtime.handle import Handle
from composable.runtime.replicated_unit import ReplicatedUnit
from composable.runtime.root import Root
from composable.runtime.sharded_unit import ShardedUnit


class _Units:
    """Sharded units that hold gradients. A participant of an end, see `composable.runtime.backward_end`."""

    turn = -1  # before replicated ones, as in a backward

    def __init__(self, handles: Sequence[Handle]) -> None:
        self._handles = handles

    def launch_rest(self) -> None:
        for handle in self._handles:
            handle.gradients.reduce()

    def finish_backward(self) -> None:
        for handle in self._handles:
            handle.gradients.end()
        wait_for_traffic()
        for handle in self._handles:
            handle.gradients.hooks.call()

    def leave_failed_backward(self) -> None:
        for handle in self._handles:
            handle.gradients.drop()
            handle.tags.say_farewell("reduce_gradients failed")


class _Holder:
    """A unit that may hold gradients, on the side of what it communicates over."""

    def __init__(self, name: str, accumulation: Accumulation, communicator: Communicator, drop: Callable[[], None]) -> None:
        self.name = name
        self.accumulation = accumulation
        self.communicator = communicator
        self.drop = drop


@torch.no_grad()
def reduce_held(sharded: Sequence[ShardedUnit], replicated: Sequence[ReplicatedUnit]) -> None:
    """Reduce what the units hold, on all ranks. Every rank calls it for the same units."""
    _refuse_in_between(sharded, replicated)
    handles = [unit.handle for unit in sharded if unit.handle.parameters.groups]
    replicas = [unit.averaging for unit in replicated if unit.averaging.communicator.size > 1]
    for unit in replicas:
        unit.order.abort()  # if a backward raised
    counted = [handle.tags.steps for handle in handles] + [unit.communicator.sums.steps for unit in replicas]
    for steps in dict.fromkeys(counted):
        steps.end_window()  # as it may have ended on a rank that lost what it held; or ranks ran different numbers of backwards
        steps.open()
    holders = [_Holder(h.name, h.gradients.accumulation, h.mesh_info.all, h.gradients.drop) for h in handles]
    holders += [_Holder(u.name, u.reducer.local.accumulation, u.communicator, u.reducer.drop) for u in replicas]
    _compare(holders)
    end = BackwardEnd()
    held = [handle for handle in handles if handle.gradients.accumulation.passes]
    if held:
        end.join(_Units(held))
    accumulations = tuple([unit.reducer.local.accumulation for unit in replicas if unit.reducer.local.accumulation.passes])
    orders = {unit.order: None for unit in replicas if unit.reducer.local.accumulation.passes}
    try:
        for order in orders:
            order.open_without_backward(end, accumulations)
        end.run()
    except BaseException:
        end.abort()
        raise


def _refuse_in_between(sharded: Sequence[ShardedUnit], replicated: Sequence[ReplicatedUnit]) -> None:
    roots: dict[Root, None] = {unit.root: None for unit in sharded if unit.root is not None}
    named = [(unit.name, unit.modules) for unit in sharded] + [
        (unit.averaging.name, unit.parameters.modules) for unit in replicated
    ]
    running = next((name for name, modules in named if any(calls_of(module) for module in modules)), None)
    running = next((root.handles[0].name for root in roots if root.running), running)
    if in_backward() or running is not None:
        where = "a backward" if in_backward() else f"the forward of unit '{running}'"
        raise PhaseError(
            f"reduce_gradients was called inside {where}, where gradients are still to come. Call it when backward() has "
            "returned; or leave it out, and run the last backward outside of no_sync"
        )
    for root in roots:
        if root.backward.is_open:
            root.abort("its backward did not finish")


def _compare(holders: Sequence[_Holder]) -> None:
    """Raise, on every rank, if the ranks hold gradients of different backwards: nothing of them is of use then."""
    families: dict[Communicator, list[_Holder]] = {}
    for holder in holders:
        families.setdefault(holder.communicator, []).append(holder)
    found = ""
    for communicator, family in families.items():
        passes = [holder.accumulation.passes for holder in family]
        lowest, highest = communicator.min_max(passes, label="comparison of what ranks hold for reduce_gradients")
        if lowest == highest:
            continue
        rows = communicator.all_gather_ints(passes, label="exchange of what ranks hold for reduce_gradients")
        index = next(i for i, (least, most) in enumerate(zip(lowest, highest, strict=True)) if least != most)
        seen = "; ".join(f"rank {rank}: {row[index]}" for rank, row in enumerate(rows))
        found = found or f"of unit '{family[index].name}': {seen}"
    if found:
        for holder in holders:
            holder.drop()
        raise RanksDisagreeError(
            f"reduce_gradients: the ranks hold gradients of different numbers of backwards under no_sync {found}. Every rank "
            "must run the same backwards under no_sync. What was held is dropped on all ranks; clear the gradients and go on"
        )
