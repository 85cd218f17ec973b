"""Which units stay unsharded when a forward is over: those that backward needs first. Knows no order, and no backward.

Note [Last units]
A unit whose forward has ended is freed when the next one is entered, and not before: nothing is gathered in between, so it
takes no memory that another unit wants. Who is still there when the outermost forward ends is who ran last, and the units
around it, whose backward comes first: those are not gathered again. Nobody has to guess who will be last, and all ranks that
run the same units decide alike.
What stays is there for that backward alone. Whoever else comes frees it first, and all ranks gather anew: the next forward,
which computes with what the shards say then, a scope, an explicit call, a removal. The next forward may be that of another
model over the same ranks, or of a neighbour that was annotated without a module around both: otherwise units that are roots
of their own would all be kept. Only a unit that all ranks have to gather frees others: one rank alone may enter what is there
already, or has no parameters, and units over other ranks.
docs/decisions/0005-backward.md has the whole story.
"""

from __future__ import annotations

import threading
from typing import Final
from weakref import WeakValueDictionary, ref

import torch
import torch.distributed as dist

from composable.plan.phases import Phase
from composable.runtime.handle import Handle, refuse_write
from composable.runtime.mesh_info import MeshInfo


class LastUnits(threading.local):
    """The units at one place whose forwards have ended since the last one was entered.

    Models that run in several threads at once do not free each other's units: each thread sees its own.
    """

    def __init__(self) -> None:
        self._left: list[ref[Handle]] = []

    def enter(self, handle: Handle) -> None:
        """The module of `handle` is about to be called: what is left of others is not the last any more."""
        gathers = handle.phase is not Phase.UNSHARDED and handle.parameters.takes_all_ranks
        if (gathers or handle.is_last) and not handle.kept_by:
            left = self._left
            while left:  # they are not the last ones any more
                last = left[-1]()
                if last is not None and last.is_last and not last.calls.depth and not last.kept_by:
                    last.reshard()
                left.pop()  # last: after an interrupt, or an error, it is done again
            if handle.is_last:
                free(handle)  # it was left in another thread

    def leave(self, handle: Handle) -> None:
        """The forward of `handle` has ended, and a backward may come."""
        if handle.kept_by or handle.phase is not Phase.UNSHARDED:
            return
        handle.is_last = True
        self._left.append(ref(handle))


# By ranks, with their numbers among all, and device; gone with the last root there. Asked once per root: to hash many ranks
# takes long.
_PLACES: Final[WeakValueDictionary[tuple[tuple[int, ...], torch.device], LastUnits]] = WeakValueDictionary()


def last_units_of(mesh_info: MeshInfo) -> LastUnits:
    """Those that free each other: over the same ranks on the same device, whatever their process groups are."""
    group = None if mesh_info.group is None else mesh_info.group()
    ranks = () if group is None or mesh_info.all.size == 1 else tuple(dist.get_process_group_ranks(group))
    return _PLACES.setdefault((ranks, mesh_info.device), LastUnits())


def free(handle: Handle) -> None:
    """Whoever comes is not its backward: what is there may be out of date, and other ranks may not have it."""
    if handle.is_last and not handle.kept_by:
        handle.reshard()


def refuse_writes(handle: Handle) -> None:
    """The forward around it ends, and it stays: raise if unsharded parameters were written to in place, which would be lost."""
    if not handle.is_last:
        return
    for each in handle.parameters.groups:
        if written := each.look_for_writes():
            handle.reshard()
            refuse_write(written[0], handle.name)
