"""Whether every trainable parameter in a tree belongs to the unit that it should; knows no phase and moves nothing."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import Any, Final, NoReturn, Protocol

from torch import nn

from composable.device.parameter_swap import Place, ShardedParam
from composable.errors import ForeignParameterError
from composable.model.traversal import (
    NamedPlace,
    TreeWatch,
    get_replicated_states,
    get_states,
    names_below,
    registered_parameters,
)
from composable.runtime.inner_units import Found, InnerUnit, Key, key_of, known_inside, must_tell, units_inside

_CURE: Final = "call remove(module, fully_shard), change the module, and annotate it again"
_CURE_OF_REPLICAS: Final = "call remove(module, replicate), change the module, and annotate it again"
_HAD_ITS_OWN: Final = "was replicated by an annotation of its own, which was removed"
_AS_IT_IS: Final = "to train it as it is, name it in ignored_params there"


class Member(Protocol):
    """What is asked of a unit."""

    @property
    def fqn(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def params(self) -> Sequence[ShardedParam]: ...

    @property
    def inner(self) -> InnerUnit: ...

    inside: list[InnerUnit]

    @property
    def replicated_inside(self) -> Sequence[Place]: ...


def places_of_replicas(modules: Sequence[nn.Module]) -> list[Place]:
    """Where replicated units below `modules` have their parameters now; asked while the verb runs that annotates these."""
    return [place for each in modules for unit in get_replicated_states(each) for place in unit.parameters.places]


def _among(place: NamedPlace, places: Sequence[Place]) -> bool:
    return any(other.module is place.module and other.name == place.name for other in places)


class Membership:
    """What a root knows of its tree: which modules there are, and whose each parameter is."""

    def __init__(self, root: nn.Module, members: Sequence[Member]) -> None:
        self._root = root
        self._members = tuple(members)
        self._tree = TreeWatch(root)
        self._units, self._changes = get_states(root), InnerUnit.changes
        self._frozen: list[nn.Parameter] = []  # that belong to nobody; none of them trains
        self._waiting: list[nn.Parameter] = []  # of units that were removed; to be told of when they train

    def changed(self) -> bool:
        """Whether modules, parameters or units came, or one that belongs to nobody is to be trained now."""
        frozen = any(parameter.requires_grad for parameter in self._frozen)
        return self._tree.changed() or frozen or must_tell(self._waiting) or self._units_changed()

    def _units_changed(self) -> bool:
        if self._changes != InnerUnit.changes:
            if get_states(self._root) != self._units:
                return True
            self._changes = InnerUnit.changes
        return False

    def check(self) -> None:
        """Raise for a parameter that is trained and that no unit knows, or that a unit knows at another place; tell of removed
        units."""
        if not self._members:
            return
        known, former = self._known_places(), self._former_places()
        home = self._homes()
        frozen = []
        left: dict[Key, tuple[NamedPlace, nn.Parameter]] = {}
        for place, parameter in registered_parameters(self._root):
            key = key_of(place)
            if key in known:
                continue
            if key in former:
                left[key] = (place, parameter)
                continue
            if id(parameter) in home:
                _refuse_tie(place.fqn, *home[id(parameter)])
            if parameter.requires_grad:
                self._refuse(place)
            frozen.append(parameter)
        self._frozen = frozen
        self._tell(left)
        first, now = self._members[0], [member.inner for member in self._members[1:]]
        first.inside = known_inside(first.inside, [unit for unit in now if all(key_of(each) in former for each in unit.places)])

    def _tell(self, left: Found) -> None:
        around = {unit: member.name for member in self._members for unit in member.inside}  # the innermost that knows it
        names = names_below(self._root) if left else {}
        told = [unit.tell(left, names, f"fully_shard on unit '{name}'") for unit, name in around.items()]
        self._waiting = [parameter for parameters in told for parameter in parameters]

    def _refuse(self, place: NamedPlace) -> NoReturn:
        seen = f"parameter '{place.fqn}' ({type(place.module).__name__})"
        if _among(place, [other for member in self._members for other in member.replicated_inside]):
            raise ForeignParameterError(
                f"{seen} {_HAD_ITS_OWN}: fully_shard around it does not shard it, and every rank would train its own. To have "
                f"it sharded, call remove(module, fully_shard), too, and annotate that module again; {_AS_IT_IS}"
            )
        raise ForeignParameterError(
            f"{seen} came into the model after fully_shard was called: nothing shards it, and every rank would train its own. "
            f"To have it sharded, {_CURE}; {_AS_IT_IS}"
        )

    def check_ties(self) -> None:
        """Raise if one of the units' places holds a sharded parameter of another place."""
        home = self._homes()
        for member in self._members:
            for param in member.params:
                fqn = param.info.fqn
                for held in param.held:
                    unit, found = home.get(id(held), ("", param))
                    if found is not param:
                        _refuse_tie(f"{member.fqn}.{fqn}" if member.fqn else fqn, unit, found)

    def _known_places(self) -> dict[Key, None]:
        places = [place for member in self._members for param in member.params for place in param.info.places]
        places += [place for unit in self._all_units() for place in unit.left_alone]
        return dict.fromkeys(map(key_of, places))

    def _former_places(self) -> dict[Key, None]:
        """Of units inside, be they removed or not."""
        return {key_of(place): None for member in self._members for unit in member.inside for place in unit.places}

    def _all_units(self) -> list[InnerUnit]:
        return [unit for member in self._members for unit in (member.inner, *member.inside)]

    def _homes(self) -> dict[int, tuple[str, ShardedParam]]:
        """The unit of every sharded parameter, by the parameter's id."""
        return {id(param.sharded): (member.name, param) for member in self._members for param in member.params}


