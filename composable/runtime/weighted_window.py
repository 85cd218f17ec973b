"""Micro-batches whose gradients become one weighted mean; knows neither units nor how gradients are weighed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final
from weakref import WeakSet

from torch import Tensor, nn

Number = float | Tensor


class Window:
    """Micro-batches whose gradients become one weighted mean.

    Attributes:
        total: the weights of all ranks, of those micro-batches so far.
        scopes: how many these were.
        members: ids of the parameters, as users see them between steps.
        active: whether a scope is open.
        more: whether that one is not the last.
        goes_on: whether more micro-batches follow.
        lost: whether an error took away what was there.
        refused: whether all ranks were told that a weight was none, before anything changed.
    """

    def __init__(self) -> None:
        self.total: Number = 0.0
        self.scopes = 0
        self.members: frozenset[int] = frozenset()
        self.active = False
        self.more = False
        self.goes_on = False
        self.lost = False
        self.refused = False

    def close(self, *, goes_on: bool) -> None:
        """A scope ends."""
        self.active, self.goes_on = False, goes_on
        if goes_on:
            _OPEN.add(self)
        else:
            _OPEN.discard(self)


_OPEN: Final[WeakSet[Window]] = WeakSet()


def unfinished(parameters: Iterable[nn.Parameter]) -> nn.Parameter | None:
    """One of `parameters` whose gradient gets more in a window that goes on."""
    if not _OPEN:  # as in every step without weights
        return None
    members = [window.members for window in _OPEN if window.goes_on and not window.lost]
    return next((p for p in parameters if p.grad is not None and any(id(p) in ids for ids in members)), None)
