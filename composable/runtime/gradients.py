"""One unit's gradients within one backward: counted as they arrive, reduced together; knows neither order nor other units."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from composable.device.collectives import Channel
from composable.plan.phases import GradEvent, GradPhase, advance_gradients
from composable.runtime.part import Part


class UnitGradients:
    """EMPTY -> ARRIVING -> REDUCING -> EMPTY, see `composable.plan.phases`.

    Attributes:
        on_first: called when a first gradient arrives.
        on_complete: called when all have arrived; decides when to `reduce`.
    """

    def __init__(self, channel: Channel) -> None:
        self.phase = GradPhase.EMPTY
        self.on_first: Callable[[], object] = _ignore
        self.on_complete: Callable[[], None] = _ignore
        self.parts: tuple[Part, ...] = ()
        self._channel = channel
        self._unit = ""
        self._label = ""
        self._until_counted = 0  # arrivals until there is something to do but to count; 0: at the next one

    def rename(self, unit: str) -> None:
        """Take the unit's name for messages."""
        self._unit = unit
        self._label = f"gradient reduction of unit '{unit}'"

    def arrived(self, _: Tensor) -> None:
        """Autograd finished one parameter's gradient. Runs for every parameter: most calls only count."""
        self._until_counted -= 1
        if self._until_counted <= 0:
            self._take_note()

    def _take_note(self) -> None:
        """It is the first one, or by the count the last one."""
        if self.phase is GradPhase.REDUCING:
            self.finish()
        first = self.phase is GradPhase.EMPTY
        if first:
            self.on_first()
        self.phase = advance_gradients(self.phase, GradEvent.ARRIVE, unit=self._unit)
        missing = sum([part.awaited for part in self.parts]) - 1 if first else 0
        if not missing:
            # Looked up and not only counted: a backward inside a backward brings one parameter's gradient twice.
            missing = sum([part.still_missing() for part in self.parts])
        self._until_counted = missing
        # One by one would be too early: a unit's gradients travel together.
        if not missing:
            self.on_complete()

    def reduce(self) -> None:
        """Launch the reduction of what arrived; what did not counts as zero, and stays None if it did nowhere."""
        if self.phase is GradPhase.REDUCING:
            self.finish()
        self.phase = advance_gradients(self.phase, GradEvent.REDUCE, unit=self._unit)
        self._until_counted = 0
        for part in self.parts:
            part.reduce(self._channel, self._label)

    def finish(self) -> None:
        """Wait for the reduction; the sharded parameters have their gradients afterwards."""
        if self.phase is not GradPhase.REDUCING:
            return
        for part in self.parts:
            part.finish()
        self.phase = advance_gradients(self.phase, GradEvent.FINISH, unit=self._unit)

    def drop(self) -> None:
        """After an error: nothing in flight, no unreduced gradient."""
        self.phase = GradPhase.EMPTY
        self._until_counted = 0
        for part in self.parts:
            part.forget_gradients()
        for part in self.parts:
            part.drop_reduction()


def _ignore() -> None:
    return None
