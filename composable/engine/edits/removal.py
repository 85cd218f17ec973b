"""Whole plain parameters again: what `remove` registers.

The original objects are registered where they still exist, with what users gave to the at-rest
parameters: gradients, attributes and hooks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composable.engine.edits.tree import leave_tree
from composable.engine.params.extension import has_protocol, whole_like
from composable.engine.params.param import (
    ManagedParam,
    copy_attributes,
    drop_label,
    keep_gradients_in,
    set_label,
    unsharded_of,
    wrap,
)
from composable.engine.params.param_hooks import move_hooks
from composable.engine.params.tensor_parallel import ModelSpec
from composable.engine.step.unit import Unit
from composable.errors import PhaseError
from composable.memory.torch_private import can_take_data, local_of, locals_of

# A value and its gradient.
_Whole = tuple[Tensor, Tensor | None]
# between `before_removal` and `restore`
_gathered: Final[WeakKeyDictionary[Unit, list[_Whole]]] = WeakKeyDictionary()


def before_removal(units: Sequence[Unit]) -> None:
    """Gather whole parameters and gradients, on all ranks, before anything changes."""
    for unit in units:
        unit.refuse_asleep("remove")
    for unit in units:
        if unit.has_unreduced:
            raise PhaseError(
                f"remove: unit '{unit.name}' has gradients that were accumulated under no_sync"
                " and not reduced. Call reduce_gradients(model) first, on all ranks, or"
                " zero_grad()"
            )
    for unit in units:
        if unit.root is not None and unit.root.in_step and not unit.root.running:
            unit.root.reset()
        unit.swap_out()
        unit.reshard()
        _gathered[unit] = _gather_whole(unit.params) if unit.is_sharded else []


def restore(unit: Unit) -> None:
    """Undo the annotation: register plain parameters; those of a sharded unit if they were
    gathered.
    """
    # readers that still have its parameters are refused in their next forward
    for each in (unit, *unit.relations.readers):
        if each.root is not None:
            each.root.forget()
    whole = _gathered.pop(unit, [])
    for index, param in enumerate(unit.dissolve()):
        if param.own is not None:
            gradient = param.at_rest.grad
            if isinstance(gradient, DTensor):
                gradient = local_of(gradient)
            _restore(param, param.own, gradient)
        elif whole:
            _restore_whole(param, *whole[index])
        set_label(param.at_rest, param.info, unit.name, "removed")
        registered = param.registered
        if registered is not None:
            drop_label(registered)
            keep_gradients_in(param.grad_dtype or registered.dtype, registered)
    leave_tree(unit)


def _gather_whole(params: Sequence[ManagedParam]) -> list[_Whole]:
    """Values and gradients of sharded parameters; all ranks call this."""
    return [
        (
            unsharded_of(at_rest, param.info.model),
            None if at_rest.grad is None else unsharded_of(at_rest.grad, param.info.model),
        )
        for param in params
        for at_rest in (param.at_rest,)
    ]


@torch.no_grad()
def _restore_whole(param: ManagedParam, value: Tensor, gradient: Tensor | None) -> None:
    original, at_rest, model = param.original(), param.at_rest, param.info.model
    if model is not None:
        _restore_spread(param, model, value, gradient)
        return
    fits = original is not None and original.shape == value.shape and original.dtype == value.dtype
    # torch gives no memory to what was made on meta, and none of some devices to what was made on a
    # host.
    if (
        original is not None
        and fits
        and original.is_meta is value.is_meta
        and can_take_data(original, value)
    ):
        plain = original
        if plain.device == value.device:
            plain.data.copy_(value)
        else:
            plain.data = _laid_out(value, at_rest)
    elif isinstance(at_rest, DTensor) and has_protocol(local := local_of(at_rest)):
        plain = nn.Parameter(whole_like(local, value), requires_grad=at_rest.requires_grad)
    else:
        plain = nn.Parameter(_laid_out(value, at_rest), requires_grad=at_rest.requires_grad)
    if gradient is not None:
        gradient = _laid_out(gradient, at_rest).to(param.grad_dtype or plain.dtype)
    _restore(param, plain, gradient)


def _restore_spread(
    param: ManagedParam, model: ModelSpec, value: Tensor, gradient: Tensor | None
) -> None:
    """Register the tensor-parallel parameter again, around this rank's local tensors."""
    spread, like = param.original(), model.like
    if spread is None or spread.dtype != value.dtype or spread.device != value.device:
        spread = model.compute_parameter(value, requires_grad=param.at_rest.requires_grad)
    else:
        locals_of([spread.detach()])[0].copy_(value)
    if gradient is not None:
        gradient = gradient.to(param.grad_dtype or value.dtype)
        if not model.is_plain:
            gradient = wrap(gradient, model.mesh, model.placements, like.shape, like.stride())
    _restore(param, spread, gradient)


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


def _laid_out(whole: Tensor, parameter: nn.Parameter) -> Tensor:
    """A copy with the strides of the whole parameter; `full_tensor` gives contiguous ones."""
    laid_out = torch.empty_strided(
        whole.shape, parameter.stride(), dtype=whole.dtype, device=whole.device
    )
    return laid_out.copy_(whole)
