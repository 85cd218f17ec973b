"""The only place that calls torch.distributed's collectives: one algorithm per backend. Knows flat tensors, not modules.

Note [Algorithms per backend]
gloo: point-to-point pairs. Its tensor collectives clone, reduce everything everywhere and copy in `wait()`; pairs move each
byte once, straight from the shard into its final place, while the caller computes. In large groups the number of pairs
per rank grows, so there gloo's own collectives take over.
NCCL and other accelerator backends: tensor collectives on a stream of their own, many of them in one launch.
Anything else: plain tensor collectives, asynchronous where the backend is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from composable.device.private import coalesced, timeout_of
from composable.device.streams import Mark, Streams, streams_of
from composable.errors import CommunicationError

PAIRS_UP_TO: Final = 8  # ranks in a gloo group up to which pairs beat its collectives
DIRECT_BYTES: Final = {"pairs": 512 << 10, "tensors": 1 << 20}  # bytes in a shard from which its own message pays

# torch 2.13 renamed these two; both names mean the same collective.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


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
    """One tensor to reduce: rank r's chunk of `source` (1-D, contiguous), summed over the ranks, lands in r's `out`."""

    source: Tensor
    chunk: int
    out: Tensor


class Scratch(Protocol):
    """Lends memory that is used again and again."""

    def take(self, numel: int, dtype: torch.dtype) -> Tensor: ...

    def give(self, tensor: Tensor) -> None: ...


class Arrival(Protocol):
    """A collective in flight."""

    def wait(self) -> None:
        """Return when (on an accelerator: order the compute stream after) the result is there."""


class Channel:
    """Tags that keep one unit's messages apart from all others in the same group.

    A tag holds the channel, a running number and the part of the message, so that messages of another unit or of another
    step can never be taken for the expected ones: ranks that diverge wait (and time out by name), and compute nothing wrong.
    """

    PARTS: Final = 1 << 10
    _FLAG: Final = 1 << 30  # apart from the small tags that users choose

    __slots__ = ("_base", "_count")

    def __init__(self, number: int) -> None:
        self._base = self._FLAG | (number % (1 << 10)) << 20
        self._count = 0

    def next_tag(self) -> int:
        self._count = (self._count + 1) % (1 << 10)
        return self._base | self._count << 10


class Wire(Protocol):
    """What handles ask of a process group. Tests pass slow, recording or failing ones in its place."""

    @property
    def rank(self) -> int: ...

    @property
    def ways(self) -> int: ...

    @property
    def even_only(self) -> bool:
        """Whether tensors can only be cut into equal chunks."""

    @property
    def direct_bytes(self) -> int:
        """Bytes in a shard from which a message of its own pays."""

    def open_channel(self) -> Channel:
        """Tags for one unit's messages; every rank opens its channels in the same order."""

    def prepare(self, parts: Sequence[GatherPart]) -> Any:
        """What `all_gather` needs, made once."""

    def all_gather(self, prepared: Any, *, label: str, tag: int) -> Arrival: ...

    def reduce_scatter(self, parts: Sequence[ReducePart], *, scratch: Scratch, label: str, tag: int) -> Arrival:
        """Sums; dividing is the caller's business."""

    def all_reduce(self, tensor: Tensor, *, label: str) -> Arrival:
        """Sums in place, in the order of the calls."""

    def broadcast(self, tensor: Tensor, *, label: str) -> None:
        """Rank 0's values everywhere, in place."""

    def exchange(self, values: Sequence[int], *, label: str) -> list[list[int]]:
        """Everybody's `values` (as many on each rank), by rank. Blocks: for checks, never per step."""


def _failed(label: str, rank: int, error: Exception) -> CommunicationError:
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return CommunicationError(
        f"rank {rank}: the {label} failed: {first_line}\n"
        "Another rank raised, ended or took another path through the model; look for the first error among all ranks."
    )


