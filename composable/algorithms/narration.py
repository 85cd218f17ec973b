"""How a rank without data follows one that has data (`join`).

All ranks of a model launch the same collectives in the same order. Which ones a step launches is
decided where a forward or a backward enters or leaves a unit, and an observer hears of these
places while a scope is open. A rank that has data says them to the others, and a rank without data
does them with the engine's `Driver`: it gathers, reduces and reshards, and does not compute.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, Final
from weakref import ref

from torch import Tensor
from typing_extensions import override

from composable.engine.step.observer import Observer
from composable.engine.step.root import ROOTS, Root
from composable.engine.step.unit import Unit, UnitCall
from composable.engine.step.visit import Driver


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


class Narrator(Observer):
    """Tells the scope that is open."""

    @override
    def enters(self, root: Root, call: UnitCall) -> None:
        if call.root is root and not root.running:
            open_scope().begin(root)
        open_scope().tell(Event.ENTER, call.unit, call.unit.modules.index(call.module), now=True)

    @override
    def leaves(self, root: Root, call: UnitCall, keep: bool) -> None:
        if call.waits:
            open_scope().tell(Event.OUTPUT, call.unit, call.counted_by is not None)
        outermost = call.root is root and len(root.running) == 1
        open_scope().tell(Event.LEAVE, call.unit, keep, now=outermost)

    @override
    def opens_backward(self, root: Root) -> None:
        open_scope().open(root)

    @override
    def comes_back(self, root: Root, call: UnitCall) -> None:
        if call.waits:
            counts = call.counted_by is not None and call.counted_by is root.counts()
            open_scope().tell(Event.COUNT, call.unit, counts)

    @override
    def goes_into(self, root: Root, unit: Unit) -> None:
        if not root.backward_is_in(unit) or not unit.is_unsharded:
            open_scope().tell(Event.BACK, unit, now=True)

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
    driver = Driver(unit)
    match event:
        case Event.ENTER:
            driver.enter(detail)
        case Event.OUTPUT:
            driver.count(1, trained=bool(detail))
        case Event.LEAVE:
            driver.leave(keep=bool(detail))
        case Event.OPEN:
            driver.root.open_backward()
        case Event.COUNT:
            driver.count(-1, trained=bool(detail))
        case Event.BACK:
            driver.go_into()
        case Event.GRADIENT:
            driver.root.on_gradient(unit, unit.params[0])
        case Event.END:
            driver.root.launch_rest()
        case Event.LANDED:
            driver.root.finish_backward()
