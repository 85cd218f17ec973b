"""What lives for one or more forwards and their backward, and what of it cannot be gone on with; moves nothing, asks no rank.

Note [What an interrupt leaves]
An interrupt may come between any two lines, and whoever is told of exceptions is not told of it. So a root notes in one
assignment that a forward (`RootForward.call`) or a backward (`Iteration.backward`) is open before it changes anything, and
takes the note back in one assignment when everything is at rest. A note of a call that is not on the stack, or of a backward
that does not run, means that state is half changed: it is made anew from what cannot be, in steps that may be interrupted and
done again.
docs/decisions/0018-interrupts.md has the whole story.

Note [Launch points]
Collectives are launched where backward enters a unit, where that makes it leave another, and where it ends. Every rank sees
the same sequence of those, whatever parameters it used. Gradients arrive in between, or not at all, so nothing is launched
because of one. Whoever waits, waits for something launched further up in the same sequence, so the rank that is furthest
behind always finds what it waits for.
docs/decisions/0013-launch-points.md tells what goes wrong otherwise.

Note [When a unit is left in backward]
A unit's backward is entered at its outputs. It is over when backward enters a unit that does not enclose it, or ends:
autograd runs the newest nodes first, so the nodes of one call run without interruption but for those of calls inside it.
Only then are the unit's parameters freed, because a frozen or detached parameter may be needed after the last gradient has
arrived, and only then is a gradient that has not arrived known not to come.

Note [Backward through a backward]
A backward that builds a graph (`create_graph=True`) leaves nodes behind that need parameters and belong to no call, so
nothing tells when backward comes to them, nor how many losses have such nodes. The units that such a backward entered stay
unsharded until a forward begins that is not part of the same step: the first one after a backward without.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol
from weakref import ref

from torch import nn

from composable.errors import CommunicationError, PhaseError
from composable.plan.schedule import BackwardOrder
from composable.runtime.accumulation import log_dropped
from composable.runtime.backward_end import BackwardEnd, gone
from composable.runtime.divergence import say_farewell
from composable.runtime.handle import Handle
from composable.runtime.in_flight import ReductionsInFlight

logger = logging.getLogger("composable")


class Iteration:
    """What lives for one or more forwards and their backward; dropped at its end, never reset."""

    __slots__ = (
        "active", "backward", "builds_graph", "entered", "finished", "reducing", "stream", "to_reduce", "untracked"
    )  # fmt: skip

    def __init__(self, stream: Any = None) -> None:
        self.stream = stream  # of the last forward
        self.finished = BackwardOrder()
        self.backward: Callable[[], BackwardEnd | None] | None = None  # that was opened and not closed, while it runs
        # Units by their number, in the order in which it happened to them.
        self.active: list[int] = []  # entered in backward and not left
        self.entered: dict[int, None] = {}
        self.to_reduce: dict[int, None] = {}  # entered since they were last reduced
        self.untracked: dict[int, None] = {}  # whose gradients may come by another way than through their outputs
        self.reducing = ReductionsInFlight()
        self.builds_graph = False  # this backward, see Note [Backward through a backward]

    def open_backward(self, end: BackwardEnd) -> None:
        self.backward = ref(end)

    def lose_backward(self) -> None:
        self.backward = gone

    @property
    def lost_backward(self) -> bool:
        """Whether a backward was opened, and ended without being closed: it raised."""
        return self.backward is not None and self.backward() is None

    def next(self) -> Iteration:
        """What is left of it when a backward has ended that is not the last."""
        following = Iteration(self.stream)
        following.finished = self.finished
        following.untracked = self.untracked
        return following


class Bracket(Protocol):
    """What a root asks of what is around its units' modules."""

    def drop_calls(self) -> None: ...


class Unit(Protocol):
    """What a root asks of its units."""

    root: Any
    former: Any

    @property
    def modules(self) -> Sequence[nn.Module]: ...

    @property
    def handle(self) -> Handle: ...

    def check_hooks(self) -> None: ...

    @property
    def bracket(self) -> Bracket: ...


def abort_units(handles: Sequence[Handle]) -> None:
    """After an error: every unit is at rest, whatever it was at, and holds no gradients: some may be there by halves."""
    log_dropped(max((handle.gradients.accumulation.passes for handle in handles), default=0), when=" before it")
    for handle in handles:
        try:
            handle.abort()
        except CommunicationError as error:
            logger.warning("while resetting unit '%s': %s", handle.name, error)


def refuse_lost_backward(iteration: Iteration | None, root: str) -> None:
    """Raise if the backward that is open has raised: ranks may have got differently far in it."""
    if iteration is not None and iteration.lost_backward:
        raise PhaseError(
            f"unit '{root}': a backward raised, and the step went on. Other ranks may have got further in it, so what it "
            "brought is of no use. Catch the error around the whole step, call zero_grad(), and begin with a forward of the "
            "model"
        )


def refuse_doubtful(doubtful: Sequence[Handle], handles: Sequence[Handle]) -> None:
    """Raise if gradients are left that `zero_grad` of a module may have missed, since it did not hold their parameters."""
    for handle in doubtful:
        held = [(param.info.fqn, param.sharded) for param in handle.parameters.params]
        refuse_gradients_left(handle.name, held, partial(say_farewell, handles))


def refuse_gradients_left(unit: str, held: Iterable[tuple[str, nn.Parameter]], leave: Callable[[str], None]) -> None:
    """Raise if one of a unit's parameters has a gradient; `leave` tells other ranks."""
    for name, parameter in held:
        if parameter.grad is not None:
            leave(f"unit '{unit}' has gradients of an interrupted step")
            raise PhaseError(
                f"unit '{unit}': an interrupt ended a step, and parameter '{name}' has a gradient from before. A "
                "zero_grad() of the module that was called where the interrupt was caught did not reach it. Call zero_grad() "
                "now, on every rank, or keep the gradient, and go on: this is said once"
            )
