"""That sums of a root's replicated units are counted by its steps, whoever shares their communicators; knows no gradient."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter, is_
from typing import Final

from composable.device.collectives import Steps
from composable.runtime.replicated_unit import ReplicatedUnit

_steps: Final = attrgetter("averaging.mesh_info.all.sums.steps")  # a unit may come to communicate over another mesh_info


class SumsInStep:
    """The sums of `units`. A copy of the model has their communicators, too, and takes them over with each of its forwards."""

    __slots__ = ("_steps", "_units")

    def __init__(self, units: Sequence[ReplicatedUnit], steps: Steps) -> None:
        self._units = tuple(units)
        self._steps = steps
        self.claim()

    def claim(self) -> None:
        """A forward begins: its sums belong to the step that it opens."""
        if all(map(is_, map(_steps, self._units), repeat(self._steps))):
            return
        apart = [unit for unit in self._units if unit.averaging.communicator.sums.steps is not self._steps]
        for unit in apart:
            self._steps.catch_up(unit.averaging.communicator.sums.steps.next_number - 1)
        for unit in apart:
            unit.forward_steps.count_by(self._steps)
