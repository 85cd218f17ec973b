"""What handles ask of a process group, whatever its backend; calls no collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from composable.device.collectives.tags import Presence, TagSequence, TagSequences
from composable.errors import CommunicationError, first_line
from composable.plan.bucketing import ALONE_BYTES, ALONE_BYTES_ON_ACCELERATORS
from composable.plan.routes import DIRECT_BYTES_OF_COLLECTIVES, DIVIDED_BYTES_ON_ACCELERATORS, PARTS_ON_ACCELERATORS

# What `prepare` makes and the same communicator alone reads: views, launches or a plan, as its algorithm wants them. Each makes
# another kind, and no caller looks inside.
PreparedGather: TypeAlias = Any


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

    def progress(self) -> bool:
        """Do this rank's part as far as no other rank has to be waited for; whether `wait` would return at once."""

    def wait(self) -> None:
        """Return when (on an accelerator: order the compute stream after) the result is there."""

    def abort(self) -> None:
        """The result is not wanted any more; afterwards nothing is written to it. Waits for others only where it has to."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What communicators, and the devices that they serve, differ in. Callers ask for these, and never for the class of a
    communicator or the type of a device. Where nothing is said it is a host.

    direct_bytes: bytes in a shard from which a message of its own pays.
    max_parts: messages of one launch at most; the largest shards get them, and the others share one.
    packed_align: bytes at whose multiples shards start that share a message, gathered or reduced; each rank's part of any
        message is a multiple of as many.
    alone_bytes: bytes in a replicated gradient from which it waits for no others to share a message with.
    divided_bytes: bytes for one rank from which a reduction is launched in two parts, so that the first can be given back while
        gradients of the next unit arrive; 0 if none is.
    even_only: tensors can only be cut into equal chunks.
    reads_scaled_inputs: `all_reduce` reads a scaled input where it lies; the others copy it first, which can be done earlier.
    ordered: sums, broadcasts and checks are told apart by nothing but their order, which all ranks must keep.
    tells_of_leaving: who waits for a rank that has left the step is told (`leave`); otherwise the group's timeout ends it.
    saves_memory: memory that comes and goes costs nothing, and to wait does not hold up the host: one reduction is over before
        the next one is launched.
    pools_memory: memory that is freed is kept for the next who needs as much. Otherwise an allocator does so already.
    wide_copies: copies walk short rows element by element, so elements are to be as wide as they can. Otherwise a kernel splits
        all rows of a message at once.
    looked_after: collectives do part of their work when asked to (`progress`), and hold memory until then: so they are asked
        now and then, and few are in flight. Otherwise they go on by themselves, and are waited for at the end.
    reads_freely: to read a tensor costs no more than the read. Otherwise the host would wait for all that was launched before.
    moves_inputs: what a root's forward is given may be elsewhere, and is moved to the parameters.
    """

    direct_bytes: int = 0
    max_parts: int = TagSequence.PARTS // 2
    packed_align: int = 1
    alone_bytes: int = ALONE_BYTES
    divided_bytes: int = 0
    even_only: bool = False
    reads_scaled_inputs: bool = False
    ordered: bool = False
    tells_of_leaving: bool = False
    saves_memory: bool = False
    pools_memory: bool = True
    wide_copies: bool = True
    looked_after: bool = True
    reads_freely: bool = True
    moves_inputs: bool = False


ON_ACCELERATOR: Final = Capabilities(
    direct_bytes=DIRECT_BYTES_OF_COLLECTIVES,
    max_parts=PARTS_ON_ACCELERATORS,
    packed_align=16,  # what kernels read at once, if it is aligned
    alone_bytes=ALONE_BYTES_ON_ACCELERATORS,
    divided_bytes=DIVIDED_BYTES_ON_ACCELERATORS,
    even_only=True,
    ordered=True,
    saves_memory=True,
    pools_memory=False,
    wide_copies=False,  # not every accelerator has such elements
    looked_after=False,
    reads_freely=False,
    moves_inputs=True,
)


class Store(Protocol):
    """Texts that ranks leave for each other, which each looks up when it likes."""

    def publish(self, text: str, place: int, *, of_rank: bool = False) -> None:
        """Leave `text`, in place of the last one, where all ranks can look it up.

        Args:
            place: of whoever leaves it among all who use the communicator.
            of_rank: it is this rank's own; otherwise all leave the same.
        """

    def published(self, place: int, rank: int | None = None) -> str:
        """What was left last, of all or as a rank's own; nothing where nothing was, or nothing can be."""


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

    @property
    def tags(self) -> TagSequences: ...

    @property
    def presence(self) -> Presence: ...

    @property
    def store(self) -> Store: ...

    def release(self) -> None:
        """Return memory that is kept for messages to come. Not a collective; what is in flight is not affected."""

    def prepare(self, parts: Sequence[GatherPart]) -> PreparedGather:
        """What `all_gather` needs, made once."""

    def all_gather(self, prepared: PreparedGather, *, label: str, tags: TagSequence) -> Work:
        """Launch. The parts' memory must be there."""

    def reduce_scatter(self, parts: Sequence[ReducePart], *, scratch: Scratch, label: str, tags: TagSequence) -> Work:
        """Sums, each multiplied by its part's scale."""

    def all_reduce(
        self, tensor: Tensor, *, label: str, scaled_input: ScaledInput | None = None, tags: TagSequence | None = None
    ) -> Work:
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


DESTROYED_HERE: Final = "this rank has destroyed its process group"
_OF_BACKEND: Final = (
    "This is an error of the process group's backend. Look for the first error among all ranks; if they have this one only, "
    "NCCL_DEBUG=WARN in the environment lets NCCL say more."
)
FAILURES: Final = (RuntimeError, OSError, EOFError)  # of backends, of memory and of pipes


def raise_failed(label: str, rank: int, error: Exception) -> NoReturn:
    """Say what has failed on this rank, and what to do about it; from within the handler of the error."""
    if isinstance(error, torch.OutOfMemoryError):
        raise error  # which is of this rank alone
    said = first_line(error) or type(error).__name__
    found = CommunicationError(f"rank {rank}: the {label} failed: {said}\n{_cure(error)}")
    found.later_step = getattr(error, "later_step", None)
    raise found from error


def _cure(error: Exception) -> str:
    if DESTROYED_HERE in str(error):
        return "destroy_process_group() ends the training of all models over the group; call it after the last step."
    if isinstance(error, dist.DistBackendError):
        return _OF_BACKEND
    return "Another rank raised, ended or took another path through the model; look for the first error among all ranks."


class CompositeWork:
    """Several works of one collective, and what follows their completion.

    Args:
        completed: they are, whatever they say of themselves.
    """

    __slots__ = ("_completed", "_finish", "_label", "_rank", "_works")

    def __init__(
        self, works: list[Any], label: str, rank: int, finish: Callable[[], None] | None = None, *, completed: bool = False
    ) -> None:
        self._works = works
        self._completed = completed
        self._label = label
        self._rank = rank
        self._finish = finish

    def progress(self) -> bool:
        for work in self._works:  # noqa: SIM110 - a generator would cost more than what it asks
            if not (self._completed or work.is_completed()):
                return False
        return True

    def wait(self) -> None:
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise_failed(self._label, self._rank, error)
        self._works = []
        if self._finish is not None:
            self._finish()
            self._finish = None

    def abort(self) -> None:
        self.wait()  # the backend writes to the result whenever it comes
