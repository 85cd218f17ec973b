"""The ranks of a group that all run on one host: who they are, their words, and the memory that they see; moves no tensor."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import astuple, dataclass
from datetime import timedelta
from functools import partial
from typing import Final, TypeVar

from torch import Tensor

from composable.device.collectives.group import GroupWire
from composable.device.collectives.wire import Channel
from composable.device.private import timeout_of, when_destroyed
from composable.device.shared_memory import UNKNOWN_HOST, Arena, Block, Identity, Outbox, Window
from composable.device.words import Inbox, Outlet, Process, Word

T = TypeVar("T")

SWITCH: Final = "COMPOSABLE_SHARED_MEMORY"  # "0" in the environment of any rank: all of them use sockets
_LABEL: Final = "exchange of where each rank's shared memory is"
_DONE: Final = 1  # added to a message's tag: word that it has been read


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Another rank of the group on this host."""

    window: Window
    inbox: Inbox
    outlet: Outlet


class Thanks:
    """The words of peers that they have finished with a message; those who have yet to say so are `left`."""

    __slots__ = ("_left", "_near", "_tag")

    def __init__(self, near: Neighbourhood, tag: int) -> None:
        self._near = near
        self._tag = tag + _DONE
        self._left = list(near.peers)

    def finished(self) -> bool:
        while self._left and self._near.has_heard(self._left[-1], self._tag):
            self._left.pop()
        return not self._left

    def wait(self) -> None:
        while self._left:
            self._near.hear(self._left[-1], self._tag)
            self._left.pop()


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
        self._group = weakref.ref(wire.group)
        self._device = wire.device
        when_destroyed(wire.group, weakref.WeakMethod(self.close))

    def close(self) -> None:
        """Neither say nor hear anything any more. Memory stays as long as somebody may read it."""
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

    def has_heard(self, peer: int, tag: int) -> bool:
        return self.glance(peer, tag) is not None

    def glance(self, peer: int, tag: int) -> Word | None:
        """The word that `peer` has said, if it has."""
        return self._neighbours[peer].inbox.next(tag)

    def hear(self, peer: int, tag: int) -> Word:
        inbox = self._neighbours[peer].inbox
        return inbox.next(tag) or inbox.wait(tag, self._limit)

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
    return Neighbour(Window(identity), inbox, Outlet(identity.process, door, inbox.writer))
