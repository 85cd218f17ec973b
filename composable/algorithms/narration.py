"""How a rank without data follows one that has data: what roots tell of their steps (`join`).

All ranks of a model launch the same collectives in the same order. Which ones a step launches is
decided where a forward or a backward enters or leaves a unit, so while a scope is open roots are of
a class that tells of these places. A rank that has data says them to the others, and a rank without
data does them: it gathers, reduces and reshards, and does not compute. Its gradients are those of a
rank on which every parameter is unused.
"""

from __future__ import annotations

import enum
from typing import Any, Final
from weakref import ref

from typing_extensions import override

from composable.engine.params.param import ManagedParam
from composable.engine.params.param_group import Kind
from composable.engine.step.root import ROOTS, UNLANDED, Iteration, Phase, Root, land_held, root_of
from composable.engine.step.unit import Unit, UnitCall


class Event(enum.IntEnum):
    """What one unit does. `shadow` does it without computing; its `detail` is a number."""

    # A forward of the module with this index, or its recomputation, begins.
    ENTER = 0
    # That forward has outputs through which backward will come; 1: it counts as trained on.
    OUTPUT = 1
    LEAVE = 2  # it ends; 1: parameters must outlive it
    OPEN = 3  # a backward begins in the unit's root
    # It has come to the outputs of one forward; 1: of one that counts as trained on, in this
    # iteration.
    COUNT = 4
    BACK = 5  # it enters the unit
    GRADIENT = 6  # a parameter has a gradient, and its unit was not entered
    # It ends, as far as this root is concerned: it launches the rest; 1: a backward around it goes
    # on, of other roots.
    END = 7
    LANDED = 8  # behind that 1: the root waits for what it launched
    LOST = 9  # the step failed


# The scope that is open; weak, since one that raised is dropped without a word.
_OPEN: Final[list[ref[Any]]] = []


def open_scope() -> Any:
    """The scope that is open (`join.py`), or None."""
    return _OPEN[0]() if _OPEN else None


class NarratedRoot(Root):
    """A root while a scope is open."""

    @property
    @override
    def source(self) -> int:
        return int(open_scope().source)

    @override
    def enter_forward(self, call: UnitCall, inputs: object) -> None:
        if not self.step.running:
            open_scope().begin(self)
        open_scope().tell(Event.ENTER, call.unit, call.unit.modules.index(call.module), now=True)
        super().enter_forward(call, inputs)

    @override
    def leave_forward(self, call: UnitCall, *, keep: bool) -> None:
        if call.waits:
            open_scope().tell(Event.OUTPUT, call.unit, call.trained is not None)
        outermost = call.root is not None and len(self.step.running) == 1
        open_scope().tell(Event.LEAVE, call.unit, keep, now=outermost)
        super().leave_forward(call, keep=keep)

    @override
    def before_recomputation(self, again: UnitCall) -> UnitCall | None:
        before = super().before_recomputation(again)
        open_scope().tell(Event.ENTER, again.unit, again.unit.modules.index(again.module), now=True)
        return before

    @override
    def _open_backward(self) -> Iteration:
        if self.phase is not Phase.LOST:  # which is refused
            if UNLANDED:
                land_held([self])
            open_scope().open(self)
        return super()._open_backward()

    @override
    def _takes_part_alone(self) -> bool:
        return not open_scope().narrates and super()._takes_part_alone()

    @override
    def enter_backward(self, unit: Unit, call: UnitCall | None = None) -> None:
        if call is not None and call.waits:
            counts = call.trained is not None and call.trained is self.step.iteration
            open_scope().tell(Event.COUNT, unit, counts)
        super().enter_backward(unit, call)

    @override
    def _go_into(self, unit: Unit, iteration: Iteration) -> None:
        if unit not in iteration.active or not unit.is_unsharded:
            open_scope().tell(Event.BACK, unit, now=True)
        super()._go_into(unit, iteration)

    @override
    def on_gradient(self, unit: Unit, param: ManagedParam) -> None:
        iteration = self.step.iteration
        known = iteration is not None and unit.gradients in iteration.due.to_reduce
        super().on_gradient(unit, param)
        if not known and unit.kind is not Kind.ARRIVAL:
            open_scope().tell(Event.GRADIENT, unit)

    @override
    def launch_rest(self) -> None:
        # Of those that end together with the backward around all, the first root's is heard.
        open_scope().tell(Event.END, self.units[0], self._ends_inside(), now=True)
        super().launch_rest()

    @override
    def finish_backward(self) -> None:
        open_scope().tell(Event.LANDED, self.units[0], now=True)  # heard before the last END only
        super().finish_backward()

    def _ends_inside(self) -> bool:
        """Whether the backward that ends runs inside of another one (reentrant checkpointing)."""
        mine = self._in_backward()
        return mine is not None and any(
            theirs is not None and theirs.end != mine.end
            for theirs in (root._in_backward() for root in ROOTS)
        )


def shadow(unit: Unit, event: Event, detail: int) -> None:
    """On a rank without data: do what another rank says that it does, and compute nothing."""
    if event is Event.ENTER:
        unit.enter(unit.modules[detail], (), {}, computes=False)
    elif event is Event.LEAVE:
        unit.step.depth -= 1
        unit.end_call(unit.step.calls.pop(), keep=bool(detail))
    elif event is Event.BACK:
        unit.pre_backward()
    else:
        root = root_of(unit)
        assert root is not None
        trained = root.trained() if detail else None
        if event in (Event.OUTPUT, Event.COUNT):
            more = 1 if event is Event.OUTPUT else -1
            unit.step.pending += more
            if trained is not None:
                trained.due.forwards += max(more, 0)
                trained.due.forwards_left += more
        elif event is Event.OPEN:
            root.open_backward()
        elif event is Event.END:
            root.launch_rest()
        elif event is Event.LANDED:
            root.finish_backward()
        elif event is Event.GRADIENT:
            root.on_gradient(unit, unit.params[0])
