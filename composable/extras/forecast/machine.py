"""A simulated device: a clock for each stream, and the live storages. It computes nothing.

Note [Virtual time]
Programs run unchanged, in one process, over host tensors whose memory is never touched. Every
operation and every collective is skipped; the time that it would take on the device is added to the
clock of its stream. An operation starts when its stream is free, what the stream waits for is over,
and the host has launched it. `Device` has the figures of the model. Collectives of one process
group run one after the other, in the order of their launches, whatever their streams, like NCCL's
on one communicator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import partial
from typing import Any, Final, NoReturn
from weakref import WeakSet, finalize, ref

import torch
import torch.distributed as dist
from torch import Tensor

from composable.comm.backends import (
    ON_ACCELERATOR,
    PAIRS_UP_TO,
    GenericComm,
    LocalComm,
    PointToPointComm,
)
from composable.comm.base import Columns, GroupComm, Traits, Work
from composable.comm.launch import Launch
from composable.errors import ForecastError
from composable.extras.forecast.devices import Device
from composable.memory.elastic import keeps_idle_memory
from composable.memory.streams import Mark, Streams
from composable.torch_private import DoneWork, name_of_group

COMPUTE: Final = "compute"
BACKEND: Final = "virtual"


class MemoryKind(IntEnum):
    """What memory is for."""

    PARAMETERS = 0
    OPTIMIZER = 1
    GRADIENTS = 2
    UNSHARDED = 3
    MESSAGES = 4
    ACTIVATIONS = 5
    IDLE = 6


KINDS: Final = {
    MemoryKind.PARAMETERS: "parameters, buffers",
    MemoryKind.OPTIMIZER: "optimizer state",
    MemoryKind.GRADIENTS: "gradients",
    MemoryKind.UNSHARDED: "unsharded parameters",
    MemoryKind.MESSAGES: "messages",
    MemoryKind.ACTIVATIONS: "activations, temporaries",
    MemoryKind.IDLE: "idle blocks of the host",
}


@dataclass(frozen=True, slots=True)
class Span:
    """Something that ran on a stream."""

    stream: str
    start: float
    end: float
    what: str


@dataclass(slots=True)
class _Block:
    storage: Any  # a weak reference
    nbytes: int
    kind: MemoryKind


@dataclass
class Peak:
    """The most memory at one time.

    Attributes:
        total: bytes.
        by_kind: bytes of each `MemoryKind`.
        where: the phase, and the unit.
    """

    total: int = 0
    by_kind: tuple[int, ...] = (0,) * len(MemoryKind)
    where: str = ""


@dataclass
class Machine(Streams):
    """The clocks: of the host, of each stream, and of the links; and memory, storage by storage.

    Attributes:
        exposed: how long the compute stream had work, and waited for another stream.
        samples: moments, and bytes by kind, whenever they moved by a three-hundredth of the peak.
        on_operation: is called at every operation, with the machine.
        step: counted from 1.
        phase: "forward", "backward" or "optimizer".
        unit: that computes.
        module: whose forward runs, the innermost one.
        on_host: bytes of the host's memory that the device copies to and from, now and at most.
        pinned: the storages of these bytes.
    """

    device: Device
    on_operation: Callable[[Machine], None] | None = None
    host: float = 0.0
    current: str = COMPUTE
    # when streams, by name, and links, by the number of their group, are free
    ready: dict[str | int, float] = field(default_factory=lambda: {COMPUTE: 0.0})
    exposed: float = 0.0
    spans: list[Span] = field(default_factory=list)
    # bytes of the wholes that collectives gather or reduce, by kind, unit, dimension and ranks
    messages: dict[tuple[str, str, str, int], list[int]] = field(default_factory=dict)
    samples: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)
    peak: Peak = field(default_factory=Peak)
    step: int = 0
    phase: str = ""
    unit: str = "(root)"
    module: str = ""
    on_host: list[int] = field(default_factory=lambda: [0, 0])
    pinned: WeakSet[torch.UntypedStorage] = field(default_factory=WeakSet)
    _ended: float = 0.0  # the last operation on the compute stream
    _held: list[int] = field(default_factory=lambda: [0] * len(MemoryKind))
    _blocks: dict[int, _Block] = field(default_factory=dict)
    _idle: Counter[int] = field(default_factory=Counter)  # a host's blocks of buffers, by size
    _sampled: int = 0

    @property
    def now(self) -> float:
        """When a reader of the results on the compute stream can go on."""
        return max(self.ready[COMPUTE], self.host)

    def at(self, **where: Any) -> None:
        """Say where the program is: `step`, `phase`, `unit`, `module`."""
        vars(self).update(where)

    @property
    def place(self) -> str:
        """What runs, e.g. "backward of unit 'layers.3'"."""
        return "optimizer" if self.phase == "optimizer" else f"{self.phase} of unit '{self.unit}'"

    def send(
        self, kind: str, unit: str, group: dist.ProcessGroup, wholes: Sequence[Tensor], label: str
    ) -> int:
        """A collective is launched on the current stream; returns bytes in sum."""
        nbytes, size = sum(whole.nbytes for whole in wholes), group.size()
        self._note_message(kind, unit, group, size, nbytes)
        # a ring: every rank sends all but its own part of the whole, twice to reduce what all get
        passes = 2 if kind == "all_reduce" else 1
        bandwidth = self.device.bandwidth(dist.get_process_group_ranks(group))
        seconds = passes * nbytes * (size - 1) / size / bandwidth
        seconds += self.device.latency + self.device.part * len(wholes)
        self.run(seconds, label, id(group))
        return nbytes

    def move(
        self, kind: str, group: dist.ProcessGroup, peer: int, tensors: Sequence[Tensor]
    ) -> None:
        """A message between this rank and another one of the group is launched on the current
        stream.
        """
        nbytes = sum(tensor.nbytes for tensor in tensors)
        self._note_message(kind, self.unit, group, 2, nbytes)
        ranks = dist.get_process_group_ranks(group)
        bandwidth = self.device.bandwidth([ranks[group.rank()], ranks[peer]])
        self.run(nbytes / bandwidth + self.device.latency, kind)

    def _note_message(
        self, kind: str, unit: str, group: dist.ProcessGroup, ranks: int, nbytes: int
    ) -> None:
        named = group.group_desc.startswith("mesh_")  # as meshes call their groups
        dimension = group.group_desc.removeprefix("mesh_") if named else ""
        key = kind.replace("_", "-"), unit, dimension, ranks
        self.messages.setdefault(key, []).append(nbytes)

    # --- time ------------------------------------------------------------------------------------

    def run(self, seconds: float, what: str, links: int | None = None) -> None:
        """An operation is launched on the current stream.

        Args:
            links: which it needs, by a number of their group.
        """
        if self.on_operation is not None:
            self.on_operation(self)
        self.host += self.device.host
        ready = self.ready[self.current]
        start = max(ready, self.host)
        if links is not None:
            start = max(start, self.ready.get(links, 0.0))
            self.ready[links] = start + seconds
        if self.current == COMPUTE:
            self.exposed += max(0.0, ready - max(self._ended, self.host))
            self._ended = start + seconds
        self.ready[self.current] = start + seconds
        self.spans.append(Span(self.current, start, start + seconds, what))

    def wait_until(self, moment: float) -> None:
        """The current stream waits for a moment of another one."""
        self.ready[self.current] = max(self.ready[self.current], moment)

    @contextmanager
    def switched(self, stream: str) -> Iterator[None]:
        """Run the body on a stream, which waits for nothing."""
        before, self.current = self.current, stream
        self.ready.setdefault(stream, 0.0)
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def fork(self, name: str) -> Iterator[None]:
        now = self.ready[self.current]
        with self.switched(name):
            self.wait_until(now)
            yield

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        if stream == self.current:
            yield
            return
        with self.fork(stream):
            yield
        self.wait_until(self.ready[stream])

    def here(self) -> str:
        return self.current

    def mark(self) -> Event:
        return Event(self)

    def begin_step(self) -> float:
        """Everything is over, and nothing is noted; when that is."""
        now = max(self.host, *self.ready.values())
        self.host = self._ended = now
        self.ready = dict.fromkeys(self.ready, now)
        self.spans, self.messages, self.samples, self.exposed = [], {}, [], 0.0
        self.peak = Peak()
        self._sampled = 0
        self._note_memory()
        return now

    def end_step(self) -> float:
        """Returns when that is."""
        self.exposed += max(0.0, self.ready[COMPUTE] - max(self._ended, self.host))
        self._sampled = -self.peak.total
        self._note_memory()
        return self.now

    # --- memory ----------------------------------------------------------------------------------

    @property
    def held(self) -> tuple[int, ...]:
        """Bytes of each `MemoryKind`."""
        return tuple(self._held)

    def hold(
        self, storage: torch.UntypedStorage, kind: MemoryKind = MemoryKind.ACTIVATIONS
    ) -> None:
        """A storage has got memory, or another amount; what it was for stays."""
        key, nbytes = storage._cdata, storage.nbytes()
        block = self._blocks.get(key)
        if block is None:
            block = _Block(ref(storage, partial(self._forget, key)), 0, kind)
            self._blocks[key] = block
        self._change(block, nbytes)

    def hold_for(self, storage: torch.UntypedStorage, kind: MemoryKind) -> None:
        """Say what a storage is for; it may have no memory yet."""
        self.hold(storage, kind)
        block = self._blocks[storage._cdata]
        if block.kind is not kind:
            self._held[block.kind] -= block.nbytes
            block.kind = kind
            self._held[kind] += block.nbytes

    def claim(self, storage: torch.UntypedStorage, kind: MemoryKind) -> None:
        """Say what a storage is for that a program made, unless that is known."""
        if self.kind_of(storage) is MemoryKind.ACTIVATIONS:
            self.hold_for(storage, kind)

    def hold_on_host(self, storage: torch.UntypedStorage) -> None:
        """A storage is pinned memory of the host."""
        self.pinned.add(storage)
        nbytes, on_host = storage.nbytes(), self.on_host
        on_host[0] += nbytes
        on_host[1] = max(on_host)
        finalize(storage, lambda: on_host.__setitem__(0, on_host[0] - nbytes))

    def keeps_idle(self, before: int, after: int) -> None:
        """The buffer of a host gives its block to the idle ones, or takes one of them."""
        if before and keeps_idle_memory():
            self._idle[before] += 1
            self._held[MemoryKind.IDLE] += before
        if after and self._idle[after]:
            self._idle[after] -= 1
            self._held[MemoryKind.IDLE] -= after

    def release_idle(self) -> None:
        """The idle blocks of a host return to the system."""
        self._held[MemoryKind.IDLE] -= sum(nbytes * count for nbytes, count in self._idle.items())
        self._idle.clear()

    def kind_of(self, storage: torch.UntypedStorage) -> MemoryKind | None:
        block = self._blocks.get(storage._cdata)
        return None if block is None else block.kind

    def _forget(self, key: int, _: Any) -> None:
        if (block := self._blocks.pop(key, None)) is not None:
            self._change(block, 0)

    def _change(self, block: _Block, nbytes: int) -> None:
        if nbytes != block.nbytes:
            self._held[block.kind] += nbytes - block.nbytes
            block.nbytes = nbytes
            self._note_memory()

    def _note_memory(self) -> None:
        total = sum(self._held)
        peak = self.peak
        if total > peak.total:
            peak.total, peak.by_kind, peak.where = total, tuple(self._held), self.place
        if abs(total - self._sampled) * 300 >= peak.total:
            self._sampled = total
            self.samples.append((self.now, tuple(self._held)))


# --- what is known of values ---------------------------------------------------------------------

_UNKNOWN: Final[WeakSet[torch.UntypedStorage]] = WeakSet()


def note_unknown(*tensors: Tensor) -> None:
    """No operation computed their values, or those of other tensors in the same memory."""
    for tensor in tensors:
        _UNKNOWN.add(tensor.untyped_storage())


def is_unknown(tensor: Tensor) -> bool:
    return tensor.untyped_storage() in _UNKNOWN


def tensors_in(value: Any) -> list[Tensor]:
    """Tensors in lists, tuples and dicts: of every operation, so the quickest way."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, (list, tuple)):
        return []
    return [tensor for item in value for tensor in tensors_in(item)]


