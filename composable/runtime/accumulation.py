"""Whether a backward reduces a unit's gradients or leaves them for a later one; knows neither gradients nor units.

Note [Windows and passes]
A pass is one run of autograd. A window begins with the first pass after gradients were reduced, and ends with the one that
reduces them, or with an explicit end. What is counted per pass (steps, rounds) is counted whether or not a pass reduces: all
ranks run the same ones. What is counted here is passes that left gradients on their rank, since the last that reduced them:
ranks that differ in it hold gradients of different micro-batches, and must not add them up.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from enum import Enum
from typing import Final
from weakref import WeakKeyDictionary

from composable.device.collectives import Steps
from composable.device.term_factors import Factor
from composable.errors import PhaseError
from composable.runtime.early_steps import EarlySteps
from composable.runtime.weighted_window import Window

logger = logging.getLogger("composable")


class Pass(Enum):
    """What a pass does with the gradients that it brings to a unit."""

    REDUCES = "it sums them over the ranks, with all that earlier ones left"
    HOLDS = "it leaves them on their rank"
    HOLDS_SHARDS = "it leaves out the sum over replicas, and what is summed over shards stays where it is"
    SPARES = "it brings none: gradients of other units are reduced"


class Accumulation:
    """What scopes say about one unit, and how many passes left gradients unreduced.

    Attributes:
        now: what a pass that runs now does: the innermost scope decides.
        passes: that did not reduce, since gradients were last reduced.
        holds: whether this pass is one of these so far. It counts when it ends.
        weight: what gradients are multiplied by as they come, while a scope says so.
        weights: the micro-batches that they are averaged with then.
        early: what steps parameters of the unit while backward runs.
    """

    __slots__ = ("__weakref__", "_accumulates", "_lost", "_scopes", "early", "holds", "now", "passes", "weight", "weights")

    def __init__(self) -> None:
        self.now = Pass.REDUCES
        self.passes = 0
        self.holds = False
        self.weight: Factor | None = None
        self.weights: Window | None = None
        self.early: tuple[EarlySteps, ...] = ()
        self._accumulates = False  # a scope was opened at any time
        self._lost = False  # and not dropped yet
        self._scopes: dict[object, Pass] = {}

    def open_scope(self, scope: object, now: Pass) -> None:
        """`scope` decides from here on, until it is closed or another one is opened."""
        self._scopes[scope] = now
        self._accumulates = True
        self.now = now

    def close_scope(self, scope: object) -> None:
        """What was decided around it counts again. Done twice is done once."""
        self._scopes.pop(scope, None)
        self.now = next(reversed(self._scopes.values()), Pass.REDUCES)

    def end_pass(self) -> None:
        """It counts if it left gradients on their rank."""
        if self.holds:
            self.holds = False
            self.passes += 1
            _OPEN[self] = None

    @property
    def in_window(self) -> bool:
        """Whether gradients are held, or would be if this pass ended."""
        return self.holds or self.passes > 0

    @property
    def complete(self) -> bool:
        """Whether what a backward brings now, and has reduced, is all of it."""
        return self.now is Pass.REDUCES and (self.weights is None or not self.weights.more)

    def end_window(self, steps: Steps) -> None:
        """What was held is being reduced.

        Args:
            steps: what counts the messages of all that take part; their window ends, too.
        """
        self.holds = False
        if self.passes:
            steps.end_window()
            self._close()

    def lose(self, steps: Steps) -> None:
        """A step was lost, and what is held with it; it is there until `drop`. Done twice is done once.

        Scopes may be others when it is dropped, and on other ranks when they come to that; and other ranks may leave the
        window in another of its steps: this may have been the first one, before any scope. Those whose units stay unsharded
        send nothing more in it, so they hear of it in the next. An evaluation is in no window.
        """
        if not self._lost:
            self._lost = True
            if self.in_window or self.now is not Pass.REDUCES or (self._accumulates and not steps.evaluates):
                steps.end_window()

    def drop(self) -> None:
        """Nothing is held any more."""
        self._lost = False
        if self.weights is not None:
            self.weights.lost = True
        self._close()

    def _close(self) -> None:
        self.holds = False
        self.passes = 0
        _OPEN.pop(self, None)


_OPEN: Final[WeakKeyDictionary[Accumulation, None]] = WeakKeyDictionary()


def any_window_open() -> bool:
    """Whether some unit holds gradients: asked before every step of an optimizer."""
    return len(_OPEN) > 0


def log_dropped(passes: int, *, unit: str = "", when: str = "") -> None:
    """Say how much was lost with a step.

    Args:
        unit: whose it was, and a colon.
        when: they were made.
    """
    if passes:
        backwards = "the backward" if passes == 1 else f"the {passes} backwards"
        logger.warning("%sthe gradients of %s under no_sync%s were dropped", unit, backwards, when)


def refuse_removal(verb: str, held: Iterable[tuple[str, Accumulation]]) -> None:
    """Raise if a unit, by name, holds gradients: nobody would average them any more. All ranks do, or none."""
    for name, accumulation in held:
        if accumulation.early:
            raise PhaseError(
                f"remove: {verb} on unit '{name}' cannot be removed while apply_optimizer_in_backward steps its "
                "parameters. Call remove() on what that returned first"
            )
        if accumulation.passes:
            raise PhaseError(
                f"remove: {verb} on unit '{name}' cannot be removed while it holds gradients that "
                "were made under no_sync and not averaged. Call reduce_gradients(model) first, on all ranks; also after "
                "zero_grad()"
            )
