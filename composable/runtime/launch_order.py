"""Reducers that take part in backwards together, and the one order in which they launch; knows neither parameters nor hooks.

Note [One order]
Where collectives are told apart by their order alone, every rank must launch the same ones over a communicator, in one order.
Reducers of units below one annotated module take part in the same backwards on every rank, so they can share a communicator: a
reducer launches only when all before it have launched everything, whichever gradients come first on this rank. At the end of
backward what is left is launched in this order, and waited for. Only then come checks, agreements and rows of sparse
gradients, reducer by reducer: whether there are any follows from what all ranks have been told.
Where messages carry tags a reducer is in an order of its own.
A copy of a model communicates over the same, in an order of its own: the one that a backward came to first launches first.
docs/decisions/0013-launch-points.md tells why units side by side cannot be in one. Where they share a communicator all the
same, as on accelerators, each has an order of its own, and launches at the end of a backward only: what it could launch before
depends on its gradients, and another one may be in a backward inside of this one. See Note [Who else trains].
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Sequence, Sized
from functools import partial
from operator import methodcaller
from typing import Any, Final, Protocol
from weakref import ref

import torch

from composable.device.collectives import Communicator
from composable.errors import CommunicationError
from composable.model.transaction import on_undo
from composable.runtime.accumulation import Accumulation
from composable.runtime.backward_end import BackwardEnd, end_of_backward, gone
from composable.runtime.bucket import Bucket
from composable.runtime.buckets import Buckets, keep_others
from composable.runtime.company import company_of
from composable.runtime.mesh_info import MeshInfo


class Member(Protocol):
    """A reducer."""

    turn: int

    @property
    def hooks(self) -> Sized:
        """Those that tell of gradients; none where nobody wants to know of backwards."""

    @property
    def buckets(self) -> Buckets:
        """What it launches in every backward."""

    def begin(self, others: bool, only: Container[Accumulation] | None = None) -> None:
        """A backward has been opened: what is not here at its end counts as zero.

        Args:
            others: whether this rank keeps some that are in no order of this kin.
            only: there is no backward; those whose accumulation is among these launch what they hold.
        """

    def conclude(self) -> None:
        """All sums are there: tell other ranks, and let them tell, whatever is left."""

    def refuse_others(self) -> None:
        """Raise if what it launches is not what another rank launches, as far as that has said so."""

    def lose(self) -> None:
        """The backward raised: the next gradient belongs to another one."""

    def close(self) -> None:
        """Back to the state before a backward."""

    def deliver(self) -> None:
        """Hand over the gradients."""

    def drop(self) -> None:
        """After an error: give up what is in flight, and forget what is held."""


_LAUNCH_COMPLETE: Final = methodcaller("launch_complete")
_LAUNCH_REST: Final = methodcaller("launch_rest")


class LaunchOrder:
    """Some reducers that take part in each backward together, in the order in which they launch. See Note [One order].

    Args:
        original: the order that this one is a copy of.

    Attributes:
        members: the reducers, in this order.
        communicator: over which all of them communicate.
        company: all that launch over that.
        backward: the one of this order that has been opened and not closed: it runs, or has raised and not been forgotten.
        kin: it and its copies have this in common.
        agreed: the last change in the company of which all ranks have said whether they keep others.
    """

    def __init__(self, communicator: Communicator, original: LaunchOrder | None = None) -> None:
        self.communicator = communicator
        self.kin: object = object() if original is None else original.kin
        self._is_copy = original is not None
        self.company = company_of(communicator)
        self.company.join(self)
        self.agreed = -1
        self._places: dict[int, Member] = {}
        self.members: tuple[Member, ...] = ()
        self.backward: OrderedBackward | None = None

    def put(self, place: int, member: Member) -> None:
        """From here on `member` launches behind those at lower places. Done between backwards."""
        if place not in self._places and not self._is_copy:
            self.company.enter(self.kin)
        self._places[place] = member
        self._sort()

    def take_out(self, place: int) -> None:
        if self._places.pop(place, None) is not None and not self._is_copy:
            self.company.leave(self.kin)
        self._sort()

    def __len__(self) -> int:
        return len(self.members)

    def _sort(self) -> None:
        self.members = tuple(self._places[place] for place in sorted(self._places))

    def __deepcopy__(self, memo: dict[int, Any]) -> LaunchOrder:
        twin = memo[id(self)] = LaunchOrder(self.communicator, self)
        return twin  # who is copied, too, puts a reducer of its own there

    # --- backward ---------------------------------------------------------------------------------------------------

    def open(self, *_: Any) -> None:
        """Backward has reached the module of one of them, or one of its parameters: all of them take part."""
        if self.backward is not None and self.backward.end() is None:
            self.abort()
        if self.backward is None and any(member.hooks for member in self.members):
            try:
                self._open(end_of_backward())
            except BaseException:
                self.lose_backward()
                raise

    def open_without_backward(self, end: BackwardEnd, held: Container[Accumulation]) -> None:
        """Let members reduce what they hold at `end`, which is no backward's."""
        self.abort()
        self._open(end, held)

    def _open(self, end: BackwardEnd, only: Container[Accumulation] | None = None) -> None:
        if self.communicator.capabilities.ordered:
            self.company.train(self.kin)
        steps, backward = self.communicator.sums.steps, OrderedBackward(self, ref(end))
        if end.join(backward, steps, backward.launch_again):
            steps.look_ahead([self.communicator.presence])
        self.backward = backward  # before anything changes: whoever finds it open, and no backward, cleans up
        self.company.line.append(ref(backward))
        others = not backward.launches_early and self.company.keeps_others(self.kin)
        for member in self.members:
            member.begin(others, only)

    def lose_backward(self) -> None:
        """It was about to be opened when something was raised: its end is to tell the other ranks."""
        backward = self.backward or OrderedBackward(self, gone)
        backward.end = gone
        end_of_backward().join(backward, self.communicator.sums.steps)
        self.backward = backward
        self.note_interrupt()

    def note_interrupt(self) -> None:
        """An error is on its way out of a hook."""
        if not isinstance(sys.exception(), Exception):
            self.communicator.sums.steps.behind = True

    def launch_complete(self) -> None:
        """Launch what may be launched by now."""
        if self.backward is not None and self.backward.launches_early:
            self.backward.launch_complete()

    def close(self) -> None:
        """Back to the state before a backward; what is in flight has been waited for."""
        for member in self.members:
            member.close()
        backward = self.backward
        line = self.company.line
        line[:] = [reference for reference in line if reference() not in (backward, None)]
        self.backward = None  # last: who is interrupted before finds that it is to be done again

    def abort(self) -> None:
        """If a backward raised: give up what is in flight and forget it."""
        if self.backward is None:
            return
        for member in self.members:
            member.drop()
        self.close()


