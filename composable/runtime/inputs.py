"""What goes into a unit's forward, and comes out of it: moved to its device, and cast; knows no parameter and no order.

Note [Casts at the edge]
They are autograd's own, so gradients go back through them. A recomputation comes through them again, or is given what was
cast before, which is not cast twice. Backward enters a unit at what its caller gets: outputs are watched after the cast.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from composable.config import MixedPrecisionPolicy
from composable.model.values import map_tensors


class EdgeCasts:
    """Of one unit; a dtype of None leaves tensors as they are."""

    __slots__ = ("_inputs", "_outputs")

    def __init__(self, inputs: torch.dtype | None, outputs: torch.dtype | None) -> None:
        self._inputs = inputs
        self._outputs = outputs

    def inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """What forward gets."""
        return (args, kwargs) if self._inputs is None else (_cast(args, self._inputs), _cast(kwargs, self._inputs))

    def output(self, output: Any) -> Any:
        """What the caller gets."""
        return output if self._outputs is None else _cast(output, self._outputs)


def edge_casts(policy: MixedPrecisionPolicy) -> EdgeCasts | None:
    """What a policy asks for; None if nothing is to be cast."""
    inputs = policy.param_dtype if policy.cast_forward_inputs else None
    return EdgeCasts(inputs, policy.output_dtype) if inputs is not None or policy.output_dtype is not None else None


def on_device(args: Any, kwargs: Any, device: torch.device) -> tuple[Any, Any]:
    """What a root's forward gets, where its parameters are."""
    moved: tuple[Any, Any] = map_tensors((args, kwargs), lambda tensor: tensor.to(device, non_blocking=True))
    return moved


def _cast(value: Any, dtype: torch.dtype) -> Any:
    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return map_tensors(value, cast)
