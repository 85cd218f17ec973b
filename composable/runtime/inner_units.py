"""What annotations keep of sharded units inside them, and say of one that is removed while they stay; refuses nothing.

Note [Removed from inside]
A unit that is removed leaves whole plain parameters, which are the user's own: an annotation around it takes none of them over.
They train on every rank by themselves, which may be meant, and is said once. An annotation knows the units inside from when it
was made, and so do copies of it. A unit was removed when no unit has its places any more.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import nn

from composable.device.parameter_swap import Place
from composable.errors import few, unit_name
from composable.model.traversal import NamedPlace, get_all_sharded_states

logger = logging.getLogger("composable")

Key = tuple[int, str]
Found = Mapping[Key, tuple[NamedPlace, nn.Parameter]]


def key_of(place: Place | NamedPlace) -> Key:
    return id(place.module), place.name


@dataclass(slots=True, eq=False)
class InnerUnit:
    """A sharded unit, as annotations around it know it, also after it was removed.

    Attributes:
        changes: how often sharded units have come or gone, of all models.
        module: that the unit is known by.
        places: of its parameters.
        left_alone: places in its tree that are no unit's, and should not be.
        told: whether users know that it was removed, or need not.
    """

    changes: ClassVar[int] = 0

    module: nn.Module | None = None
    places: Sequence[Place] = ()
    left_alone: list[Place] = field(default_factory=list)
    told: bool = False

    def tell(self, left: Found, names: Mapping[int, str], around: str) -> list[nn.Parameter]:
        """Say once that nothing averages the gradients of those that train.

        Args:
            left: parameters in the tree that are no unit's.
            names: of modules, by their ids.
            around: the annotation that stays.

        Returns:
            Those to look at again: it is to be said when they train.
        """
        found = [left[key] for key in map(key_of, self.places) if key in left]
        if self.told or not found:
            return []
        trained = {id(parameter): f"'{place.fqn}'" for place, parameter in reversed(found) if parameter.requires_grad}
        if not trained or not torch.is_grad_enabled():
            return [parameter for _, parameter in found]
        self.told = True
        name = names.get(id(self.module), found[0][0].fqn.rpartition(".")[0])
        logger.warning(
            "unit '%s' was removed from under %s, which does not take its parameters over: nothing averages the gradients of "
            "%s, and every rank trains its own. Annotate it again, or freeze it; or, if that is meant, remove the annotation "
            "around it, too, and name them in ignored_params when you annotate that again",
            unit_name(name),
            around,
            few([*reversed(trained.values())]),
        )
        return []


def sharded_units_changed() -> None:
    """One came, or was removed."""
    InnerUnit.changes += 1


def units_inside(modules: Iterable[nn.Module]) -> list[InnerUnit]:
    """The sharded units on `modules` and below."""
    return [unit.inner for module in modules for unit in get_all_sharded_states(module)]


def known_inside(before: Sequence[InnerUnit], now: Collection[InnerUnit]) -> list[InnerUnit]:
    """Those that are there `now`, and those of `before` whose places they have not taken over."""
    taken = {key_of(place): None for unit in now for place in unit.places}
    gone = [unit for unit in before if any(key_of(place) not in taken for place in unit.places)]
    return [*gone, *now]


def must_tell(waiting: Iterable[nn.Parameter]) -> bool:
    """Whether one of those that were to be looked at again trains now."""
    return any(parameter.requires_grad for parameter in waiting) and torch.is_grad_enabled()
