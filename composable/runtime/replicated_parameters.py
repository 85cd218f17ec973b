"""Which parameters a replicated unit has, and what its modules compute with: registered plainly, or one form of two.

It knows neither who averages their gradients nor when another form is registered.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from composable.device.parameter_swap import Place
from composable.errors import PhaseError, still_on_meta
from composable.runtime.cast_unit import CastUnit
from composable.runtime.paired_places import PairedPlaces
from composable.runtime.resting_form import at_rest
from composable.runtime.sparse import is_sparse_lookup

T = TypeVar("T")


class ReplicatedParameters:
    """The parameters of one replicated unit.

    Attributes:
        modules: that are annotated as one.
        places: every place of every parameter: what is tied now need not stay so.
        names: FQNs below the unit, of all places.
        lookups: for each place, whether its module reads it by sparse lookups.
        exact: for each place, whether its module keeps its dtype where others are cast.
        pairs: of forms, while the parameters rest as DTensors.
    """

    def __init__(self) -> None:
        self.modules: tuple[nn.Module, ...] = ()
        self.places: tuple[Place, ...] = ()
        self.names: tuple[str, ...] = ()
        self.lookups: tuple[bool, ...] = ()
        self.exact: tuple[bool, ...] = ()
        self.pairs: PairedPlaces | None = None
        # Of the places; asked at every forward.
        self._registries: list[tuple[dict[str, nn.Parameter | None], str]] | None = None

    def initialize(
        self, modules: Sequence[nn.Module], places: Sequence[Place], names: Sequence[str], exact: Sequence[bool]
    ) -> None:
        self.modules = tuple(modules)
        self.exact = tuple(exact)
        self.places = tuple(places)
        self.lookups = tuple(is_sparse_lookup(place.module) for place in places)
        self.names = tuple(names)

    def clear(self) -> None:
        """The unit is removed, and has none any more."""
        self.places, self.names, self.lookups, self.pairs, self._registries = (), (), (), None, None

    @property
    def registered(self) -> list[nn.Parameter]:
        """The parameters that the modules compute with, as they hold them now, tied ones as often as they are registered."""
        if self.pairs is not None:
            return self.pairs.plain
        if self._registries is None:
            self._registries = [(place.module._parameters, place.name) for place in self.places]
        held = [registry.get(name) for registry, name in self._registries]
        return [parameter for parameter in held if parameter is not None]

    @property
    def present(self) -> list[int]:
        """Numbers of the places of those."""
        if self.pairs is not None:
            return self.pairs.present
        return [number for number, place in enumerate(self.places) if place.registered is not None]

    @property
    def named(self) -> list[tuple[nn.Parameter, str]]:
        """Those, and their FQNs below the unit."""
        return self._with(self.names)

    def _with(self, values: Sequence[T]) -> list[tuple[nn.Parameter, T]]:
        """Those, each with one of `values`, which are of all places."""
        registered = self.registered
        if len(registered) != len(values):  # a user took some away
            values = [values[number] for number in self.present]
        return list(zip(registered, values, strict=True))

    def summed_in(self, casts: CastUnit, registered: Sequence[nn.Parameter], present: Sequence[int]) -> list[torch.dtype]:
        """In which dtypes gradients are summed over the ranks: of what is `registered` at the places with these numbers."""
        each = zip(registered, present, strict=True)
        return [casts.summed_in(parameter.dtype, exact=self.exact[number]) for parameter, number in each]

    def with_exact(self) -> list[tuple[nn.Parameter, bool]]:
        """Those, and whether each keeps its dtype."""
        return self._with(self.exact)

    def with_lookups(self) -> list[tuple[nn.Parameter, bool]]:
        """Those, and whether each is read by sparse lookups."""
        return self._with(self.lookups)

    def at_rest(self, parameter: nn.Parameter) -> nn.Parameter:
        """What users see, between steps, of one of them."""
        return parameter if self.pairs is None else at_rest(parameter)

    def name_of(self, parameter: nn.Parameter) -> str:
        """The FQN, below the unit, of one of them."""
        return next((name for held, name in self.named if held is parameter), "")

    def refuse_meta(self, unit: str) -> None:
        """Raise if one has no values yet."""
        late = next((parameter for parameter in self.registered if parameter.is_meta), None)
        if late is not None:
            raise PhaseError(still_on_meta(self.name_of(late), unit))

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplicatedParameters:
        modules, places, pairs = copy.deepcopy((self.modules, self.places, self.pairs), memo)
        if id(self) in memo:  # copying modules leads here, and to whoever makes a reducer of what is copied by then
            done: ReplicatedParameters = memo[id(self)]
            return done
        twin = memo[id(self)] = ReplicatedParameters()
        twin.modules, twin.places, twin.pairs = modules, places, pairs
        twin.names, twin.lookups, twin.exact = self.names, self.lookups, self.exact
        return twin