class _Works:
    """Several works of one collective, and what follows their completion."""

    __slots__ = ("_finish", "_label", "_rank", "_works")

    def __init__(self, works: list[Any], label: str, rank: int, finish: Callable[[], None] | None = None) -> None:
        self._works = works
        self._label = label
        self._rank = rank
        self._finish = finish

    def wait(self) -> None:
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise _failed(self._label, self._rank, error) from error
        self._works = []
        if self._finish is not None:
            self._finish()
            self._finish = None


_CHANNELS: dict[dist.ProcessGroup, int] = {}


class LocalWire:
    """One rank: nothing to say to anybody."""

    rank = 0
    ways = 1
    even_only = False
    direct_bytes = 0

    def open_channel(self) -> Channel:
        return Channel(0)

    def prepare(self, parts: Sequence[GatherPart]) -> Any:
        return tuple(parts)

    def all_gather(self, prepared: Any, *, label: str, tag: int) -> Arrival:
        for part in prepared:
            part.whole.copy_(part.shard)
        return _Works([], label, 0)

    def reduce_scatter(self, parts: Sequence[ReducePart], *, scratch: Scratch, label: str, tag: int) -> Arrival:
        for part in parts:
            part.out.copy_(part.source[: part.out.numel()])
        return _Works([], label, 0)

    def all_reduce(self, tensor: Tensor, *, label: str) -> Arrival:
        return _Works([], label, 0)

    def broadcast(self, tensor: Tensor, *, label: str) -> None:
        return None

    def exchange(self, values: Sequence[int], *, label: str) -> list[list[int]]:
        return [list(values)]


