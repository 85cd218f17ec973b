"""That sums of a root's replicated units are counted by its steps, whoever shares their communicators; knows no gradient."""

from __future__ import annotations

from collections.abc import Sequence

from composable.device.collectives import Steps
from composable.runtime.replicated_unit import ReplicatedUnit


class SumsInStep:
    """The sums of `units`. A copy of the model has their communicators, too, and takes them over with each of its forwards."""

    __slots__ = ("_steps", "_tags", "_units")

    def __init__(self, units: Sequence[ReplicatedUnit], steps: Steps) -> None:
        self._units = tuple(units)
        self._steps = steps
        self._tags = tuple({unit.averaging.communicator.sums: None for unit in units})  # asked at every forward
        self.claim()

    def claim(self) -> None:
        """A forward begins: its sums belong to the step that it opens."""
        if all(tags.steps is self._steps for tags in self._tags):
            return
        apart = [unit for unit in self._units if unit.averaging.communicator.sums.steps is not self._steps]
        for unit in apart:
            self._steps.catch_up(unit.averaging.communicator.sums.steps.number)
        for unit in apart:
            unit.forward_steps.count_by(self._steps)
