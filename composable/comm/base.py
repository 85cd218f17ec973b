"""What a comm is, and what all comms over a process group have in common: checks, exchanges, and
errors by name.
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol, TypeVar
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

from composable.comm.launch import COMPARISON_OF_LAUNCHES, Launch
from composable.comm.ledger import ledger_of
from composable.errors import CommunicationError, RanksDisagreeError, first_line
from composable.memory.streams import range_label
from composable.torch_private import Launcher, launchers, profiled

R = TypeVar("R")

Pairs = Sequence[tuple[Tensor, Tensor]]
Sizes = Sequence[int]
# outputs and inputs, or what is reduced in place
Columns = Sequence[Sequence[Tensor]]

# a broadcast is sent in messages of this size at most, which bounds its memory
MESSAGE_BYTES: Final = 64 << 20
# backends with a reduction to the mean, which costs nothing over the sum
_AVERAGING: Final = ("nccl", "fake")
_DESTROYED: Final = "this rank has destroyed its process group"


# Is given the comm, the launch, the collective (a key of `launchers`, "all_to_all", "broadcast" or
# "max"), its tensors, and the scale of sums or the rank that sends a broadcast.
LaunchObserver = Callable[["GroupComm", Launch, str, Columns, Any], None]
WaitObserver = Callable[["GroupComm", Launch], None]
_LAUNCHING: Final[list[LaunchObserver]] = []
_LAUNCHED: Final[list[LaunchObserver]] = []
_WAITING: Final[list[WaitObserver]] = []
_WAITED: Final[list[WaitObserver]] = []


def observe_launches(
    *,
    launching: LaunchObserver | None = None,
    launched: LaunchObserver | None = None,
    waiting: WaitObserver | None = None,
    waited: WaitObserver | None = None,
) -> Callable[[], None]:
    """Call these for each collective of this process from now on; returns what ends it.

    Args:
        launching: before it is launched.
        launched: when it has been launched. An exchange that blocks has its answer then.
        waiting: before it is waited for, if it was launched while `waiting` or `waited` was there.
        waited: when the wait has returned.
    """
    pairs: list[tuple[list[Any], Any]] = [
        (_LAUNCHING, launching), (_LAUNCHED, launched), (_WAITING, waiting), (_WAITED, waited),
    ]  # fmt: skip
    added = [(observers, notify) for observers, notify in pairs if notify is not None]
    for observers, notify in added:
        observers.append(notify)

    def end() -> None:
        for observers, notify in added:
            observers.remove(notify)

    return end


_WHEN: Final[list[Callable[[], str]]] = []


def tell_when(tell: Callable[[], str]) -> None:
    """Add this to errors of collectives: " in the backward of step 3", or nothing."""
    _WHEN.append(tell)


class Work(Protocol):
    """A collective in flight. What it reads and writes must stay as it is until `wait` returns."""

    def wait(self) -> None:
        """Return when the result is there; on an accelerator, make the current stream wait for it
        and go on. Memory that the collective used may be freed then: its next user is later work
        of this stream, which waits as well (Note [Stream discipline] in memory/streams.py).

        Raises:
            CommunicationError: the collective failed.
        """


def scale_sums(tensors: Iterable[Tensor], scale: float) -> None:
    """Multiply in place. `_foreach_mul_` of a host first rounds the factor to the dtype of the
    tensors.
    """
    for tensor in tensors:
        tensor.mul_(scale)


class _Done:
    def wait(self) -> None:
        return None


DONE: Final[Work] = _Done()


@dataclass(frozen=True)
class Traits:
    """What backends differ in, as far as it decides the layout of messages.

    Attributes:
        direct_bytes: a shard of at least this many bytes travels in a message of its own.
        max_direct: how many such messages one launch may have.
        align: bytes. Rows of messages, and shards in their buffer, start at multiples of it.
        on_stream: `Work.wait` orders a stream, and to read a tensor on the host would wait for the
            device.
        simulated: nothing is sent, and outputs have no values: ranks are taken to be like this one.
    """

    direct_bytes: int
    max_direct: int
    align: int
    on_stream: bool
    simulated: bool = False


class Comm(Protocol):
    """The collectives among the ranks of a process group, for tensors on one device. Tests put
    others in their place.

    All ranks launch the same collectives in the same order. A `Launch` says what one is for.
    """

    @property
    def group(self) -> dist.ProcessGroup | None:
        """None: this rank alone."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def traits(self) -> Traits: ...

    def all_gather(self, pairs: Pairs, launch: Launch) -> Work:
        """For each (whole, shard): fill `whole` with the `shard` of every rank, in the order of
        ranks.

        Both are 1-D and contiguous, `whole.numel() == size * shard.numel()`, and all have one
        dtype.
        """

    def reduce_scatter(self, pairs: Pairs, launch: Launch, scale: float = 1.0) -> Work:
        """For each (out, whole): the sum over all ranks of this rank's part of `whole`, times
        `scale`, becomes `out`.

        Shapes are as for `all_gather`. `out` must not overlap `whole`.
        """

    def all_reduce(self, tensors: Sequence[Tensor], launch: Launch, scale: float = 1.0) -> Work:
        """Sums over all ranks, times `scale`, in place. The tensors are contiguous."""

    def all_to_all(
        self, out: Tensor, out_sizes: Sizes, source: Tensor, sizes: Sizes, launch: Launch
    ) -> Work:
        """Give each rank another part of `source`, of the next of `sizes` elements: `out` becomes
        what all ranks give to this one, in the order of ranks.

        Both are 1-D, contiguous and of one dtype. `sizes[r]` is `out_sizes[this rank]` of rank r,
        and may be 0.
        """

    def broadcast(self, tensors: Sequence[Tensor], launch: Launch, src: int = 0) -> None:
        """Rank `src` of the group's values everywhere, in place. Blocks. The tensors may be on any
        device.
        """

    def min_max(self, values: Sequence[int], launch: Launch) -> tuple[list[int], list[int]]:
        """The lowest and the highest of all ranks' `values` (as many on each rank), one by one.
        Blocks.
        """

    def all_gather_ints(self, values: Sequence[int], launch: Launch) -> list[list[int]]:
        """All ranks' `values` (as many on each rank), by rank. Blocks."""

    def all_gather_objects(self, value: Any, launch: Launch) -> list[Any]:
        """All ranks' `value`, pickled, by rank. Blocks, and grows with the ranks: for what went
        wrong.
        """


