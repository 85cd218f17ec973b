"""Parameters that are tied after the annotation. Libraries do this when they load weights into a
model that was sharded on the meta device.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from torch import nn

from composable.contract.tree import Place, registered_parameters
from composable.engine.params.param import ManagedParam, set_label
from composable.engine.step.unit import Unit, unit_of

Holder = tuple[Unit, ManagedParam]


def holders_of(units: Iterable[Unit]) -> dict[Place, Holder]:
    """Which parameter of which unit has its place where."""
    return {
        place: (unit, param)
        for unit in units
        for param in unit.params
        for place in param.info.places
    }


def follow_ties(units: Sequence[Unit], left_alone: Collection[Place]) -> None:
    """Give each parameter that is registered in places of several units to one of them.

    That is the innermost unit around all its places, as in an annotation of tied parameters: it is
    gathered whenever one of them computes. What cannot be moved is left as it is, for the next
    check to refuse. Between two steps.

    Args:
        units: of one root; the first has the outermost modules.
        left_alone: places of ignored parameters.
    """
    holders = holders_of(units)
    found: dict[int, list[Place]] = {}
    for module in units[0].modules:
        for place, parameter in registered_parameters(module, stop=()):
            if place not in left_alone:
                found.setdefault(id(parameter), []).append(place)
    for places in found.values():
        held = dict.fromkeys(holders.get(place) for place in places)
        holding = [holder for holder in held if holder is not None]
        if holding and len(held) > 1:
            _move(holding, places, units)


def _move(held: list[Holder], places: list[Place], units: Sequence[Unit]) -> None:
    """Let the innermost unit around the places manage what is registered there."""
    tensor, inside = places[0].registered, {unit: _places(unit) for unit in units}
    around = [unit for unit in units if inside[unit].keys() >= set(places)]
    if not around or not isinstance(tensor, nn.Parameter) or unit_of(tensor) not in (None, *units):
        return  # of one call of `torch.func.functional_call`; or of a unit elsewhere
    owner = min(reversed(around), key=lambda unit: len(inside[unit]))
    touched = dict.fromkeys([owner, *(unit for unit, _ in held)])
    if not all(_can_move(unit, owner) for unit in touched) or not all(
        param.info.form.is_whole and param.info.mesh_info is None for _, param in held
    ):
        return
    _, param = next((each for each in held if each[1].at_rest is tensor), held[0])
    for unit, other in held:
        unit.give([other])
        if other.at_rest is not tensor:
            set_label(other.at_rest, other, unit.name, "replaced")
    owner.take(param, tuple(inside[owner][place] for place in places))
    for unit in touched:
        unit.reshard()
        unit.build()


def _can_move(unit: Unit, owner: Unit) -> bool:
    """Whether parameters of `unit` may become those of `owner`."""
    return (
        unit.is_sharded
        and unit.mesh_info.mesh == owner.mesh_info.mesh
        and unit.spec.grouping == owner.spec.grouping
        and unit.spec.divisor == owner.spec.divisor
        and not unit.gradients.has_unreduced
        and not any(group.extended for group in unit.groups)
    )


def _places(unit: Unit) -> dict[Place, Place]:
    """All places of parameters in the unit's modules and below, with their names there."""
    found: dict[Place, Place] = {}
    for index, module in enumerate(unit.modules):
        prefix = "" if len(unit.modules) == 1 else str(index)
        for place, _ in registered_parameters(module, prefix, stop=()):
            found.setdefault(place, place)
    return found
