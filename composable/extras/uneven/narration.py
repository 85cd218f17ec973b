"""How a rank without data follows one that has data (`join`).

All ranks of a model launch the same collectives in the same order. Which ones a step launches is
decided where a forward or a backward enters or leaves a unit, and an observer hears of these
places while a scope is open. A rank that has data says them to the others, and a rank without data
does them through the same hooks: it gathers, reduces and reshards, and does not compute.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from typing_extensions import override

from composable.engine.step.observer import Observer, open_scope
from composable.engine.step.plan import root_of
from composable.engine.step.root import ROOTS, Root
from composable.engine.step.unit import BACKWARD, Unit, UnitCall
from composable.engine.step.visit import Visit, come_back, end_call


class Event(enum.IntEnum):
    """What one unit does. `shadow` does it without computing; its `detail` is a number."""

    # A forward of the module with this index, or its recomputation, begins.
    ENTER = 0
    OUTPUT = 1  # that forward has outputs through which backward will come
    LEAVE = 2  # it ends; 1: parameters must outlive it
    OPEN = 3  # a backward begins in the unit's root
    BACK = 4  # it enters the unit; 1: by the first output of a forward
    GRADIENT = 5  # a parameter has a gradient, and its unit was not entered
    # It ends, as far as this root is concerned: it launches the rest; 1: a backward around it goes
    # on, of other roots.
    END = 6
    LANDED = 7  # behind that 1: the root waits for what it launched
    LOST = 8  # the step failed


class Narrator(Observer):
    """Tells the scope that is open."""

    @override
    def enters(self, root: Root, call: UnitCall) -> None:
        if call.root is root and not root.step.running:
            open_scope().begin(root)
        open_scope().tell(Event.ENTER, call.unit, call.unit.modules.index(call.module), now=True)

    @override
    def leaves(self, root: Root, call: UnitCall, keep: bool) -> None:
        if call.waits:
            open_scope().tell(Event.OUTPUT, call.unit)
        outermost = call.root is root and len(root.step.running) == 1
        open_scope().tell(Event.LEAVE, call.unit, keep, now=outermost)

    @override
    def opens_backward(self, root: Root) -> None:
        open_scope().open(root)

    @override
    def comes_back(self, root: Root, call: UnitCall) -> None:
        unit = call.unit
        if call.waits or BACKWARD not in unit.step.needed_by or not unit.is_unsharded:
            open_scope().tell(Event.BACK, unit, call.waits, now=True)

    @override
    def gradient_came(self, unit: Unit) -> None:
        open_scope().tell(Event.GRADIENT, unit)

    @override
    def ends_backward(self, root: Root) -> None:
        # Of those that end together with the backward around all, the first root's is heard.
        inside = any(each.ends_after(root) for each in ROOTS)  # reentrant checkpointing
        open_scope().tell(Event.END, root.units[0], inside, now=True)

    @override
    def lands_backward(self, root: Root) -> None:
        open_scope().tell(Event.LANDED, root.units[0], now=True)  # heard before the last END only

    @override
    def communicates(self, what: str, parameters: Sequence[Tensor], *args: Any) -> None:
        open_scope().call(what, parameters, *args)


def shadow(unit: Unit, event: Event, detail: int) -> None:
    """On a rank without data: do what another rank says that it does, and compute nothing."""
    root = root_of(unit)
    match event:
        case Event.ENTER:
            Visit(unit).enter(unit.modules[detail], (), {}, computes=False)
        case Event.OUTPUT:
            unit.count(1)
        case Event.LEAVE:
            end_call(unit.end(), keep=bool(detail))
        case Event.OPEN:
            root.open_backward()
        case Event.BACK:
            unit.count(-detail)
            come_back(UnitCall(unit, unit.step, unit.modules[0], 0, None))  # of no forward
        case Event.GRADIENT:
            root.on_gradient(unit, unit.params[0])
        case Event.END:
            root.launch_remaining()
        case Event.LANDED:
            root.finish_backward()
