"""What handles ask of a process group, whatever its backend; calls no collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from composable.errors import CommunicationError, first_line


@dataclass(frozen=True, slots=True)
class GatherPart:
    """One tensor to gather: every rank's `shard` (1-D, one chunk) lands in `whole` (1-D, a chunk per rank).

    `numel`: elements of `whole` that mean anything; the last ranks' chunks may be partly or wholly padding.
    """

    shard: Tensor
    whole: Tensor
    numel: int


@dataclass(frozen=True, slots=True)
class ReducePart:
    """One tensor to reduce: rank r's chunk of `source` (1-D, contiguous), summed over the ranks, lands in r's `out`.

    `scale`: what the sum is multiplied by.
    `early`: a communicator may multiply the terms in place of the sum, where it reads or writes them anyway.
    """

    source: Tensor
    chunk: int
    out: Tensor
    scale: float = 1.0
    early: bool = False


# What a rank adds to a sum: a tensor of the sum's shape and layout, and a factor, see `Scaling.input_factor`.
ScaledInput = tuple[Tensor, float]


class Scratch(Protocol):
    """Lends memory that is used again and again."""

    def take(self, numel: int, dtype: torch.dtype) -> Tensor: ...

    def give(self, tensor: Tensor) -> None: ...


def scale_sums(parts: Sequence[ReducePart]) -> None:
    """Multiply what has been summed, for communicators that have no better moment for it."""
    for part in parts:
        if part.scale != 1.0:
            part.out.mul_(part.scale)


def put_scaled_input(tensor: Tensor, scaled_input: ScaledInput | None) -> None:
    """Write a rank's term to where the sum will be, for communicators that sum in place."""
    if scaled_input is not None:
        torch.mul(*scaled_input, out=tensor)


class Work(Protocol):
    """A collective in flight."""

    def wait(self) -> None:
        """Return when (on an accelerator: order the compute stream after) the result is there."""

    def abort(self) -> None:
        """The result is not wanted any more; afterwards nothing is written to it. Waits for others only where it has to."""


class PollableWork(Work, Protocol):
    """A collective in flight that can be looked after now and then."""

    def progress(self) -> bool:
        """Do this rank's part as far as no other rank has to be waited for; whether `wait` would return at once."""


