"""The end of a backward, for everything that took part in it: first all launch, then all wait. Knows no unit and no collective.

Note [Launch first, then wait]
Which units take part in a backward, and which of them first, may differ from rank to rank: a replicated unit takes part with
the first gradient that arrives. If each one launched what is left and waited for it in turn, one rank would wait for a unit
that another launches after it has waited for a third. So at the end everything is launched before anything is waited for,
and both happen in an order that all ranks share.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Final, Protocol
from weakref import WeakValueDictionary

from composable.device.collectives import Steps
from composable.device.private import at_end_of_backward, backward_id, outside_transforms


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
        """It raised: wait for nobody."""


class BackwardEnd:
    """Who takes part in one backward. It lives as long as autograd runs it: one that raises leaves nothing behind."""

    def __init__(self) -> None:
        self._participants: list[Participant] = []
        self.counted: list[Steps] = []

    def join(self, participant: Participant, steps: Steps | None = None) -> None:
        """`participant` is called when backward ends.

        Args:
            steps: what counts the participant's messages. Backwards that run inside this one belong to the same step.
        """
        self._participants.append(participant)
        if steps is not None and steps.by_backward and steps not in self.counted:
            if not any(steps in end.counted for end in _RUNNING.values()):
                steps.open()
            self.counted.append(steps)

    @outside_transforms
    def run(self) -> None:
        """Backward has ended. See Note [Launch first, then wait]."""
        participants = sorted(self._participants, key=attrgetter("turn"))
        for participant in participants:
            participant.launch_rest()
        for participant in participants:
            participant.finish_backward()

    def abort(self) -> None:
        """Backward raised."""
        for participant in self._participants:
            participant.leave_failed_backward()


_RUNNING: Final[WeakValueDictionary[int, BackwardEnd]] = WeakValueDictionary()


def end_of_backward() -> BackwardEnd:
    """The end of the backward that this thread is in."""
    number = backward_id()
    end = _RUNNING.get(number)
    if end is None:
        end = _RUNNING[number] = BackwardEnd()
        at_end_of_backward(end.run, end.abort)
    return end
