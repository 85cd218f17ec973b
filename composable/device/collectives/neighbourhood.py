"""The ranks of a group that all run on one host: who they are, their words, and the memory that they see; moves no tensor."""

from __future__ import annotations

import itertools
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from datetime import timedelta
from functools import partial
from typing import Final, TypeVar

import torch
from torch import Tensor

from composable.device.collectives.group import GroupWire, channel_of
from composable.device.collectives.wire import Channel, Steps
from composable.device.private import timeout_of, when_destroyed
from composable.device.shared_memory import UNKNOWN_HOST, Arena, Block, Identity, Outbox, Window
from composable.device.words import Inbox, Outlet, Process, Word

T = TypeVar("T")

SWITCH: Final = "COMPOSABLE_SHARED_MEMORY"  # "0" in the environment of any rank: all of them use sockets
_LABEL: Final = "exchange of where each rank's shared memory is"
_DONE: Final = 1  # added to a message's tag: word that it has been read, or will never be
_FAREWELL: Final = 2  # added to a channel's: where this rank says why it has left a step
_TOLD: Final = 4  # added to that, if another rank had left the step before
_REASON_BYTES: Final = 400
_LONG: Final = 0.1  # seconds from which on the others may look up what this rank waits for
_FAREWELLS: Final = 16  # kept for those who have yet to read them


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Another rank of the group on this host."""

    process: int
    window: Window
    inbox: Inbox
    outlet: Outlet


class WentOn(EOFError):
    """A word cannot come any more: who should say it is in a later step, or waits for this rank itself."""

    def __init__(self, why: str, later_step: int | None = None) -> None:
        super().__init__(why)
        self.later_step = later_step


class Thanks:
    """The words of peers that they have finished with a message; those who have yet to say so are `left`."""

    __slots__ = ("_left", "_near", "_tag")

    def __init__(self, near: Neighbourhood, tag: int) -> None:
        self._near = near
        self._tag = tag + _DONE
        self._left = list(near.peers)

    def finished(self) -> bool:
        while self._left and self._has_finished(self._left[-1]):
            self._near.glance(self._left.pop(), self._tag)  # now: after an interrupt a word may be left, but none is missed
        return not self._left

    def _has_finished(self, peer: int) -> bool:
        return self._near.has_said(peer, self._tag)

    def wait(self) -> None:
        while self._left:
            self._near.hear(self._left[-1], self._tag)
            self._left.pop()


class ThanksOfSome(Thanks):
    """Of a message that this rank gave up: peers who never came to that collective will not read it, and say nothing.

    Args:
        launched: peers who are known to have come to it.
    """

    __slots__ = ("_launched", "_steps")

    def __init__(self, near: Neighbourhood, tag: int, launched: Iterable[int], steps: Steps) -> None:
        super().__init__(near, tag)
        self._launched = dict.fromkeys(launched)
        self._steps = steps

    def _has_finished(self, peer: int) -> bool:
        if super()._has_finished(peer):
            return True
        tag = self._tag - _DONE
        past = self._steps.met > Channel.step_in(tag)  # then all that the peer said in that step is here
        if peer not in self._launched and self._near.glance(peer, tag) is not None:
            self._launched[peer] = None
        return past and peer not in self._launched


class Neighbourhood:
    """What lives as long as a process group: the other ranks, and the blocks that this one shows.

    A block comes back when its readers say so, through pipes of that group; with the group, both are gone. A rank that
    destroys the group closes its pipes, whatever models still hold, so that the others are told.
    """

    def __init__(self, wire: GroupWire, arena: Arena, neighbours: dict[int, Neighbour]) -> None:
        self.rank = wire.rank
        self.ways = wire.ways
        self.peers = tuple((wire.rank + step) % wire.ways for step in range(1, wire.ways))
        self.outbox = Outbox(arena)
        # For the checks of all wires. Not the backend's own order: others may use the group in another thread, as torch's
        # checkpoints do that are written while training goes on.
        self.checks: Channel = wire.open_channel()
        self._neighbours = neighbours
        self._arena = arena
        self._board = arena.board
        self._closed = False
        _ALL[next(_NUMBERS)] = self
        self._left: weakref.WeakKeyDictionary[Steps, int] = weakref.WeakKeyDictionary()
        self._farewells: deque[Block] = deque(maxlen=_FAREWELLS)
        self._group = weakref.ref(wire.group)
        self._device = wire.device
        when_destroyed(wire.group, weakref.WeakMethod(self.close))

    def close(self) -> None:
        """Neither say nor hear anything any more. Memory stays as long as somebody may read it."""
        self._closed = True
        for neighbour in self._neighbours.values():
            neighbour.outlet.close()
            neighbour.inbox.close()

    # --- words ------------------------------------------------------------------------------------------------------

    @property
    def _limit(self) -> timedelta | None:
        group = self._group()
        return timeout_of(group, self._device) if group is not None else None

    def _say(self, peer: int, tag: int, first: int = 0, second: int = 0) -> None:
        outlet = self._neighbours[peer].outlet
        if not outlet.say(tag, first, second):
            self._say_with_patience(peer, tag, first, second)

    def _say_with_patience(self, peer: int, tag: int, first: int, second: int) -> None:
        """Wait for room in a pipe that is full; others may wait for room in ours meanwhile."""
        outlet, limit, start = self._neighbours[peer].outlet, self._limit, time.monotonic()
        while not outlet.say(tag, first, second):
            if limit is not None and time.monotonic() - start > limit.total_seconds():
                raise TimeoutError(f"rank {peer} has read no word within {limit}")
            for neighbour in self._neighbours.values():
                neighbour.inbox.drain()
            outlet.wait_for_room()

    def say_done(self, tag: int) -> None:
        """Tell everybody that their message has been read."""
        for peer in self.peers:
            with suppress(BrokenPipeError):  # who has ended does not need its memory any more
                self._say(peer, tag + _DONE)

    def glance(self, peer: int, tag: int) -> Word | None:
        """The word that `peer` has said, if it has."""
        return self._neighbours[peer].inbox.next(tag)

    def has_said(self, peer: int, tag: int) -> bool:
        """Whether `peer` has said a word that nobody has asked for."""
        return self._neighbours[peer].inbox.holds(tag)

    def hear(self, peer: int, tag: int, label: str = "") -> Word:
        """The next word with this tag.

        Args:
            label: of the collective that cannot go on without it; others who wait for this rank are told.
        """
        inbox = self._neighbours[peer].inbox
        word = inbox.next(tag)
        if word is not None:
            return word
        start = time.monotonic()
        shown = False

        def check(pending: Sequence[int]) -> None:
            nonlocal shown
            self._refuse_if_gone_on(peer, tag, pending)
            if label and time.monotonic() - start > _LONG:
                if not shown:
                    shown = True
                    self._board.write(tag, label)
                self._refuse_if_hopeless(peer, tag)

        try:
            return inbox.wait(tag, self._limit, check)
        finally:
            if shown:
                self._board.clear(tag)

    # --- steps ------------------------------------------------------------------------------------------------------

    def say_farewell(self, channel: Channel, why: str) -> None:
        """Tell everybody, once a step, that this rank says nothing more in it."""
        steps = channel.steps
        if self._left.get(steps) == steps.number:
            return
        self._left[steps] = steps.number
        tag = channel.farewell() + _FAREWELL + (_TOLD if steps.told == steps.number else 0)
        with suppress(OSError, EOFError):  # who does not hear it notices the end, or waits
            text = why.encode()[:_REASON_BYTES]
            block = self._farewells[0] if len(self._farewells) == _FAREWELLS else Block(self._arena, _REASON_BYTES)
            block.memory[: len(text)].copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
            self._farewells.append(block)  # who reads it, and when, is of no interest
            for peer in self.peers:
                self._neighbours[peer].outlet.say(tag, block.start, len(text))

    def latest_step(self, steps: Steps) -> int:
        """The last step that somebody has begun by his own count so far.

        Who has begun the one that this rank has just opened counts as this rank does. If he has left it because others had
        left one before, this rank must come to it, and be told, too: later ones do not count.
        """
        latest = steps.number
        for neighbour in self._neighbours.values():
            tags = [tag for tag in neighbour.inbox.pending() if self._steps_of(tag) is steps]
            if any(Channel.step_in(tag) == steps.number and not tag & (_DONE | _FAREWELL) for tag in tags):
                tags = [tag for tag in tags if tag & _FAREWELL and not tag & _TOLD]
            latest = max([latest, *map(Channel.step_in, tags)])
        return latest

    def give_up(self, block: Block, tag: int, heard: Iterable[int], steps: Steps) -> None:
        """This rank reads nothing that the others show under `tag`, but they may read what it has shown."""
        block.readers = ThanksOfSome(self, tag, heard, steps)
        block.in_step = False
        block.settled = True
        for peer in self.peers:
            with suppress(OSError, EOFError):
                self._say(peer, tag + _DONE)

    def _refuse_if_gone_on(self, peer: int, tag: int, pending: Sequence[int]) -> None:
        """Raise if `peer` has left a step that is not over here, so that there is no use in waiting for it.

        Args:
            pending: tags of what it has said and nobody has asked for.
        """
        steps = self._steps_of(tag)
        if steps is not None:
            # In a later step it launches nothing of an earlier one any more, but it may have yet to read what it launched then.
            last = steps.number if tag & _DONE else Channel.step_in(tag)
            self._look_for_later(peer, steps, last, pending)

    def _steps_of(self, tag: int) -> Steps | None:
        group = self._group()
        channel = channel_of(group, tag) if group is not None else None
        return channel.steps if channel is not None else None

    def _look_for_later(self, peer: int, steps: Steps, last: int, pending: Sequence[int]) -> None:
        """Raise if `peer` has said something in a later one of `steps` than `last`."""
        gone_on = -1
        for other in pending:
            step = Channel.step_in(other)
            if step <= steps.oldest or other & _DONE or self._steps_of(other) is not steps:
                continue
            if other & _FAREWELL:
                word = self.glance(peer, other)
                if word is not None:
                    steps.told = steps.number
                    why = bytes(self.look(peer, word).tolist()).decode(errors="replace")
                    raise WentOn(f"rank {peer} has left this step: {why}", step)
            gone_on = max(gone_on, step)
        if gone_on > last:
            steps.told = steps.number
            raise WentOn(f"rank {peer} has left this step and gone on to a later one", gone_on)

    def _refuse_if_hopeless(self, peer: int, tag: int) -> None:
        """After some time: look at what `peer` says and waits for in other groups, too, if steps are shared with them."""
        steps, mine = self._steps_of(tag), self._neighbours[peer]
        if steps is None:
            return
        for other in list(_ALL.values()):
            for rank, neighbour in other._neighbours.items():
                if neighbour.process != mine.process or other._closed:
                    continue
                waits_for, label = neighbour.window.board.read()
                pending = neighbour.inbox.pending()
                if mine.inbox.holds(tag):  # looked at last: it was said before what has just been found
                    return
                other._look_for_later(rank, steps, Channel.step_in(tag), pending)
                if waits_for:
                    other._refuse_if_mutual(rank, steps, waits_for, label)

    def _refuse_if_mutual(self, peer: int, steps: Steps, waits_for: int, label: str) -> None:
        """Raise if `peer`, which has not come to what this rank waits for, waits for what this rank has not come to.

        Everybody takes part in every collective of a step, so neither can ever go on. That `peer` has not come to what this
        rank waits for is known because it says what it launches before it shows what it waits for.
        """
        group = self._group()
        channel = channel_of(group, waits_for) if group is not None else None
        if channel is None or channel.steps is not steps:
            return
        if Channel.step_in(waits_for) == steps.number and not channel.has_come_to(waits_for):
            raise WentOn(
                f"rank {peer} waits for the {label}, and neither rank comes to what the other waits for: in this step they run "
                "different units, or run them in another order or another number of times, or one of them has cast the model"
            )

    # --- memory -----------------------------------------------------------------------------------------------------

    def show(self, block: Block, tag: int, *, in_step: bool) -> None:
        """Tell everybody that `block` is filled; they will say that they have finished.

        Args:
            in_step: all ranks read it at the same point of the program.
        """
        self.outbox.lend(block, Thanks(self, tag), in_step=in_step)
        for peer in self.peers:
            self._say(peer, tag, block.start, block.nbytes)

    def look(self, peer: int, word: Word) -> Tensor:
        """The block that `peer` told of."""
        return self._neighbours[peer].window.look(*word)


_ALL: Final[weakref.WeakValueDictionary[int, Neighbourhood]] = weakref.WeakValueDictionary()  # of this process
_NUMBERS: Final = itertools.count()

# --- who sees whose memory --------------------------------------------------------------------------------------------


def look_around(wire: GroupWire) -> Neighbourhood | None:
    """The group's neighbourhood; None on every rank if any rank cannot look at any other. All ranks call it together.

    Whatever a rank lacks (memory, descriptors, /proc), it goes on to the votes: the others wait for it there.
    """
    arena = _made(Arena) if os.environ.get(SWITCH, "1") != "0" else None
    # Numbers of hosts are not negative; a rank that cannot, or may not, has a number that nobody else has.
    host = arena.identity.host if arena is not None and arena.identity.host != UNKNOWN_HOST else -2 - wire.rank
    # First what costs the same for any number of ranks: most large groups are no neighbourhoods.
    lowest, highest = wire.extremes([host], label=_LABEL)
    if lowest != highest or arena is None:
        return None
    inboxes = {rank: _made(partial(Inbox, f"rank {rank}")) for rank in range(wire.ways) if rank != wire.rank}
    doors = [inbox.descriptor if (inbox := inboxes.get(rank)) is not None else -1 for rank in range(wire.ways)]
    rows = wire.exchange([*astuple(arena.identity), *doors], label=_LABEL)
    neighbours: dict[int, Neighbour] = {}
    for rank, inbox in inboxes.items():
        if inbox is not None:
            found = _made(partial(_meet, Identity(*rows[rank][:4]), rows[rank][4 + wire.rank], inbox))
            if found is not None:
                neighbours[rank] = found
    if wire.extremes([len(neighbours)], label=_LABEL)[0] != [wire.ways - 1]:
        return None
    for rank, neighbour in neighbours.items():
        neighbour.inbox.seal(Process(rows[rank][1]))
    return Neighbourhood(wire, arena, neighbours)


def _made(make: Callable[[], T]) -> T | None:
    """What `make` returns, None where the system does not let it."""
    try:
        return make()
    except OSError:
        return None


def _meet(identity: Identity, door: int, inbox: Inbox) -> Neighbour:
    return Neighbour(identity.process, Window(identity), inbox, Outlet(identity.process, door, inbox.writer))
