"""Whole plain parameters again: what `remove` registers.

The original objects are registered where they still exist, with what users gave to the at-rest
parameters: gradients, attributes and hooks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composable.engine.params.param import (
    ManagedParam,
    copy_attributes,
    drop_label,
    keep_gradients_in,
    set_label,
)
from composable.engine.params.param_hooks import move_hooks
from composable.engine.params.protocol import as_class_of
from composable.memory.torch_private import local_of

# A value and its gradient.
Whole = tuple[Tensor, Tensor | None]


def gather_whole(params: Sequence[ManagedParam]) -> list[Whole]:
    """Values and gradients of sharded parameters; all ranks call this."""
    return [
        (form.unsharded(at_rest), None if at_rest.grad is None else form.unsharded(at_rest.grad))
        for form, at_rest in ((param.info.form, param.at_rest) for param in params)
    ]


def restore(unit: str, params: Sequence[ManagedParam], whole: Sequence[Whole]) -> None:
    """Register plain parameters, in the modules of the unit with this name.

    Args:
        whole: of sharded ones, what `gather_whole` returned; empty if nothing was gathered.
    """
    for index, param in enumerate(params):
        if param.own is not None:
            gradient = param.at_rest.grad
            if isinstance(gradient, DTensor):
                gradient = local_of(gradient)
            _restore(param, param.own, gradient)
        elif whole:
            _restore_whole(param, *whole[index])
        set_label(param.at_rest, param.info, unit, "removed")
        registered = param.registered
        if registered is not None:
            drop_label(registered)
            keep_gradients_in(param.grad_dtype or registered.dtype, registered)


@torch.no_grad()
def _restore_whole(param: ManagedParam, value: Tensor, gradient: Tensor | None) -> None:
    form, at_rest, plain = param.info.form, param.at_rest, param.original()
    if plain is None or not form.refill(plain, value, at_rest):
        if isinstance(at_rest, DTensor):
            value = as_class_of(local_of(at_rest), value)
        plain = form.compute_parameter(
            form.laid_out(value, at_rest), requires_grad=at_rest.requires_grad
        )
    if gradient is not None:
        gradient = form.laid_out(gradient, at_rest).to(param.grad_dtype or plain.dtype)
        gradient = form.shown(gradient)
    _restore(param, plain, gradient)


def _restore(param: ManagedParam, plain: nn.Parameter, gradient: Tensor | None) -> None:
    """Register `plain`, which takes over what users gave to the at-rest parameter."""
    at_rest = param.at_rest
    if plain is at_rest:
        return
    plain.requires_grad_(at_rest.requires_grad)
    keep_gradients_in(param.grad_dtype or plain.dtype, plain)
    plain.grad = gradient
    copy_attributes(at_rest, plain)
    move_hooks(at_rest, plain)
    if param.registered is at_rest:
        param.register(plain)
