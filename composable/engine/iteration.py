"""What a root knows of the step that is under way: `Root.step` is a `Step`, which holds the open
`Forward`, and the `Iteration` of one or more forwards and their backward. A step that is lost is
dropped as one object, and not cleaned up field by field.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final
from weakref import ref

from torch import nn

from composable.engine.param import ManagedParam
from composable.engine.unit import Unit, UnitCall

# Entries of `Iteration.finished` and `Step.calls` at most: forwards without a backward must not
# fill the memory.
REMEMBERED: Final = 4096

CLOCK: Final = count()  # of forwards and ends of backwards


@dataclass(slots=True)
class Forward:
    """One forward of the outermost module.

    Attributes:
        module: the outermost one.
        with_gradients: autograd records it.
        order: the units that gather, as it has entered them.
        cursor: in the order of the last forward; what follows there is gathered ahead.
        has_unknown: some frozen unit was computed by no rank, so that its `given` is not known.
    """

    module: nn.Module
    with_gradients: bool
    order: list[Unit] = field(default_factory=list)
    cursor: int = 0
    has_unknown: bool = False


class Iteration:
    """One or more forwards and their backward.

    Attributes:
        stream: that the forward computes on; autograd ends a backward on whatever stream the caller
            has.
        began: when its last forward did, on the clock of `CLOCK`.
        forward: `Root.forward` of the one that backward is in.
        read_at_rest: a parameter whose at-rest form autograd accumulated on while backward was in a
            forward, and that forward.
        finished: units that gather and whose forward has ended, newest last. Backward will probably
            enter them in reverse.
        last: units that `reshard_after_forward=None` keeps until a forward enters another unit over
            the same ranks.
        untracked: units that backward may need without entering them: an output aliases a
            parameter, or none was found to watch.
        end: None until a backward begins; then a weak reference to its `BackwardEnd`, dead if that
            backward raised.
        active: units that backward has entered and not left.
        to_reduce: units that backward has entered, or brought a gradient to, since they were last
            reduced.
        in_flight, over_replicas: units whose reduction is in its first, or second, stage.
        builds_graph: the backward runs with `create_graph=True`.
        forwards, forwards_left: calls of the outermost module in training mode; how many of them
            backward has not entered.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.began = next(CLOCK)
        self.forward: int | None = None
        self.read_at_rest: tuple[int, Unit, ManagedParam] | None = None
        self.finished: list[Unit] = []
        self.last: list[Unit] = []
        self.untracked: dict[Unit, None] = {}
        self.end: ref[Any] | None = None
        self.active: list[Unit] = []
        self.to_reduce: dict[Unit, None] = {}
        self.in_flight: list[Unit] = []
        self.over_replicas: list[Unit] = []
        self.builds_graph = False
        self.forwards = self.forwards_left = 0


class Step:
    """All that a lost step takes with it. What its units know of it is in `UnitStep`.

    Attributes:
        iteration: None if no backward is to come, and none runs.
        forward: the forward of the outermost module that is under way.
        running: units whose forward is under way, outermost first.
        calls: of units with gradients, as they began, from the first on whose backward has not
            come. Recomputation looks for them.
    """

    __slots__ = ("calls", "forward", "iteration", "running")

    def __init__(self) -> None:
        self.iteration: Iteration | None = None
        self.forward: Forward | None = None
        self.running: list[Unit] = []
        self.calls: list[UnitCall] = []
