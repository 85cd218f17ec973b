"""Which form of a unit's parameters its modules see, for the calls and the backward that are running; knows no phase."""

from __future__ import annotations

from collections.abc import Sequence

from composable.model.hooks import Guard, GuardRow
from composable.runtime.parameters import UnitParameters


class UnitCalls:
    """Modules see unsharded parameters while a call or a backward of the unit is running. Whether those are there is not asked.

    Attributes:
        depth: calls of the unit's modules that are running, and its backward.
    """

    __slots__ = ("_guards", "_running", "_unit_parameters", "depth")

    def __init__(self, parameters: UnitParameters) -> None:
        self._unit_parameters = parameters
        self._guards = GuardRow(())
        self._running = 0  # calls alone
        self.depth = 0

    def guarded_by(self, guards: Sequence[Guard]) -> None:
        """`guards` stand wherever one of the parameters is registered, while no call is running."""
        self._guards = GuardRow(guards)

    def use_unsharded(self) -> None:
        """Modules compute with the unsharded parameters from here on; nests."""
        self.depth += 1
        if self.depth == 1:
            self._unit_parameters.swap.use_unsharded()

    def use_sharded(self) -> None:
        """Modules hold the sharded parameters again, whether or not the unsharded ones still exist."""
        if self.depth:
            self.depth -= 1
        if not self.depth:
            self._unit_parameters.swap.use_sharded()

    def begin(self) -> None:
        """`use_unsharded`, for a call of one of its modules: the modules inside, too, are called as they should be."""
        self.use_unsharded()
        self._running += 1
        if self._running == 1:
            self._guards.step_aside()

    def end(self) -> None:
        """`use_sharded`, at the end of a call."""
        self.use_sharded()
        if self._running:
            self._running -= 1
        if not self._running:
            self._guards.stand()

    def set_to(self, running: int) -> None:
        """Whatever was shown or hidden before: show for so many calls, and no backward."""
        if not running:
            self._unit_parameters.swap.use_sharded()
            self._guards.stand()
        self.depth = self._running = running
