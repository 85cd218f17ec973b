"""A machine that computes nothing and keeps time; knows no model.

It has streams, events, a process group and tensors without values.

Note [Virtual time]
Programs run as they are, in one process, over tensors of the host whose memory nobody touches.
Every operation and every collective is skipped; what it would take on the device is added to the
clock of the stream that it was given to. An operation starts when its stream is free, what the
stream was told to wait for is over, and the host has launched it. What is modelled, and with which
figures, says `Device`. Collectives of one process group run one after the other, in the order in
which they were launched, whatever their streams, as NCCL's do on one communicator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry

COMPUTE = "compute"
BACKEND = "virtual"
MIB = 1 << 20


@dataclass(frozen=True)
class Device:
    """What operations take, in seconds: like an H100, as training programs reach it.

    They reach it with matrix products and copies.

    Attributes:
        flops: of products per second, 60 % of the peak of 989 T in bfloat16.
        memory: bytes per second read and written, 80 % of 3.35 T.
        launch: of a kernel on its stream, at least.
        host: of an operation on the host, until the device may begin.
        bandwidth: bytes per second that a rank gets and gives in collectives, at most ("bus
            bandwidth").
        latency: of one launch of collectives.
        part: of each tensor in it.
    """

    flops: float = 0.6 * 989e12
    memory: float = 0.8 * 3.35e12
    launch: float = 2e-6
    host: float = 5e-6
    bandwidth: float = 350e9
    latency: float = 50e-6
    part: float = 2e-6


@dataclass
class Span:
    """Something that ran."""

    stream: str
    start: float
    end: float
    what: str


@dataclass
class Machine:
    """The clocks: of the host, of each stream, and of the links."""

    device: Device
    host: float = 0.0
    links: float = 0.0
    current: str = COMPUTE
    ready: dict[str, float] = field(default_factory=lambda: {COMPUTE: 0.0})
    ended: float = 0.0  # the last operation on the compute stream
    exposed: float = 0.0  # how long the compute stream had work, and waited for another stream
    spans: list[Span] = field(default_factory=list)
    # when, and bytes that are allocated
    memory: list[tuple[float, int]] = field(default_factory=list)
    _sizes: dict[int, tuple[StorageWeakRef, int]] = field(default_factory=dict)

    # --- time ------------------------------------------------------------------------------------

    def run(self, seconds: float, what: str, *, on_links: bool = False) -> None:
        """An operation is launched on the current stream."""
        self.host += self.device.host
        ready = self.ready[self.current]
        start = max(ready, self.host)
        if on_links:
            start = max(start, self.links)
            self.links = start + seconds
        if self.current == COMPUTE:
            self.exposed += max(0.0, ready - max(self.ended, self.host))
            self.ended = start + seconds
        self.ready[self.current] = start + seconds
        self.spans.append(Span(self.current, start, start + seconds, what))

    def wait_until(self, moment: float) -> None:
        """The current stream waits for a moment of another one."""
        self.ready[self.current] = max(self.ready[self.current], moment)

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        before, self.current = self.current, stream
        self.ready.setdefault(stream, 0.0)
        try:
            yield
        finally:
            self.current = before

    def begin_step(self) -> float:
        """Everything is over, and nothing is noted; when that is."""
        now = max(self.host, self.links, *self.ready.values())
        self.host = self.links = self.ended = now
        self.ready = dict.fromkeys(self.ready, now)
        self.spans, self.memory, self.exposed = [], [(now, self._count())], 0.0
        return now

    def end_step(self) -> float:
        """When whoever reads the gradients on the compute stream can go on."""
        self.exposed += max(0.0, self.ready[COMPUTE] - max(self.ended, self.host))
        return max(self.ready[COMPUTE], self.host)

    # --- memory ----------------------------------------------------------------------------------

    def hold(self, storage: torch.UntypedStorage) -> None:
        """A storage has got memory, or another amount."""
        key, size = storage._cdata, storage.nbytes()
        before = (
            self._sizes[key][1] if key in self._sizes and not self._sizes[key][0].expired() else 0
        )
        if before or size:
            self._sizes[key] = (StorageWeakRef(storage), size)
        if abs(size - before) >= MIB:
            self.memory.append((max(self.ready[COMPUTE], self.host), self._count()))

    def _count(self) -> int:
        self._sizes = {key: found for key, found in self._sizes.items() if not found[0].expired()}
        return sum(size for _, size in self._sizes.values())

    @property
    def peak(self) -> int:
        return max(size for _, size in self.memory)


class Streams:
    """The machine's streams, as the library asks for them."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    @contextmanager
    def fork(self, name: str) -> Iterator[None]:
        machine = self._machine
        now = machine.ready[machine.current]
        with machine.on(name):
            machine.wait_until(now)
            yield

    def mark(self) -> _Event:
        return _Event(self._machine).record()


class _Event:
    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.moment = 0.0

    def record(self, stream: _Stream | None = None) -> _Event:
        self.moment = self._machine.ready[self._machine.current if stream is None else stream.name]
        return self

    def join(self) -> None:
        self._machine.wait_until(self.moment)

    wait = join


class _Stream:
    def __init__(self, machine: Machine, name: str) -> None:
        self._machine = machine
        self.name = name
        machine.ready.setdefault(name, 0.0)

    def wait_stream(self, other: _Stream) -> None:
        self.wait(self._machine.ready[other.name])

    def wait_event(self, event: _Event) -> None:
        self.wait(event.moment)

    def wait(self, moment: float) -> None:
        self._machine.ready[self.name] = max(self._machine.ready[self.name], moment)

    def record_event(self) -> _Event:
        return _Event(self._machine).record(self)


class DeviceModule:
    """The machine's streams, as torch's own programs ask a module like `torch.cuda` for them."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._count = 0

    def Stream(self, *_: Any, **__: Any) -> _Stream:
        self._count += 1
        return _Stream(self._machine, f"stream {self._count}")

    def Event(self, *_: Any, **__: Any) -> _Event:
        return _Event(self._machine)

    def current_stream(self, *_: Any) -> _Stream:
        return _Stream(self._machine, self._machine.current)

    def stream(self, stream: _Stream) -> Any:
        return self._machine.on(stream.name)

    def current_device(self) -> int:
        return 0


# --- a process group ----------------------------------------------------------------------------


class VirtualGroup(dist.ProcessGroup):
    """Rank 0 of `size`. What is sent takes time and brings nothing; numbers of checks are this
    rank's.
    """

    machine: Machine

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._num = size

    def _nothing(self, *_: Any) -> dist.Work:
        return FakeWork()

    broadcast = barrier = _nothing

    def _take(self, what: str, wholes: Sequence[Tensor]) -> dist.Work:
        device = self.machine.device
        nbytes = (
            sum(whole.numel() * whole.element_size() for whole in wholes)
            * (self._num - 1)
            / self._num
        )
        self.machine.run(
            device.latency + device.part * len(wholes) + nbytes / device.bandwidth,
            what,
            on_links=True,
        )
        return FakeWork()

    def allreduce(self, tensors: list[Tensor], *_: Any) -> dist.Work:
        return (
            FakeWork() if tensors[0].dtype is torch.int64 else self._take("all-reduce", tensors * 2)
        )

    def _gather(self, output: Tensor, part: Tensor, *_: Any) -> dist.Work:
        if output.dtype is torch.int64:
            output.view(self._num, -1).copy_(part.clone().view(1, -1))
            return FakeWork()
        return self._take("all-gather", [output])

    def _gathers(self, outputs: list[Tensor], parts: list[Tensor], *_: Any) -> dist.Work:
        return self._take("all-gather", outputs)

    def _scatter(self, output: Tensor, whole: Tensor, *_: Any) -> dist.Work:
        return self._take("reduce-scatter", [whole])

    def _scatters(self, outputs: list[Tensor], wholes: list[Tensor], *_: Any) -> dist.Work:
        return self._take("reduce-scatter", wholes)

    _allgather_base = all_gather_single = _gather  # the second names from torch 2.13 on
    _reduce_scatter_base = reduce_scatter_single = _scatter
    allgather_into_tensor_coalesced = all_gather_single_coalesced = _gathers
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced = _scatters

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def group_name(self) -> str:
        return str(dist.distributed_c10d._world.pg_names[self])


def form_group(machine: Machine, size: int) -> None:
    """Make a process group of `size` ranks, of which this is the first."""
    VirtualGroup.machine = machine
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            BACKEND, lambda _, rank, size, __: VirtualGroup(rank, size), devices=["cpu"]
        )
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=0, world_size=size)


# --- tensors without values ---------------------------------------------------------------------

_REAL = (
    "set_",
    "resize_",
    "_unsafe_view",
    "_fused_sdp_choice",
    "is_pinned",
    "lift",
    "_local_scalar_dense",
    "equal",
)
_MADE = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted")
_FILLED = (
    "zeros",
    "ones",
    "full",
    "zeros_like",
    "ones_like",
    "new_zeros",
    "new_ones",
    "full_like",
    "new_full",
)


class NoValues(TorchDispatchMode):
    """Operations of the body take time and leave memory as it is. Small numbers, which programs
    read, are computed.
    """

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine
        self._resize = torch.UntypedStorage.resize_

    def __enter__(self) -> Any:
        resize, machine = self._resize, self.machine

        def noted(storage: torch.UntypedStorage, size: int) -> Any:
            found = resize(storage, size)
            machine.hold(storage)
            return found

        torch.UntypedStorage.resize_ = noted  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        returns = func._schema.returns
        if (
            func.namespace == "profiler"
            or name in _REAL
            or any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        ):
            return func(*args, **kwargs)
        given = _tensors((args, kwargs))
        # its input is a part of its output, which its schema does not say
        if name == "all_gather_copy_in":
            self._take(name, 2 * _bytes_of(args[0]), 0.0)
            return args[1].narrow(0, args[3] * args[4], args[3]), args[1]
        if any(t.is_meta for t in given) or torch.device("meta") == kwargs.get("device"):
            made = func(*args, **kwargs)
            for tensor in _tensors(made):
                shard = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                if not shard.is_meta:  # it gets memory
                    self.machine.hold(shard.untyped_storage())
            return made
        if name in (*_MADE, *_FILLED) or not given:
            return self._make(func, name, args, kwargs)
        if all(t.dtype is torch.int64 and t.numel() < 1000 for t in given):
            return func(*args, **kwargs)
        made = (
            self._outputs(func, args, kwargs)
            if returns and not all(r.alias_info for r in returns)
            else None
        )
        written = [
            a for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write
        ]
        result = (
            made if made is not None else _written(func, args, kwargs, written) if returns else None
        )
        outputs = _tensors(made)
        for tensor in outputs:
            self.machine.hold(tensor.untyped_storage())
        self._take(name, _bytes_of(given) + _bytes_of(outputs), _flops(func, args, kwargs, result))
        return result

    def _make(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name in _FILLED:
            made = tree_map_only(
                Tensor, _hollow, func(*_on_meta(args), **{**_on_meta(kwargs), "device": "meta"})
            )
            self._take(name, _bytes_of([made]), 0.0)
        else:
            made = func(*args, **kwargs)
        self.machine.hold(made.untyped_storage())
        return made

    @staticmethod
    def _outputs(func: Any, args: Any, kwargs: Any) -> Any:
        kwargs = {
            key: torch.device("meta") if key == "device" and value is not None else value
            for key, value in kwargs.items()
        }
        return tree_map_only(Tensor, _hollow, func(*_on_meta(args), **_on_meta(kwargs)))

    def _take(self, what: str, nbytes: float, flops: float) -> None:
        device = self.machine.device
        self.machine.run(device.launch + max(nbytes / device.memory, flops / device.flops), what)


def _hollow(like: Tensor) -> Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)


def _on_meta(value: Any) -> Any:
    return tree_map_only(
        Tensor,
        lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta"),
        value,
    )


def _written(func: Any, args: Any, kwargs: Any, written: Sequence[Any]) -> Any:
    places = {argument.name: k for k, argument in enumerate(func._schema.arguments)}
    found = [args[k] if (k := places[a.name]) < len(args) else kwargs[a.name] for a in written]
    return found[0] if len(func._schema.returns) == 1 else tuple(found)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return (
        [tensor for item in value for tensor in _tensors(item)]
        if isinstance(value, (list, tuple))
        else []
    )


def _bytes_of(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    name = func.overloadpacket.__name__
    if "flash_attention_for_cpu" in name:  # causal: half of the products
        backward = "backward" in name
        query, key = args[1 if backward else 0], args[2 if backward else 1]
        batch, heads, length, width = query.shape
        return (2.5 if backward else 1.0) * 2 * batch * heads * length * key.shape[2] * width
    count = flop_registry.get(func.overloadpacket)
    return float(count(*args, **kwargs, out_val=out)) if count is not None else 0.0
