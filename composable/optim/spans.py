"""Which parameters an optimizer may step as one tensor: neighbours in memory that agree in everything; it steps nothing.

Note [Runs]
Sharded parameters of one unit are views of one buffer, and so are their gradients. An element-wise optimizer does to
every element what it would do if the element stood alone, so a stretch of the buffer can be stepped as one tensor, provided
that its parameters share hyper-parameters, have their gradients in the same order and at the same distances, and agree on
all state that is not per element (`step`). Such a stretch is a run. A parameter without such neighbours is a run of its own:
its local tensor, in its own shape. On a host a run ends where another parameter would make it longer than `LONGEST`: an
optimizer goes over its tensors several times, and what is short is still in the caches the next time. A parameter that is
longer alone is stepped in slices, where torch's loop steps it and it is float32 or float64 and contiguous; the other
implementations take all tensors at once anyway. Where torch computes in several threads, each has a part of that length.

Between two neighbours there may be padding, because slots are aligned. A run swallows it, if it is known to be padding in
the buffer of the parameters *and* in the buffer of the gradients (`note_starts`), whose memory may hold anything there,
NaN included. That does no harm: no element-wise operation lets one element see another, nobody reads the padding of a shard
buffer (a gather carries it to padding of the unsharded buffer, views skip it), and the state's padding belongs to the run.

Note [Rounding]
Where an element lies in a tensor may decide how it is rounded: kernels on the CPU compute whole vectors in one way and the
elements that are left over in another, and for some kernels the two differ in the last bit: `fused` ones, and all in half
precision. A run must not change one bit, so there a parameter joins others only if nothing of it is left over (fused), or not
at all (half precision). On accelerators each element is computed alike. Decision 9 has the measurement.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial

from composable.device.flat_parameters import in_buffer, note_starts, starts_in
from composable.device.parameter_forms import adopt_local
from composable.device.private import local_of
from composable.optim.slices import Slices, States

LONGEST: Final = 1 << 20  # bytes for each thread of a run of several parameters on a host, or of a slice of one
_CACHE_LINE: Final = 64  # bytes: what slots are aligned to, and no vector is longer
_ROUNDED_ALIKE: Final = (torch.float32, torch.float64)


class Kind(Enum):
    """What an entry of a parameter's optimizer state is."""

    ELEMENTS = "one value per element of the parameter"
    SCALAR = "a tensor without dimensions"
    VALUE = "a plain Python value"
    OPAQUE = "anything else"


def kind_of(value: object, parameter: DTensor) -> Kind:
    """What an entry of `parameter`'s state is, as users see it."""
    if isinstance(value, DTensor):
        alike = value.placements == parameter.placements and value.device_mesh == parameter.device_mesh
        local = local_of(value)
        fits = type(local) is Tensor and local.shape == local_of(parameter).shape
        return Kind.ELEMENTS if alike and fits else Kind.OPAQUE
    if type(value) is Tensor and value.dim() == 0:
        return Kind.SCALAR
    return Kind.VALUE if value is None or isinstance(value, (bool, int, float, str)) else Kind.OPAQUE


@dataclass(frozen=True, slots=True, eq=False)
class LocalParameter:
    """A sharded parameter that has a gradient, in local tensors.

    Attributes:
        agreement: what must be equal among the parameters of one run, apart from where they lie.
        joins: whether it may be stepped together with others; see Note [Rounding].
        slices: whether it may be stepped slice by slice.
    """

    parameter: DTensor
    local: Tensor
    gradient: Tensor
    agreement: tuple[object, ...]
    joins: bool
    slices: bool


def local_parameter_of(parameter: DTensor, state: Mapping[str, Any], *, fused: bool, loops: bool) -> LocalParameter | None:
    """A parameter in local tensors; None if torch's code must see it as it is, because there is no equal step on those.

    Args:
        fused, loops: how the optimizer steps: all operations in one, or one parameter after the other.
    """
    gradient = parameter.grad
    if not isinstance(gradient, DTensor):
        return None
    local, local_gradient = in_buffer(local_of(parameter)), local_of(gradient)
    plain = type(local) is Tensor and type(local_gradient) is Tensor and not local.requires_grad
    spread_alike = gradient.placements == parameter.placements and gradient.device_mesh == parameter.device_mesh
    alike = local.shape == local_gradient.shape and local.dtype == local_gradient.dtype and spread_alike
    if not plain or not alike or any(isinstance(p, Partial) for p in parameter.placements):
        return None
    agreement: list[object] = [local.dtype, local.device]
    flat = local.is_contiguous() and local_gradient.is_contiguous()
    for key, value in state.items():
        kind = kind_of(value, parameter)
        if kind is Kind.OPAQUE:
            return None
        agreement += (key, kind, type(value))
        flat = flat and (kind is not Kind.ELEMENTS or local_of(value).is_contiguous())
        if isinstance(value, Tensor):
            agreement += (value.dtype, value.device)
        if kind is not Kind.ELEMENTS:
            agreement.append(value.item() if isinstance(value, Tensor) else value)
    joins = _joins(local, fused=fused)
    slices = loops and flat and local.device.type == "cpu" and local.dtype in _ROUNDED_ALIKE and _nbytes(local) > _longest()
    return LocalParameter(parameter, local, local_gradient, tuple(agreement), joins, slices)


def _longest() -> int:
    return LONGEST * torch.get_num_threads()


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _joins(local: Tensor, *, fused: bool) -> bool:
    if local.device.type != "cpu":
        return True
    return local.dtype in _ROUNDED_ALIKE and (not fused or _nbytes(local) % _CACHE_LINE == 0)


