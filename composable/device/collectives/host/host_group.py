"""The ranks of a group that all run on one host: who they are, their pipes, and the memory that they see; moves no tensor."""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from torch import Tensor

from composable.device.collectives.base import GroupCommunicator, tags_of
from composable.device.collectives.communicator import Steps, TagSequence
from composable.device.collectives.host.pipes import Message, PipeReader, PipeWriter
from composable.device.collectives.host.shared_memory import Arena, Block, Outbox, Window
from composable.device.private import timeout_of, when_destroyed

_ACK: Final = 1  # added to a message's tag: what it told of has been read, or never will be
_LEAVING: Final = 2  # added to a tag: where this rank says why it has left a step
_TOLD: Final = 4  # added to that, if another rank had left the step before
_MUTUAL: Final = 8  # added to that, if this rank and one that waits for it are both in the step
_LONG: Final = 0.1  # seconds from which on the others may look up what this rank waits for


@dataclass(frozen=True, slots=True)
class Connection:
    """To another rank of the group on this host: a view of its memory, a pipe from it and a pipe to it."""

    process: int
    window: Window
    reader: PipeReader
    writer: PipeWriter


class WentOn(EOFError):
    """A message cannot come any more: who should send it is in a later step, or waits for this rank itself."""

    def __init__(self, why: str, later_step: int | None = None) -> None:
        super().__init__(why)
        self.later_step = later_step


