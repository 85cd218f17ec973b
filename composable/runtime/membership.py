"""Whether every trainable parameter in a tree belongs to the unit that it should; knows no phase and moves nothing."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import Any, Final, NoReturn, Protocol

from torch import nn

from composable.device.parameter_swap import Place, ShardedParam
from composable.errors import ForeignParameterError
from composable.model.traversal import NamedPlace, TreeWatch, get_replicated_states, registered_parameters

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
    def left_alone(self) -> Sequence[Place]: ...

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
        self._frozen: list[nn.Parameter] = []  # that belong to nobody; none of them trains

    def changed(self) -> bool:
        """Whether modules or parameters came, or one that belongs to nobody is to be trained now."""
        return self._tree.changed() or any(parameter.requires_grad for parameter in self._frozen)

    def check(self) -> None:
        """Raise for a parameter that is trained and that no unit knows, or that a unit knows at another place."""
        known = self._known_places()
        if not self._members:
            return
        home = self._homes()
        frozen = []
        for place, parameter in registered_parameters(self._root):
            if (id(place.module), place.name) in known:
                continue
            if id(parameter) in home:
                _refuse_tie(place.fqn, *home[id(parameter)])
            if parameter.requires_grad:
                self._refuse(place)
            frozen.append(parameter)
        self._frozen = frozen

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

    def _known_places(self) -> dict[tuple[int, str], None]:
        places = [place for member in self._members for param in member.params for place in param.info.places]
        places += [place for member in self._members for place in member.left_alone]
        return {(id(place.module), place.name): None for place in places}

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
        self._known = {(id(place.module), place.name): place for place in found}  # and kept: ids of what is gone come again
        self._replicated_inside = places_of_replicas(modules)
        self._frozen: list[nn.Parameter] = []

    def _registered(self) -> list[tuple[NamedPlace, nn.Parameter]]:
        return [found for module in self._annotated for found in registered_parameters(module)]

    def refuse(self, held: Collection[int], unit: str) -> None:
        """Raise for one that is trained.

        Args:
            held: ids of parameters whose gradients are averaged, wherever they are registered.
        """
        seen = self._trees and not any(tree.changed() for tree in self._trees)
        if seen and not any(parameter.requires_grad for parameter in self._frozen):
            return
        came = [
            (place, parameter)
            for place, parameter in self._registered()
            if (id(place.module), place.name) not in self._known and id(parameter) not in held
        ]
        for place, parameter in came:
            if parameter.requires_grad:
                self._refuse(place, unit)
        self._frozen = [parameter for _, parameter in came]
        self._trees = [TreeWatch(module) for module in self._annotated]

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
        twin._annotated, twin._replicated_inside = copy.deepcopy((self._annotated, self._replicated_inside), memo)
        places = copy.deepcopy([*self._known.values()], memo)
        twin._known = {(id(place.module), place.name): place for place in places}
        return twin
