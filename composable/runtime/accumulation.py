"""Whether a backward reduces a unit's gradients or leaves them for a later one; knows neither gradients nor units.

Note [Windows and passes]
A pass is one run of autograd. A window begins with the first pass after gradients were reduced, and ends with the one that
reduces them, or with an explicit end. What is counted per pass (steps, rounds) is counted whether or not a pass reduces: all
ranks run the same ones. What is counted here is passes that left gradients on their rank, since the last that reduced them:
ranks that differ in it hold gradients of different micro-batches, and must not add them up.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final
from weakref import WeakKeyDictionary

from composable.errors import PhaseError


class Accumulation:
    """What scopes say about one unit, and how many passes left gradients unreduced.

    Attributes:
        keeps: whether a backward that runs now leaves gradients on their rank: the innermost scope decides.
        keeps_shards: whether it leaves out the sum over replicas, and what is summed over shards stays where it is.
        passes: that did either, since gradients were last reduced.
    """

    __slots__ = ("__weakref__", "_scopes", "keeps", "keeps_shards", "passes")

    def __init__(self) -> None:
        self.keeps = self.keeps_shards = False
        self.passes = 0
        self._scopes: dict[object, tuple[bool, bool]] = {}

    def open_scope(self, scope: object, *, keeps: bool = False, keeps_shards: bool = False) -> None:
        """`scope` decides from here on, until it is closed or another one is opened."""
        self._scopes[scope] = keeps, keeps_shards
        self.keeps, self.keeps_shards = keeps, keeps_shards

    def close_scope(self, scope: object) -> None:
        """What was decided around it counts again. Done twice is done once."""
        self._scopes.pop(scope, None)
        self.keeps, self.keeps_shards = next(reversed(self._scopes.values()), (False, False))

    def count_pass(self) -> None:
        """A backward has left gradients on their rank."""
        self.passes += 1
        _OPEN[self] = None

    def end_window(self) -> None:
        """What was held is being reduced, or was dropped."""
        if self.passes:
            self.passes = 0
            _OPEN.pop(self, None)


_OPEN: Final[WeakKeyDictionary[Accumulation, None]] = WeakKeyDictionary()


def any_window_open() -> bool:
    """Whether some unit holds gradients: asked before every step of an optimizer."""
    return len(_OPEN) > 0


def refuse_removal(verb: str, held: Iterable[tuple[str, Accumulation]]) -> None:
    """Raise if a unit, by name, holds gradients: nobody would average them any more. All ranks do, or none."""
    for name, accumulation in held:
        if accumulation.passes:
            raise PhaseError(
                f"remove: {verb} on unit '{name}' cannot be removed while it holds gradients that "
                "were made under no_sync and not averaged. Call reduce_gradients(model) first, on all ranks; also after "
                "zero_grad()"
            )
