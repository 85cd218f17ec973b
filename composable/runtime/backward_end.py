"""The end of a backward, for everything that took part in it: first all launch, then all wait. Knows no unit and no collective.

Note [Launch first, then wait]
Which units take part in a backward, and which of them first, may differ from rank to rank: a replicated unit takes part with
the first gradient that arrives. If each one launched what is left and waited for it in turn, one rank would wait for a unit
that another launches after it has waited for a third. So at the end everything is launched before anything is waited for,
and both happen in an order that all ranks share.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from operator import attrgetter
from typing import Final, Protocol
from weakref import WeakValueDictionary

from composable.compilation import backward_is_compiled
from composable.device.collectives import Steps
from composable.device.private import at_end_of_backward, backward_id, outside_transforms
from composable.errors import DifferentiationError


class Participant(Protocol):
    """Something that has collectives to launch or to wait for when backward ends."""

    @property
    def turn(self) -> int:
        """Its place among all, the same on every rank; of equals, who joined first is first."""

    def launch_rest(self) -> None:
        """Launch what backward did not; wait for nothing."""

    def finish_backward(self) -> None:
        """Wait for everything; all ranks have launched it, or are about to without waiting for this one."""

    def leave_failed_backward(self) -> None:
        """It raised: wait for nobody. May be called for who took no part."""


class BackwardEnd:
    """Who takes part in one backward. It lives as long as autograd runs it: one that raises leaves nothing behind."""

    def __init__(self) -> None:
        self._participants: list[Participant] = []
        self._again: list[tuple[Steps, Callable[[], None]]] = []
        self.counted: dict[Steps, int] = {}  # and the number that belongs to this backward

    def join(
        self, participant: Participant, steps: Steps | None = None, launch_again: Callable[[], None] | None = None
    ) -> bool:
        """`participant` is called when backward ends.

        Args:
            steps: what counts the participant's messages. Backwards that run inside this one belong to the same step.
            launch_again: called when what it has launched, and has met nothing, belongs to a later one of `steps`.

        Returns:
            Whether this opens a step.
        """
        self._participants.append(participant)
        if steps is not None and launch_again is not None:
            self._again.append((steps, launch_again))
        if steps is None or not steps.by_backward or steps in self.counted:
            return False
        inside = any(steps in end.counted for end in _RUNNING.values())
        number = steps.number if inside else steps.next_number
        self.counted[steps] = number  # before that changes: an interrupt may come in between
        if not inside:
            steps.open()
        return not inside

    def go_on(self, steps: Steps, number: int) -> None:
        """This backward belongs to a later step; what has been launched is launched again."""
        steps.catch_up(number)
        for counted, launch_again in self._again:
            if counted is steps:
                launch_again()

    @outside_transforms
    def run(self) -> None:
        """Backward has ended. See Note [Launch first, then wait]."""
        participants = sorted(self._participants, key=attrgetter("turn"))
        for participant in participants:
            participant.launch_rest()
        for participant in participants:
            participant.finish_backward()
        # A thread of autograd's may hold this a little longer than the backward lasts. No later backward runs inside of it.
        self._participants, self._again, self.counted = [], [], {}

    def abort(self) -> None:
        """Backward raised."""
        for steps, number in self.counted.items():
            steps.catch_up(number)
            steps.behind = steps.behind or not isinstance(sys.exception(), Exception | None)
        for participant in self._participants:
            participant.leave_failed_backward()
        self.counted = {}  # whoever keeps the error keeps this as well: later backwards do not run inside of it


def gone() -> None:
    """In place of a weak reference to the end of a backward that raised."""
    return None


_RUNNING: Final[WeakValueDictionary[int, BackwardEnd]] = WeakValueDictionary()


def end_of_backward() -> BackwardEnd:
    """The end of the backward that this thread is in."""
    number = backward_id()
    end = _RUNNING.get(number)
    if end is None:
        if backward_is_compiled():
            raise DifferentiationError(
                "compiled autograd runs this backward. It tells nobody when it ends, and no gradient would be averaged over "
                "the ranks. Compile the model or its blocks, and leave compiled autograd off"
            )
        end = _RUNNING[number] = BackwardEnd()
        at_end_of_backward(end.run, end.abort)
    return end
