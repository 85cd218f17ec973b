"""Modules that keep their dtype where the unit around them computes in another one; knows no parameter and no order."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from composable.model.hooks import EdgeHooks
from composable.model.values import map_tensors
from composable.runtime.unit_precision import UnitPrecision


class ExactModule:
    """One such module: what it is given is cast to its dtype, and what it returns is cast back.

    The casts are autograd's own. What is in a third dtype stays in it.

    Args:
        unit: that the module is in.
        where: the unit has its `UnitPrecision`, as attributes. A function would not be copied with the unit.
    """

    __slots__ = ("_edges", "_precision_of", "_unit")

    def __init__(self, module: nn.Module, unit: object, where: str) -> None:
        self._unit = unit
        self._precision_of = attrgetter(where)
        self._edges = EdgeHooks(module, self._cast_inputs, self._cast_back)

    def _cast_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        low = self._low()
        changed: tuple[Any, Any] = (args, kwargs) if low is None else _cast((args, kwargs), low, _dtype_of(module))
        return changed

    def _cast_back(self, module: nn.Module, args: Any, output: Any) -> Any:
        low = self._low()
        return output if low is None else _cast(output, _dtype_of(module), low)

    def _low(self) -> torch.dtype | None:
        precision: UnitPrecision = self._precision_of(self._unit)
        dtype: torch.dtype | None = precision.in_force.param_dtype
        return dtype

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
