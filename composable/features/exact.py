"""Modules that keep their dtype inside of a unit that computes in a lower one
(`full_precision_classes`).
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import nn

from composable.contract.values import map_tensors


class ExactModule:
    """A module that keeps its dtype inside a unit that computes in `low`: inputs are cast to its
    dtype, outputs back.
    """

    def __init__(self, module: nn.Module, low: torch.dtype) -> None:
        self._low = low
        before = module.register_forward_pre_hook(self._cast_inputs, with_kwargs=True)
        self._handles = (before, module.register_forward_hook(self._cast_back))

    def _cast_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        inputs: tuple[Any, Any] = _cast_between((args, kwargs), self._low, _dtype_of(module))
        return inputs

    def _cast_back(self, module: nn.Module, args: Any, output: Any) -> Any:
        return _cast_between(output, _dtype_of(module), self._low)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def _dtype_of(module: nn.Module) -> torch.dtype:
    """The dtype of its first floating-point parameter or buffer."""
    held = chain(module.parameters(), module.buffers())
    return next((tensor.dtype for tensor in held if tensor.is_floating_point()), torch.float32)


def _cast_between(value: Any, before: torch.dtype, after: torch.dtype) -> Any:
    return map_tensors(value, lambda tensor: tensor.to(after) if tensor.dtype == before else tensor)
