"""Where a parameter is registered, and which of its two forms modules see there; knows no buffer, and makes no form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Place:
    """A place in the module tree where a parameter, or a buffer, is registered."""

    module: nn.Module
    name: str

    @property
    def registered(self) -> nn.Parameter | None:
        """What the module holds now."""
        return self.module._parameters.get(self.name)


@dataclass(frozen=True, slots=True)
class ParamInfo:
    """What is asked of one parameter, and stays; copied with the module.

    Attributes:
        fqn: below the annotated module.
        places: every place where it is registered (tied weights: several).
        cut_dim: the dimension that is cut; None for what has no dimensions, or is not cut.
        stride: of the parameter before it was sharded.
        exact: whether it is computed with in the dtype that it has, whatever the policy says.
    """

    fqn: str
    places: tuple[Place, ...]
    cut_dim: int | None = None
    stride: tuple[int, ...] = ()
    exact: bool = False


class ShardedParam:
    """One parameter, and its two forms: a DTensor at rest (replicated ones next to shards are DTensors, too), and what modules
    compute with."""

    __slots__ = ("by_setattr", "info", "registries", "sharded", "unsharded")

    def __init__(self, info: ParamInfo, sharded: nn.Parameter) -> None:
        places = info.places
        self.info = info
        self.sharded = sharded
        self.unsharded: nn.Parameter = sharded
        # Modules that keep books on their own parameters (RNNs: a flat list) must hear of the change.
        self.by_setattr = tuple(place for place in places if type(place.module).__setattr__ is not nn.Module.__setattr__)
        self.registries = tuple((place.module._parameters, place.name) for place in places if place not in self.by_setattr)

    @property
    def registered(self) -> Tensor | None:
        """What the module holds now."""
        return self.info.places[0].registered

    @property
    def held(self) -> list[Tensor | None]:
        """What each of the places holds now."""
        return [place.registered for place in self.info.places]

    def replace(self, parameter: nn.Parameter) -> None:
        """Put `parameter` where the current one stands, whatever it is. Where somebody has taken it away none comes back."""
        for registry, name in self.registries:
            if registry.get(name) is not None:
                registry[name] = parameter
        for place in self.by_setattr:
            if place.registered is not None:
                setattr(place.module, place.name, parameter)


class ParameterSwap:
    """Which form of a unit's parameters its modules see. A tensor that somebody else registered stays where it is."""

    __slots__ = ("_by_setattr", "_by_table", "strays")

    def __init__(self, params: Sequence[ShardedParam]) -> None:
        # Flat tuples and plain loops: they run for every parameter several times per step, and C has nothing quicker to offer.
        self._by_table = tuple(
            (registry, name, param.sharded, param.unsharded) for param in params for registry, name in param.registries
        )
        self._by_setattr = tuple(
            (place.module, place.name, param.sharded, param.unsharded) for param in params for place in param.by_setattr
        )
        self.strays = False  # whether `use_sharded` found a parameter that is neither form of ours

    def use_unsharded(self) -> None:
        """Modules compute with the unsharded parameters."""
        try:
            for registry, name, sharded, unsharded in self._by_table:
                if registry[name] is sharded:
                    registry[name] = unsharded
            for module, name, sharded, unsharded in self._by_setattr:
                if module._parameters[name] is sharded:
                    setattr(module, name, unsharded)
        except KeyError:
            self._where_names_are().use_unsharded()

    def use_sharded(self) -> None:
        """Modules hold the sharded parameters, as they do at rest."""
        self.strays = False
        try:
            for registry, name, sharded, unsharded in self._by_table:
                held = registry[name]
                if held is unsharded:
                    registry[name] = sharded
                elif held is not sharded and isinstance(held, nn.Parameter):
                    self.strays = True
            for module, name, sharded, unsharded in self._by_setattr:
                if module._parameters[name] is unsharded:
                    setattr(module, name, sharded)
        except KeyError:
            left = self._where_names_are()
            left.use_sharded()
            self.strays = left.strays

    def _where_names_are(self) -> ParameterSwap:
        """The same for the places whose parameter nobody has deleted."""
        left = ParameterSwap(())
        left._by_table = tuple(row for row in self._by_table if row[1] in row[0])
        left._by_setattr = tuple(row for row in self._by_setattr if row[1] in row[0]._parameters)
        return left

    @property
    def at_rest(self) -> list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]]:
        """Registries, names, and the sharded parameter that each has while nobody computes."""
        by_setattr = [(module._parameters, name, sharded) for module, name, sharded, _ in self._by_setattr]
        return [(registry, name, sharded) for registry, name, sharded, _ in self._by_table] + by_setattr

    def intact(self) -> bool:
        """Whether every module still holds the sharded parameter that we put there, or none since somebody took it away."""
        return all(registry.get(name) is sharded or registry.get(name) is None for registry, name, sharded in self.at_rest)
