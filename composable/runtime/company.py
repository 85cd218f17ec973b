"""All that launch over one communicator: who trains there, and what every rank may take for granted of that; launches nothing.

Note [Who else trains]
Where order alone tells collectives apart, a backward may launch sums as gradients come if nobody else trains over the same
communicator. All ranks must think alike of that: if a backward raises on all of them, those that launched at once have sums
under way that the others never launch. But a model that is dropped lives on until its rank has collected garbage, and one rank
may keep it, or a copy. So each rank goes by what was annotated and trained, which is the same on all, and not by what lives.
What lives is said behind the gradients of each backward, where another one is known: a number that is zero if nobody else is
left on this rank. The sum of it is the same everywhere. It is read once after each change (somebody was annotated or removed),
since an accelerator's host waits for it; if it is zero, all ranks forget the others, at the end of the same backward.
It is no message of its own: a rank that an interrupt kept from reading it reads the next one, and meets nobody wrongly.
"""

from __future__ import annotations

import gc
from collections.abc import Sized
from typing import Any, Final, Protocol
from weakref import WeakKeyDictionary, WeakSet, ref

from composable.device.collectives import Communicator


class Order(Protocol):
    """Some that launch in one order."""

    @property
    def kin(self) -> object:
        """It and its copies have this in common."""

    @property
    def members(self) -> Sized:
        """The reducers in it."""


class Company:
    """All that launch over one communicator. See Note [Who else trains].

    Attributes:
        line: backwards that have been opened and not closed, in the order in which that happened.
        changes: how often somebody was annotated or removed. Not counted are copies, which one rank may make for itself, and
            annotations that were taken back before anything had trained.
    """

    def __init__(self) -> None:
        self._orders: WeakSet[Order] = WeakSet()
        # How many reducers were put into orders of a kin, as far as all ranks know: those of copies are not counted.
        self._members: dict[object, int] = {}
        self._trained: dict[object, None] = {}  # kins, of which there may be copies somewhere
        self._places = 0  # that have been given away
        self._collected = 0  # at which change there was no garbage left
        self.changes = 0
        self.line: list[ref[Any]] = []

    def join(self, order: Order) -> None:
        self._orders.add(order)

    def reserve(self, count: int) -> range:
        """Places that no other reducer has. Every rank reserves the same."""
        start = self._places
        self._places += count
        return range(start, start + count)

    # --- what is the same on all ranks ------------------------------------------------------------------------------

    def enter(self, kin: object) -> None:
        """A reducer has been put into an order of that kin, which is no copy."""
        self._members[kin] = self._members.get(kin, 0) + 1
        self.changes += 1

    def leave(self, kin: object) -> None:
        """It has been taken out. If it has trained, copies may go on."""
        if kin in self._trained:
            self.changes += 1
        else:
            self._members[kin] = self._members.get(kin, 0) - 1
            self.changes -= 1  # as if it had never been there: an annotation may fail on one rank only

    def train(self, kin: object) -> None:
        """A backward of that kin is opened; it may be a copy's, and the original gone."""
        if kin not in self._trained:
            self._trained[kin] = None
            if not self._members.get(kin):
                self.enter(kin)

    def may_have_others(self, kin: object) -> bool:
        """Whether somebody of another kin may train or compute on some rank."""
        return any(count for other, count in self._members.items() if other is not kin)

    def drop_others(self, kin: object) -> None:
        """On no rank is anybody left who is of another kin."""
        self._members = {kin: self._members.get(kin, 0)}
        self._trained = {kin: None}

    # --- what is not ------------------------------------------------------------------------------------------------

    def keeps_others(self, kin: object) -> bool:
        """Whether somebody of another kin is left on this rank."""
        if self._finds_others(kin) and self._collected != self.changes:
            gc.collect()
            self._collected = self.changes
        return self._finds_others(kin)

    def _finds_others(self, kin: object) -> bool:
        orders = list(self._orders)  # they may go meanwhile
        return any(len(order.members) > 0 for order in orders if order.kin is not kin)


_COMPANIES: Final[WeakKeyDictionary[Communicator, Company]] = WeakKeyDictionary()


def company_of(communicator: Communicator) -> Company:
    """Of all that launch over it."""
    return _COMPANIES.setdefault(communicator, Company())
