"""Which units' all-gathers are launched now: of the one that computes next, which is waited for, and ahead of need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from composable.plan.phases import Phase
from composable.plan.schedule import BackwardOrder, ForwardOrder
from composable.runtime.handle import Handle, gather_completed

_AT_REST: Final = (Phase.SHARDED, Phase.SHARDED_POST_FORWARD)
PREFETCH_DEPTH: Final = 1  # units gathered ahead of need; docs/decisions/0005 says what was measured


def gather_with_next(
    handles: Sequence[Handle], unit: int, order: ForwardOrder | BackwardOrder, *, saves_memory: bool = False
) -> bool:
    """Have the parameters of `unit`, and launch the all-gathers of the units that come next; those that are there stay.

    What has come of `unit` is put in its place first: the next messages get the memory that its own had, while that is in the
    caches. What is still on its way does not keep the next ones from setting out.

    Args:
        saves_memory: messages of `unit` are given back before the next ones get memory, wherever they are.

    Returns:
        Whether anything is gathered ahead that was not.
    """
    handle = handles[unit]
    if handle.phase in _AT_REST:
        handle.unshard_in_step()
    first = saves_memory or gather_completed(handle)
    if first:
        handle.wait_for_unshard()
    ahead = False
    for index in order.next_units(PREFETCH_DEPTH):
        if handles[index].phase in _AT_REST:
            handles[index].unshard_in_step()
            ahead = True
    if not first:
        handle.wait_for_unshard()
    return ahead
