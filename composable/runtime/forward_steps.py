"""In whose steps the forwards of a replicated unit are, and what other ranks are told of one that was lost.

It knows neither modules nor how gradients are averaged. See docs/decisions/0019-rounds.md.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from typing import Any

from composable.device.collectives import Steps
from composable.errors import first_line
from composable.runtime.accumulation import Pass
from composable.runtime.averaging import Averaging
from composable.runtime.rounds import Forward
from composable.runtime.shards_inside import ShardsInside


class ForwardSteps:
    """The steps of one replicated unit's messages, as far as forwards open them or lose them.

    Attributes:
        opened_here: whether the unit's own forwards open them.
        trains: whether a backward is to follow the last forward, which nothing annotated was around.
    """

    def __init__(self, averaging: Averaging) -> None:
        self._averaging = averaging
        self._inside: tuple[Averaging, ...] = ()  # those of the replicated units below
        self._shards = ShardsInside()
        self.opened_here = False
        self.trains = False

    def contain(self, inside: Sequence[Averaging]) -> None:
        """A forward of this unit is one of the replicated units below it, too."""
        self._inside = tuple(inside)
        for averaging in inside:
            averaging.forwards[1:] = self._averaging.forwards[:1]

    def open_here(self, shards: ShardsInside) -> None:
        """All ranks run this unit's forwards together, since `shards` are gathered in them: these open steps."""
        self.opened_here = True
        self._shards = shards
        self._count_by(Steps())

    def count_by(self, steps: Steps) -> None:
        """Messages of this unit and of those inside belong to `steps`, which forwards of a module around it open."""
        self.opened_here = False
        self._count_by(steps)

    def _count_by(self, steps: Steps) -> None:
        for averaging in (self._averaging, *self._inside):
            averaging.communicator.tags.count_by(steps)

    def open(self) -> None:
        """A forward begins, and with it a step."""
        self._shards.expect()
        communicator = self._averaging.communicator
        communicator.sums.steps.open()
        communicator.sums.steps.look_ahead([communicator.presence])

    def count(self) -> Forward:
        """A forward has ended that backward is to go through."""
        return self._averaging.forwards[0].begin(self._averaging.communicator.sums.steps.number)

    def lose(self) -> None:
        """A forward raised. If a backward was to follow, this rank gives the step up, and meets the others in the next one."""
        error = sys.exception()
        why = f"raised {type(error).__name__}: {first_line(error)}" if isinstance(error, Exception) else "was interrupted"
        why = f"unit '{self._averaging.name}' {why}"
        if self.opened_here:
            self._shards.lose(why)
        if not self.trains:
            return
        communicator = self._averaging.communicator
        self.trains, sums = False, communicator.sums
        if sums.steps.by_backward:
            sums.steps.open()
        elif not self.opened_here:
            return
        communicator.presence.leave(sums, why)
        for averaging in (self._averaging, *self._inside):
            if averaging.reducer.local.accumulation.now is Pass.HOLDS:
                sums.steps.end_window()  # of which this may have been the first pass
            averaging.reducer.drop()

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardSteps:
        twin = memo[id(self)] = ForwardSteps(self._averaging)
        twin.opened_here = self.opened_here
        twin._averaging, twin._inside, twin._shards = copy.deepcopy((self._averaging, self._inside, self._shards), memo)
        return twin
