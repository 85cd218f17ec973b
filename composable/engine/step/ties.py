"""Parameters that users tie after the annotation, as libraries do that load weights into a model
which is sharded on the meta device.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn

from composable.contract.tree import Place, registered_parameters
from composable.engine.params.param import ManagedParam, set_label
from composable.engine.step.unit import Unit, unit_of

Holder = tuple[Unit, ManagedParam]


def follow_ties(units: Sequence[Unit], left_alone: Collection[tuple[int, str]]) -> None:
    """Give each parameter that is registered in places of several units to one of them.

    That is the innermost unit around all its places, as in an annotation of tied parameters: it is
    gathered whenever one of them computes. What cannot be moved is left as it is, for the next
    check to refuse. Between two steps.

    Args:
        units: of one root; the first has the outermost modules.
        left_alone: places of ignored parameters.
    """
    holders = {
        (id(place.module), place.name): (unit, param)
        for unit in units
        for param in unit.params
        for place in param.info.places
    }
    found: dict[int, list[tuple[int, str]]] = {}
    for module in units[0].modules:
        for place, parameter in registered_parameters(module, stop=()):
            if (key := (id(place.module), place.name)) not in left_alone:
                found.setdefault(id(parameter), []).append(key)
    for keys in found.values():
        held = dict.fromkeys(holders[key] for key in keys if key in holders)
        if len(held) > 1 or (held and any(key not in holders for key in keys)):
            _move([*held], keys, units)


def _move(held: list[Holder], keys: list[tuple[int, str]], units: Sequence[Unit]) -> None:
    """Let the innermost unit around the places `keys` manage what is registered there."""
    around = [(places, unit) for unit in units if (places := _places(unit, keys))]
    if not around:
        return
    places, owner = min(around, key=lambda each: _size(each[1]))
    tensor, touched = places[0].registered, dict.fromkeys([owner, *(unit for unit, _ in held)])
    if not isinstance(tensor, nn.Parameter) or unit_of(tensor) not in (None, *units):
        return  # of one call of `torch.func.functional_call`; or of a unit elsewhere
    if not all(_can_move(unit, owner) for unit in touched) or not all(
        param.info.form.is_whole and param.info.mesh_info is None for _, param in held
    ):
        return
    _, param = next((each for each in held if each[1].at_rest is tensor), held[0])
    for unit, other in held:
        unit.give([other])
        if other.at_rest is not tensor:
            set_label(other.at_rest, other.info, unit.name, "replaced")
    owner.take(param, places)
    for unit in touched:
        unit.reshard()
        unit.build()


def _can_move(unit: Unit, owner: Unit) -> bool:
    """Whether parameters of `unit` may become those of `owner`."""
    return (
        unit.is_sharded
        and unit.mesh_info.mesh == owner.mesh_info.mesh
        and unit.spec.offload == owner.spec.offload
        and not unit.gradients.has_unreduced
        and not any(group.extended for group in unit.groups)
    )


def _places(unit: Unit, keys: Collection[tuple[int, str]]) -> tuple[Place, ...]:
    """The places `keys` by their names below the unit; none if some are elsewhere."""
    found: dict[tuple[int, str], Place] = {}
    for index, module in enumerate(unit.modules):
        prefix = "" if len(unit.modules) == 1 else str(index)
        for place, _ in registered_parameters(module, prefix, stop=()):
            found.setdefault((id(place.module), place.name), place)
    return tuple(found[key] for key in keys) if all(key in found for key in keys) else ()


def _size(unit: Unit) -> int:
    return len({id(below) for module in unit.modules for below in module.modules()})
