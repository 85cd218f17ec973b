"""Steps of the sharded units below a replicated module, where its forward raises: on other ranks they are lost, too.

It knows neither modules nor gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from composable.device.private import in_backward
from composable.runtime.divergence import say_farewell
from composable.runtime.handle import Handle
from composable.runtime.step import abort_units


class Unit(Protocol):
    """A sharded unit."""

    root: Any
    spec: Any  # None once it was removed

    @property
    def handle(self) -> Handle: ...


class ShardsInside:
    """The sharded units below one replicated module, which all ranks call together.

    A forward that raises may not have come to all of them. Other ranks have: they wait for this one in a step that it has not
    opened, and would take what it brings to the next for that.
    """

    def __init__(self, units: Sequence[Unit] = ()) -> None:
        self._units = tuple(units)
        self._next: list[int] = []
        self._records = False  # what a backward will go through

    def expect(self) -> None:
        """A forward begins."""
        self._records = torch.is_grad_enabled()
        self._next = [unit.handle.tags.steps.next_number if unit.spec is not None else 0 for unit in self._units]

    def lose(self, why: str) -> None:
        """It raised. Done twice is done once."""
        if in_backward():
            return  # a recomputation, which may end so
        for unit, number in zip(self._units, self._next, strict=False):
            if unit.spec is None:
                continue  # it was removed
            root = unit.root
            steps = unit.handle.tags.steps
            late = steps.number < number
            if late:
                steps.open()
            if root is None:
                say_farewell([unit.handle], why)
                abort_units([unit.handle])
            elif late or (self._records and root.backward.iteration is not None):
                root.abort(why, why)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardsInside:
        twin = memo[id(self)] = ShardsInside()
        twin._units = copy.deepcopy(self._units, memo)
        return twin