class Again(list[tuple[Tensor, Tensor]]):
    """Pairs of outputs and inputs that are gathered in each step, in memory that comes and goes.

    Attributes:
        columns: the outputs, and the inputs.
        plans: what a comm has made of them, by the comm.
    """

    def __init__(self, pairs: Pairs) -> None:
        super().__init__(pairs)
        self.columns: tuple[Sequence[Tensor], ...] = tuple(zip(*pairs, strict=True))
        self.plans: dict[object, Any] = {}

    def keep_plan(self, comm: object, plan: Any) -> Any:
        """See `plans`; returns the plan."""
        self.plans[comm] = plan
        return plan


def cut_flat(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Views of a flat tensor with these shapes, one behind the other."""
    sizes = [shape.numel() for shape in shapes]
    return [
        piece.view(shape)
        for piece, shape in zip(flat[: sum(sizes)].split(sizes), shapes, strict=True)
    ]


class _ObservedWork:
    """A work that tells observers when it is waited for."""

    def __init__(self, comm: GroupComm, launch: Launch, work: Work) -> None:
        self._comm, self._launch, self._work = comm, launch, work

    def wait(self) -> None:
        for notify in _WAITING:
            notify(self._comm, self._launch)
        self._work.wait()
        for notify in _WAITED:
            notify(self._comm, self._launch)


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """The backend that serves tensors on `device`, e.g. "gloo"; "undefined" where none does."""
    for entry in str(dist.get_backend_config(group)).split(","):
        kind, _, backend = entry.rpartition(":")
        if kind in ("", device.type):
            return backend
    return "undefined"


class GroupComm(ABC):
    """What comms over a process group have in common. A transport is a subclass with `traits` and
    `_start`; `_make_comm` in backends.py picks it.
    """

    traits: Traits

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        # Weak: `destroy_process_group` must be able to end the group. If a model kept it alive
        # until the interpreter exits, the group's threads would end the process by
        # `std::terminate`, after all work was done.
        self._group = ref(group)
        self.device = device
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._ledger = ledger_of(group)
        self._name = dist.get_rank()  # by which messages call this rank: its number among all
        self._launchers = launchers(group, asynchronous=not self.traits.on_stream)
        self._means = launchers(group, asynchronous=not self.traits.on_stream, mean=True)
        self._averages = backend_of(group, device) in _AVERAGING

    @property
    def group(self) -> dist.ProcessGroup:
        group = self._group()
        if group is None:
            raise RuntimeError(_DESTROYED)
        return group

    # --- collectives in flight -------------------------------------------------------------------

    def all_gather(self, pairs: Pairs, launch: Launch) -> Work:
        if not pairs:
            return DONE
        columns = pairs.columns if isinstance(pairs, Again) else tuple(zip(*pairs, strict=True))
        return self._launch(launch, "all_gather", columns, 1.0, self._start)

    def reduce_scatter(self, pairs: Pairs, launch: Launch, scale: float = 1.0) -> Work:
        if not pairs:
            return DONE
        columns = tuple(zip(*pairs, strict=True))
        return self._launch(launch, "reduce_scatter", columns, scale, self._start)

    def all_reduce(self, tensors: Sequence[Tensor], launch: Launch, scale: float = 1.0) -> Work:
        if not tensors:
            return DONE
        return self._launch(launch, "all_reduce", (tensors,), scale, self._start)

    def all_to_all(
        self, out: Tensor, out_sizes: Sizes, source: Tensor, sizes: Sizes, launch: Launch
    ) -> Work:
        # `_launch` is given no tensors, since ranks send different amounts
        start = partial(self._start_to_all, out, out_sizes, source, sizes)
        return self._launch(launch, "all_to_all", (), 1.0, start)

    def _start_to_all(
        self, out: Tensor, out_sizes: Sizes, source: Tensor, sizes: Sizes, launch: Launch, *_: Any
    ) -> Work:
        call = partial(
            dist.all_to_all_single, out, source, list(out_sizes), list(sizes),
            group=self.group, async_op=not self.traits.on_stream,
        )  # fmt: skip
        return self._start_by(call, launch, "all_to_all", ((out,), (source,)))

    @abstractmethod
    def _start(self, launch: Launch, collective: str, tensors: Columns, scale: float) -> Work:
        """Launch collectives of one kind, a key of `launchers`, for outputs and inputs, or for what
        is reduced in place.
        """

    def launched_by(
        self, call: Callable[[], Any], collective: str, launch: Launch, tensors: Columns
    ) -> Work:
        """Launch a collective by `call`, of the user's, which returns a work of torch's, or None.

        Args:
            tensors: what it writes and reads.
        """
        return self._launch(launch, collective, tensors, 1.0, partial(self._start_by, call))

    def _start_by(
        self, call: Callable[[], Any], launch: Launch, collective: str, tensors: Columns, *_: Any
    ) -> Work:
        if (work := call()) is not None:
            work.wait()
        return DONE

    def _launcher(self, kind: str, scale: float) -> tuple[Launcher, float]:
        """How to launch `kind`, and by what to multiply the results: some backends make means of
        sums by themselves.
        """
        if scale != 1.0 and scale == 1.0 / self.size and self._averages:
            return self._means[kind], 1.0
        return self._launchers[kind], scale

    # --- launches and errors ---------------------------------------------------------------------

    def _launch(
        self,
        launch: Launch,
        collective: str,
        tensors: Columns,
        option: Any,
        call: Callable[[Launch, str, Columns, Any], R],
    ) -> R:
        """Call what launches a collective, and notify observers. All collectives go
        through here.
        """
        for notify in _LAUNCHING:
            notify(self, launch, collective, tensors, option)
        self._ledger.note(launch, collective, tensors)
        try:
            if not profiled():  # a context that does nothing would be called, too
                launched = call(launch, collective, tensors, option)
            else:
                with range_label(launch.text):
                    launched = call(launch, collective, tensors, option)
        except (torch.OutOfMemoryError, RanksDisagreeError):
            raise  # of this rank alone
        except (RuntimeError, OSError) as error:
            raise self.failure(launch, error) from error
        for notify in _LAUNCHED:
            notify(self, launch, collective, tensors, option)
        if (_WAITING or _WAITED) and hasattr(launched, "wait"):
            observed: Any = _ObservedWork(self, launch, launched)
            return observed  # type: ignore[no-any-return]
        return launched

    def failure(self, launch: Launch, error: Exception) -> CommunicationError:
        """An error of the backend's, at the launch of a collective or while it was waited for, with
        the collective's name, what to do, and what every rank launched last.
        """
        said = first_line(error) or type(error).__name__
        when = "".join(tell() for tell in _WHEN)
        return CommunicationError(
            f"rank {self._name}: the {launch} failed{when}:"
            f" {said}\n{_cure(error)}\n{self._ledger.report()}"
        )

    # --- checks and exchanges --------------------------------------------------------------------

    @torch.no_grad()
    def broadcast(self, tensors: Sequence[Tensor], launch: Launch, src: int = 0) -> None:
        for tensor in tensors:
            flat = tensor.detach().reshape(-1)  # a view, where that is possible
            # As bytes, because backends do not know all dtypes.
            for piece in flat.view(torch.uint8).split(MESSAGE_BYTES) if flat.numel() else ():
                message = piece.to(self.device)
                self._launch(launch, "broadcast", ((message,),), src, self._broadcast)
                if message is not piece and self.rank != src:
                    piece.copy_(message)
            if flat.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(flat.view(tensor.shape))

    def _broadcast(self, launch: Launch, collective: str, tensors: Columns, src: int) -> None:
        dist.broadcast(tensors[0][0], group=self.group, group_src=src)

    def min_max(self, values: Sequence[int], launch: Launch) -> tuple[list[int], list[int]]:
        both = torch.tensor(
            [*values, *(-value for value in values)], dtype=torch.int64, device=self.device
        )
        highest = self._launch(launch, "max", ((both,),), None, self._max)
        return [-value for value in highest[len(values) :]], highest[: len(values)]

    def _max(self, launch: Launch, collective: str, tensors: Columns, _: None) -> list[int]:
        numbers = tensors[0][0]
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self.group)
        found: list[int] = numbers.tolist()
        return found

    def all_gather_ints(self, values: Sequence[int], launch: Launch) -> list[list[int]]:
        return self._rows(torch.tensor(list(values), dtype=torch.int64, device=self.device), launch)

    def all_gather_objects(self, value: Any, launch: Launch) -> list[Any]:
        sent = pickle.dumps(value)
        lengths = [row[0] for row in self.all_gather_ints([len(sent)], launch)]
        padded = torch.tensor(
            list(sent.ljust(max(lengths), b"\0")), dtype=torch.uint8, device=self.device
        )
        return [
            pickle.loads(bytes(row[:length]))
            for row, length in zip(self._rows(padded, launch), lengths, strict=True)
        ]

    def _rows(self, numbers: Tensor, launch: Launch) -> list[list[int]]:
        every = numbers.new_empty(self.size, numbers.numel())
        self.all_gather([(every.view(-1), numbers)], launch).wait()
        rows: list[list[int]] = every.tolist()
        return rows


def compare_launches(comm: Comm) -> None:
    """Check that all ranks of `comm` launched the same collectives. All of them call it at the same
    point.

    Raises:
        RanksDisagreeError: they did not; names the first difference.
    """
    assert comm.group is not None, "one rank has nothing to compare"
    ledger = ledger_of(comm.group)
    mine = (ledger.count, list(ledger.texts))  # before the exchange below adds to them
    rows = comm.all_gather_ints([ledger.count, ledger.digest], COMPARISON_OF_LAUNCHES)
    if any(row != rows[0] for row in rows):
        ledger.refuse(comm.all_gather_objects(mine, Launch("exchange of launches that differ")))


def _cure(error: Exception) -> str:
    if str(error) == _DESTROYED:
        return (
            "destroy_process_group() ends the training of all models over the group; call it after"
            " the last step."
        )
    if isinstance(error, dist.DistBackendError):
        return (
            "This is an error of the process group's backend. Look for the first error among all"
            " ranks; if all have this one only, NCCL_DEBUG=WARN in the environment lets NCCL say"
            " more."
        )
    return (
        "Another rank raised, ended or took another path through the model; look for the first"
        " error among all ranks."
    )
