"""Memory that all ranks of a host gather into together, each its part; says no word and moves no bytes.

Note [One unsharded buffer per host]
Ranks of one host that gather the same unit would each fill a buffer with the same numbers. Here they fill one: each copies
its own shard to where it belongs and says so; when all have, everybody computes with the same pages. The rules:

* A rank writes to nothing but its own chunks, and buffers take turns in a place only if their chunks lie alike. So ranks that
  have come to different units never overwrite each other's numbers.
* A rank writes to a place only if every rank has said that it has finished *all* earlier gathers that had a right to the
  place, used or not. Until then, and while the place is needed here, it gathers privately.
* A place is computed with only if every rank's word says that it has written to it. Otherwise all copy what they need into
  buffers of their own. So nobody waits for a place, and ranks may decide differently without knowing it.

Nobody may write to what is computed with; a unit finds out (`Part.find_writes`).
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Final, Protocol

from composable.device.collectives.wire import Room
from composable.device.shared_memory import Common

TURNS: Final = 3  # places for buffers that take turns: one is computed with, one is on its way, one is still used elsewhere
_PATIENCE: Final = 64  # unfinished gathers after which a place is given up: somebody has forgotten to finish


class Users(Protocol):
    """The ranks that take part in a gather."""

    def finished(self) -> bool: ...


class Place:
    """Where buffers of one layout may be gathered together, one at a time.

    Attributes:
        number: the same on every rank.
        common: the memory, once this rank has opened it.
    """

    def __init__(self, number: int, nbytes: int) -> None:
        self.number = number
        self.nbytes = nbytes
        self.common: Common | None = None
        self._used_here = Lock()  # models may be trained in threads
        self._earlier: list[Users] = []

    def enter(self) -> bool:
        """Take the place for this rank, if nobody anywhere uses it."""
        if not self._used_here.acquire(blocking=False):
            return False
        self._earlier = [users for users in self._earlier if not users.finished()]
        if self._earlier:
            self._used_here.release()
            return False
        return True

    def leave(self) -> None:
        self._used_here.release()

    def note(self, users: Users) -> None:
        """A gather that has a right to the place begins, here or privately."""
        if len(self._earlier) < _PATIENCE:
            self._earlier.append(users)


class Places:
    """The places of one group. Every rank asks for them in the same order, so they are numbered alike.

    Args:
        announce: tells the other ranks of a place that this one has made; None on all ranks but one.
    """

    def __init__(self, announce: Callable[[Place], None] | None) -> None:
        self._announce = announce
        self._made = 0
        self._rings: dict[str, list[Place]] = {}
        self._asked: dict[str, int] = {}

    def place_for(self, room: Room) -> Place:
        """The place in which `room` is gathered: one of its own if it stays, or else one of a few that take turns."""
        if room.stays:
            return self._make(room.nbytes)
        ring = self._rings.setdefault(room.layout, [])
        asked = self._asked.get(room.layout, 0)
        self._asked[room.layout] = asked + 1
        if asked < TURNS:
            ring.append(self._make(room.nbytes))
        return ring[asked % TURNS]

    def _make(self, nbytes: int) -> Place:
        place = Place(self._made, nbytes)
        self._made += 1
        if self._announce is not None:
            place.common = Common.make(nbytes)
            self._announce(place)
        return place
