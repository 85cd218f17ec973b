"""Measure which bytes are alive during a training step.

A dispatch mode sees every operation, and so every storage when it is made, also those that only autograd holds. Weak references
tell when a storage is freed. Several storages may share memory (DLPack); every byte is counted once. The idea is that of
`torch.distributed._tools.mem_tracker`.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


class Kind(IntEnum):
    """What memory is for. The greatest kind counts where several apply."""

    ACTIVATIONS = 0
    COMMUNICATION = 1
    UNSHARDED = 2
    GRADIENTS = 3
    OPTIMIZER = 4
    PARAMETERS = 5

    @property
    def label(self) -> str:
        return _LABELS[self]


_LABELS: Final = {
    Kind.ACTIVATIONS: "activations, temporaries",
    Kind.COMMUNICATION: "messages, other buffers",
    Kind.UNSHARDED: "unsharded parameters",
    Kind.GRADIENTS: "gradients",
    Kind.OPTIMIZER: "optimizer state",
    Kind.PARAMETERS: "parameters, buffers",
}


@dataclass
class MemoryTrace:
    """Live bytes after every operation of one step: `totals[i]` by `Kind`, `rss[i]` of the whole process (0: unknown).

    `phases` holds the name of each phase and the index of its first sample; `resident_before` is `rss` before there
    was a model; `idle` counts storages without a tensor at the end of the step, which are kept for the next one.
    """

    totals: list[tuple[int, ...]] = field(default_factory=list)
    rss: list[int] = field(default_factory=list)
    phases: list[tuple[str, int]] = field(default_factory=list)
    resident_before: int = 0
    idle: int = 0

    def kept(self) -> int:
        """Bytes at the end of the step that are neither parameters, buffers nor optimizer state."""
        last = self.totals[-1]
        return sum(last) - last[Kind.PARAMETERS] - last[Kind.OPTIMIZER] + self.idle

    def peak(self) -> int:
        """The most bytes that tensors held at any time."""
        return max(sum(total) for total in self.totals)


class _Meter(TorchDispatchMode):
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, ignore: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = MemoryTrace()
        self._optimizer = optimizer
        self._modules = [m for m in model.modules() if m._parameters]
        self._at_rest = list(model.parameters())
        self._live: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._kind: dict[int, Kind] = {}
        self._ignored = {_local(t).untyped_storage()._cdata for t in ignore}
        self._own = {_local(p).untyped_storage()._cdata for p in self._at_rest}
        # Tensors that were made before this step count, too; their memory may come and go during the step.
        for thing in gc.get_objects():
            if type(thing) in (Tensor, nn.Parameter) and thing.layout is torch.strided:
                self._note(thing, Kind.COMMUNICATION)
        for tensor in (*self._at_rest, *model.buffers()):
            self._note(tensor, Kind.PARAMETERS)
        self._note_optimizer()

    def phase(self, name: str) -> None:
        """What follows belongs to phase `name`."""
        self._note_optimizer()
        self.sample()
        self.trace.phases.append((name, len(self.trace.totals) - 1))

    def finish(self) -> None:
        """The step is over."""
        self.sample()
        storages = [thing for thing in gc.get_objects() if type(thing) is torch.UntypedStorage]
        unseen = {s._cdata: s.nbytes() for s in storages if s._cdata not in self._live and s._cdata not in self._ignored}
        self.trace.idle = sum(unseen.values())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            for tensor in _tensors(args):
                self._note(tensor, Kind.COMMUNICATION)
        for tensor in _tensors(result):
            self._note(tensor, Kind.ACTIVATIONS)
        self.sample()
        return result

    def _note(self, tensor: Tensor, kind: Kind) -> None:
        storage = _local(tensor).untyped_storage()
        key = storage._cdata
        known = self._live.get(key)
        if known is None or known() is None:  # an id is used again after its storage was freed
            self._live[key] = weakref.ref(storage)
            self._kind[key] = kind
        else:
            self._kind[key] = max(kind, self._kind[key])

    def _note_optimizer(self) -> None:
        for state in self._optimizer.state.values():
            for tensor in _tensors(state):
                self._note(tensor, Kind.OPTIMIZER)

    def _note_shown(self) -> None:
        """A plain tensor that is registered on a module now and was not at rest is an unsharded parameter."""
        for module in self._modules:
            for p in module._parameters.values():
                if p is not None and not isinstance(p, DTensor):
                    if p.untyped_storage()._cdata not in self._own:
                        self._note(p, Kind.UNSHARDED)
                    if p.grad is not None:
                        self._note(p.grad, Kind.GRADIENTS)
        for p in self._at_rest:
            if p.grad is not None:
                self._note(p.grad, Kind.GRADIENTS)

    def sample(self) -> None:
        """Record what is alive now."""
        self._note_shown()
        spans: list[tuple[int, int, Kind]] = []
        for key, reference in list(self._live.items()):
            storage = reference()
            if storage is None:
                del self._live[key], self._kind[key]
            elif key not in self._ignored and storage.device.type != "meta" and storage.nbytes():
                start = storage.data_ptr()
                spans.append((start, start + storage.nbytes(), self._kind[key]))
        self.trace.totals.append(_bytes_by_kind(spans))
        self.trace.rss.append(resident_bytes())


def _bytes_by_kind(spans: Iterable[tuple[int, int, Kind]]) -> tuple[int, ...]:
    """Bytes of memory by kind. Where spans (start, end, kind) overlap, the greatest kind counts."""
    edges = sorted(edge for start, end, kind in spans for edge in ((start, kind, 1), (end, kind, -1)))
    total, open_spans = [0] * len(Kind), [0] * len(Kind)
    for (at, kind, change), (following, _, _) in pairwise(edges):
        open_spans[kind] += change
        if following > at and any(open_spans):
            total[max(kind for kind in Kind if open_spans[kind])] += following - at
    return tuple(total)


def measure_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[], Tensor],
    *,
    ignore: Iterable[Tensor] = (),
    resident_before: int = 0,
    with_gradients: Callable[[], None] = lambda: None,
) -> MemoryTrace:
    """Run one training step and measure what is alive after each of its operations; a measured step is a slow one.

    Args:
        loss: the forward, from the batch to a scalar.
        ignore: tensors that have nothing to do with training, such as the data.
        resident_before: resident memory of the process before there was a model, for the record.
        with_gradients: called between backward and the optimizer's step.
    """
    optimizer.zero_grad()
    gc.collect()
    meter = _Meter(model, optimizer, ignore)
    with meter:
        meter.phase("forward")
        value = loss()
        meter.phase("backward")
        value.backward()
        del value
        with_gradients()
        meter.phase("optimizer")
        optimizer.step()
        optimizer.zero_grad()
        meter.phase("at rest")
        meter.finish()
    meter.trace.resident_before = resident_before
    return meter.trace


@dataclass(frozen=True)
class Footprint:
    """Bytes of parameters and buffers, gradients and optimizer state: of this process, and of the un-annotated model."""

    local: dict[str, int]
    whole: dict[str, int]


def footprint_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Footprint:
    """The bytes of `model` between backward and `zero_grad`."""
    parameters = list(model.parameters())
    groups: dict[str, list[Tensor]] = {
        "parameters, buffers": [*parameters, *model.buffers()],
        "gradients": [p.grad for p in parameters if p.grad is not None],
        "optimizer state": [t for p in parameters for t in _tensors(optimizer.state[p])],
    }
    return Footprint(
        local={name: sum(_local(t).nbytes for t in tensors) for name, tensors in groups.items()},
        whole={name: sum(t.numel() * t.element_size() for t in tensors) for name, tensors in groups.items()},
    )


def resident_bytes() -> int:
    """Resident memory of this process; 0 where the system does not say."""
    statm = Path("/proc/self/statm")
    try:
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0


def _local(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _tensors(thing: Any) -> Iterator[Tensor]:
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, (list, tuple)):
        for item in thing:
            yield from _tensors(item)
    elif isinstance(thing, dict):
        yield from _tensors(list(thing.values()))
