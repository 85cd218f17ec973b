"""Where torch asks what to do with DTensors, and when it clips, scales or parametrizes; knows nothing of this project.

Checked with torch 2.11.0, 2.13.0 (CPU build) and 2.15.0, and read in the sources of 2.12. There are no public ways in that
see tensors. Where this torch has not what is looked for, nothing happens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial, wraps
from threading import local
from typing import Any

import torch
import torch.nn.utils.clip_grad as torchs_clipping
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrizations, parametrize

Handler = Callable[[Any, tuple[Any, ...], Any], Any]
FoundInf = dict[torch.device, Tensor]
Extension = Callable[[Any, tuple[Any, ...], Any, Callable[[], Any]], Any]


def _table() -> dict[Any, Handler] | None:
    found: dict[Any, Handler] | None = getattr(getattr(DTensor, "_op_dispatcher", None), "_custom_op_handlers", None)
    return found


def replace_dtensor_operation(operation: Any, handler: Handler) -> bool:
    """Have `handler` called with `operation`, its arguments and keyword arguments, where one of the tensors is a DTensor, if
    torch has a handler of its own for it. False where this torch has no such table."""
    handlers = _table()
    if handlers is None or operation not in handlers:
        return False
    handlers[operation] = handler
    return True


def extend_dtensor_operation(operation: Any, extension: Extension) -> bool:
    """Have `extension` called likewise, and with what does as torch does without it. False where it cannot be, or is done
    otherwise already."""
    handlers = _table()
    if handlers is None or operation in handlers:
        return False

    def handler(called: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        return extension(called, args, kwargs, partial(as_torch_does, called, args, kwargs))

    def as_torch_does(called: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        handlers.pop(operation, None)  # another thread meets torch's own for as long
        try:
            return called(*args, **(kwargs or {}))
        finally:
            handlers[operation] = handler

    handlers[operation] = handler
    return True


def ask_before_clipping(
    gradients: Callable[[Any], None],
    nothing: Callable[[list[Any]], None],
    summary: Callable[[list[Any], float, list[Any] | None], list[Any]],
) -> None:
    """Have torch's functions that clip gradients ask first, on an eager run.

    Args:
        gradients: is told those that they have found.
        nothing: is told what the caller of `torch.nn.utils.clip_grad_norm_` gave as `parameters`, if it has found none.
        summary: is given all gradients whose norm is taken, its order, and the parameters if it was these that the caller gave;
            it returns tensors that have the same norm.
    """
    take, sort = (getattr(torchs_clipping, name, None) for name in ("_get_total_norm", "_group_tensors_by_device_and_dtype"))
    if take is None or sort is None:
        return
    of_thread = local()

    @wraps(take)
    def total_norm(tensors: Any, norm_type: Any = 2.0, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not isinstance(tensors, list):
            return take(tensors, norm_type, *args, **kwargs)
        parameters = sys._getframe(1).f_locals.get("parameters")
        if not isinstance(parameters, list):
            return take(tensors, norm_type, *args, **kwargs)
        if not tensors:
            nothing(parameters)
        gradients(tensors)
        of_thread.has_summary = True
        try:
            return take(summary(tensors, float(norm_type), parameters), norm_type, *args, **kwargs)
        finally:
            of_thread.has_summary = False

    @wraps(sort)
    def sorted_by_kind(lists: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and not getattr(of_thread, "has_summary", False):
            gradients(lists[0])
            caller = sys._getframe(1)
            if caller.f_code.co_name == take.__name__:
                lists = [summary(lists[0], caller.f_locals["norm_type"], None)]
        return sort(lists, *args, **kwargs)

    vars(torchs_clipping).update(_get_total_norm=total_norm, _group_tensors_by_device_and_dtype=sorted_by_kind)


def extend_unscaling(extension: Callable[[Callable[[], FoundInf], torch.optim.Optimizer, Tensor], FoundInf]) -> None:
    """Have `extension` called where a gradient scaler unscales the gradients of an optimizer: with what does as torch does
    without it, the optimizer, and the inverse of the scale. It returns the numbers, by device, that say whether a gradient was
    not finite."""
    name = "_unscale_grads_"
    for kind in (GradScaler, ShardedGradScaler):
        if name in vars(kind):
            setattr(kind, name, _extended(vars(kind)[name], extension))


def _extended(
    unscale: Callable[..., FoundInf], extension: Callable[[Callable[[], FoundInf], torch.optim.Optimizer, Tensor], FoundInf]
) -> Callable[..., FoundInf]:
    @wraps(unscale)
    def unscaled(self: Any, optimizer: Any, inverse: Tensor, *args: Any, **kwargs: Any) -> FoundInf:
        return extension(partial(unscale, self, optimizer, inverse, *args, **kwargs), optimizer, inverse)

    return unscaled


def ask_before_parametrizing(ask: Callable[[nn.Parameter], None]) -> None:
    """Have `ask` called with a parameter before a parametrization is made of it."""
    # All parametrizations go through the first one; spectral norm computes with the weight before that.
    for room, name in ((parametrize, "ParametrizationList"), (parametrizations, "_SpectralNorm")):
        kind = getattr(room, name, None)
        if kind is not None:
            kind.__init__ = _asking(kind.__init__, ask)


def _asking(init: Callable[..., None], ask: Callable[[nn.Parameter], None]) -> Callable[..., None]:
    @wraps(init)
    def asked(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        for given in (*args, *kwargs.values()):
            if isinstance(given, nn.Parameter):
                ask(given)
        init(self, *args, **kwargs)

    return asked