class _GroupWire:
    """What every real process group does the same way."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.rank = dist.get_rank(group)
        self.ways = dist.get_world_size(group)

    def open_channel(self) -> Channel:
        number = _CHANNELS.get(self.group, 0)
        _CHANNELS[self.group] = number + 1
        return Channel(number)

    def _launch(self, label: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:
            raise _failed(label, self.rank, error) from error

    def broadcast(self, tensor: Tensor, *, label: str) -> None:
        self._launch(label, lambda: dist.broadcast(tensor, group=self.group, group_src=0))

    def exchange(self, values: Sequence[int], *, label: str) -> list[list[int]]:
        mine = torch.tensor(list(values), dtype=torch.int64, device=self.device)
        everybody = torch.empty(self.ways * len(values), dtype=torch.int64, device=self.device)
        self._launch(label, lambda: _all_gather(everybody, mine, group=self.group))
        rows: list[list[int]] = everybody.view(self.ways, len(values)).tolist()
        return rows


class PairsWire(_GroupWire):
    """gloo: every pair of ranks exchanges exactly the bytes that it must, straight between shard and unsharded buffer."""

    even_only = False
    direct_bytes = DIRECT_BYTES["pairs"]

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        # Each rank starts with its right neighbour, so that nobody is everybody's first.
        self._peers = tuple((self.rank + step) % self.ways for step in range(1, self.ways))

    def prepare(self, parts: Sequence[GatherPart]) -> Any:
        receives: list[tuple[list[Tensor], int, int]] = []
        sends: list[tuple[list[Tensor], int, int]] = []
        copies: list[tuple[Tensor, Tensor]] = []
        for index, part in enumerate(parts):
            chunk = part.shard.numel()
            pieces = [part.whole[r * chunk : min((r + 1) * chunk, part.numel)] for r in range(self.ways)]
            mine = part.shard[: pieces[self.rank].numel()]
            if mine.numel():
                copies.append((pieces[self.rank], mine))
            for peer in self._peers:
                if pieces[peer].numel():
                    receives.append(([pieces[peer]], peer, index))
                if mine.numel():
                    sends.append(([mine], peer, index))
        return receives, sends, copies

    def all_gather(self, prepared: Any, *, label: str, tag: int) -> Arrival:
        receives, sends, copies = prepared
        group = self.group
        try:
            works = [group.recv(tensor, peer, tag + index) for tensor, peer, index in receives]
            works += [group.send(tensor, peer, tag + index) for tensor, peer, index in sends]
        except RuntimeError as error:
            raise _failed(label, self.rank, error) from error
        for whole, mine in copies:
            whole.copy_(mine)
        return _Works(works, label, self.rank)

    def reduce_scatter(self, parts: Sequence[ReducePart], *, scratch: Scratch, label: str, tag: int) -> Arrival:
        group, rank, peers = self.group, self.rank, self._peers
        incoming: list[tuple[ReducePart, Tensor, Tensor]] = []
        works: list[Any] = []
        try:
            for index, part in enumerate(parts):
                source, chunk, numel = part.source, part.chunk, part.out.numel()
                if numel:
                    lent = scratch.take(len(peers) * numel, source.dtype)
                    rows = lent.view(len(peers), numel)
                    works += [group.recv([rows[row]], peer, tag + index) for row, peer in enumerate(peers)]
                    incoming.append((part, rows, lent))
                for peer in peers:
                    piece = source[peer * chunk : (peer + 1) * chunk]
                    if piece.numel():
                        works.append(group.send([piece], peer, tag + index))
        except RuntimeError as error:
            raise _failed(label, rank, error) from error

        def add_up() -> None:
            for part, rows, lent in incoming:
                own = part.source[rank * part.chunk : rank * part.chunk + part.out.numel()]
                by_rank = [own if r == rank else rows[(r - rank) % self.ways - 1] for r in range(self.ways)]
                torch.add(by_rank[0], by_rank[1], out=part.out)
                for other in by_rank[2:]:  # in the order of ranks, so that every run rounds alike
                    part.out.add_(other)
                scratch.give(lent)

        return _Works(works, label, rank, add_up)

    def all_reduce(self, tensor: Tensor, *, label: str) -> Arrival:
        work = self._launch(label, lambda: dist.all_reduce(tensor, group=self.group, async_op=True))
        return _Works([work], label, self.rank)


class TensorsWire(_GroupWire):
    """Plain tensor collectives; `async_op` keeps those of a host backend off this thread."""

    even_only = True
    direct_bytes = DIRECT_BYTES["tensors"]

    def prepare(self, parts: Sequence[GatherPart]) -> Any:
        return tuple(parts)

    def all_gather(self, prepared: Any, *, label: str, tag: int) -> Arrival:
        calls = [partial(_all_gather, p.whole, p.shard, group=self.group, async_op=True) for p in prepared]
        return self._run(label, calls)

    def reduce_scatter(self, parts: Sequence[ReducePart], *, scratch: Scratch, label: str, tag: int) -> Arrival:
        calls = [partial(_reduce_scatter, p.out, p.source, group=self.group, async_op=True) for p in parts]
        return self._run(label, calls)

    def all_reduce(self, tensor: Tensor, *, label: str) -> Arrival:
        return self._run(label, [partial(dist.all_reduce, tensor, group=self.group, async_op=True)])

    def _run(self, label: str, calls: Sequence[Callable[[], Any]]) -> Arrival:
        return _Works([self._launch(label, call) for call in calls], label, self.rank)


class _OnStream:
    """Collectives on a stream: waiting orders the compute stream and leaves the host alone."""

    __slots__ = ("_kept", "_mark")

    def __init__(self, mark: Mark, kept: object) -> None:
        self._mark = mark
        self._kept = kept  # what the stream still reads must not be freed before the compute stream has waited

    def wait(self) -> None:
        self._mark.join()
        self._kept = None


class StreamsWire(_GroupWire):
    """An accelerator's tensor collectives, many in one launch, each kind on a stream of its own."""

    even_only = True
    direct_bytes = DIRECT_BYTES["tensors"]

    def __init__(self, group: dist.ProcessGroup, device: torch.device, streams: Streams) -> None:
        super().__init__(group, device)
        self._streams = streams

    def prepare(self, parts: Sequence[GatherPart]) -> Any:
        return tuple(parts)

    def all_gather(self, prepared: Any, *, label: str, tag: int) -> Arrival:
        def calls() -> None:
            for part in prepared:
                _all_gather(part.whole, part.shard, group=self.group)

        return self._on_stream("all_gather", label, calls, len(prepared), prepared)

    def reduce_scatter(self, parts: Sequence[ReducePart], *, scratch: Scratch, label: str, tag: int) -> Arrival:
        def calls() -> None:
            for part in parts:
                _reduce_scatter(part.out, part.source, group=self.group)

        return self._on_stream("reduce_scatter", label, calls, len(parts), parts)

    def all_reduce(self, tensor: Tensor, *, label: str) -> Arrival:
        return self._on_stream("all_reduce", label, lambda: dist.all_reduce(tensor, group=self.group), 1, tensor)

    def _on_stream(self, stream: str, label: str, calls: Callable[[], Any], count: int, kept: object) -> Arrival:
        try:
            with self._streams.fork(stream):
                if count == 1:
                    calls()
                else:
                    with coalesced(self.group):
                        calls()
                return _OnStream(self._streams.mark(), kept)
        except RuntimeError as error:
            raise _failed(label, self.rank, error) from error


