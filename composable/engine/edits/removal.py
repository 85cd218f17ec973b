"""Make the whole plain parameters that `remove` registers.

If the original parameter objects still exist, they are registered again. They get the gradients,
attributes and hooks that users have set on the at-rest parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composable.engine.edits.tree import leave_tree
from composable.engine.params.param import (
    ManagedParam,
    copy_attributes,
    drop_label,
    keep_gradients_in,
    set_label,
)
from composable.engine.params.param_hooks import move_hooks
from composable.engine.step.unit import Unit
from composable.errors import PhaseError
from composable.tensors.protocol import as_class_of
from composable.torch_private import local_of

# A value and its gradient.
_Gathered = tuple[Tensor, Tensor | None]
# between `before_removal` and `restore`
_gathered: Final[WeakKeyDictionary[Unit, list[_Gathered]]] = WeakKeyDictionary()


def before_removal(units: Sequence[Unit]) -> None:
    """Gather whole parameters and gradients, on all ranks, before anything changes."""
    for unit in units:
        unit.refuse_offloaded("remove")
        if unit.gradients.has_unreduced:
            raise PhaseError(
                f"remove: unit '{unit.name}' has gradients that were accumulated under no_sync"
                " and not reduced. Call reduce_gradients(model) first, on all ranks, or"
                " zero_grad()"
            )
    for unit in units:
        unit.give_up_step()
        unit.swap_out()
        unit.reshard()
        _gathered[unit] = [_whole(param) for param in unit.params] if unit.is_sharded else []


def restore(unit: Unit) -> None:
    """Undo the annotation: register plain parameters; those of a sharded unit if they were
    gathered.
    """
    # readers that still have its parameters are refused in their next forward
    for each in (unit, *unit.relations.readers):
        each.forget_root()
    whole = _gathered.pop(unit, [])
    for index, param in enumerate(unit.remove()):
        if param.own is not None:
            gradient = param.at_rest.grad
            if isinstance(gradient, DTensor):
                gradient = local_of(gradient)
            _restore(param, param.own, gradient)
        elif whole:
            _restore_whole(param, *whole[index])
        set_label(param.at_rest, param, unit.name, "removed")
        registered = param.registered
        if registered is not None:
            drop_label(registered)
            keep_gradients_in(param.grad_dtype or registered.dtype, registered)
    leave_tree(unit)


def _whole(param: ManagedParam) -> _Gathered:
    """The value and the gradient of a sharded parameter; all ranks call this."""
    form, at_rest = param.info.form, param.at_rest
    value = form.unsharded(at_rest)
    return value, None if at_rest.grad is None else form.unsharded(at_rest.grad)


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
