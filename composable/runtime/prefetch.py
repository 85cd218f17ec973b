"""Which units' all-gathers are launched now: of the one that computes next, which is waited for, and ahead of need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from composable.plan.phases import Phase
from composable.plan.schedule import BackwardOrder, ForwardOrder
from composable.runtime.handle import Handle

PREFETCH_DEPTH: Final = 1  # units gathered ahead of need; docs/decisions/0005 says what was measured


def gather_with_next(
    handles: Sequence[Handle], unit: int, order: ForwardOrder | BackwardOrder, *, saves_memory: bool = False
) -> None:
    """Have the parameters of `unit`, and launch the all-gathers of the units that come next; those that are there stay.

    Args:
        saves_memory: messages of `unit` are given back before the next ones get memory.
    """
    for index in (unit, *order.next_units(PREFETCH_DEPTH)):
        handle = handles[index]
        if handle.phase is Phase.SHARDED or handle.phase is Phase.SHARDED_POST_FORWARD:
            handle.unshard_in_step()
        if saves_memory and index == unit:
            handle.wait_for_unshard()
    if not saves_memory:
        handles[unit].wait_for_unshard()
