"""Which units' all-gathers are launched now: of the one that computes next, and ahead of need; waits for none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from composable.plan.phases import Phase
from composable.plan.schedule import BackwardOrder, ForwardOrder
from composable.runtime.handle import Handle

PREFETCH_DEPTH: Final = 1  # units gathered ahead of need; docs/decisions/0005 says what was measured


def gather_ahead(handles: Sequence[Handle], unit: int, order: ForwardOrder | BackwardOrder) -> None:
    """Launch what is not there yet: the all-gather of `unit`, and those of the units that come next."""
    for index in (unit, *order.next_units(PREFETCH_DEPTH)):
        handle = handles[index]
        if handle.phase is Phase.SHARDED or handle.phase is Phase.SHARDED_POST_FORWARD:
            handle.unshard_in_step()
