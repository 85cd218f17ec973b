"""Who reads replicated parameters that rest as DTensors: calls and backwards around them; knows neither form of a parameter.

Readers are noted by name, not counted: who has been interrupted between two lines shows, or hides, once more.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Protocol
from weakref import ref

from composable.device.parameter_swap import Place
from composable.runtime.averaging import Averaging
from composable.runtime.backward_end import BackwardEnd, end_of_backward
from composable.runtime.cast_unit import CastUnit


class Shown(Protocol):
    """What modules of a unit see of its parameters."""

    casts: CastUnit | None

    def use_plain(self, reader: object) -> bool:
        """Modules compute with plain parameters from here on, for `reader`.

        Returns:
            Whether nobody was around the unit before.
        """

    def use_resting(self, reader: object) -> None:
        """Modules hold what they hold at rest again, if they show nothing for anybody else."""


class Readable(Protocol):
    """A replicated unit, whose parameters are read."""

    buffers: tuple[Place, ...]
    averaging: Averaging

    @property
    def shown(self) -> Shown: ...

    def drop_calls(self) -> None:
        """An interrupt ended the calls of its modules."""


class Readers:
    """Lets replicated units show what their modules compute with, while a call or a backward of who is around them goes on.

    A participant of the end of a backward, see `composable.runtime.backward_end`.
    """

    turn = sys.maxsize  # last: whoever finishes a backward may still recompute

    def __init__(self, units: Sequence[Readable], recover: Callable[[], None]) -> None:
        self._units = tuple(units)
        self.recover = recover  # leaves the call if an interrupt has ended it
        self._in_call = False
        self._in_backward = object()  # who reads then: a call may go on around a backward
        self._backward: Callable[[], BackwardEnd | None] | None = None  # while it runs; see Note [What an interrupt leaves]

    def enter_call(self) -> Sequence[Readable]:
        """Returns the units that nobody else is around."""
        if not self._units or self._in_call:
            return ()
        self._in_call = True
        try:
            # This may refuse what was put in a parameter's place.
            return [unit for unit in self._units if unit.shown.use_plain(self)]
        except Exception:
            self.leave_call()
            raise

    def leave_call(self) -> None:
        if self._in_call:
            for unit in self._units:
                unit.shown.use_resting(self)
            self._in_call = False

    def drop_calls(self) -> None:
        """An interrupt ended the calls that were under way, of these units and of who is around them."""
        for unit in self._units:
            unit.drop_calls()
        self.leave_call()

    def enter_backward(self) -> None:
        if self._units and (self._backward is None or self._backward() is None):
            end = end_of_backward()
            end.join(self)
            self._backward = ref(end)
            for unit in self._units:
                unit.shown.use_plain(self._in_backward)
                unit.averaging.open_backward()

    def launch_rest(self) -> None:
        """It has no collectives."""

    def finish_backward(self) -> None:
        if self._backward is not None:
            for unit in self._units:
                unit.shown.use_resting(self._in_backward)
            self._backward = None

    leave_failed_backward = finish_backward

    def abort(self) -> None:
        """Leave whatever is under way; a step is lost."""
        self.finish_backward()
        self.leave_call()
        for unit in self._units:
            unit.averaging.reducer.drop()