_WRAPPERS: list[Callable[[Wire], Wire]] = []


@contextmanager
def wires_wrapped_by(wrapper: Callable[[Wire], Wire]) -> Iterator[None]:
    """Wires made in the body pass through `wrapper`: how tests delay, record or break collectives."""
    _WRAPPERS.append(wrapper)
    try:
        yield
    finally:
        _WRAPPERS.remove(wrapper)


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """The backend that serves tensors on `device`, e.g. "gloo"."""
    for entry in str(dist.get_backend_config(group)).split(","):
        kind, _, backend = entry.rpartition(":")
        if kind in ("", device.type):
            return backend
    return "undefined"


def wire_of(group: dist.ProcessGroup | None, device: torch.device) -> Wire:
    """The wire for tensors on `device` among the ranks of `group` (None: this rank alone)."""
    wire: Wire
    if group is None or dist.get_world_size(group) == 1:
        wire = LocalWire()
    elif device.type not in ("cpu", "meta"):
        wire = StreamsWire(group, device, streams_of(device))
    elif backend_of(group, torch.device("cpu")) == "gloo" and dist.get_world_size(group) <= PAIRS_UP_TO:
        wire = PairsWire(group, torch.device("cpu"))
    else:
        wire = TensorsWire(group, torch.device("cpu"))
    for wrapper in _WRAPPERS:
        wire = wrapper(wire)
    return wire


_NEIGHBOURS: dict[tuple[dist.ProcessGroup, int], dist.ProcessGroup] = {}


def neighbours(group: dist.ProcessGroup, ways: int, device: torch.device) -> dist.ProcessGroup:
    """The group of `ways` neighbouring ranks of `group` that this rank belongs to; made once."""
    if (group, ways) not in _NEIGHBOURS:
        ranks = dist.get_process_group_ranks(group)
        start = dist.get_rank(group) // ways * ways
        _NEIGHBOURS[group, ways] = _new_group(ranks[start : start + ways], group, device)
    return _NEIGHBOURS[group, ways]


def communicator_like(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """A new group of the same ranks, whose collectives cannot be taken for those of `group`."""
    if dist.get_world_size(group) == 1:
        return group
    return _new_group(dist.get_process_group_ranks(group), group, device)


def _new_group(ranks: list[int], like: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """A group of `ranks` that gives up as early, or as late, as `like` does."""
    made: dist.ProcessGroup = dist.new_group(ranks, timeout=timeout_of(like, device), use_local_synchronization=True)
    return made


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def world_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None  # callers asked is_distributed() first
    return group
