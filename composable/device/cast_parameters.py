"""Parameters in the dtype that modules compute in, cast as modules read them; knows registries of parameters, no unit.

Note [Cast when read]
A module looks its parameters up in a registry whenever it computes with them. While its unit computes, another registry stands
there, which hands out casts, and makes each when somebody asks for it first. So everybody waits for his own, what nobody reads
is not cast, and it does not matter who reads: a tied weight is cast once, and `MultiheadAttention` finds the weight of a module
that it never calls. To iterate (`parameters()`, `state_dict()`, optimizers) finds the parameters themselves.

The casts are autograd's. A gradient comes to the user's own parameter in its own dtype, and all that happens to gradients there
need not know of casts: hooks, sums over ranks, several backwards. Casts are made with grad enabled, whoever asks: one that was
made under `no_grad` would bring no gradient to who reads it after that.

On a device with streams, what was read next in the forward before is cast ahead of use, on a stream of its own, into memory of
the compute stream. See Note [Stream discipline].
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from composable.device.private import in_backward, is_transformed
from composable.device.streams import Mark, has_streams, streams_of

_AHEAD: Final = 8  # parameters
_REAL: Final = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

Registry = dict[str, "nn.Parameter | None"]


class CastHolder(NamedTuple):
    """A module, and the names of the parameters in its registry that are cast; whether these get sparse gradients."""

    module: nn.Module
    names: frozenset[str]
    sparse: bool = False


class CastParameters:
    """The parameters of one unit; `use_casts` and `use_originals` done twice are done once."""

    def __init__(self, holders: Sequence[CastHolder]) -> None:
        self._holders = tuple(holders)
        self._registries: list[CastingRegistry] = []  # while they are shown
        self._casts: dict[int, _Cast] = {}  # by the ids of the parameters
        self._read: list[tuple[int, str]] = []  # now: registries, by number, and names
        self._read_before: list[tuple[int, str]] = []
        self._positions: Mapping[tuple[int, str], int] = {}

    def use_casts(self, dtype: torch.dtype) -> None:
        """Modules compute with casts from here on."""
        if not self._registries:
            for number, (module, names, _) in enumerate(self._holders):
                registry = CastingRegistry(self, number, names, dtype, module._parameters)
                self._registries.append(registry)  # first: an interrupt may come in between
                module._parameters = registry

    def use_originals(self) -> None:
        """Modules have the registries of before again."""
        for holder in self._holders if self._registries else ():
            registry = holder.module._parameters
            if isinstance(registry, CastingRegistry):
                holder.module._parameters = registry.original
        for cast in self._casts.values():
            cast.join()  # memory of the compute stream is about to be freed, and another stream may still write there
        if self._read and not in_backward():
            self._read_before = self._read
            self._positions = {key: position for position, key in enumerate(self._read)}
        self._registries, self._casts, self._read = [], {}, []

    def written(self) -> list[tuple[nn.Module, str]]:
        """Whose casts somebody wrote to in place: that will be lost."""
        casts = {key: cast for key, cast in self._casts.items() if cast.was_written}
        found = [(r, name, id(r.original.get(name))) for r in self._registries for name in sorted(r.names)] if casts else []
        return [(self._holders[r.number].module, name) for r, name, key in found if key in casts]

    def source_of(self, tensor: object) -> object:
        """The parameter that `tensor` is a cast of, or `tensor` itself."""
        return next((cast.parameter for cast in self._casts.values() if cast.tensor is tensor), tensor)

    def cast(self, parameter: nn.Parameter, dtype: torch.dtype, key: tuple[int, str]) -> Tensor:
        """What modules compute with in place of `parameter`, which is read at `key`."""
        found = self._casts.get(id(parameter))
        if found is None:
            if is_transformed():
                return parameter.to(dtype)  # for one transform alone
            found = self._casts[id(parameter)] = _Cast(parameter, dtype, sparse=self._holders[key[0]].sparse)
            self._note(key, parameter.device, dtype)
        elif found.join():
            self._note(key, parameter.device, dtype)
        return found.tensor

    def _note(self, key: tuple[int, str], device: torch.device, dtype: torch.dtype) -> None:
        self._read.append(key)
        position = self._positions.get(key)
        if position is None or not has_streams(device) or in_backward():
            return
        for number, name in self._read_before[position + 1 : position + 1 + _AHEAD]:
            parameter = self._registries[number].original.get(name)
            if parameter is not None and is_cast_to(dtype, parameter) and id(parameter) not in self._casts:
                self._casts[id(parameter)] = _Cast(parameter, dtype, ahead=True)


def is_cast_to(dtype: torch.dtype, parameter: Tensor) -> bool:
    """Whether a parameter is computed with in another dtype than its own."""
    return parameter.dtype is not dtype and parameter.dtype in _REAL


def can_be_cast(module: nn.Module) -> bool:
    """Whether a module looks up its parameters where another registry could stand."""
    return isinstance(module._parameters, dict)


class CastingRegistry(dict[str, "nn.Parameter | None"]):
    """What stands for a module's registry of parameters: it has the same contents, and hands out casts of them."""

    __slots__ = ("_casts", "_dtype", "names", "number", "original")

    def __init__(
        self, casts: CastParameters, number: int, names: frozenset[str], dtype: torch.dtype, original: Registry
    ) -> None:
        super().__init__(original)
        self.original = original
        self.names = names
        self.number = number
        self._casts = casts
        self._dtype = dtype

    def __getitem__(self, name: str) -> Any:
        parameter = self.original[name]
        if parameter is None or name not in self.names or not is_cast_to(self._dtype, parameter):
            return parameter
        if torch.compiler.is_compiling():
            return parameter.to(self._dtype)
        return self._casts.cast(parameter, self._dtype, (self.number, name))

    def __setitem__(self, name: str, value: Any) -> None:
        """Who puts back what he found (`torch.func.functional_call`) found a cast."""
        value = self._casts.source_of(value)
        self.original[name] = value
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        del self.original[name]
        super().__delitem__(name)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies are made of what stands there at rest."""
        return dict, (self.original,)

    def __deepcopy__(self, memo: dict[int, Any]) -> Registry:
        return copy.deepcopy(self.original, memo)


class _Cast:
    """A parameter in another dtype, or on its way there."""

    __slots__ = ("_mark", "_version", "parameter", "tensor")

    def __init__(self, parameter: nn.Parameter, dtype: torch.dtype, *, ahead: bool = False, sparse: bool = False) -> None:
        self.parameter = parameter
        self._mark: Mark | None = None
        with torch.inference_mode(False), torch.set_grad_enabled(parameter.requires_grad and not (ahead or sparse)):
            if ahead:
                self.tensor = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
                streams = streams_of(parameter.device)
                with streams.fork("cast"):
                    self.tensor.copy_(parameter)
                    self._mark = streams.mark()
            else:
                self.tensor = parameter.to(dtype)
        if sparse:  # autograd's own cast does not bring sparse gradients back
            self._show_to_autograd()
        self._version = self.tensor._version

    def join(self) -> bool:
        """It is there from here on; whether it was not before."""
        mark, self._mark = self._mark, None
        if mark is None:
            return False
        mark.join()
        self._show_to_autograd()
        return True

    def _show_to_autograd(self) -> None:
        if self.parameter.requires_grad:
            with torch.inference_mode(False), torch.enable_grad():
                self.tensor = CastAhead.apply(self.parameter, [self.tensor])  # type: ignore[no-untyped-call]

    @property
    def was_written(self) -> bool:
        return self.tensor._version != self._version


class CastAhead(torch.autograd.Function):
    """The cast of a parameter that is there already, as autograd should see it."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, cast: list[Tensor]) -> Tensor:
        ctx.dtype = parameter.dtype
        return cast[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.to(ctx.dtype), None
