"""`summon_full_params`: a scope in which modules hold whole plain parameters, and may be edited."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composable.api.explicit_calls import units_in
from composable.comm.launch import Launch
from composable.compilation import unwrapped
from composable.contract.contract import registry
from composable.contract.tree import registered_parameters
from composable.engine.params.param import holds_unreduced, keep_gradients_in
from composable.engine.step.unit import RANK0_ONLY, Unit, show_again, written
from composable.errors import ForeignParameterError, PhaseError, few
from composable.state.whole import (
    NamedParam,
    all_or_none,
    checked_on_all_ranks,
    follow_whole,
    managed_in,
    require_at_rest,
    whole_parameter,
    write_whole,
)
from composable.tensors import has_protocol, plain_parts
from composable.torch_private import (
    gradient_hooks,
    hooks_after_accumulation,
    local_of,
    local_tensor,
    version_of,
)

_SCOPE: Final = "summon_full_params()"


@dataclass(slots=True)
class _Shown:
    """A parameter whose whole copy is registered in its place.

    `shape` and `version` are those of the copy and of the shard when it was gathered.
    """

    managed: NamedParam
    whole: nn.Parameter
    shape: torch.Size
    version: int


@checked_on_all_ranks
@contextmanager
def summon_full_params(
    module: nn.Module,
    *,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Let modules hold whole plain parameters inside the scope, in their full precision.

    If the scope ends without an exception, edits are written back to the shards. Changes of
    `requires_grad` and of attributes of parameters are kept, too. Each rank keeps its part of *its
    own* edits, so make the same edits on all ranks. With `rank0_only`, the edits of rank 0 count,
    and are sent one parameter at a time (attributes are not sent). All ranks enter and leave the
    scope together, outside of forward and backward. If scopes nest, the outer one decides.

    Args:
        module: an annotated module, or one that contains some.
        recurse: include parameters of units below. Without it, only those of `module`'s own unit.
        writeback: keep edits. False drops every edit in the scope.
        rank0_only: gather whole parameters only on the first rank of each unit's mesh. Modules of
            other ranks hold shards.
        offload_to_cpu: put whole parameters on the host.
        with_grads: gather whole gradients, too. You read, write and remove them like parameters.

    Raises:
        NotAnnotatedError: no annotated module in `module`.
        PhaseError: inside of a forward or backward, or gradients are not reduced. Also, if a
            forward of a unit runs, or an optimizer steps, inside the scope.
        ForeignParameterError: an edit changed a parameter's shape or dtype, tied two parameters, or
            registered a hook on one.

    Example:
        >>> with summon_full_params(model, rank0_only=True), torch.no_grad():
        ...     if rank == 0:
        ...         model.head.weight[:, :10].zero_()

    Source: FSDP1's `summon_full_params`; writing back from one rank is
    https://github.com/pytorch/pytorch/issues/92297.
    """
    module = unwrapped(module)
    units = units_in("summon_full_params", module)
    if not recurse:
        own = [annotation.state for annotation in registry(module).values()]
        units = [unit for unit in units if unit in own]
    require_at_rest("summon_full_params", units)
    mine = [unit for unit in units if not unit.shown_by]
    managed = [each for each in managed_in("summon_full_params", module) if each.unit in mine]
    if with_grads:
        _refuse_accumulated(managed)
    copies = rank0_only or offload_to_cpu or not writeback
    shown: list[_Shown] = []
    try:
        try:
            for param in managed:
                # edits of the user's own parameters need no copy
                if copies or isinstance(param.param.at_rest, DTensor):
                    shown.append(_show(param, rank0_only, offload_to_cpu, with_grads))
            yield
        finally:
            tied = _hide(module, managed, shown, mine)
        if writeback:
            comms = dict.fromkeys(unit.mesh_info.all for unit in mine if rank0_only)
            all_or_none("summon_full_params", [*comms], partial(_check_edits, shown, tied))
            changed = []  # the same units on all ranks
            for unit in mine:
                edited = [each for each in shown if each.managed.unit is unit]
                for each in edited:
                    follow_whole(each.managed.param.at_rest, each.whole)
                # edits of a unit without copies have reached its parameters
                if not edited or with_grads or rank0_only or _is_edited(unit, edited):
                    changed.append(unit)
                    for each in edited:
                        _write_back(each, rank0_only=rank0_only, with_grads=with_grads)
            written(changed)
    finally:
        show_again(units)


def _refuse_accumulated(managed: list[NamedParam]) -> None:
    for each in managed:
        if holds_unreduced(each.param.at_rest):
            raise PhaseError(
                f"summon_full_params: the gradient of '{each.fqn}' (unit"
                f" '{each.unit.name}') was accumulated under no_sync and is not reduced. Call"
                " reduce_gradients(model) first, on all ranks, or zero_grad()"
            )


@torch.no_grad()
def _show(managed: NamedParam, rank0_only: bool, offload_to_cpu: bool, with_grads: bool) -> _Shown:
    at_rest, comm = managed.param.at_rest, managed.comm
    gradient = at_rest.grad if with_grads else None
    form = managed.param.info.form
    value = form.unsharded(at_rest)
    whole_gradient = None if gradient is None else form.unsharded(gradient)
    version = version_of(local_tensor(at_rest))
    managed.unit.show_whole(RANK0_ONLY if rank0_only else _SCOPE)
    if rank0_only and comm.rank:
        return _Shown(managed, at_rest, at_rest.shape, version)
    if offload_to_cpu:
        value = value.cpu()
        whole_gradient = None if whole_gradient is None else whole_gradient.cpu()
    whole = whole_parameter(form.shown(value), at_rest, form.kind)
    if whole_gradient is not None:
        keep_gradients_in(whole_gradient.dtype, whole)
        whole.grad = form.shown(whole_gradient)
    managed.param.register(whole)
    return _Shown(managed, whole, whole.shape, version)


