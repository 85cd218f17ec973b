"""Which replicated unit averages a parameter that several hold, and which steps must not be taken; knows no gradients.

Note [A parameter has one owner]
Tied weights may stand in several replicated units, or several times in one. The unit that was annotated first averages such a
parameter, once, when all of its gradients of a backward are there; for the others it is as good as frozen. When the owner is
removed, or comes to hold another parameter, the next one takes over.

Note [Before an optimizer steps]
Gradients are averaged by hooks on parameters. A call of the unit notices parameters that somebody replaced or unfroze, and
moves the hooks; where nobody calls the unit (`model.forward(x)`, a method of the user's) nothing would. So each unit is asked
before any step of a `torch.optim` optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from operator import attrgetter
from typing import Any, Final, Protocol
from weakref import WeakKeyDictionary

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from composable.runtime.early_steps import is_asked_to_step
from composable.runtime.mesh_info import MeshInfo
from composable.runtime.reducer import Reducer

_numbers: Final = count()
# Not a list from which callbacks of weak references remove: before Python 3.12 the collector may call them in the middle of
# `tuple(list)`, which then holds references that have been freed.
_enrolled: Final[WeakKeyDictionary[Holder, None]] = WeakKeyDictionary()


class Holder(Protocol):
    """What holds the parameters of a replicated unit.

    Attributes:
        number: units are numbered in the order of annotation; a copy has the number of its original.
        name: what it is called in messages.
        held: ids of the parameters that it held when it made its reducer, and keeps alive.
        mesh_info: where they are spread; None before the annotation is done.
        owned_at_rest: those that it averages, as users see them between steps.
    """

    number: int
    held: frozenset[int]
    name: str
    mesh_info: MeshInfo | None

    @property
    def reducer(self) -> Reducer:
        """Averages its gradients."""

    @property
    def owned_at_rest(self) -> Sequence[nn.Parameter]: ...

    def follow(self) -> None:
        """Another unit holds other parameters now."""

    def check_step(self, optimizer: Optimizer) -> None:
        """Raise when this unit's gradients are not what `optimizer` should step on."""


def next_number() -> int:
    return next(_numbers)


def enroll(unit: Holder) -> None:
    _enrolled[unit] = None


def strike_off(unit: Holder) -> None:
    """`unit` owns nothing any more."""
    _enrolled.pop(unit, None)
    tell_the_next(unit, unit.held)


def units() -> list[Holder]:
    """All units that live, in the order in which they were annotated or copied."""
    # Not by iterating: another thread may annotate meanwhile.
    return [unit for reference in _enrolled.keyrefs() if (unit := reference()) is not None]


def owned_elsewhere(unit: Holder, parameters: Sequence[nn.Parameter]) -> frozenset[int]:
    """Indices of `parameters` that an earlier unit averages, or that stand before in the same list."""
    earlier = [other.held for other in units() if other.number < unit.number]
    seen: dict[int, None] = {}
    found = []
    for index, parameter in enumerate(parameters):
        key = id(parameter)
        if key in seen or any(key in held for held in earlier):
            found.append(index)
        seen[key] = None
    return frozenset(found)


def holder_of(parameter: nn.Parameter) -> Holder | None:
    """The unit that owns `parameter`; None for one that no replicated unit holds."""
    holders = [unit for unit in units() if id(parameter) in unit.held]
    return min(holders, key=attrgetter("number"), default=None)


def local_gradients() -> Iterator[tuple[nn.Parameter, str, str]]:
    """Parameters with a gradient of this rank alone that later backwards average, and the names of unit and parameter."""
    for unit in units():
        for parameter, name in unit.reducer.local.named():
            yield parameter, unit.name, name


def tell_the_next(unit: Holder, changed: frozenset[int]) -> None:
    """`unit` has come to hold parameters, or holds them no longer: units that came later may own less, or more."""
    for other in units() if changed else ():
        if other.number > unit.number and not changed.isdisjoint(other.held):
            other.follow()


def _check_step(optimizer: Optimizer, *_: Any) -> None:
    if is_asked_to_step(optimizer):
        return
    for unit in units():
        unit.check_step(optimizer)


register_optimizer_step_pre_hook(_check_step)
