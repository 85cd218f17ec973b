"""One collective on the way of gradients, and what of it is in flight; knows no gradient, and not what follows.

Note [Hops]
A bucket of replicated gradients makes one hop, an all-reduce over all ranks. Rows of sharded ones make one, a reduce-scatter
over the shards; on a hybrid mesh a second follows, an all-reduce of the shards over the replicas. Wherever it stands on the
way, a hop is launched, looked after, waited for and given up alike, and each is in flight at most once.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from composable.device.collectives import Communicator, ReducePart, ScaledInput, Scratch, TagSequence, Work


class Hop:
    """A sum over the ranks of one communicator. What is launched is waited for, or aborted, before it is launched again.

    Attributes:
        in_flight: whether it was launched, and neither waited for nor aborted since; `wait_for_first` leaves it so.
    """

    __slots__ = ("_works", "communicator", "in_flight")

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self._works: list[Work] = []
        self.in_flight = False

    def reduce_scatter(self, parts: Sequence[ReducePart], scratch: Scratch, label: str, tags: TagSequence) -> None:
        """Launch one more: each rank gets its chunk of the sums."""
        work = self.communicator.reduce_scatter(parts, scratch=scratch, label=label, tags=tags)
        self._works.append(work)
        self.in_flight = True

    def all_reduce(
        self,
        message: Tensor,
        label: str,
        scaled_input: ScaledInput | None = None,
        tags: TagSequence | None = None,
    ) -> None:
        """Launch one more: each rank gets the whole sum of the message, in place."""
        self._works.append(self.communicator.all_reduce(message, label=label, scaled_input=scaled_input, tags=tags))
        self.in_flight = True

    def progress(self) -> bool:
        """Do this rank's part of all-reduces as far as no other rank has to be waited for; whether `wait` would return now."""
        for work in self._works:  # noqa: SIM110 - a generator would cost more than what it asks
            if not work.progress():
                return False
        return True

    def wait_for_first(self) -> None:
        """Wait for the first that was launched: its message is not read any more. `wait` is still to come."""
        if self._works:
            self._works.pop(0).wait()

    def wait(self) -> None:
        """The sums are there afterwards."""
        self.in_flight = False
        works, self._works = self._works, []
        for work in works:
            work.wait()

    def abort(self) -> None:
        """The sums are not wanted; nothing is written any more."""
        self.in_flight = False
        works, self._works = self._works, []
        for work in works:
            work.abort()
