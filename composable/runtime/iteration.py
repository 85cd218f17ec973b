"""One forward and backward of one root: who is unsharded when, prefetching, finishing, unwinding. Moves no bytes itself.

Note [When a unit is left in backward]
A unit's backward is entered at its outputs. It is over when backward enters a unit that does not enclose it, or ends:
autograd runs the newest nodes first, so the nodes of one call run without interruption but for those of calls inside it.
Only then are the unit's parameters freed, because a frozen or detached parameter may be needed after the last gradient has
arrived, and only then is a gradient that has not arrived known not to come. Every rank sees the same sequence of units,
so every rank launches the same collectives in the same order, whatever parameters it used.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from composable.device.collectives import Wire
from composable.device.private import at_end_of_backward
from composable.errors import CommunicationError, OutputError, RanksDisagreeError
from composable.model.hooks import HookWatch, before_gradient, tensors_in
from composable.plan.phases import GradPhase, Phase
from composable.plan.schedule import BackwardOrder, ForwardOrder
from composable.runtime.handle import Handle
from composable.runtime.recompute import close_interrupted

logger = logging.getLogger("composable")

PREFETCH_DEPTH: Final = 1  # units gathered ahead of need; docs/decisions/0005 says what was measured
REDUCTIONS_IN_FLIGHT: Final = 1  # while the next one is launched


class Iteration:
    """What lives for one or more forwards and their backward; dropped at its end, never reset."""

    def __init__(self) -> None:
        self.finished = BackwardOrder()
        self.in_backward = False
        # Units by their number, in the order in which it happened to them.
        self.active: list[int] = []  # entered in backward and not left
        self.entered: dict[int, None] = {}
        self.reduced: dict[int, None] = {}
        self.reducing: list[int] = []


class Unit(Protocol):
    """What a root asks of its units."""

    root: Root | None

    @property
    def modules(self) -> Sequence[nn.Module]: ...

    @property
    def handle(self) -> Handle: ...

    def check_hooks(self) -> None: ...

    def forget_calls(self) -> None: ...


class Root:
    """What lives as long as the root: its handles in traversal order, and the recorded order of their forwards."""

    def __init__(self, module: nn.Module, units: Sequence[Unit], enclosing: Sequence[tuple[int, ...]]) -> None:
        self.module = module
        self.units = tuple(units)
        self.handles = handles = tuple(unit.handle for unit in units)
        self._index = {handle: index for index, handle in enumerate(handles)}
        self._enclosing = tuple(enclosing)  # for each handle, the indices of the handles around it
        self.order = ForwardOrder()
        self.iteration: Iteration | None = None
        self.depth = 0
        self.entry: nn.Module = module
        self.failure = ""
        self._watch = HookWatch(module for unit in units for module in unit.modules)
        self._verified = all(handle.ground.wire.ways == 1 for handle in handles)
        for index, handle in enumerate(handles):
            handle.on_backward = partial(self.enter_backward, index)
            handle.gradients.on_first = self._open_backward
            handle.gradients.on_complete = partial(self.gradients_complete, index)

    def disband(self) -> None:
        """A unit leaves: the next forward plans the tree anew, without it."""
        for unit in self.units:
            if unit.root is self:
                unit.root = None

    def check_hooks(self) -> None:
        """Raise when somebody removed the hooks of one of the units' modules."""
        if not self._watch.all_stand():
            for unit in self.units:
                unit.check_hooks()
            self._watch = HookWatch(module for unit in self.units for module in unit.modules)

    # --- forward ----------------------------------------------------------------------------------------------------

    def open_forward(self, module: nn.Module) -> None:
        """Called before every forward of a unit; the outermost one opens an iteration, or goes on with the open one."""
        if self.depth == 0 and self.iteration is not None and self.iteration.in_backward:
            self._unwind("its backward did not finish")
        self.depth += 1
        if self.depth > 1:
            return
        self.entry = module
        if self.iteration is None:
            self.iteration = Iteration()
        for handle in self.handles:
            handle.prepare()

    def enter(self, handle: Handle) -> None:
        """`handle`'s module is about to compute."""
        index = self._index[handle]
        if not self._verified:
            self._verify(index, handle.ground.wire)
        self.order.record(index)
        self._gather(index, *self.order.next_units(PREFETCH_DEPTH))
        handle.land()

    def _gather(self, *indices: int) -> None:
        """Launch what is not there yet: a unit's all-gather, and those of the units that come next."""
        for index in indices:
            handle = self.handles[index]
            if handle.phase is Phase.SHARDED or handle.phase is Phase.REGROUPED:
                handle.unshard_in_step()

    def leave(self, handle: Handle, output: Any, *, complete: bool) -> None:
        """`handle`'s module has computed `output`; `complete`: so have all modules of its unit."""
        assert self.iteration is not None
        keep = False
        if torch.is_grad_enabled():
            keep = self.watch(handle, output, count=True)
            self.iteration.finished.forward_finished(self._index[handle])
        if complete and not keep:
            handle.settle_after_forward()

    def watch(self, handle: Handle, output: Any, *, count: bool) -> bool:
        """Ask to be called before backward goes through `output`; True when the parameters must outlive forward."""
        opaque: list[Any] = []
        entry = _Entry(handle, count)
        found = aliased = seen = False
        for tensor in tensors_in(output, opaque):
            seen = True
            aliased = aliased or handle.parameters.aliased_by(tensor)
            if tensor.requires_grad:
                before_gradient(tensor, entry)
                found = True
        if found:
            handle.uses += count
        elif opaque and not seen and handle.trainable:
            kinds = ", ".join(dict.fromkeys(type(value).__name__ for value in opaque))
            raise OutputError(
                f"fully_shard(unit '{handle.name}'): forward returned {kinds}, in which no tensor that requires grad was "
                "found; its backward cannot be tracked. Return tensors, containers, dataclasses or objects with attributes."
            )
        # Whatever reaches the loss by another way than the outputs still finds its parameters.
        return aliased or (not found and handle.trainable)

    def close_forward(self) -> None:
        """The outermost forward has ended."""
        self.depth -= 1
        if self.depth:
            return
        if not self._verified:
            self._verify(len(self.handles), next(h.ground.wire for h in self.handles if h.ground.wire.ways > 1))
            self._verified = True
        self.order.complete()
        for handle in self.handles:
            if handle.phase is Phase.GATHERING and not handle.pins:
                handle.reshard()  # prefetched for nothing
            elif handle.phase is Phase.UNSHARDED and not torch.is_grad_enabled() and not handle.pins:
                handle.reshard()  # no backward will come
        if not torch.is_grad_enabled() and self.iteration is not None and not self.iteration.finished.next_units(1):
            self.iteration = None

    def abandon(self, handle_name: str) -> None:
        """A forward raised; called from the innermost annotated module outwards."""
        if not self.failure:
            error = sys.exception()
            self.failure = f"previous step of unit '{handle_name}' ended with {type(error).__name__}"
        self.depth = max(0, self.depth - 1)
        if self.depth == 0:
            self._unwind(self.failure)
            self.failure = ""

    def recover_from_interrupt(self) -> None:
        """A forward ended without a word, as a KeyboardInterrupt makes it: clean up before the next one."""
        for unit in self.units:
            unit.forget_calls()
        close_interrupted()
        self._unwind("its forward was interrupted")

    def _verify(self, index: int, wire: Wire) -> None:
        """In the first forward, make sure that every rank runs the same unit; later ones are gathered by name."""
        if wire.ways == 1:
            return
        label = "check of the order of units"
        lowest, highest = wire.extremes([index], label=label)
        if lowest != highest:
            running = [row[0] for row in wire.exchange([index], label=label)]
            names = [f"'{self.handles[i].name}'" if i < len(self.handles) else "no further unit" for i in running]
            seen = "; ".join(f"rank {rank} runs {name}" for rank, name in enumerate(names))
            raise RanksDisagreeError(
                f"the ranks run their modules in different orders in the first forward: {seen}. "
                "All ranks must run the same fully sharded modules in the same order."
            )

    # --- backward ---------------------------------------------------------------------------------------------------

    def _open_backward(self) -> Iteration:
        iteration = self.iteration
        if iteration is not None and iteration.in_backward:
            return iteration
        iteration = self.iteration = iteration or Iteration()
        iteration.in_backward = True
        for handle in self.handles:
            if handle.phase is not Phase.SHARDED:
                handle.look_up_edition()
        at_end_of_backward(self._end_backward, self._leave_failed_backward)
        return iteration

    def enter_backward(self, index: int) -> None:
        """Backward is about to go through an output of unit `index`."""
        iteration = self._open_backward()
        handle = self.handles[index]
        iteration.finished.enter(index)
        entering = index not in iteration.active
        if entering:
            self._leave_backward(iteration, entered=index)
            iteration.active.append(index)
            iteration.entered[index] = None
            iteration.reduced.pop(index, None)  # what arrives from here on was not in that reduction
            handle.gradients.expect()
        self._gather(index, *iteration.finished.next_units(PREFETCH_DEPTH))
        handle.land()
        if entering:
            handle.show()  # parts of the unit may be recomputed by themselves: guards let them pass now

    def _leave_backward(self, iteration: Iteration, entered: int) -> None:
        """See Note [When a unit is left in backward]. A unit may share its outputs with the one around it: neither is left."""
        staying = []
        around = self._enclosing[entered]
        for index in iteration.active:
            if index in around or entered in self._enclosing[index]:
                staying.append(index)
                continue
            handle = self.handles[index]
            if handle.uses <= 0 and handle.trainable and index not in iteration.reduced:
                self._reduce(iteration, index)
            handle.hide()
            if not handle.pins:
                handle.reshard()
        iteration.active = staying

    def gradients_complete(self, index: int) -> None:
        """All gradients of unit `index` have arrived."""
        self._reduce(self._open_backward(), index)

    def _reduce(self, iteration: Iteration, index: int) -> None:
        reducing = iteration.reducing
        if index in reducing:
            reducing.remove(index)
        self.handles[index].gradients.reduce()
        iteration.reduced[index] = None
        reducing.append(index)
        while len(reducing) > REDUCTIONS_IN_FLIGHT + 1:
            self.handles[reducing.pop(0)].gradients.finish()

    def _end_backward(self) -> None:
        iteration = self.iteration
        if iteration is None or not iteration.in_backward:
            return
        for index, handle in enumerate(self.handles):
            late = handle.gradients.phase is GradPhase.ARRIVING  # its backward was not entered through an output
            if late or (index in iteration.entered and handle.trainable and index not in iteration.reduced):
                self._reduce(iteration, index)
        for index in iteration.reducing:
            self.handles[index].gradients.finish()
        for index in iteration.active:
            self.handles[index].hide()
        for handle in self.handles:
            handle.gradients.end()
            handle.uses = 0
            if not handle.pins:
                handle.reshard()
        self.iteration = None

    # --- after an error ---------------------------------------------------------------------------------------------

    def _leave_failed_backward(self) -> None:
        """It raised. Who clears gradients or makes an optimizer before the next forward finds the sharded parameters."""
        iteration = self.iteration
        if iteration is not None and iteration.in_backward:
            for index in iteration.active:
                self.handles[index].hide()
            iteration.active = []

    def _unwind(self, why: str) -> None:
        """Wait for whatever is in flight, free whatever is unsharded, forget unreduced gradients."""
        logger.warning("%s; state was reset", why if why.startswith("previous") else f"previous step: {why}")
        for handle in self.handles:
            try:
                handle.reset()
            except CommunicationError as error:
                logger.warning("while resetting unit '%s': %s", handle.name, error)
        self.order.abandon()
        self.iteration = None
        self.depth = 0


class _Entry:
    """Called before backward goes through one call's outputs; several outputs count once."""

    __slots__ = ("_counted", "_handle", "_versions")

    def __init__(self, handle: Handle, count: bool) -> None:
        self._handle = handle
        self._counted = count
        self._versions = handle.versions

    def __call__(self, *gradients: Tensor) -> None:
        if self._counted:
            self._counted = False
            self._handle.uses -= 1
        self._handle.on_backward()
        if self._versions is not self._handle.versions:
            self._handle.tell_of_writes(self._versions)
            self._versions = self._handle.versions
