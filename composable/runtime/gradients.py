"""One unit's gradients within one backward: counted as they arrive, reduced together; knows neither order nor other units.

Note [Hooks on parameters hold nothing]
A parameter holds the hooks that wait for its gradient where Python's collector does not look. A hook that leads back to its
parameter, by however many steps, keeps both alive for good, and with them the whole model. So such hooks refer weakly to
what they call.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any
from weakref import ref

from torch import Tensor, nn

from composable.device.collectives import Channel
from composable.device.gradients import call_hooks_after_accumulation
from composable.errors import DifferentiationError
from composable.plan.phases import GradEvent, GradPhase, advance_gradients
from composable.runtime.part import Part


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """A call of a bound method that keeps its object from nothing; nothing happens once that is gone.

    See Note [Hooks on parameters hold nothing].
    """
    assert isinstance(method, MethodType)
    reference, function = ref(method.__self__), method.__func__

    def call(*args: Any) -> None:
        found = reference()
        if found is not None:
            function(found, *args)

    return call


class Countdown:
    """Counts arrivals down, and calls at each from the last one on."""

    __slots__ = ("_call", "left")

    def __init__(self, call: Callable[[], None]) -> None:
        self.left = 0
        self._call = weakly(call)

    def arrived(self, _: Tensor) -> None:
        """Autograd finished one parameter's gradient. Runs for every parameter: most calls only count."""
        self.left -= 1
        if self.left <= 0:
            self._call()


class UnitGradients:
    """EMPTY -> ARRIVING -> REDUCING -> EMPTY, see `composable.plan.phases`.

    Attributes:
        on_first: called when a first gradient arrives that was not expected, and others are missing.
        on_complete: called when all have arrived; decides when to `reduce`.
        countdown: arrivals until there is something to do but to count.
        rounds: backwards in which the unit was reduced; the same on every rank, because all take part in that.
    """

    def __init__(self, channel: Channel) -> None:
        self.phase = GradPhase.EMPTY
        self.on_first: Callable[[], object] = _ignore
        self.on_complete: Callable[[], None] = _ignore
        self.parts: tuple[Part, ...] = ()
        self._channel = channel
        self._unit = ""
        self._label = ""
        self.rounds = 0
        self._reduced = False  # in this backward
        self._waiting: dict[int, nn.Parameter] = {}  # with hooks to be called when this backward has ended
        self.countdown = Countdown(self._take_note)

    def rename(self, unit: str) -> None:
        """Take the unit's name for messages."""
        self._unit = unit
        self._label = f"gradient reduction of unit '{unit}'"

    def expect(self) -> None:
        """Backward has reached the unit: there is nothing to do until all of its gradients have arrived."""
        if self.phase is GradPhase.EMPTY and not self.countdown.left:
            self.countdown.left = sum([part.awaited for part in self.parts])

    def _take_note(self) -> None:
        """It is the last one, by the count, or one that nobody expected."""
        if self.phase is GradPhase.REDUCING:
            self.finish()
        # Looked up and not only counted: a backward inside a backward brings one parameter's gradient twice.
        missing = 0
        for part in self.parts:
            missing += part.still_missing()
        self.countdown.left = missing
        # One by one would be too early: a unit's gradients travel together.
        if not missing:
            self.on_complete()
            return
        if self.phase is GradPhase.EMPTY:
            self.on_first()
        self.phase = advance_gradients(self.phase, GradEvent.ARRIVE, unit=self._unit)

    def end(self) -> None:
        """Backward has ended, and whatever arrived was reduced."""
        self.finish()
        self._end_round()

    def call_hooks(self) -> None:
        """After `end`: hooks of the user's on sharded parameters, which find the gradients of the whole backward there."""
        waiting, self._waiting = self._waiting, {}
        for parameter in waiting.values():
            call_hooks_after_accumulation(parameter)

    def _end_round(self) -> None:
        self.countdown.left = 0
        self.rounds += self._reduced
        self._reduced = False

    def reduce(self) -> None:
        """Launch the reduction of what arrived; what did not counts as zero, and stays None if it did nowhere."""
        if self.phase is GradPhase.REDUCING:
            self.finish()
        self.phase = advance_gradients(self.phase, GradEvent.REDUCE, unit=self._unit)
        self._reduced = True
        self.countdown.left = 0
        for part in self.parts:
            part.reduce(self._channel, self._label)

    def refuse_graph(self) -> None:
        """Raise if a gradient arrived: it was made in a backward that builds a graph, and sharded gradients are in none."""
        if any(part.still_missing() < part.awaited for part in self.parts):
            raise DifferentiationError(
                f"backward(create_graph=True) brought gradients to parameters of unit '{self._unit}'. They are averaged over "
                "the ranks and sharded outside of autograd's graph, so nothing could be differentiated through them. Ask for "
                "gradients of inputs only, torch.autograd.grad(loss, inputs, create_graph=True), or leave create_graph=True "
                "out"
            )

    def finish(self) -> None:
        """Wait for the reduction; the sharded parameters have their gradients afterwards."""
        if self.phase is not GradPhase.REDUCING:
            return
        for part in self.parts:
            for parameter in part.finish():
                self._waiting[id(parameter)] = parameter
        self.phase = advance_gradients(self.phase, GradEvent.FINISH, unit=self._unit)

    def drop(self) -> None:
        """After an error: nothing in flight, no unreduced gradient."""
        self.phase = GradPhase.EMPTY
        self._waiting = {}
        self._end_round()
        for part in self.parts:
            part.forget_gradients()
        for part in self.parts:
            part.drop_reduction()


def _ignore() -> None:
    return None
