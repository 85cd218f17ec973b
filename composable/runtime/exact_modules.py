"""Modules that keep their dtype where the unit around them computes in another one; knows no parameter and no order."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from composable.model.hooks import EdgeHooks
from composable.model.values import map_tensors
from composable.runtime.unit_precision import UnitPrecision


class _Parameters(Protocol):
    @property
    def precision(self) -> UnitPrecision: ...


class _Handle(Protocol):
    @property
    def parameters(self) -> _Parameters: ...


class _Unit(Protocol):
    @property
    def handle(self) -> _Handle: ...


class ExactModule:
    """One such module: what it is given is cast to its dtype, and what it returns is cast back.

    The casts are autograd's own. What is in a third dtype stays in it.
    """

    __slots__ = ("_edges", "_unit")

    def __init__(self, module: nn.Module, unit: _Unit) -> None:
        self._unit = unit
        self._edges = EdgeHooks(module, self._cast_inputs, self._cast_back)

    def _cast_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        low = self._unit.handle.parameters.precision.in_force.param_dtype
        changed: tuple[Any, Any] = (args, kwargs) if low is None else _cast((args, kwargs), low, _dtype_of(module))
        return changed

    def _cast_back(self, module: nn.Module, args: Any, output: Any) -> Any:
        low = self._unit.handle.parameters.precision.in_force.param_dtype
        return output if low is None else _cast(output, _dtype_of(module), low)

    def remove(self) -> None:
        """May be called twice."""
        self._edges.remove()


def _dtype_of(module: nn.Module) -> torch.dtype:
    """That of its first floating-point parameter or buffer."""
    for held in (module.parameters(), module.buffers()):
        for tensor in held:
            if tensor.is_floating_point():
                return tensor.dtype
    return torch.float32


def _cast(value: Any, before: torch.dtype, after: torch.dtype) -> Any:
    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(after) if tensor.dtype == before else tensor

    return map_tensors(value, cast)
