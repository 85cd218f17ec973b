"""What messages of a process group are counted by, so that none is taken for another; calls no collective."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Protocol


class Losses:
    """Steps that ranks left before their end, as far as others may not know of them; and where ranks met last.

    Attributes:
        met_in: the last step in which messages of every other rank of a group came, by a number of the group's own.
        left: steps that this rank left.
        left_by: the same of other processes, by their number, where it has been told; the steps after these.
    """

    __slots__ = ("left", "left_by", "met_in")

    def __init__(self) -> None:
        self.met_in: dict[int, int] = {}
        self.left: list[int] = []
        self.left_by: dict[int, list[int]] = {}

    def note(self, step: int) -> None:
        """This rank leaves `step`. Done twice is done once."""
        if step not in self.left:
            self.left.append(step)

    def note_of(self, process: int, step: int) -> None:
        """Another process has left the one before `step`."""
        self.left_by.setdefault(process, []).append(step)

    def meet(self, step: int, group: int) -> None:
        """Messages of every other rank of the group with the number `group` have come in `step`."""
        self.met_in[group] = step
        if self.left or self.left_by:
            everywhere = min(self.met_in.values())
            self.left = [number for number in self.left if number >= everywhere]
            later = {process: [number for number in left if number > everywhere] for process, left in self.left_by.items()}
            self.left_by = {process: left for process, left in later.items() if left}

    def add(self, other: Losses) -> None:
        """What is known of other steps holds for these, too."""
        for group, step in other.met_in.items():
            self.met_in[group] = max(step, self.met_in.get(group, step))
        for step in other.left:
            self.note(step)
        for process, left in other.left_by.items():
            self.left_by.setdefault(process, []).extend(left)


class Steps:
    """What tag sequences count their messages by: those of one step never meet those of another.

    Whoever owns it opens a step at points that every rank comes to, wherever it left the step before.

    Where gradients are accumulated over several steps, ranks leave the window of these in different ones. So a window that has
    ended, well or not, takes all of its numbers with it, used or not: all ranks begin the next one with the same.
    """

    WINDOW: Final = 65537  # steps in a window at most; odd: numbers that lie a window apart differ in their lowest bits, too

    __slots__ = (
        "__weakref__", "_window_ended", "behind", "by_backward", "evaluates", "losses", "met", "mutual", "number", "oldest",
        "rejoined", "told"
    )  # fmt: skip

    def __init__(self, number: int = 0, *, by_backward: bool = False) -> None:
        self.number = number
        self.by_backward = by_backward  # each backward is one: ranks may run forwards for themselves
        self.oldest = number  # that is not over on this rank
        self.rejoined = -1  # who left this step, or one before, takes part again
        self.met = -1  # the last step in which messages of every other rank of a group came
        self.told = -1  # the last step in which another rank was found to have left one
        self.mutual = -1  # the last step in which this rank and another one were found to wait for each other
        self.behind = False  # maybe: an interrupt came, and others have opened more steps since
        self.evaluates = False  # no backward will come to what this step does
        self._window_ended = False
        self.losses = Losses()

    @classmethod
    def after(cls, several: Iterable[Steps]) -> Steps:
        """What goes on where `several` have come to that counted apart; all that they know, it knows."""
        each = list(dict.fromkeys(several))
        steps = cls(max(one.next_number for one in each) - 1)
        steps.behind = any(one.behind for one in each)
        for one in each:
            steps.losses.add(one.losses)
        return steps

    @property
    def next_number(self) -> int:
        """Of the step that is opened next."""
        return (self.number // self.WINDOW + 1) * self.WINDOW if self._window_ended else self.number + 1

    def end_window(self) -> None:
        """This step is the last of several that belong together, or they were given up. Done twice is done once."""
        self._window_ended = True

    def open(self, *, going_on: bool = False) -> None:
        """A new step begins. Nothing is said in the ones before from here on.

        Args:
            going_on: something of the one before is still to come: a backward, if only in this step.
        """
        self.number = self.next_number
        self._window_ended = False
        if not going_on:
            self.oldest = self.number

    def rejoin(self) -> None:
        """A forward begins that all ranks run, also those that have left the backward before it."""
        if self.by_backward:
            self.rejoined = self.number

    def look_ahead(self, presences: Sequence[Presence]) -> None:
        """After an interrupt: a step that has just been opened is the one that others are in, as far as they have said so."""
        if self.behind and self.number == self.oldest:
            self.number = self.oldest = max(presence.latest_step(self) for presence in presences)

    def lose(self) -> None:
        """This rank leaves this step before its end. Done twice is done once."""
        self.losses.note(self.number)

    def meet(self, step: int, group: int) -> None:
        """Messages of every other rank of the group with the number `group` have come in `step`."""
        self.met = step
        self.losses.meet(step, group)

    def may_go_on_to(self, step: int) -> bool:
        """Whether it is the one that others are in, and nothing has come about in this one.

        After an interrupt it may be any. After an error by which all ranks lost a step, it may be one behind the window, where
        that has ended for the others and not for this rank.
        """
        if self.met >= self.number or self.number != self.oldest:
            return False
        return (self.behind and step > self.number) or self.window_of(step) > self.window_of(self.number)

    @classmethod
    def window_of(cls, step: int) -> int:
        return step // cls.WINDOW

    def catch_up(self, number: int) -> None:
        """Another rank, or what was counted apart so far, has come to step `number`; all before are over."""
        if number > self.number:
            self.number = number
            self._window_ended = False
        self.oldest = self.number


class TagSequence:
    """Tags that keep one unit's messages of one kind apart from all others in the same group.

    A tag holds the sequence, a step, a number that runs within it and the part of the message, so that messages of another
    unit, of another kind or of another step can never be taken for the expected ones: ranks that diverge wait (and time out by
    name, or are told). Gathers and reductions are of different kinds, since a rank that left out a collective would otherwise
    take the next one's bytes for it. Ranks that left a step at different places meet again in the next one.
    The running number leaps with `decisions`, so that ranks which decide differently do not meet one message later either, and
    with what was `agreed` before the step, so that those which do not know of it yet do not meet the others.
    Tags do not repeat within 2^20 sequences and 2^31 messages a step. Backends whose tags are C ints get the
    lowest 31 bits, which repeat after a thousand of either.
    """

    PARTS: Final = 1 << 10
    LOWEST: Final = (1 << 31) - 1
    BITS: Final = 62  # below the step
    DIGESTS: Final = 1021
    _FLAG: Final = 1 << 30  # apart from the small tags that users choose

    _APART: Final = 1_000_003  # odd in the lowest bits, too: one decision more is many messages away
    _STRIDE: Final = 101  # messages of one step and the next, where the lowest bits must tell them apart

    __slots__ = ("__weakref__", "_apart", "_base", "_count", "_first", "_step", "agreed", "decisions", "number", "steps")

    def __init__(self, number: int) -> None:
        high, low = divmod(number, 1 << 10)
        self.number = number % (1 << 20)
        self.steps = Steps()
        self.decisions = 0  # that ranks take by themselves and must take alike; if not, their messages do not meet
        self.agreed = 0  # a number below `DIGESTS` for what the ranks have agreed on; it counts from the next step on
        self._apart = 0
        self._base = self._FLAG | low << 20 | (high % (1 << 10)) << 52
        self._step = 0
        self._count = 0
        self._first = 0  # what had been decided at the first message of the step

    def next_tag(self) -> int:
        step = self.steps.number
        if step != self._step:
            self._step = step
            self._count = 0
            self._first = self.decisions
            self._apart = self.agreed * self._APART + step * self._STRIDE
        self._count += 1
        count = self._count + self.decisions * self._APART + self._apart
        return self._base | (count >> 10 & (1 << 21) - 1) << 31 | (count & (1 << 10) - 1) << 10 | step << self.BITS

    def mark(self) -> tuple[int, int]:
        """Where the next message stands."""
        return self._step, self._count

    def go_back_to(self, mark: tuple[int, int]) -> None:
        """The next message has the tag that it had then: whoever has it already has it twice, and asks for it once."""
        step, count = mark
        self._count = count if step == self._step else 0

    def has_come_to(self, tag: int) -> bool:
        """Whether this rank has sent the message with this tag of the sequence, or one that comes after it."""
        step = self.step_in(tag)
        if step != self._step:
            return step < self._step
        count = tag >> 10 & (1 << 10) - 1 | (tag >> 31 & (1 << 21) - 1) << 10
        first, last = (known * self._APART + self._apart for known in (self._first, self.decisions))
        # Who decided otherwise before the step sends messages that this rank never comes to.
        return first & self.LOWEST < count <= self._count + last & self.LOWEST

    def farewell(self) -> int:
        """A tag that no message has: of the step after this one, before which this rank says nothing any more."""
        return self._base | (self.steps.number + 1) << self.BITS

    @staticmethod
    def step_left(farewell: int) -> int:
        """The step that a rank says farewell to with this tag."""
        return TagSequence.step_in(farewell) - 1

    @staticmethod
    def number_in(tag: int) -> int:
        return tag >> 20 & (1 << 10) - 1 | (tag >> 52 & (1 << 10) - 1) << 10

    @staticmethod
    def step_in(tag: int) -> int:
        return tag >> TagSequence.BITS


class TagSequences(Protocol):
    """The tag sequences that this rank has opened in a process group."""

    def open(self) -> TagSequence:
        """Tags for one unit's messages of one kind; all ranks open their sequences in one order."""

    @property
    def opened(self) -> int:
        """How many this rank has opened in the group."""

    def open_up_to(self, count: int) -> None:
        """As if this rank had opened so many: a rank that failed has opened less than the others."""

    def count_by(self, steps: Steps) -> None:
        """Sums, and checks of those who sum, belong to `steps` from now on."""


class Presence(Protocol):
    """In which step the ranks of a process group are, as far as they say so."""

    def leave(self, tags: TagSequence, why: str) -> None:
        """Tell the others, if the communicator `tells_of_leaving`, that this rank sends nothing more in the tags' step."""

    def latest_step(self, steps: Steps) -> int:
        """The last step in which others have said something so far, where the communicator `tells_of_leaving`."""


class NoPresence:
    """Backends carry no messages of ours: who waits for a rank that has left waits until its group's timeout."""

    def leave(self, tags: TagSequence, why: str) -> None:
        return None

    def latest_step(self, steps: Steps) -> int:
        return steps.number
