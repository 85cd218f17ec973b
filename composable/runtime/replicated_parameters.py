"""Which parameters a replicated unit has, and what its modules compute with: registered plainly, or one form of two.

It knows neither who averages their gradients nor when another form is registered.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import nn

from composable.device.parameter_swap import Owner
from composable.errors import PhaseError, still_on_meta
from composable.runtime.paired_places import PairedPlaces
from composable.runtime.resting_form import at_rest
from composable.runtime.sparse import is_sparse_lookup


class ReplicatedParameters:
    """The parameters of one replicated unit.

    Attributes:
        modules: that are annotated as one.
        owners: every place of every parameter: what is tied now need not stay so.
        names: FQNs below the unit, of all places.
        lookups: for each place, whether its module reads it by sparse lookups.
        pairs: of forms, while the parameters rest as DTensors.
    """

    def __init__(self) -> None:
        self.modules: tuple[nn.Module, ...] = ()
        self.owners: tuple[Owner, ...] = ()
        self.names: tuple[str, ...] = ()
        self.lookups: tuple[bool, ...] = ()
        self.pairs: PairedPlaces | None = None
        self._places: list[tuple[dict[str, nn.Parameter | None], str]] | None = None  # of the owners; asked at every forward

    def initialize(self, modules: Sequence[nn.Module], owners: Sequence[Owner], names: Sequence[str]) -> None:
        self.modules = tuple(modules)
        self.owners = tuple(owners)
        self.lookups = tuple(is_sparse_lookup(owner.module) for owner in owners)
        self.names = tuple(names)

    def clear(self) -> None:
        """The unit is removed, and has none any more."""
        self.owners, self.names, self.lookups, self.pairs, self._places = (), (), (), None, None

    @property
    def registered(self) -> list[nn.Parameter]:
        """The parameters that the modules compute with, as they hold them now, tied ones as often as they are registered."""
        if self.pairs is not None:
            return self.pairs.plain
        if self._places is None:
            self._places = [(owner.module._parameters, owner.name) for owner in self.owners]
        held = [registry.get(name) for registry, name in self._places]
        return [parameter for parameter in held if parameter is not None]

    def at_rest(self, parameter: nn.Parameter) -> nn.Parameter:
        """What users see, between steps, of one of them."""
        return parameter if self.pairs is None else at_rest(parameter)

    def name_of(self, parameter: nn.Parameter) -> str:
        """The FQN, below the unit, of one of them."""
        return next((name for held, name in zip(self.registered, self.names, strict=False) if held is parameter), "")

    def refuse_meta(self, unit: str) -> None:
        """Raise if one has no values yet."""
        late = next((parameter for parameter in self.registered if parameter.is_meta), None)
        if late is not None:
            raise PhaseError(still_on_meta(self.name_of(late), unit))

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplicatedParameters:
        modules, owners, pairs = copy.deepcopy((self.modules, self.owners, self.pairs), memo)
        if id(self) in memo:  # copying modules leads here, and to whoever makes a reducer of what is copied by then
            done: ReplicatedParameters = memo[id(self)]
            return done
        twin = memo[id(self)] = ReplicatedParameters()
        twin.modules, twin.owners, twin.pairs = modules, owners, pairs
        twin.names, twin.lookups = self.names, self.lookups
        return twin