def _refuse_tie(fqn: str, unit: str, param: ShardedParam) -> None:
    raise ForeignParameterError(
        f"'{fqn}' was tied to parameter '{param.info.fqn}' of unit '{unit}' after fully_shard was called, which tied "
        f"parameters must be before: {_CURE}"
    )


class Newcomers:
    """Parameters that come below replicated modules after their annotation: nothing averages their gradients."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._annotated = tuple(modules)
        self._trees = [TreeWatch(module) for module in modules]
        found = [place for place, _ in self._registered()]
        self._known = {key_of(place): place for place in found}  # and kept: ids of what is gone come again
        self._replicated_inside = places_of_replicas(modules)
        self._inside = units_inside(modules)
        self._changes = InnerUnit.changes
        self._frozen: list[nn.Parameter] = []
        self._waiting: list[nn.Parameter] = []

    def _registered(self) -> list[tuple[NamedPlace, nn.Parameter]]:
        return [found for module in self._annotated for found in registered_parameters(module)]

    def refuse(self, held: Collection[int], unit: str) -> None:
        """Raise for one that is trained; tell of removed sharded units.

        Args:
            held: ids of parameters whose gradients are averaged, wherever they are registered.
        """
        seen = self._trees and self._changes == InnerUnit.changes and not any(tree.changed() for tree in self._trees)
        if seen and not any(parameter.requires_grad for parameter in self._frozen) and not must_tell(self._waiting):
            return
        apart = [(place, parameter) for place, parameter in self._registered() if id(parameter) not in held]
        came = [(place, parameter) for place, parameter in apart if key_of(place) not in self._known]
        for place, parameter in came:
            if parameter.requires_grad:
                self._refuse(place, unit)
        self._frozen = [parameter for _, parameter in came]
        self._tell({key_of(place): (place, parameter) for place, parameter in apart}, unit)
        self._trees = [TreeWatch(module) for module in self._annotated]
        self._changes = InnerUnit.changes

    def _tell(self, apart: Found, unit: str) -> None:
        now = units_inside(self._annotated)
        known = known_inside(self._inside, now)
        sharded = {key_of(place): None for each in now for place in each.places}
        left = {key: found for key, found in apart.items() if key not in sharded}
        names = {key: name for module in self._annotated for key, name in names_below(module).items()} if known else {}
        told = [each.tell(left, names, f"replicate on unit '{unit}'") for each in known]
        self._waiting = [parameter for parameters in told for parameter in parameters]
        self._inside = known

    def _refuse(self, place: NamedPlace, unit: str) -> NoReturn:
        seen = f"parameter '{place.fqn}' of unit '{unit}' ({type(place.module).__name__})"
        if _among(place, self._replicated_inside):
            raise ForeignParameterError(
                f"{seen} {_HAD_ITS_OWN}: replicate around it does not average its gradient, and every rank would train its "
                "own. To have it replicated, call remove(module, replicate) on the module of that unit, too, and annotate that "
                f"module again; {_AS_IT_IS}"
            )
        raise ForeignParameterError(
            f"{seen} came into the module after replicate was called: nothing averages its gradient, and every rank would "
            f"train its own. To have it replicated, {_CURE_OF_REPLICAS}; {_AS_IT_IS}"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Newcomers:
        """Of modules that are not whole yet: the first call looks at them."""
        twin = memo[id(self)] = Newcomers(())
        kept = (self._annotated, self._replicated_inside, self._inside)
        twin._annotated, twin._replicated_inside, twin._inside = copy.deepcopy(kept, memo)
        places = copy.deepcopy([*self._known.values()], memo)
        twin._known = {key_of(place): place for place in places}
        return twin
