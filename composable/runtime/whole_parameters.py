"""How a whole plain parameter comes back where a sharded one was; knows no unit."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from composable.device.parameter_labels import copy_attributes
from composable.device.parameter_swap import ShardedParam
from composable.device.private import take_hooks


def restore(param: ShardedParam, whole: Tensor, original: nn.Parameter | None, gradient: Tensor | None) -> None:
    """Register a plain parameter with the values of `whole`: `original`, if it still exists and fits, or a new one."""
    if original is not None and (original.shape != whole.shape or original.dtype != whole.dtype):
        original = None
    if original is None or original.device != whole.device:
        copy = torch.empty_strided(whole.shape, param.info.stride, dtype=whole.dtype, device=whole.device)
        original = _moved(original, copy.copy_(whole))
    elif whole.device.type != "meta":
        original.data.copy_(whole)
    original.requires_grad_(param.sharded.requires_grad)
    copy_attributes(param.sharded, original)
    take_hooks(param.sharded, original)
    if gradient is not None:
        original.grad = gradient.to(original.dtype)
    param.replace(original)


def _moved(original: nn.Parameter | None, data: Tensor) -> nn.Parameter:
    """`original` with `data` on another device; a new parameter where torch cannot do that: to and from meta tensors."""
    if original is not None:
        try:
            original.data = data
        except RuntimeError:
            pass
        else:
            return original
    return nn.Parameter(data, requires_grad=False)
