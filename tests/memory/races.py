"""Finds races: streams that only keep vector clocks, and a dispatch mode that watches the tensors of every operation.

Each stream counts its operations and knows how far it has waited for the others. An operation on another stream is in the past
only if a fork or a join orders it. In real time all operations run at once, one after the other, so a missing wait is found in
every run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from composable.memory.elastic import ElasticBuffer

COMPUTE = "compute"
Clock = dict[str, int]


class Point:
    """A mark: the clock of the stream when it was set."""

    def __init__(self, streams: ClockedStreams, clock: Clock) -> None:
        self._streams = streams
        self._clock = clock

    def join(self) -> None:
        self._streams.join(self._clock)

    def wait_on_host(self) -> None:
        self._streams.join(self._clock)  # later operations of the stream are launched by the host


class ClockedStreams:
    """Streams without a device, with clocks. `deaf` forks or joins order nothing, to show that the watch finds it."""

    def __init__(self, *, deaf_forks: bool = False, deaf_joins: bool = False) -> None:
        self.current = COMPUTE
        self.clocks: dict[str, Clock] = {COMPUTE: {}}
        self.used: dict[str, None] = {}
        self._deaf_forks = deaf_forks
        self._deaf_joins = deaf_joins
        self.before_join: list[Any] = []

    def _catch_up(self, name: str, with_: Clock) -> None:
        mine = self.clocks.setdefault(name, {})
        for other, count in with_.items():
            mine[other] = max(mine.get(other, 0), count)

    @contextmanager
    def fork(self, name: str) -> Iterator[None]:
        self.clocks.setdefault(name, {})
        self.used[name] = None
        if not self._deaf_forks:
            self._catch_up(name, self.clocks[self.current])
        before, self.current = self.current, name
        try:
            yield
        finally:
            self.current = before

    def mark(self) -> Point:
        return Point(self, dict(self.clocks[self.current]))

    def here(self) -> str:
        return self.current

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        before, self.current = self.current, stream
        self._catch_up(stream, self.clocks[before])
        yield
        self.current = before
        self._catch_up(before, self.clocks[stream])

    def join(self, clock: Clock) -> None:
        for act in self.before_join:
            act()
        if not self._deaf_joins:
            self._catch_up(self.current, clock)

    def tick(self) -> int:
        clock = self.clocks[self.current]
        clock[self.current] = clock.get(self.current, 0) + 1
        return clock[self.current]


@dataclass(frozen=True)
class Access:
    """One operation's use of some memory."""

    stream: str
    time: int
    what: str
    start: int
    end: int

    def in_the_past_of(self, clock: Clock) -> bool:
        return clock.get(self.stream, 0) >= self.time

    def overlaps(self, start: int, end: int) -> bool:
        return self.start < end and start < self.end


@dataclass
class Memory:
    """The accesses of one storage that later ones must be ordered after."""

    reference: StorageWeakRef
    home: str  # the stream that it was allocated on, and is freed on
    writes: list[Access] = field(default_factory=list)
    reads: list[Access] = field(default_factory=list)


