"""The ranks of a group that all run on one host: who they are, their pipes, and the memory that they see; moves no tensor."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Final

from torch import Tensor

from composable.device.collectives.base import GroupCommunicator
from composable.device.collectives.host.pipes import Message
from composable.device.collectives.host.presence import Connection, HostPresence, TagBit
from composable.device.collectives.host.shared_memory import Arena, Block, Outbox
from composable.device.collectives.tags import Steps, TagSequence
from composable.device.private_groups import timeout_of, when_destroyed

_LONG: Final = 0.1  # seconds from which on the others may look up what this rank waits for


class Acks:
    """What peers send when they have finished with a block; those who have yet to do so are `left`."""

    __slots__ = ("_group", "_left", "_tag")

    def __init__(self, group: HostGroup, tag: int) -> None:
        self._group = group
        self._tag = tag + TagBit.ACK
        self._left = list(group.peers)

    def finished(self) -> bool:
        while self._left and self._has_finished(self._left[-1]):
            self._group.poll(self._left.pop(), self._tag)  # now: after an interrupt one may be left, but none is missed
        return not self._left

    def _has_finished(self, peer: int) -> bool:
        return self._group.has_sent(peer, self._tag)

    def wait(self) -> None:
        while self._left:
            self._group.receive(self._left[-1], self._tag, keep=True)
            self._group.poll(self._left.pop(), self._tag)  # now, as above


class AcksOfSome(Acks):
    """Of a block whose collective this rank gave up: peers who never came to it will not read the block, and send nothing.

    Args:
        launched: peers who are known to have come to it.
    """

    __slots__ = ("_launched", "_steps")

    def __init__(self, group: HostGroup, tag: int, launched: Iterable[int], steps: Steps) -> None:
        super().__init__(group, tag)
        self._launched = dict.fromkeys(launched)
        self._steps = steps

    def _has_finished(self, peer: int) -> bool:
        if super()._has_finished(peer):
            return True
        tag = self._tag - TagBit.ACK
        # In this group: others have other ranks, and a later step there tells nothing of those who have yet to come to it here.
        met = self._steps.losses.met_in.get(self._group.number, -1)
        past = met > TagSequence.step_in(tag)  # all that the peer sent is here
        if peer not in self._launched and self._group.poll(peer, tag) is not None:
            self._launched[peer] = None
        return past and peer not in self._launched


class HostGroup:
    """What lives as long as a process group: the other ranks, and the blocks that this one shows.

    A block comes back when its readers acknowledge it, through pipes of that group; with the group, both are gone. A rank that
    destroys the group closes its pipes, whatever models still hold, so that the others are told.
    """

    def __init__(self, communicator: GroupCommunicator, arena: Arena, connections: dict[int, Connection]) -> None:
        self.rank, self.names = communicator.rank, communicator.names
        self.size = communicator.size
        self.peers = tuple((communicator.rank + step) % communicator.size for step in range(1, communicator.size))
        self.outbox = Outbox(arena)
        # For the checks of all communicators. Not the backend's own order: others may use the group in another thread, as
        # torch's checkpoints do that are written while training goes on.
        self.checks: TagSequence = communicator.tags.open()
        self._connections = connections
        self._board = arena.board
        self.presence = HostPresence(communicator, arena, connections, self.peers)
        self.number = self.presence.number
        self._group = weakref.ref(communicator.group)
        self._device = communicator.device
        when_destroyed(communicator.group, weakref.WeakMethod(self.close))

    def close(self) -> None:
        """Neither send nor receive anything any more. Memory stays where somebody may read it."""
        self.presence.close()
        for connection in self._connections.values():
            connection.writer.close()
            connection.reader.close()
        self.outbox.close()  # last: what nobody can be told of, nobody will read

    # --- messages ---------------------------------------------------------------------------------------------------

    @property
    def _limit(self) -> timedelta | None:
        group = self._group()
        return timeout_of(group, self._device) if group is not None else None

    def _send(self, peer: int, tag: int, first: int = 0, second: int = 0) -> None:
        writer = self._connections[peer].writer
        if not writer.send(tag, first, second):
            self._send_patiently(peer, tag, first, second)

    def _send_patiently(self, peer: int, tag: int, first: int, second: int) -> None:
        """Wait for room in a pipe that is full; others may wait for room in ours meanwhile."""
        writer, limit, start = self._connections[peer].writer, self._limit, time.monotonic()
        while not writer.send(tag, first, second):
            if limit is not None and time.monotonic() - start > limit.total_seconds():
                raise TimeoutError(f"rank {self.names[peer]} has read no message within {limit}")
            for connection in self._connections.values():
                connection.reader.drain()
            writer.wait_for_room()

    def acknowledge(self, tag: int) -> None:
        """Tell everybody that their block has been read."""
        for peer in self.peers:
            with suppress(BrokenPipeError):  # who has ended does not need its memory any more
                self._send(peer, tag + TagBit.ACK)

    def poll(self, peer: int, tag: int) -> Message | None:
        """The message that `peer` has sent, if it has."""
        return self._connections[peer].reader.poll(tag)

    def has_sent(self, peer: int, tag: int) -> bool:
        """Whether `peer` has sent a message that nobody has asked for."""
        return self._connections[peer].reader.has(tag)

    def receive(self, peer: int, tag: int, label: str = "", *, keep: bool = False) -> Message:
        """The next message with this tag.

        Args:
            keep: it stays, and what is returned means nothing: an interrupt that comes now takes nothing away.
            label: of the collective that cannot go on without it; others who wait for this rank are told.
        """
        reader = self._connections[peer].reader
        message = reader.poll(tag) if not keep else None
        if message is not None:
            return message
        start = time.monotonic()
        shown = False

        def check(pending: Sequence[int]) -> None:
            nonlocal shown
            self.presence.refuse_if_gone_on(peer, tag, pending)
            if time.monotonic() - start > _LONG:
                if label and not shown:
                    shown = True
                    self._board.write(tag, label)
                self.presence.refuse_if_hopeless(peer, tag)

        try:
            return reader.receive(tag, self._limit, check, keep=keep)
        finally:
            if shown:
                self._board.clear(tag)

    def abort(self, block: Block, tag: int, received: Iterable[int], steps: Steps) -> None:
        """This rank reads nothing that the others show under `tag`, but they may read what it has shown."""
        block.readers = AcksOfSome(self, tag, received, steps)
        block.in_step = False
        block.received = True
        for peer in self.peers:
            with suppress(OSError, EOFError):
                self._send(peer, tag + TagBit.ACK)

    # --- memory -----------------------------------------------------------------------------------------------------

    def send_block(self, block: Block, tag: int, *, in_step: bool) -> None:
        """Tell everybody that `block` is filled; they will acknowledge it.

        Args:
            in_step: all ranks read it at the same point of the program.
        """
        self.outbox.lend(block, Acks(self, tag), in_step=in_step)
        for peer in self.peers:
            self._send(peer, tag, block.start, block.nbytes)

    def view(self, peer: int, message: Message) -> Tensor:
        """The block that `peer` told of."""
        return self._connections[peer].window.view(*message)
