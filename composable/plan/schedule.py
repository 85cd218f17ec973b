"""In which order units run, and who is probably next; knows units as ints and moves nothing.

Note [Order is recorded, not assumed]
Modules run in whatever order the user's forward calls them. The order of the last complete forward is a guess for the
next one: it decides what is prefetched, never what is right. A unit that runs out of turn is unsharded when it runs, and
the guess goes on from wherever that unit stands in the record.
"""

from __future__ import annotations

from typing import Final

# Forwards that no backward ever follows (an evaluation that records gradients) must not fill the memory.
_REMEMBERED: Final = 4096


class ForwardOrder:
    """Records the order of units in a forward and predicts the units that follow.

    Example:
        >>> order = ForwardOrder()
        >>> for unit in (0, 1, 2): order.record(unit)
        >>> _ = order.complete()
        >>> order.record(0); order.next_units(1)
        (1,)
    """

    __slots__ = ("_current", "_cursor", "recorded")

    def __init__(self) -> None:
        self.recorded: tuple[int, ...] = ()
        self._current: list[int] = []
        self._cursor = 0

    def record(self, unit: int) -> None:
        self._current.append(unit)
        recorded = self.recorded
        if self._cursor < len(recorded) and recorded[self._cursor] == unit:
            self._cursor += 1
            return
        if unit in recorded[self._cursor :]:  # else it is out of turn, and the guess stays where it was
            self._cursor = recorded.index(unit, self._cursor) + 1

    def next_units(self, depth: int) -> tuple[int, ...]:
        return self.recorded[self._cursor : self._cursor + depth]

    @property
    def current(self) -> tuple[int, ...]:
        return tuple(self._current)

    def complete(self) -> bool:
        """Close this forward; True when its order differs from the record it replaces."""
        changed = tuple(self._current) != self.recorded
        if changed:
            self.recorded = tuple(self._current)
        self.drop()
        return changed

    def drop(self) -> None:
        """Forget a forward that did not complete."""
        self._current = []
        self._cursor = 0


class CallNesting:
    """Which units are called inside which others; modules need not hold what they call.

    Attributes:
        running: units that are called now, outermost first.
        around: for each unit, those that have ever been running when it was called.
    """

    __slots__ = ("around", "running")

    def __init__(self, units: int) -> None:
        self.running: list[int] = []
        self.around: tuple[dict[int, None], ...] = tuple([{} for _ in range(units)])

    def enter(self, unit: int) -> None:
        for outer in self.running:
            if outer != unit:
                self.around[unit][outer] = None
        self.running.append(unit)


class BackwardOrder:
    """The units whose forward has finished, newest last; backward walks it from the end."""

    __slots__ = ("_finished",)

    def __init__(self) -> None:
        self._finished: list[int] = []

    def forward_finished(self, unit: int) -> None:
        self._finished.append(unit)
        if len(self._finished) > _REMEMBERED:
            del self._finished[: _REMEMBERED // 2]

    def enter(self, unit: int) -> None:
        """`unit` starts its backward: it and whatever finished after it can no longer be next."""
        finished = self._finished
        for position in range(len(finished) - 1, -1, -1):
            if finished[position] == unit:
                del finished[position:]
                return

    def next_units(self, depth: int) -> tuple[int, ...]:
        """The units whose backward probably comes next, nearest first."""
        return tuple(reversed(self._finished[-depth:])) if depth else ()

    def clear(self) -> None:
        self._finished.clear()
