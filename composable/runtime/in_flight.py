"""Whose gradients are being reduced, and in which order they go on; launches and waits through units, knows no collective.

Note [Two hops]
On a hybrid mesh a reduction has two hops: a reduce-scatter over the shard dimension, then an all-reduce of the shards over the
replicate dimension. The second can be launched when the first has arrived, and nobody waits for the first before room is
needed: where the reduction of a unit further on has just been launched. There the second is launched, and waited for when the
next unit's is. All of these are launch points, see Note [Launch points]: whoever waits, waits for what was launched further up.
"""

from __future__ import annotations

from composable.runtime.gradients import UnitGradients


class ReductionsInFlight:
    """Those of one backward."""

    __slots__ = ("_first_hop", "_second_hop")

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
        gradients.settle()
        self._first_hop.append(gradients)

    def make_room(self, first: int, *, second: int = 1) -> None:
        """Go on with the oldest until at most `first` are in their first hop, and `second` in their second one."""
        while len(self._first_hop) > first:
            oldest = self._first_hop.pop(0)
            if not oldest.all_reduce():
                oldest.finish()
                continue
            self._second_hop.append(oldest)
            self._finish_second(1)
        self._finish_second(second)

    def _finish_second(self, left: int) -> None:
        while len(self._second_hop) > left:
            self._second_hop.pop(0).finish()
