"""The root of a tree of units: what lives as long as it, and what becomes of all that after an error. Decides no order."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from torch import nn

from composable.device.collectives import Steps
from composable.device.private import in_backward
from composable.errors import first_line
from composable.model.removed_hooks import HookWatch
from composable.plan.schedule import CallNesting
from composable.runtime.divergence import say_farewell
from composable.runtime.handle import Handle
from composable.runtime.membership import Membership
from composable.runtime.misuse import note_of_mixing
from composable.runtime.open_forwards import close_interrupted
from composable.runtime.preparation import Preparation
from composable.runtime.readers import Readers
from composable.runtime.replicated_unit import ReplicatedUnit
from composable.runtime.root_backward import RootBackward
from composable.runtime.root_forward import RootForward
from composable.runtime.step import Unit, abort_units
from composable.runtime.sums_in_step import SumsInStep

logger = logging.getLogger("composable")


class Root:
    """The units below one module, in traversal order, and their forwards and backwards.

    Attributes:
        running: the numbers of the units that are called now, outermost first.
    """

    __slots__ = (
        "__weakref__", "_failure", "_readers", "_reason", "_watch", "backward", "forward", "handles", "membership", "module",
        "running", "steps", "units"
    )  # fmt: skip

    def __init__(
        self, module: nn.Module, units: Sequence[Unit], membership: Membership, replicated: Sequence[ReplicatedUnit]
    ) -> None:
        """Replicated units inside show their parameters, and take part, wherever the root's units may want them."""
        for former in dict.fromkeys(root for unit in units for root in (unit.root, unit.former)):
            if former is not None:
                former.backward.unpin()  # or nobody would
        self.module = module
        self.membership = membership
        self.units = tuple(units)
        self.handles = handles = tuple(unit.handle for unit in units)
        # In the first forward others may still be in a step of former roots, and know only units of these.
        known = sorted(handles, key=lambda handle: not handle.tags.steps.number)
        self.steps = steps = Steps.after(handle.tags.steps for handle in handles)
        for handle in handles:
            handle.tags.count_by(steps)
        self._failure = ""
        self._reason = ""
        self._watch = HookWatch(module for unit in units for module in unit.modules)
        nesting = CallNesting(len(handles))
        self.running = nesting.running
        self._readers = readers = Readers(replicated, self.recover)
        self.backward = RootBackward(handles, nesting, steps, readers)
        self.forward = RootForward(
            handles,
            nesting,
            steps,
            Preparation(module, handles, membership),
            readers,
            SumsInStep(replicated, steps),
            known,
            self.backward,
            self.abort,
        )

    def invalidate(self) -> None:
        """A unit leaves: the next forward plans the tree anew, without it."""
        for unit in self.units:
            if unit.root is self:
                unit.root, unit.former = None, self

    def check_hooks(self) -> None:
        """Raise when somebody removed the hooks of one of the units' modules."""
        if not self._watch.all_attached():
            for unit in self.units:
                unit.check_hooks()
            self._watch = HookWatch(module for unit in self.units for module in unit.modules)

    # --- after an error ---------------------------------------------------------------------------------------------

    def on_error(self, handle: Handle) -> None:
        """A forward of `handle`'s module raised; called from the innermost annotated module outwards."""
        if not self._failure:
            error = sys.exception()
            self._failure = f"previous step of unit '{handle.name}' ended with {type(error).__name__}"
            self._reason = f"unit '{handle.name}' raised {type(error).__name__}: {first_line(error)}"
            note_of_mixing(error, [other for other in self.handles if other is not handle and not other.calls.depth])
        if self.running:
            self.running.pop()
        if not self.running:
            self.abort(self._failure, self._reason)
            self._failure = ""

    def recover(self) -> None:
        """Show what should be seen, if an interrupt or an error has ended what was under way."""
        if self.forward.is_left():
            self.recover_from_interrupt()
        elif self.backward.is_open and not in_backward():
            self.backward.leave_failed_backward()

    def recover_from_interrupt(self) -> None:
        """A forward ended without a word. All of this may be interrupted, and done again."""
        self.steps.behind = True
        for unit in self.units:
            unit.bracket.drop_calls()
        close_interrupted()
        self._readers.drop_calls()
        self.abort("its forward was interrupted")

    def abort(self, why: str, reason: str = "") -> None:
        """Give up whatever is in flight, free whatever is unsharded, forget unreduced gradients."""
        self.forward.doubt()
        say_farewell(self.handles, reason or why)
        logger.warning("%s; state was reset", why if why.startswith("previous") else f"previous step: {why}")
        abort_units(self.handles)
        self.backward.unpin()
        self._readers.abort()
        self.forward.order.drop()
        self.backward.drop()
        self.forward.end()  # last: what an interrupt ends is done again
