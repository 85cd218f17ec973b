"""Whose gradients are being reduced, and in which order they go on; launches and waits through units, knows no collective.

Note [Two hops]
On a hybrid mesh a reduction has two hops: a reduce-scatter over the shard dimension, then an all-reduce of the shards over the
replicate dimension. The second can be launched when the first has arrived, and nobody waits for the first before room is
needed: where the reduction of a unit further on has just been launched. There the second is launched, and waited for when the
next unit's is. All of these are launch points, see Note [Launch points]: whoever waits, waits for what was launched further up.

Note [Back before the next one]
Where memory is saved, one reduction is over before the next one is launched. While the unit in between brings gradients, there
are these, the message of the reduction, the unit's own parameters and those of the one after it: four times a unit, and sharded
gradients. To wait is a rank's own affair, so it waits earlier: when three quarters of the gradients are there, and the message
is given back before the last quarter comes. What is large travels in two parts, launched one after the other where all was
launched before: then the first part is waited for when a third of the gradients are there, and the second has as much time as
ever. Where units stayed unsharded nothing is gathered ahead, and no gather keeps the links busy meanwhile: then what travels in
one part is waited for when seven eighths are there. Beside the last unit of a root nobody waits: no unit after it takes room,
and the rest of its own backward hides the message. Where a backward goes on into another root that message stays until the end.
docs/decisions/0002-flat-storages.md has the figures, and what else was tried.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from composable.device.streams import Streams
from composable.runtime.gradient_hooks import weakly
from composable.runtime.gradients import UnitGradients, divided, give_back

FIRST_AT: Final = 1 / 3  # of the next unit's gradients are there where the first of two parts is waited for
WHOLE_AT: Final = 3 / 4  # where everything is
ALONE_AT: Final = 7 / 8  # where everything is, and no parameters are gathered ahead


class ReductionsInFlight:
    """Those of one backward."""

    __slots__ = ("__weakref__", "_first_hop", "_second_hop")

    def __init__(self) -> None:
        self._first_hop: list[UnitGradients] = []
        self._second_hop: list[UnitGradients] = []

    def launch(self, gradients: UnitGradients, *, saves_memory: bool) -> None:
        """Reduce what has arrived in a unit, or hold it; what it has in flight is finished before.

        Args:
            saves_memory: the gradients of the unit before are given back before this one's are copied for their message.
        """
        if saves_memory:
            self.make_room(0, second=1)
        for hop in (self._first_hop, self._second_hop):
            if gradients in hop:
                hop.remove(gradients)
        gradients.reduce_or_hold()
        self._first_hop.append(gradients)

    def give_back_beside(self, arriving: UnitGradients, streams: Streams, stream: Any, *, beside_next: bool) -> None:
        """Give messages back while gradients of the next unit arrive, on `stream`. See Note [Back before the next one].

        Args:
            beside_next: parameters of the unit after that one have just been gathered ahead.
        """
        if self._first_hop:
            share = FIRST_AT if any(map(divided, self._first_hop)) else WHOLE_AT if beside_next else ALONE_AT
            nbytes = int(share * sum(group.nbytes for group in arriving.groups))
            arriving.watch.count(nbytes, partial(weakly(self._give_back), streams, stream))

    def _give_back(self, streams: Streams, stream: Any) -> None:
        with streams.on(stream):
            for gradients in self._first_hop:
                give_back(gradients)

    def make_room(self, first: int, *, second: int = 1) -> None:
        """Go on with the oldest until at most `first` are in their first hop, and `second` in their second one."""
        while len(self._first_hop) > first:
            oldest = self._first_hop.pop(0)
            if oldest.replica_tags is None or not oldest.all_reduce():
                oldest.finish()
                continue
            self._second_hop.append(oldest)
            self._finish_second(1)
        if self._second_hop:
            self._finish_second(second)

    def _finish_second(self, left: int) -> None:
        while len(self._second_hop) > left:
            self._second_hop.pop(0).finish()
