"""Measure which bytes are alive during a training step.

A dispatch mode sees every operation, and so every storage when it is made, also those that only
autograd holds. Weak references tell when a storage is freed. Several storages may share memory
(DLPack); every byte is counted once. The idea is that of `torch.distributed._tools.mem_tracker`.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Kind(IntEnum):
    """What memory is for."""

    PARAMETERS = 0
    OPTIMIZER = 1
    GRADIENTS = 2
    UNSHARDED = 3
    MESSAGES = 4
    ACTIVATIONS = 5
    IDLE = 6  # kept without a tensor, for the next message


@dataclass
class MemoryTrace:
    """Memory over one step.

    Attributes:
        totals: live bytes by `Kind` after every operation. Where several apply, the first counts.
        phases: the name of each phase, and the index of its first sample.
        idle: bytes of storages without a tensor at the end of the step, which are kept for the next
            one.
        footprint: bytes at the end of backward of this process and of the whole model, by what they
            are for.
    """

    totals: list[tuple[int, ...]] = field(default_factory=list)
    phases: list[tuple[str, int]] = field(default_factory=list)
    idle: int = 0
    footprint: dict[str, tuple[int, int]] = field(default_factory=dict)

    def kept(self) -> int:
        """Bytes at the end of the step that are neither parameters, buffers nor optimizer state."""
        last = self.totals[-1]
        return sum(last) - last[Kind.PARAMETERS] - last[Kind.OPTIMIZER] + self.idle


def measure_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[], Tensor],
    *,
    ignore: Iterable[Tensor] = (),
) -> MemoryTrace:
    """Run one training step and measure what is alive after each of its operations; a measured step
    is a slow one.

    Args:
        loss: the forward, from the batch to a scalar.
        ignore: tensors that have nothing to do with training, such as the data.
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
        meter.trace.footprint = _footprint(model, optimizer)
        meter.phase("optimizer")
        optimizer.step()
        optimizer.zero_grad()
        meter.phase("at rest")
        meter.finish()
    return meter.trace


class _Meter(TorchDispatchMode):
    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, ignore: Iterable[Tensor]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = MemoryTrace()
        self._optimizer = optimizer
        self._modules = [module for module in model.modules() if module._parameters]
        self._at_rest = list(model.parameters())
        self._live: dict[int, tuple[weakref.ref[torch.UntypedStorage], Kind]] = {}
        self._ignored = {_storage(tensor)._cdata for tensor in ignore}
        self._own = {_storage(parameter)._cdata for parameter in self._at_rest}
        self._empty: set[int] = set()  # storages that had no memory at the last sample
        # Tensors that were made before this step count, too; their memory may come and go during
        # the step.
        before = [thing for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter)]
        self._note([tensor for tensor in before if tensor.layout is torch.strided], Kind.MESSAGES)
        self._note([*self._at_rest, *model.buffers()], Kind.PARAMETERS)
        self._others = {storage._cdata for storage in _storages()} - self._live.keys()

    def phase(self, name: str) -> None:
        self._note(list(self._optimizer.state.values()), Kind.OPTIMIZER)
        self._sample()
        self.trace.phases.append((name, len(self.trace.totals) - 1))

    def finish(self) -> None:
        self._sample()
        seen = {*self._live, *self._ignored}
        self.trace.idle = sum(each.nbytes() for each in _storages() if each._cdata not in seen)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(each, "__tensor_flatten__") for each in types):
            return NotImplemented  # what they do to plain tensors comes here again
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            self._note(args, Kind.MESSAGES)
        self._note(result, Kind.ACTIVATIONS)
        self._sample()
        return result

    def _note(self, tensors: Any, kind: Kind) -> None:
        for tensor in tensors_in(tensors):
            storage = _storage(tensor)
            key = storage._cdata
            before, was = self._live.get(key, (None, kind))
            if before is None or before() is None:  # ids are used again after storages are freed
                self._live[key] = weakref.ref(storage), kind
            else:
                self._live[key] = before, min(kind, was)

    def _sample(self) -> None:
        """Record what is alive now."""
        registered = [
            p for module in self._modules for p in module._parameters.values() if p is not None
        ]
        plain = [p for p in registered if not isinstance(p, DTensor)]
        # A plain tensor that is registered on a module now and was not at rest is an unsharded
        # parameter.
        self._note([p for p in plain if _storage(p)._cdata not in self._own], Kind.UNSHARDED)
        self._note([p.grad for p in (*plain, *self._at_rest)], Kind.GRADIENTS)
        spans: list[tuple[int, int, Kind]] = []
        empty = set()
        for key, (reference, kind) in list(self._live.items()):
            storage = reference()
            if storage is None:
                del self._live[key]
            elif storage.device.type != "meta" and not storage.nbytes():
                empty.add(key)
            elif key not in self._ignored and storage.device.type != "meta":
                spans.append(_span(storage, kind))
        if not empty <= self._empty:  # another storage, which no tensor has, may keep the memory
            for storage in _storages():
                if storage._cdata not in self._live and storage._cdata not in self._others:
                    self._live[storage._cdata] = weakref.ref(storage), Kind.IDLE
                    spans.append(_span(storage, Kind.IDLE))
        self._empty = empty
        self.trace.totals.append(_bytes_by_kind(spans))


def _span(storage: torch.UntypedStorage, kind: Kind) -> tuple[int, int, Kind]:
    start = storage.data_ptr()
    return start, start + storage.nbytes(), kind


def _bytes_by_kind(spans: Iterable[tuple[int, int, Kind]]) -> tuple[int, ...]:
    """Bytes of memory by kind. Where spans (start, end, kind) overlap, the first kind counts."""
    edges = sorted(
        edge for start, end, kind in spans for edge in ((start, kind, 1), (end, kind, -1))
    )
    total, open_spans = [0] * len(Kind), [0] * len(Kind)
    for (at, kind, change), (following, _, _) in pairwise(edges):
        open_spans[kind] += change
        if following > at and any(open_spans):
            total[min(kind for kind in Kind if open_spans[kind])] += following - at
    return tuple(total)


def _footprint(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, tuple[int, int]]:
    parameters = list(model.parameters())
    groups = {
        "parameters, buffers": [*parameters, *model.buffers()],
        "optimizer state": tensors_in([optimizer.state[p] for p in parameters]),
        "gradients": [p.grad for p in parameters if p.grad is not None],
    }
    return {
        name: (
            sum(_local(t).nbytes for t in tensors),
            sum(t.numel() * t.element_size() for t in tensors),
        )
        for name, tensors in groups.items()
    }


def tensors_in(tree: Any) -> list[Tensor]:
    """Tensors in lists, tuples and dicts."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _local(tensor: Tensor) -> Tensor:
    """The plain tensor in a DTensor, or in what a collective that DTensor launched brings."""
    while hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        tensor = getattr(tensor, names[0])
    return tensor


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return _local(tensor).untyped_storage()


def _storages() -> list[torch.UntypedStorage]:
    """All storages that Python has seen, also without a tensor. Fake tensors of the compiler
    have no memory, and sizes that may be symbols; they are left out.
    """
    found = [thing for thing in gc.get_objects() if type(thing) is torch.UntypedStorage]
    return [storage for storage in found if storage.device.type != "meta"]