class Event(Mark):
    """The end of the current stream's work so far."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.moment = machine.ready[machine.current]

    def join(self) -> None:
        self._machine.wait_until(self.moment)


# --- collectives --------------------------------------------------------------------------------


class VirtualLocalComm(LocalComm):
    """One rank alone: what it copies has no values, either."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.traits = replace(self.traits, simulated=True)


class VirtualComm(GroupComm):
    """Collectives that take time on the machine's links and bring nothing."""

    def __init__(self, group: dist.ProcessGroup, machine: Machine, traits: Traits) -> None:
        self.traits = replace(traits, simulated=True)
        self._by_pairs = traits is PointToPointComm.traits
        super().__init__(group, torch.device("cpu"))
        self._machine = machine

    def min_max(self, values: Sequence[int], launch: Launch) -> tuple[list[int], list[int]]:
        return list(values), list(values)

    def _rows(self, numbers: Tensor, launch: Launch) -> list[list[int]]:
        return [numbers.tolist()] * self.size

    def _broadcast(self, *_: Any) -> None:
        return None

    def _start(self, launch: Launch, kind: str, tensors: Columns, scale: float) -> Work:
        machine = self._machine
        wholes = tensors[1] if kind == "reduce_scatter" else tensors[0]
        note_unknown(*tensors[0])
        for tensor in (part for parts in tensors for part in parts):
            lands = kind != "all_gather" and any(tensor is out for out in tensors[0])
            machine.claim(
                tensor.untyped_storage(), MemoryKind.GRADIENTS if lands else MemoryKind.MESSAGES
            )
        if not self.traits.on_stream:  # a host computes nothing while messages move
            nbytes = machine.send(kind, launch.unit, self.group, wholes, launch.text)
            pairs = self._by_pairs and kind == "reduce_scatter"
            return _Sent(machine, tensors, (nbytes - nbytes // self.size) if pairs else 0)
        with machine.fork(kind):
            machine.send(kind, launch.unit, self.group, wholes, launch.text)
            return _Sent(machine, tensors)


class _Sent:
    """A collective that was launched on the current stream, and what is kept until it is waited
    for.

    Args:
        received: bytes that a host gets of the other ranks before it adds up.
    """

    __slots__ = ("_end", "_kept", "_machine", "_received")

    def __init__(self, machine: Machine, tensors: object, received: int = 0) -> None:
        self._machine = machine
        self._end = Event(machine)
        machine.keeps_idle(0, received)
        self._received: Tensor | None = torch.empty(received, dtype=torch.uint8)
        machine.hold_for(self._received.untyped_storage(), MemoryKind.MESSAGES)
        self._kept = tensors  # as the comm of accelerators keeps what its stream uses

    def wait(self) -> None:
        self._end.join()
        self._kept = None
        if self._received is not None:
            self._machine.keeps_idle(self._received.nbytes, 0)
            self._received = None


class _Moved(dist.Work):
    """A message between two ranks that was launched."""

    def __init__(self, end: Event) -> None:
        super().__init__()
        self._end = end

    def wait(self, *_: Any) -> bool:
        self._end.join()
        return True


def _refused(name: str) -> Any:
    """A method of a group that is not forecast."""
    return lambda group, *_: refuse(group, name)


class VirtualGroup(dist.ProcessGroup):
    """A rank of `size`, for who calls torch's collectives. What is sent takes time and brings
    nothing; numbers of checks are this rank's. What another rank sends is there when it is wanted.
    """

    machine: Machine

    def _nothing(self, *_: Any) -> dist.Work:
        return DoneWork()

    broadcast = barrier = _nothing  # type: ignore[assignment]

    def take(self, kind: str, wholes: Sequence[Tensor]) -> dist.Work:
        machine = self.machine
        machine.send(kind, machine.unit, self, wholes, kind.replace("_", "-"))
        return DoneWork()

    def allreduce(self, tensors: list[Tensor], *_: Any) -> dist.Work:  # type: ignore[override]
        return DoneWork() if tensors[0].dtype is torch.int64 else self.take("all_reduce", tensors)

    def take_gather(self, outputs: Tensor | list[Tensor], part: Any, *_: Any) -> dist.Work:
        wholes = tensors_in(outputs)
        if wholes[0].dtype is torch.int64:
            wholes[0].view(self.size(), -1).copy_(part.clone().view(1, -1))
            return DoneWork()
        note_unknown(*wholes)
        return self.take("all_gather", wholes)

    def take_scatter(self, outputs: Tensor | list[Tensor], wholes: Any, *_: Any) -> dist.Work:
        note_unknown(*tensors_in(outputs))
        return self.take("reduce_scatter", tensors_in(wholes))

    def send(self, tensors: list[Tensor], dst: int, *_: Any) -> dist.Work:
        return self._move("send", dst, tensors)

    def recv(self, tensors: list[Tensor], src: int, *_: Any) -> dist.Work:
        if tensors[0].dtype is torch.int32 and tensors[0].numel() == 1:
            # by which stages of torch's pipelines agree that all of them know their shapes
            tensors[0].fill_(1)
            return DoneWork()
        note_unknown(*tensors)
        for tensor in tensors:
            self.machine.claim(tensor.untyped_storage(), MemoryKind.MESSAGES)
        return self._move("receive", src, tensors)

    def _move(self, kind: str, peer: int, tensors: list[Tensor]) -> dist.Work:
        """A message between two ranks: on a stream of its own, until something waits for it."""
        machine = self.machine
        with machine.fork(kind if machine.device.accelerator else machine.current):
            machine.move(kind, self, peer, tensors)
            return _Moved(Event(machine))

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def group_name(self) -> Any:
        return name_of_group(self)

    # the methods by which torch's public functions launch; single ones are new in torch 2.13
    _allgather_base = allgather_into_tensor_coalesced = take_gather  # type: ignore[assignment]
    all_gather_single = all_gather_single_coalesced = take_gather  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_tensor_coalesced = take_scatter  # type: ignore[assignment]
    reduce_scatter_single = reduce_scatter_single_coalesced = take_scatter  # type: ignore[assignment]
    recv_anysource, alltoall, alltoall_base, gather, scatter, reduce = map(
        _refused, ("recv_anysource", "alltoall", "alltoall_base", "gather", "scatter", "reduce")
    )


def refuse(group: VirtualGroup, name: str) -> NoReturn:
    raise ForecastError(
        f"forecast: the program calls '{name}' of a process group in {group.machine.place}:"
        " exchanges among all, as experts', are not forecast. Forecast one rank's experts, as a"
        " model of its own over the data-parallel ranks alone"
    )


def form_group(machine: Machine, size: int, rank: int) -> None:
    """Make a process group of `size` ranks, of which this is number `rank`."""
    VirtualGroup.machine = machine
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            BACKEND,
            lambda _, rank, size, __: VirtualGroup(rank, size),  # type: ignore[call-arg]
            devices=["cpu"],
        )
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=size)


def traits_of(device: Device, size: int) -> Traits:
    """How messages are laid out among `size` ranks of the device."""
    if device.accelerator:
        return ON_ACCELERATOR
    return (PointToPointComm if size <= PAIRS_UP_TO else GenericComm).traits