class OrderedBackward:
    """One backward of an order: who launches next, and what follows its end.

    A participant of the end of a backward, see `composable.runtime.backward_end`.

    Attributes:
        end: of autograd's backward, as long as that runs.
        launches_early: whatever is complete, and not at the end only.
    """

    __slots__ = ("__weakref__", "_first", "_order", "end", "launches_early")

    def __init__(self, order: LaunchOrder, end: Callable[[], BackwardEnd | None]) -> None:
        self._order = order
        self.end = end
        ordered, company = order.communicator.capabilities.ordered, order.company
        self.launches_early = not (ordered and company.may_have_others(order.kin))
        self._first = 0  # of the members that have not launched everything

    @property
    def turn(self) -> int:
        return min(member.turn for member in self._order.members)

    @property
    def _is_open(self) -> bool:
        return self._order.backward is self

    @torch.no_grad()
    def launch_complete(self) -> None:
        """Launch what may be launched by now."""
        self._launch(_LAUNCH_COMPLETE)

    @torch.no_grad()
    def launch_rest(self) -> None:
        """Backward is at its end: what has not arrived counts as zero."""
        if self._is_open:
            self._launch(_LAUNCH_REST)

    def _launch(self, launch: Callable[[Buckets], None]) -> None:
        for backward in self._up_to_this():
            for member in backward._order.members[backward._first :]:
                launch(member.buckets)
                if not member.buckets.has_launched:
                    return
                backward._first += 1

    def _up_to_this(self) -> Sequence[OrderedBackward]:
        """Those over the same communicator, of copies, that this backward came to before this one; and this one."""
        end = self.end()
        before = []
        for reference in self._order.company.line:
            backward = reference()
            if backward is self:
                break
            if backward is not None and end is not None and backward.end() is end and backward._order.kin is self._order.kin:
                before.append(backward)
        return (*before, self)

    @torch.no_grad()
    def launch_again(self) -> None:
        """What has been launched belongs to another step."""
        for member in self._order.members:
            member.buckets.launch_again()

    @torch.no_grad()
    def finish_backward(self) -> None:
        """See `composable.runtime.backward_end`: everybody is about to launch the same, in this order."""
        if not self._is_open:
            return
        for backward in self._up_to_this():
            backward._finish_sums()
        order = self._order
        if not self.launches_early and order.agreed != order.company.changes:
            self._agree_on_others()
        for member in order.members:
            member.conclude()
        order.close()
        order.communicator.sums.steps.behind = False
        for member in order.members:
            member.deliver()

    def _agree_on_others(self) -> None:
        """Read whether some rank keeps others. All ranks come to it in the same backward."""
        order = self._order
        for member in order.members:
            others = keep_others(member.buckets)
            if others is not None:
                order.agreed = order.company.changes
                if not others:
                    order.company.drop_others(order.kin)
                return

    def _finish_sums(self) -> None:
        for member in self._order.members:
            for bucket in member.buckets.each:
                self.launch_rest()
                self._finish(bucket, member)

    def _finish(self, bucket: Bucket, member: Member) -> None:
        while True:
            try:
                member.buckets.finish(bucket)
                return
            except CommunicationError as error:
                end, steps, later = self.end(), self._order.communicator.sums.steps, error.later_step
                if end is None or later is None or not steps.may_go_on_to(later):
                    member.refuse_others()
                    raise
                end.go_on(steps, later)

    def leave_failed_backward(self) -> None:
        """The next forward, or backward, unwinds; who waits for this one is told."""
        self.end = gone
        order = self._order
        for member in order.members:
            member.lose()
        order.communicator.presence.leave(order.communicator.sums, "its backward did not finish")


