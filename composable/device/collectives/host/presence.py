"""In which step the ranks of one host are: who has left one, and who can never come to what others wait for; moves no bytes."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from composable.device.collectives.base import GroupCommunicator, tags_of
from composable.device.collectives.host.pipes import PipeReader, PipeWriter
from composable.device.collectives.host.shared_memory import Arena, Window
from composable.device.collectives.tags import Steps, TagSequence


class TagBit:
    """What is added to a tag, to say of a message what it is about."""

    ACK: Final = 1  # what the message with the tag told of has been read, or never will be
    LEAVING: Final = 2  # where this rank says why it has left a step
    TOLD: Final = 4  # added to that, if another rank had left the step before
    MUTUAL: Final = 8  # added to that, if this rank and one that waits for it are both in the step


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


class HostPresence:
    """Tells the others of a group that this rank has left a step, and notices whether they have."""

    def __init__(
        self, communicator: GroupCommunicator, arena: Arena, connections: dict[int, Connection], peers: Sequence[int]
    ) -> None:
        self._names = communicator.names
        self._peers = peers
        self._connections = connections
        self._arena = arena
        self._closed = False
        self._left: weakref.WeakKeyDictionary[Steps, int] = weakref.WeakKeyDictionary()
        self._notes = 0  # left for the others so far
        self._group = weakref.ref(communicator.group)
        self.number = next(_NUMBERS)  # in this process
        _ALL[self.number] = self

    def close(self) -> None:
        """Nothing is known of the others any more."""
        self._closed = True

    def leave(self, tags: TagSequence, why: str) -> None:
        """Tell everybody, once a step, that this rank sends nothing more in it."""
        steps = tags.steps
        if self._left.get(steps) == steps.number:
            return
        steps.lose()
        tag = tags.farewell() + TagBit.LEAVING + (TagBit.TOLD if steps.told == steps.number else 0)
        tag += TagBit.MUTUAL if steps.mutual == steps.number else 0
        with suppress(OSError, EOFError):  # who does not get it notices the end, or waits
            start, length = self._arena.write_note(self._notes, why.encode())  # who reads it, and when, is of no interest
            self._notes += 1
            for peer in self._peers:
                self._connections[peer].writer.send(tag, start, length)
        self._left[steps] = steps.number  # last: after an interrupt it is told again, and once too often harms nobody

    def latest_step(self, steps: Steps) -> int:
        """The last step that somebody has begun by his own count so far.

        Who has begun the one that this rank has just opened counts as this rank does. If he has left it because others had
        left one before, this rank must come to it, and be told, too: later ones do not count.
        """
        latest = steps.number
        for connection in self._connections.values():
            tags = [tag for tag in connection.reader.pending() if self._steps_of(tag) is steps]
            if any(TagSequence.step_in(tag) == steps.number and not tag & (TagBit.ACK | TagBit.LEAVING) for tag in tags):
                tags = [tag for tag in tags if tag & TagBit.LEAVING and not tag & TagBit.TOLD]
            latest = max([latest, *map(TagSequence.step_in, tags)])
        return latest

    def refuse_if_gone_on(self, peer: int, tag: int, pending: Sequence[int]) -> None:
        """Raise if `peer` has left a step that is not over here, so that there is no use in waiting for it.

        Args:
            pending: tags of what it has sent and nobody has asked for.
        """
        steps = self._steps_of(tag)
        if steps is not None:
            # In a later step it launches nothing of an earlier one any more, but it may have yet to read what it launched then.
            last = steps.number if tag & TagBit.ACK else TagSequence.step_in(tag)
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
            if step <= steps.oldest or other & TagBit.ACK or self._steps_of(other) is not steps:
                continue
            if other & TagBit.LEAVING:
                if TagSequence.step_left(other) <= steps.rejoined:
                    continue
                message = self._connections[peer].reader.poll(other)
                if message is not None:
                    steps.told = steps.number
                    steps.losses.note_of(self._connections[peer].process, step)
                    why = self._connections[peer].window.read_note(*message).decode(errors="replace")
                    # It is this step that all lose, unless an interrupt came before. Who was in it together with this rank is
                    # not ahead of it even then.
                    ahead = steps.behind and not other & TagBit.MUTUAL
                    raise WentOn(f"rank {self._names[peer]} has left this step: {why}", step if ahead else None)
            gone_on = max(gone_on, step)
        if gone_on > last:
            steps.told = steps.number
            mine, theirs = self._losses(peer, steps, gone_on)
            # Whoever has lost more steps than another would bring other batches to this one.
            known = steps.behind or mine == theirs > 0
            raise WentOn(f"rank {self._names[peer]} has left this step and gone on to a later one", gone_on if known else None)

    def _losses(self, peer: int, steps: Steps, last: int) -> tuple[int, int]:
        """How many steps this rank and `peer` have left before `last`, since they met in one."""
        process, losses = self._connections[peer].process, steps.losses
        met, told = -1, dict.fromkeys(losses.left_by.get(process, ()))
        for presence in list(_ALL.values()):  # other groups may have met, and been told, too
            for connection in presence._connections.values():
                if connection.process == process and not presence._closed:
                    met = max(met, losses.met_in.get(presence.number, -1))
                    tags = [tag for tag in connection.reader.pending() if tag & TagBit.LEAVING and not tag & TagBit.ACK]
                    told.update({TagSequence.step_in(tag): None for tag in tags if presence._steps_of(tag) is steps})
        return len([step for step in losses.left if met <= step < last]), len([step for step in told if met < step <= last])

    def refuse_if_hopeless(self, peer: int, tag: int) -> None:
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
                f"rank {self._names[peer]} waits for the {label}, and neither rank comes to what the other waits for: in this "
                "step they run different units, or run them in another order or another number of times, or one of them has "
                "cast the model, or has other communication hooks"
            )


_ALL: Final[weakref.WeakValueDictionary[int, HostPresence]] = weakref.WeakValueDictionary()  # of this process
_NUMBERS: Final = itertools.count()
