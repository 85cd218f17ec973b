"""What changes in units if others around them are added or removed: which unit owns tied
parameters, and the at-rest form of replicated parameters.

`before_removal` and `restore` register whole plain parameters for `remove`: the original parameter
objects again, if they still exist. These get the gradients, attributes and hooks that users have
set on the at-rest parameters (`ManagedParam.restore`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composable.contract.contract import on_undo
from composable.contract.tree import Place
from composable.engine.gradients.unit_gradients import UnitKind
from composable.engine.params.param import ManagedParam, ParamInfo
from composable.engine.step.unit import Unit, rename_below, units_below, without_shards
from composable.errors import PhaseError
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
            param.restore(param.own, gradient)
        elif whole:
            param.restore_whole(*whole[index])
        param.end(unit.name)
    leave_tree(unit)


def _whole(param: ManagedParam) -> _Gathered:
    """The value and the gradient of a sharded parameter; all ranks call this."""
    form, at_rest = param.info.form, param.at_rest
    value = form.unsharded(at_rest)
    return value, None if at_rest.grad is None else form.unsharded(at_rest.grad)


def settle(
    modules: Sequence[nn.Module],
    own: Unit,
    tied: Sequence[tuple[Unit, nn.Parameter, tuple[Place, ...]]] = (),
) -> None:
    """At the end of an annotation: decide how replicated parameters in the tree rest, and who owns
    tied ones.

    Args:
        own: the unit that is being made, whose record is not in the registry yet.
        tied: replicated units that own a parameter which is registered at more places of the
            annotated modules.
    """
    below = [unit for unit in units_below(modules) if unit is not own]
    for unit, parameter, places in tied:
        for param in unit.params:
            if any(parameter is form for form in (param.at_rest, param.own, param.compute)):
                on_undo(_tie(unit, param, places))
                unit.relations.note_reader(own)
    group = own.mesh_info.all.group
    for unit in below:
        if unit.mesh_info.all.size < own.mesh_info.all.size and group is not None:
            on_undo(partial(unit.note_model_group, unit.relations.model_group))
            unit.note_model_group(ref(group))
    on_undo(partial(leave_tree, own))  # before ties are undone: all places get the form of one
    own.relations.surround(own, below)
    for unit in (own, *below):
        choose_rest(unit)
    for unit in dict.fromkeys(unit for unit, _, _ in tied):
        unit.build()
    # until the first forward plans the tree, units have their FQNs below what was annotated last
    rename_below(modules, below)
    for unit in (own, *below):
        unit.forget_root()


def leave_tree(unit: Unit) -> None:
    """Replicated units around which there are no shards any more rest as plain parameters again."""
    for other in unit.relations.end(unit):
        choose_rest(other)


def choose_rest(unit: Unit) -> None:
    """Decide the kind of a replicated unit and how its parameters rest, see `UnitKind`."""
    if unit.is_sharded or not unit.params or unit.mesh_info.mesh is None:
        return
    for to_unit in reversed(unit.relations.around.values()):
        around = to_unit()
        if around is None:
            return  # it was dropped, maybe not yet on other ranks: what it has decided stays
        units = (around, *around.relations.below)
        mesh = next(
            (each.mesh_info.mesh for each in units if each.is_sharded and each.params), None
        )
        if mesh is not None:
            ranks = sorted(unit.mesh_info.mesh.mesh.tolist())
            unit.change_kind(
                UnitKind.BESIDE, mesh if sorted(mesh.mesh.flatten().tolist()) == ranks else None
            )
            return
    unit.change_kind(without_shards(unit.mesh_info), None)


def _tie(unit: Unit, param: ManagedParam, places: Sequence[Place]) -> Callable[[], None]:
    """Register a replicated parameter at places in other units, too; returns the inverse."""
    info = param.info
    more = [place for place in places if place not in info.places]
    plain = [place for place in more if place.registered is param.own]
    param.set_info(replace(info, places=(*info.places, *more)))
    if param.registered is not None:
        param.register(param.registered)
    undo = unit.watch(dict.fromkeys(place.module for place in more))
    return partial(_untie, unit, param, info, plain, undo)


def _untie(
    unit: Unit,
    param: ManagedParam,
    info: ParamInfo,
    plain: list[Place],
    undo: list[Callable[[], object]],
) -> None:
    for each in undo:
        each()
    if not unit.params:
        return  # it has been removed itself
    param.set_info(info)
    for place in plain:
        if param.own is not None:
            place.register(param.own)
