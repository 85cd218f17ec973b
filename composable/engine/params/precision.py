"""In which dtypes a unit computes, communicates and keeps gradients, and the casts at its edges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from composable.config import GRAD_DTYPE, MixedPrecisionPolicy
from composable.contract.values import map_tensors

_REAL: Final = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes of one parameter; parameters with equal ones share a `ParamGroup`.

    Attributes:
        original: at rest, of the optimizer state and of what is saved.
        compute: of what modules compute with, and of the all-gather.
        reduce: of the messages and sums of gradients.
        gradient: of the gradient that users and optimizers see.
        accumulate: of what autograd accumulates on the compute parameter, where it is not the
            compute dtype.
    """

    original: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    gradient: torch.dtype
    accumulate: torch.dtype | None = None

    @property
    def casts(self) -> bool:
        return self.compute != self.original

    @property
    def changes(self) -> bool:
        return {self.original} != {self.compute, self.reduce, self.gradient}


def resolve(
    policy: MixedPrecisionPolicy,
    dtype: torch.dtype,
    *,
    exact: bool = False,
    keeps: bool = False,
    grad_dtype: torch.dtype | None = None,
) -> Precision:
    """What a policy means for a parameter of `dtype`. Only real floating-point parameters are cast.

    Args:
        exact: the parameter keeps its dtype, whatever the policy says (`full_precision_classes`).
        keeps: it computes in its dtype (`param_dtype_override_fn`).
        grad_dtype: what its user has set `parameter.grad_dtype` to.
    """
    if dtype not in _REAL:
        return Precision(dtype, dtype, dtype, dtype)
    compute = dtype if exact or keeps else policy.param_dtype or dtype
    reduce = None if exact else policy.reduce_dtype
    if reduce == GRAD_DTYPE:
        reduce = grad_dtype or dtype
    reduce = reduce or grad_dtype or compute
    gradient = reduce if policy.keep_grads_in_reduce_dtype else dtype
    accumulate = None if grad_dtype == compute else grad_dtype
    return Precision(dtype, compute, reduce, grad_dtype or gradient, accumulate)


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors in `value`. Autograd sees the cast, so that gradients go back
    through it.
    """
    return map_tensors(
        value, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor
    )


def moved(value: Any, device: torch.device) -> Any:
    return map_tensors(value, lambda tensor: tensor.to(device, non_blocking=True))


class BufferHolder(NamedTuple):
    """A module and what its floating-point buffers are cast to while it computes: all of them, or
    those that are named.
    """

    module: nn.Module
    dtypes: torch.dtype | Mapping[str, torch.dtype]

    def dtype_of(self, name: str) -> torch.dtype | None:
        return self.dtypes.get(name) if isinstance(self.dtypes, Mapping) else self.dtypes


class BufferCasts:
    """The casts of a unit's buffers while it computes. At rest modules hold their own buffers, in
    their own dtype.
    """

    __slots__ = ("_holders", "_shown")

    def __init__(self, holders: tuple[BufferHolder, ...]) -> None:
        self._holders = holders
        # module, name, buffer, its cast
        self._shown: list[tuple[nn.Module, str, Tensor, Tensor]] = []

    def show(self) -> None:
        if self._shown:
            return
        # a buffer that two modules share stays one
        casts: dict[tuple[int, torch.dtype], Tensor] = {}
        with torch.no_grad(), torch.inference_mode(False):
            for holder in self._holders:
                for name, buffer in holder.module._buffers.items():
                    dtype = holder.dtype_of(name)
                    if (
                        dtype is None
                        or buffer is None
                        or buffer.dtype == dtype
                        or not buffer.is_floating_point()
                    ):
                        continue
                    if (id(buffer), dtype) not in casts:
                        casts[id(buffer), dtype] = buffer.to(dtype)
                    self._shown.append((holder.module, name, buffer, casts[id(buffer), dtype]))
                    holder.module._buffers[name] = casts[id(buffer), dtype]

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """The casts that modules hold, with the buffers that they stand for."""
        return [(cast, buffer) for _, _, buffer, cast in self._shown]

    def hide(self) -> None:
        """Register the buffers again, with what forward wrote to their casts."""
        if not self._shown:
            return
        shown, self._shown = self._shown, []
        with torch.no_grad():
            for module, name, buffer, cast in shown:
                held = module._buffers.get(name)
                if held is cast:
                    # Elements that forward did not change keep all their bits. Batch norm's writes
                    # bump no version counter.
                    buffer.data.copy_(
                        torch.where(buffer.to(cast.dtype) == cast, buffer, cast.to(buffer.dtype))
                    )
                    module._buffers[name] = buffer
                elif held is not None and held.dtype == cast.dtype:
                    # forward registered another tensor
                    module._buffers[name] = held.to(buffer.dtype)


# --- modules that keep their dtype inside of a unit (`full_precision_classes`) ------------------


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
