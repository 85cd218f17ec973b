"""Which units stay unsharded when a forward is over: those that backward needs first. Knows no order, and no backward.

Note [Last units]
A unit whose forward has ended is freed when the next one is entered, and not before: nothing is gathered in between, so it
takes no memory that another unit wants. Who is still there when the outermost forward ends is who ran last, and the units
around it, whose backward comes first: those are not gathered again. Nobody has to guess who will be last, and all ranks that
run the same units decide alike.
The next forward frees them before it gathers anything, so it computes with what the shards say then. It may be that of another
model over the same ranks, or of a neighbour that was annotated without a module around both: otherwise units that are roots
of their own would all be kept. Units over other ranks free nothing here, since not all ranks may run them.
docs/decisions/0005-backward.md has the whole story.
"""

from __future__ import annotations

import threading
from typing import Final
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist

from composable.runtime.handle import Handle
from composable.runtime.mesh_info import MeshInfo


class LastUnits:
    """The units over the same ranks whose forwards have ended since the last one was entered."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left: list[ref[Handle]] = []

    def add(self, handle: Handle) -> None:
        """The forward of `handle` has ended, and a backward may come."""
        if not handle.kept_by:
            handle.is_last = True
            self._left.append(ref(handle))

    def free(self) -> None:
        """They are not the last ones any more."""
        if not self._left:
            return
        left, self._left = self._left, []
        for reference in left:
            handle = reference()
            if handle is not None and handle.is_last and not handle.calls.depth:
                handle.settle_after_forward()


class _Known(threading.local):
    """Models that run in several threads at once do not free each other's units."""

    def __init__(self) -> None:
        self.by_group: WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, LastUnits]] = WeakKeyDictionary()


_KNOWN: Final = _Known()


def last_units(mesh_info: MeshInfo, alone: LastUnits) -> LastUnits:
    """Those over the ranks of `mesh_info`, for a root that is planned; `alone` where a rank is by itself."""
    group = None if mesh_info.group is None else mesh_info.group()
    if group is None or mesh_info.all.size == 1:
        return alone
    return _KNOWN.by_group.setdefault(group, {}).setdefault(mesh_info.device, LastUnits())