class Acks:
    """What peers send when they have finished with a block; those who have yet to do so are `left`."""

    __slots__ = ("_group", "_left", "_tag")

    def __init__(self, group: HostGroup, tag: int) -> None:
        self._group = group
        self._tag = tag + _ACK
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
        tag = self._tag - _ACK
        # In this group: others have other ranks, and a later step there tells nothing of those who have yet to come to it here.
        past = self._steps.met_in.get(self._group.number, -1) > TagSequence.step_in(tag)  # all that the peer sent is here
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
        self.checks: TagSequence = communicator.open_tags()
        self._connections = connections
        self._arena = arena
        self._board = arena.board
        self._closed = False
        self.number = next(_NUMBERS)  # in this process
        _ALL[self.number] = self
        self._left: weakref.WeakKeyDictionary[Steps, int] = weakref.WeakKeyDictionary()
        self._notes = 0  # left for the others so far
        self._group = weakref.ref(communicator.group)
        self._device = communicator.device
        when_destroyed(communicator.group, weakref.WeakMethod(self.close))

    def close(self) -> None:
        """Neither send nor receive anything any more. Memory stays where somebody may read it."""
        self._closed = True
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
                self._send(peer, tag + _ACK)

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
            self._refuse_if_gone_on(peer, tag, pending)
            if label and time.monotonic() - start > _LONG:
                if not shown:
                    shown = True
                    self._board.write(tag, label)
                self._refuse_if_hopeless(peer, tag)

        try:
            return reader.receive(tag, self._limit, check, keep=keep)
        finally:
            if shown:
                self._board.clear(tag)

    # --- steps ------------------------------------------------------------------------------------------------------

    def tell_leaving(self, tags: TagSequence, why: str) -> None:
        """Tell everybody, once a step, that this rank sends nothing more in it."""
        steps = tags.steps
        if self._left.get(steps) == steps.number:
            return
        self._left[steps] = steps.number
        tag = tags.farewell() + _LEAVING + (_TOLD if steps.told == steps.number else 0)
        tag += _MUTUAL if steps.mutual == steps.number else 0
        with suppress(OSError, EOFError):  # who does not get it notices the end, or waits
            start, length = self._arena.write_note(self._notes, why.encode())  # who reads it, and when, is of no interest
            self._notes += 1
            for peer in self.peers:
                self._connections[peer].writer.send(tag, start, length)

    def latest_step(self, steps: Steps) -> int:
        """The last step that somebody has begun by his own count so far.

        Who has begun the one that this rank has just opened counts as this rank does. If he has left it because others had
        left one before, this rank must come to it, and be told, too: later ones do not count.
        """
        latest = steps.number
        for connection in self._connections.values():
            tags = [tag for tag in connection.reader.pending() if self._steps_of(tag) is steps]
            if any(TagSequence.step_in(tag) == steps.number and not tag & (_ACK | _LEAVING) for tag in tags):
                tags = [tag for tag in tags if tag & _LEAVING and not tag & _TOLD]
            latest = max([latest, *map(TagSequence.step_in, tags)])
        return latest

    def abort(self, block: Block, tag: int, received: Iterable[int], steps: Steps) -> None:
        """This rank reads nothing that the others show under `tag`, but they may read what it has shown."""
        block.readers = AcksOfSome(self, tag, received, steps)
        block.in_step = False
        block.settled = True
        for peer in self.peers:
            with suppress(OSError, EOFError):
                self._send(peer, tag + _ACK)

    def _refuse_if_gone_on(self, peer: int, tag: int, pending: Sequence[int]) -> None:
        """Raise if `peer` has left a step that is not over here, so that there is no use in waiting for it.

        Args:
            pending: tags of what it has sent and nobody has asked for.
        """
        steps = self._steps_of(tag)
        if steps is not None:
            # In a later step it launches nothing of an earlier one any more, but it may have yet to read what it launched then.
            last = steps.number if tag & _ACK else TagSequence.step_in(tag)
            self._look_for_later(peer, steps, last, pending)

    def _steps_of(self, tag: int) -> Steps | None:
        group = self._group()
        tags = tags_of(group, tag) if group is not None else None
        return tags.steps if tags is not None else None

    def _look_for_later(self, peer: int, steps: Steps, last: int, pending: Sequence[int]) -> None:
        """Raise if `peer` has sent something in a later one of `steps` than `last`."""
        gone_on = -1
        for other in pending:
            step = TagSequence.step_in(other)
            if step <= steps.oldest or other & _ACK or self._steps_of(other) is not steps:
                continue
            if other & _LEAVING:
                message = self.poll(peer, other)
                if message is not None:
                    steps.told = steps.number
                    why = self._connections[peer].window.read_note(*message).decode(errors="replace")
                    # Who was in this step together with this rank is not ahead of it, even if an interrupt came before.
                    raise WentOn(f"rank {self.names[peer]} has left this step: {why}", None if other & _MUTUAL else step)
            gone_on = max(gone_on, step)
        if gone_on > last:
            steps.told = steps.number
            raise WentOn(f"rank {self.names[peer]} has left this step and gone on to a later one", gone_on)

    def _refuse_if_hopeless(self, peer: int, tag: int) -> None:
        """After some time: look at what `peer` sends and waits for in other groups, too, if steps are shared with them."""
        steps, mine = self._steps_of(tag), self._connections[peer]
        if steps is None:
            return
        for other in list(_ALL.values()):
            for rank, connection in other._connections.items():
                if connection.process != mine.process or other._closed:
                    continue
                waits_for, label = connection.window.board.read()
                pending = connection.reader.pending()
                if mine.reader.has(tag):  # looked at last: it was sent before what has just been found
                    return
                other._look_for_later(rank, steps, TagSequence.step_in(tag), pending)
                if waits_for:
                    other._refuse_if_mutual(rank, steps, waits_for, label)

    def _refuse_if_mutual(self, peer: int, steps: Steps, waits_for: int, label: str) -> None:
        """Raise if `peer`, which has not come to what this rank waits for, waits for what this rank has not come to.

        Everybody takes part in every collective of a step, so neither can ever go on. That `peer` has not come to what this
        rank waits for is known because it sends what it launches before it shows what it waits for.
        """
        group = self._group()
        tags = tags_of(group, waits_for) if group is not None else None
        if tags is None or tags.steps is not steps:
            return
        if TagSequence.step_in(waits_for) == steps.number and not tags.has_come_to(waits_for):
            steps.mutual = steps.number
            raise WentOn(
                f"rank {self.names[peer]} waits for the {label}, and neither rank comes to what the other waits for: in this "
                "step they run different units, or run them in another order or another number of times, or one of them has "
                "cast the model"
            )

    # --- memory -----------------------------------------------------------------------------------------------------

    def show(self, block: Block, tag: int, *, in_step: bool) -> None:
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


_ALL: Final[weakref.WeakValueDictionary[int, HostGroup]] = weakref.WeakValueDictionary()  # of this process
_NUMBERS: Final = itertools.count()