class Launcher(Protocol):
    """What launches the sums of a replicated unit."""

    mesh_info: MeshInfo | None
    order: LaunchOrder
    place: int

    def launch_in(self, order: LaunchOrder, place: int, mesh_info: MeshInfo | None) -> None:
        """Belong to `order` from here on, and communicate over what all in it communicate over; nothing if it was removed."""


def launch_together(units: Sequence[Launcher]) -> None:
    """Units on and below a module that is being annotated, outer ones first, until that is taken back. See Note [One order]."""
    families: dict[Any, list[Launcher]] = {}
    for unit in dict.fromkeys(units):
        if unit.mesh_info is not None and unit.mesh_info.all.capabilities.ordered:
            families.setdefault(unit.mesh_info.place, []).append(unit)
    for family in families.values():
        mesh_info = family[0].mesh_info
        if len(family) > 1 and mesh_info is not None:
            order = LaunchOrder(mesh_info.all)
            on_undo(partial(_apart, order, [(unit, unit.order, unit.place, unit.mesh_info) for unit in family]))
            places = order.company.reserve(len(family))
            for place, unit in zip(places, reversed(family), strict=True):  # gradients of what comes last are ready first
                unit.launch_in(order, place, mesh_info)


def _apart(order: LaunchOrder, before: Sequence[tuple[Launcher, LaunchOrder, int, MeshInfo | None]]) -> None:
    for unit, last, place, mesh_info in before:
        if unit.order is order:
            unit.launch_in(last, place, mesh_info)