def _hide(
    module: nn.Module, managed: list[NamedParam], shown: list[_Shown], units: list[Unit]
) -> list[str]:
    """Register what was there, and return what was tied to a whole parameter.

    What else the user registered inside the scope stays; the next forward adopts or refuses it.
    """
    wholes = {id(each.whole): each.managed for each in shown}
    tied = []
    for place, parameter in registered_parameters(module, stop=()):
        owner = wholes.get(id(parameter))
        if owner is not None and place not in owner.param.info.places:
            tied.append(f"'{place.fqn}' was tied to '{owner.fqn}'")
    for each in managed:
        for place in each.param.info.places:
            if id(place.registered) in wholes:
                place.register(each.param.at_rest)
    for unit in units:
        unit.show_whole("")
    return tied


def _check_edits(shown: list[_Shown], tied: list[str]) -> None:
    if tied:
        raise ForeignParameterError(
            f"summon_full_params: {few(tied)} inside the scope; whole parameters are there in the"
            " scope only. Call remove(module), tie the parameters, and annotate again"
        )
    for each in shown:
        managed, whole, at_rest = each.managed, each.whole, each.managed.param.at_rest
        if (whole.shape, whole.dtype) != (each.shape, at_rest.dtype):
            raise ForeignParameterError(
                f"summon_full_params: parameter '{managed.fqn}' of unit '{managed.unit.name}' has"
                f" the shape {tuple(whole.shape)} and is {whole.dtype} after the scope; before it"
                f" was {tuple(each.shape)} and {at_rest.dtype}. To change a shape, register a new"
                " parameter in its place; cast a model outside of the scope"
            )
        if whole is not at_rest and (gradient_hooks(whole) or hooks_after_accumulation(whole)):
            raise ForeignParameterError(
                f"summon_full_params: a hook was registered on parameter '{managed.fqn}' of unit"
                f" '{managed.unit.name}' inside the scope, on its whole copy, whose gradient is not"
                " the one that lands. Register hooks on parameters outside of the scope"
            )
        if version_of(local_tensor(at_rest)) != each.version:
            raise PhaseError(
                f"summon_full_params: the shard of '{managed.fqn}' (unit '{managed.unit.name}') was"
                " written to inside the scope, by an optimizer or load_state_dict, and the scope's"
                " edits would replace that. Step and load outside of it"
            )


@torch.no_grad()
def _is_edited(unit: Unit, shown: list[_Shown]) -> bool:
    """Whether any rank's shards change.

    All ranks write or none, and nothing that backward still needs is written without a reason.
    """

    def differs(each: _Shown) -> bool:
        at_rest = each.managed.param.at_rest
        if not isinstance(at_rest, DTensor):
            return not torch.equal(at_rest, each.whole.to(at_rest.device))
        local, whole = local_of(at_rest), local_tensor(each.whole)
        if has_protocol(local):
            return True  # its class may not know how to compare
        form = each.managed.param.info.form
        return not torch.equal(local, local_of(form.shard_like(whole, at_rest, local.device)))

    mine = int(any(map(differs, shown)))
    launch = Launch(f"comparison of edits of unit '{unit.name}'")
    return unit.mesh_info.all.min_max([mine], launch)[1][0] > 0


@torch.no_grad()
def _write_back(each: _Shown, *, rank0_only: bool, with_grads: bool) -> None:
    managed, whole = each.managed, each.whole
    at_rest, comm = managed.param.at_rest, managed.comm
    form = managed.param.info.form
    value = local_tensor(whole.detach())
    gradient = None if whole.grad is None else local_tensor(whole.grad)
    if rank0_only and comm.size > 1:
        device = managed.unit.mesh_info.device
        flags = torch.tensor([int(gradient is not None), int(whole.requires_grad)], device=device)
        # what is gathered, which may be of a class of its own, has space for what comes
        empty = form.unsharded(at_rest)
        value = (empty if comm.rank else value).to(device).contiguous()
        comm.broadcast([*plain_parts(value), flags], Launch(f"edits of '{managed.fqn}'"))
        at_rest.requires_grad_(bool(flags[1]))
        if with_grads and bool(flags[0]):
            dtype = value.dtype if at_rest.grad is None else at_rest.grad.dtype
            gradient = (
                torch.empty_like(value, dtype=dtype)
                if gradient is None or comm.rank
                else gradient.to(device, dtype).contiguous()
            )
            comm.broadcast([gradient], Launch(f"edited gradient of '{managed.fqn}'"))
        else:
            gradient = None
    write_whole(value, at_rest, form)
    if not with_grads:
        return
    if gradient is None:
        at_rest.grad = None
    elif at_rest.grad is not None:
        write_whole(gradient, at_rest.grad, form)
    else:
        at_rest.grad = (
            form.shard_like(gradient, at_rest, local_of(at_rest).device)
            if isinstance(at_rest, DTensor)
            else gradient
        )
