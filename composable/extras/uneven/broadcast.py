"""How a rank with data sends ranks without data the visits of units that it makes (`join`).

While a scope is open, an observer is notified of these visits and sends them. A rank without data
makes the visits that it receives (`engine/step/driver.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from typing_extensions import override

from composable.seams import Call, Observer, Root, StepEvent, Unit, open_scope


class Broadcaster(Observer):
    """Tells the scope that is open."""

    @override
    def pre_forward(self, root: Root, call: Call) -> None:
        if call.root is root and not root.running:
            open_scope().begin(root)
        open_scope().tell(
            StepEvent.PRE_FORWARD, call.unit, call.unit.modules.index(call.module), now=True
        )

    @override
    def post_forward(self, root: Root, call: Call, keep: bool) -> None:
        if call.waits:
            open_scope().tell(StepEvent.OUTPUT, call.unit)
        outermost = call.root is root and len(root.running) == 1
        open_scope().tell(StepEvent.POST_FORWARD, call.unit, keep, now=outermost)

    @override
    def opens_backward(self, root: Root) -> None:
        open_scope().open(root)

    @override
    def pre_backward(self, root: Root, call: Call) -> None:
        unit = call.unit
        if call.waits or not unit.is_in_backward or not unit.is_unsharded:
            open_scope().tell(StepEvent.PRE_BACKWARD, unit, call.waits, now=True)

    @override
    def gradient_came(self, unit: Unit) -> None:
        open_scope().tell(StepEvent.GRADIENT, unit)

    @override
    def ends_backward(self, root: Root) -> None:
        # If several roots end with one outer backward, ranks without data follow the first
        # root's END.
        open_scope().tell(StepEvent.END, root.units[0], root.ends_inside, now=True)

    @override
    def lands_backward(self, root: Root) -> None:
        open_scope().tell(StepEvent.LANDED, root.units[0], now=True)
        # ranks without data follow only the LANDED that comes before the last END

    @override
    def communicates(self, what: str, parameters: Sequence[Tensor], *args: Any) -> None:
        open_scope().call(what, parameters, *args)