class Steps:
    """What tag sequences count their messages by: those of one step never meet those of another.

    Whoever owns it opens a step at points that every rank comes to, wherever it left the step before.

    Where gradients are accumulated over several steps, ranks leave the window of these in different ones. So a window that has
    ended, well or not, takes all of its numbers with it, used or not: all ranks begin the next one with the same.
    """

    WINDOW: Final = 65537  # steps in a window at most; odd: numbers that lie a window apart differ in their lowest bits, too

    __slots__ = (
        "__weakref__", "_window_ended", "behind", "by_backward", "met", "met_in", "mutual", "number", "oldest", "told"
    )  # fmt: skip

    def __init__(self, number: int = 0, *, by_backward: bool = False) -> None:
        self.number = number
        self.by_backward = by_backward  # each backward is one: ranks may run forwards for themselves
        self.oldest = number  # that is not over on this rank
        self.met = -1  # the last step in which messages of every other rank of a group came
        self.met_in: dict[int, int] = {}  # the same for each group, by a number of its own
        self.told = -1  # the last step in which another rank was found to have left one
        self.mutual = -1  # the last step in which this rank and another one were found to wait for each other
        self.behind = False  # maybe: an interrupt came, and others have opened more steps since
        self._window_ended = False

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

    def look_ahead(self, communicators: Sequence[Communicator]) -> None:
        """After an interrupt: a step that has just been opened is the one that others are in, as far as they have said so."""
        if self.behind and self.number == self.oldest:
            self.number = self.oldest = max(communicator.latest_step(self) for communicator in communicators)

    def may_go_on_to(self, step: int) -> bool:
        """Whether others are in a later one, after an interrupt, and nothing has come about in this one."""
        return self.behind and self.met < self.number == self.oldest and step > self.number

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
    def number_in(tag: int) -> int:
        return tag >> 20 & (1 << 10) - 1 | (tag >> 52 & (1 << 10) - 1) << 10

    @staticmethod
    def step_in(tag: int) -> int:
        return tag >> TagSequence.BITS


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What communicators differ in. Callers ask for these, and never for the class of a communicator.

    direct_bytes: bytes in a shard from which a message of its own pays.
    even_only: tensors can only be cut into equal chunks.
    reads_scaled_inputs: `all_reduce` reads a scaled input where it lies; the others copy it first, which can be done earlier.
    ordered: sums, broadcasts and checks are told apart by nothing but their order, which all ranks must keep.
    tells_of_leaving: who waits for a rank that has left the step is told (`leave`); otherwise the group's timeout ends it.
    saves_memory: memory that comes and goes costs nothing, and to wait does not hold up the host: messages have none between
        gathers, and one reduction is over before the next one is launched.
    """

    direct_bytes: int = 0
    even_only: bool = False
    reads_scaled_inputs: bool = False
    ordered: bool = False
    tells_of_leaving: bool = False
    saves_memory: bool = False


class Communicator(Protocol):
    """What handles ask of a process group. Tests pass slow, recording or failing ones in its place."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def sums(self) -> TagSequence:
        """The tags of `all_reduce`."""

    def count_by(self, steps: Steps) -> None:
        """Sums, and checks of those who sum, belong to `steps` from now on."""

    def open_tags(self) -> TagSequence:
        """Tags for one unit's messages of one kind; all ranks open their sequences in one order."""

    @property
    def tags_opened(self) -> int:
        """How many this rank has opened in the group."""

    def open_tags_up_to(self, count: int) -> None:
        """As if this rank had opened so many: a rank that failed has opened less than the others."""

    def leave(self, tags: TagSequence, why: str) -> None:
        """Tell the others, if the communicator `tells_of_leaving`, that this rank sends nothing more in the tags' step."""

    def latest_step(self, steps: Steps) -> int:
        """The last step in which others have said something so far, where the communicator `tells_of_leaving`."""

    def publish(self, text: str, place: int, *, of_rank: bool = False) -> None:
        """Leave `text`, in place of the last one, where all ranks can look it up, each when it likes.

        Args:
            place: of whoever leaves it among all who use the communicator.
            of_rank: it is this rank's own; otherwise all leave the same.
        """

    def published(self, place: int, rank: int | None = None) -> str:
        """What was left last, of all or as a rank's own; nothing where nothing was, or nothing can be."""

    def release(self) -> None:
        """Return memory that is kept for messages to come. Not a collective; what is in flight is not affected."""

    def prepare(self, parts: Sequence[GatherPart]) -> Any:
        """What `all_gather` needs, made once."""

    def all_gather(self, prepared: Any, *, label: str, tags: TagSequence) -> Work:
        """Launch. The parts' memory must be there."""

    def reduce_scatter(self, parts: Sequence[ReducePart], *, scratch: Scratch, label: str, tags: TagSequence) -> Work:
        """Sums, each multiplied by its part's scale."""

    def all_reduce(
        self, tensor: Tensor, *, label: str, scaled_input: ScaledInput | None = None, tags: TagSequence | None = None
    ) -> PollableWork:
        """Sums in place; with a `scaled_input`, `tensor` becomes the sum of everybody's instead.

        Args:
            tags: of sums that all ranks launch, and wait for, at the same points of their program. The others are told apart
                by the order of the calls, and so are all sums where a communicator is `ordered`.
        """

    def broadcast(self, tensor: Tensor, *, label: str) -> None:
        """Rank 0's values everywhere, in place."""

    def min_max(self, values: Sequence[int], *, label: str, tags: TagSequence | None = None) -> tuple[list[int], list[int]]:
        """The lowest and the highest of everybody's `values` (as many on each rank), one by one.

        Blocks: for checks, never per step. Costs the same whatever the number of ranks.

        Args:
            tags: of a check that belongs to a step. All others have tags in common.
        """

    def all_gather_ints(self, values: Sequence[int], *, label: str, tags: TagSequence | None = None) -> list[list[int]]:
        """Everybody's `values` (as many on each rank), by rank. Blocks, and grows with the ranks: for what went wrong."""


FAILURES: Final = (RuntimeError, OSError, EOFError)  # of backends, of memory and of pipes


def failed(label: str, rank: int, error: Exception) -> CommunicationError:
    found = CommunicationError(
        f"rank {rank}: the {label} failed: {first_line(error) or type(error).__name__}\n"
        "Another rank raised, ended or took another path through the model; look for the first error among all ranks."
    )
    found.later_step = getattr(error, "later_step", None)
    return found


class CompositeWork:
    """Several works of one collective, and what follows their completion."""

    __slots__ = ("_finish", "_label", "_rank", "_works")

    def __init__(self, works: list[Any], label: str, rank: int, finish: Callable[[], None] | None = None) -> None:
        self._works = works
        self._label = label
        self._rank = rank
        self._finish = finish

    def progress(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise failed(self._label, self._rank, error) from error
        self._works = []
        if self._finish is not None:
            self._finish()
            self._finish = None

    def abort(self) -> None:
        self.wait()  # the backend writes to the result whenever it comes