class RaceWatch(TorchDispatchMode):
    """Records reads and writes of every operation; `found` are those that no fork or join orders."""

    def __init__(self, streams: ClockedStreams) -> None:
        super().__init__()
        self.streams = streams
        self.found: list[str] = []
        self._memory: dict[int, Memory] = {}
        streams.before_join.append(self._look_for_freed)

    # --- what operations touch ----------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self._look_for_freed()
        result = function(*args, **kwargs)
        if not _is_view(function):
            self.streams.tick()
            reads, writes = _reads_and_writes(function, args, kwargs, result)
            for tensor in reads:
                self._read(tensor, str(function))
            for tensor in writes:
                self._write(tensor, str(function))
        return result

    def _entry(self, tensor: Tensor, what: str) -> tuple[Memory, Access]:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._memory:
            self._memory[key] = Memory(StorageWeakRef(storage), self.streams.current)
        streams = self.streams
        start = tensor.storage_offset() * tensor.element_size()
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        end = start + extent * tensor.element_size() if tensor.numel() else start
        time = streams.clocks[streams.current].get(streams.current, 0)
        return self._memory[key], Access(streams.current, time, what, start, end)

    def _read(self, tensor: Tensor, what: str) -> None:
        memory, access = self._entry(tensor, what)
        self._must_be_past([w for w in memory.writes if w.overlaps(access.start, access.end)], access, "reads what")
        memory.reads.append(access)

    def _write(self, tensor: Tensor, what: str) -> None:
        memory, access = self._entry(tensor, what)
        touched = [a for a in (*memory.writes, *memory.reads) if a.overlaps(access.start, access.end)]
        self._must_be_past(touched, access, "overwrites what")
        inside = [a for a in touched if access.start <= a.start and a.end <= access.end]
        memory.writes = [a for a in memory.writes if a not in inside] + [access]
        memory.reads = [a for a in memory.reads if a not in inside]

    def _must_be_past(self, others: Sequence[Access], access: Access, does: str) -> None:
        clock = self.streams.clocks[access.stream]
        for other in others:
            if not other.in_the_past_of(clock):
                self.found.append(f"{access.what} on {access.stream} {does} {other.what} on {other.stream} still uses")

    # --- memory that goes away ----------------------------------------------------------------------------------------

    def _look_for_freed(self) -> None:
        gone = [key for key, memory in self._memory.items() if memory.reference.expired()]
        for key in gone:
            self._freed(self._memory.pop(key))

    def _freed(self, memory: Memory) -> None:
        clock = self.streams.clocks[memory.home]
        for access in (*memory.writes, *memory.reads):
            if not access.in_the_past_of(clock):
                self.found.append(f"memory of {memory.home} is freed that {access.what} on {access.stream} still uses")

    def drained(self, storage: torch.UntypedStorage) -> None:
        """The storage stays, its memory goes."""
        memory = self._memory.pop(storage._cdata, None)
        if memory is not None:
            self._freed(memory)

    def filled(self, storage: torch.UntypedStorage) -> None:
        """The storage gets memory, which others of its stream used before."""
        streams = self.streams
        access = Access(streams.current, streams.tick(), "its allocation", 0, storage.nbytes())
        self._memory[storage._cdata] = Memory(StorageWeakRef(storage), streams.current, [access])


@contextmanager
def watched(streams: ClockedStreams) -> Iterator[RaceWatch]:
    """Watch all operations of the body and all memory that it frees."""
    watch = RaceWatch(streams)
    with ExitStack() as patches:
        patches.enter_context(mock.patch.multiple(ElasticBuffer, **_noting_buffers(watch)))
        patches.enter_context(watch)
        yield watch


def _noting_buffers(watch: RaceWatch) -> dict[str, Callable[..., None]]:
    """Methods of `ElasticBuffer` that tell `watch` when memory comes and goes."""
    allocate, free = ElasticBuffer.allocate, ElasticBuffer.free

    def noted_allocate(buffer: ElasticBuffer) -> None:
        held = buffer.held
        allocate(buffer)
        if not held:
            watch.filled(buffer.tensor.untyped_storage())

    def noted_free(buffer: ElasticBuffer) -> None:
        if buffer.held:
            watch.drained(buffer.tensor.untyped_storage())
        free(buffer)

    return {"allocate": noted_allocate, "free": noted_free}


def _is_view(function: Any) -> bool:
    """Whether an operation only makes another view of its argument, and touches no memory."""
    returns = function._schema.returns
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _reads_and_writes(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> tuple[list[Tensor], list[Tensor]]:
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    collective = function.namespace == "c10d"
    declared = function._schema.arguments
    given = [*zip(declared, args, strict=False), *((a, kwargs[a.name]) for a in declared if a.name in kwargs)]
    for argument, value in given:
        tensors = list(_tensors(value))
        if collective:  # their schemas do not say what they write
            if argument.name.startswith("output") or argument.name == "tensors":
                writes += tensors
            if not argument.name.startswith("output"):
                reads += tensors
        elif argument.alias_info is not None and argument.alias_info.is_write:
            writes += tensors
        else:
            reads += tensors
    known = [id(tensor) for tensor in (*reads, *writes)]
    writes += [] if collective else [tensor for tensor in _tensors(result) if id(tensor) not in known]
    return reads, writes


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, DTensor):
        yield value._local_tensor
    elif isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