def gap_between(one: Tensor, other: Tensor) -> int | None:
    """Elements of padding between two tensors of one buffer, `other` right after `one`; None if that is not how they lie."""
    buffer = one._base
    if buffer is None or other._base is not buffer or not one.is_contiguous() or not other.is_contiguous():
        return None
    first, second = int(one.storage_offset()), int(other.storage_offset())
    gap = second - first - one.numel()
    if gap and not (0 < gap * one.element_size() < _CACHE_LINE and _are_neighbours(buffer, first, second)):
        return None
    return gap


def _are_neighbours(buffer: Tensor, first: int, second: int) -> bool:
    starts = starts_in(buffer)
    index = bisect_left(starts, first)
    return starts[index : index + 2] == (first, second)


def _follows(one: LocalParameter, other: LocalParameter) -> bool:
    """Whether a run that ends with `one` can go on with `other`."""
    gap = gap_between(one.local, other.local)
    if gap is None or not (one.joins and other.joins) or gap_between(one.gradient, other.gradient) != gap:
        return False
    return one.agreement == other.agreement


def find_spans(members: Sequence[LocalParameter]) -> Iterator[Span]:
    """Cut pieces, of one group of hyper-parameters, into runs: as few as possible, but none that are too long."""
    buffers: dict[int, list[LocalParameter]] = {}
    for local in members:
        # An empty shard has no place among its neighbours.
        if local.local._base is None or not local.local.numel():
            yield Span([local])
        else:
            buffers.setdefault(id(local.local._base), []).append(local)
    for here in buffers.values():
        here.sort(key=lambda local: local.local.storage_offset())
        start = 0
        for end in range(1, len(here) + 1):
            if end == len(here) or not _follows(here[end - 1], here[end]) or _too_long(here[start].local, here[end].local):
                yield Span(here[start:end])
                start = end


def _too_long(first: Tensor, last: Tensor) -> bool:
    """Whether a run from `first` to `last` would be."""
    numel = int(last.storage_offset() - first.storage_offset()) + last.numel()
    return first.device.type == "cpu" and numel * first.element_size() > _longest()


class Span:
    """Parameters that torch's code steps as one tensor, or one that it steps in slices."""

    def __init__(self, members: Sequence[LocalParameter]) -> None:
        first, last = members[0].local, members[-1].local
        self.parameters = tuple(local.parameter for local in members)
        self.locals = tuple(local.local for local in members)
        # The gradients must be free to go: their buffer is used again only when nobody holds them.
        self.gradients = tuple(weakref.ref(local.gradient) for local in members)
        self.single = len(members) == 1
        self._starts = tuple(int(local.storage_offset() - first.storage_offset()) for local in self.locals)
        # An alias shares the version counter of the buffer, so writes through it are seen.
        self.tensor = _alone(first.detach()) if self.single else _stretch(first, self._starts[-1] + last.numel())
        # What is long enough for slices is too long for company.
        self._slices = Slices(self.tensor, _longest()) if members[0].slices else None

    @property
    def stepped(self) -> Sequence[Tensor]:
        """What torch's code steps."""
        return (self.tensor,) if self._slices is None else self._slices.tensors

    def take_gradients(self) -> None:
        """Put the parameters' gradients on what is stepped."""
        gradient = self.gradients[0]()
        assert gradient is not None
        if self._slices is not None:
            self._slices.take_gradient(gradient)
        else:
            self.tensor.grad = _alone(gradient) if self.single else _stretch(gradient, self.tensor.numel())

    def drop_gradients(self) -> None:
        for tensor in self.stepped:
            tensor.grad = None

    def spread_state(self, states: States) -> None:
        """The state of the span's tensor becomes that of what is stepped."""
        if self._slices is not None:
            self._slices.spread(states)

    def collect_state(self, states: States, known: Mapping[str, Any]) -> None:
        """The state of what was stepped is that of the span's tensor again; it was `known` before."""
        if self._slices is not None:
            self._slices.collect(states, known)

    def part(self, whole: Tensor, index: int) -> Tensor:
        """What belongs to one parameter of a tensor that is like the span's: a view."""
        if self.single:
            return whole.view(self.locals[0].shape) if whole.dim() != self.locals[0].dim() else whole
        local, start = self.locals[index], self._starts[index]
        return whole[start : start + local.numel()].view(local.shape)

    def note_parts(self, whole: Tensor) -> None:
        """Note on a tensor that is like the span's what of it is padding."""
        if not self.single:
            note_starts(whole, self._starts)

    def whole_of(self, first: DTensor) -> Tensor:
        """The tensor like the span's that state of its first parameter lives in, with that of the others."""
        local = local_of(first)
        return _alone(local) if self.single else _stretch(local, self.tensor.numel())

    def gather(self, values: Sequence[DTensor]) -> Tensor:
        """One tensor like the span's that holds `values`, per-element state of the parameters, which live in it afterwards."""
        locals_ = [local_of(value) for value in values]
        if self.single or _gaps(locals_) == _gaps(self.locals):
            return self.whole_of(values[0])
        whole = torch.zeros_like(self.tensor, dtype=locals_[0].dtype, device=locals_[0].device)
        self.note_parts(whole)
        for index, value in enumerate(values):
            adopt_local(value, self.part(whole, index))
        return whole


def _gaps(tensors: Sequence[Tensor]) -> list[int | None]:
    return [gap_between(one, other) for one, other in pairwise(tensors)]


def _alone(tensor: Tensor) -> Tensor:
    """A tensor with a dimension: without any, state per element would look like state per parameter."""
    return tensor if tensor.dim() else tensor.view(1)


def _stretch(first: Tensor, numel: int) -> Tensor:
    """`numel` elements of a buffer, from where `first` starts: a view."""
    return first.as_strided((numel,), (1,), first.storage_offset())
