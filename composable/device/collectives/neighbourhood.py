"""The ranks of a group that all run on one host: who they are, their words, and the memory that they see; moves no tensor."""

from __future__ import annotations

import os
import weakref
from contextlib import suppress
from dataclasses import astuple, dataclass
from typing import Final

from torch import Tensor

from composable.device.collectives.group import GroupWire
from composable.device.private import timeout_of
from composable.device.shared_memory import Block, Identity, Outbox, Window, my_identity
from composable.device.words import Inbox, Outlet, Word

SWITCH: Final = "COMPOSABLE_SHARED_MEMORY"  # "0" in the environment of any rank: all of them use sockets
_LABEL: Final = "exchange of where each rank's shared memory is"
_DONE: Final = 1  # added to a message's tag: word that it has been read


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Another rank of the group on this host."""

    process: int
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

    A block comes back when its readers say so, through pipes of that group; with the group, both are gone.
    """

    def __init__(self, wire: GroupWire, neighbours: dict[int, Neighbour]) -> None:
        self.rank = wire.rank
        self.ways = wire.ways
        self.peers = tuple((wire.rank + step) % wire.ways for step in range(1, wire.ways))
        self.outbox = Outbox()
        self._neighbours = neighbours
        self._group = weakref.ref(wire.group)
        self._device = wire.device

    # --- words ------------------------------------------------------------------------------------------------------

    def say_done(self, tag: int) -> None:
        """Tell everybody that their message has been read."""
        for peer in self.peers:
            with suppress(BrokenPipeError):  # who has ended does not need its memory any more
                self._neighbours[peer].outlet.say(tag + _DONE)

    def has_heard(self, peer: int, tag: int) -> bool:
        return self.glance(peer, tag) is not None

    def glance(self, peer: int, tag: int) -> Word | None:
        """The word that `peer` has said, if it has."""
        return self._neighbours[peer].inbox.next(tag)

    def hear(self, peer: int, tag: int) -> Word:
        inbox, group = self._neighbours[peer].inbox, self._group()
        return inbox.next(tag) or inbox.wait(tag, timeout_of(group, self._device) if group is not None else None)

    # --- memory -----------------------------------------------------------------------------------------------------

    def show(self, block: Block, tag: int, *, in_step: bool) -> None:
        """Tell everybody that `block` is filled; they will say that they have finished.

        Args:
            in_step: all ranks read it at the same point of the program.
        """
        for peer in self.peers:
            self._neighbours[peer].outlet.say(tag, block.descriptor, block.nbytes)
        self.outbox.lend(block, Thanks(self, tag), in_step=in_step)

    def look(self, peer: int, word: Word) -> Tensor:
        """The block that `peer` told of."""
        return self._neighbours[peer].window.look(*word)


# --- who sees whose memory --------------------------------------------------------------------------------------------


def look_around(wire: GroupWire) -> Neighbourhood | None:
    """The group's neighbourhood; None on every rank if any rank cannot look at any other. All ranks call it together."""
    mine = my_identity() if os.environ.get(SWITCH, "1") != "0" else None
    host = mine.host if mine is not None else -1
    # First what costs the same for any number of ranks: most large groups are no neighbourhoods.
    lowest, highest = wire.extremes([host], label=_LABEL)
    if mine is None or lowest != highest:
        return None
    inboxes = {rank: Inbox(f"rank {rank}") for rank in range(wire.ways) if rank != wire.rank}
    doors = [inboxes[rank].descriptor if rank in inboxes else -1 for rank in range(wire.ways)]
    rows = wire.exchange([*astuple(mine), *doors], label=_LABEL)
    met = {rank: _meet(Identity(*rows[rank][:4]), rows[rank][4 + wire.rank], inbox) for rank, inbox in inboxes.items()}
    neighbours = {rank: neighbour for rank, neighbour in met.items() if neighbour is not None}
    if wire.extremes([len(neighbours)], label=_LABEL)[0] != [wire.ways - 1]:
        return None
    for inbox in inboxes.values():
        inbox.seal()
    return Neighbourhood(wire, neighbours)


def _meet(identity: Identity, door: int, inbox: Inbox) -> Neighbour | None:
    window = Window(identity.process)
    if not identity.visible(window):
        return None
    try:
        return Neighbour(identity.process, window, inbox, Outlet(identity.process, door, inbox.writer))
    except OSError:
        return None
