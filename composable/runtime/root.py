"""One forward and backward of one root: who is unsharded when, prefetching, finishing, unwinding. Moves no bytes itself."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from composable.device.collectives import Steps
from composable.device.private import in_backward
from composable.errors import CommunicationError, first_line
from composable.model.interrupts import calls_of
from composable.model.removed_hooks import HookWatch
from composable.plan.phases import GradPhase, Phase
from composable.plan.schedule import ForwardOrder
from composable.runtime.backward_end import end_of_backward
from composable.runtime.buffer_broadcast import share_buffers
from composable.runtime.divergence import catch_up, check_order, say_farewell
from composable.runtime.gradients import refuse_graph
from composable.runtime.handle import Handle
from composable.runtime.membership import Membership
from composable.runtime.misuse import note_of_mixing
from composable.runtime.preparation import Preparation
from composable.runtime.readers import Readers
from composable.runtime.recompute import close_interrupted
from composable.runtime.replicated_unit import ReplicatedUnit
from composable.runtime.step import Iteration, Unit, refuse_doubtful, refuse_lost_backward, reset

logger = logging.getLogger("composable")

PREFETCH_DEPTH: Final = 1  # units gathered ahead of need; docs/decisions/0005 says what was measured
REDUCTIONS_IN_FLIGHT: Final = 1  # while the next one is launched


class Root:
    """What lives as long as the root: its handles in traversal order, and the recorded order of their forwards."""

    __slots__ = (
        "__weakref__", "_communicators", "_doubtful", "_enclosing", "_index", "_preparation", "_saves_memory", "_summing",
        "_verified", "_watch", "call", "failure", "handled", "handles", "iteration", "membership", "module", "order",
        "reason", "replicated", "running", "steps", "units"
    )  # fmt: skip

    def __init__(self, module: nn.Module, units: Sequence[Unit], membership: Membership) -> None:
        self.module = module
        self.membership = membership
        self.replicated = Readers((), self.settle)  # units inside whose parameters whoever is around them may read
        self._summing: tuple[ReplicatedUnit, ...] = ()  # the same units
        self.units = tuple(units)
        self.handles = handles = tuple(unit.handle for unit in units)
        self._index = {handle: index for index, handle in enumerate(handles)}
        # For each unit, by number, those that were running when it was called: modules need not hold what they call.
        self._enclosing: list[dict[int, None]] = [{} for _ in handles]
        self.order = ForwardOrder()
        self.iteration: Iteration | None = None
        self.steps = Steps(max(handle.tags.steps.number for handle in handles))
        self._communicators = [each for handle in handles for each in handle.mesh_info.communicators]
        for handle in handles:
            handle.tags.count_by(self.steps)
        self.running: list[int] = []  # units that are called now, outermost first
        self.call: nn.Module | None = None  # the outermost one whose forward is under way
        self.handled: BaseException | None = None  # when that began
        self._doubtful: tuple[Handle, ...] = ()  # showed unsharded parameters while users could act
        self.failure = ""
        self.reason = ""
        self._watch = HookWatch(module for unit in units for module in unit.modules)
        self._preparation = Preparation(handles, membership)
        self._saves_memory = any(handle.mesh_info.shard.capabilities.saves_memory for handle in handles)
        self._verified = all(handle.mesh_info.all.size == 1 for handle in handles)
        for index, handle in enumerate(handles):
            handle.outputs.on_backward = partial(self.enter_backward, index)
            handle.gradients.on_unexpected = self._open_backward

    def take_along(self, replicated: Sequence[ReplicatedUnit]) -> None:
        """Replicated units inside show their parameters, and take part, wherever the root's units may want them."""
        self.replicated = Readers(replicated, self.settle)
        self._summing = tuple(replicated)
        self._count_sums()

    def _count_sums(self) -> None:
        """Sums of replicated units belong to this root's steps: a copy of the model has their communicators, too."""
        apart = [unit for unit in self._summing if unit.averaging.communicator.sums.steps is not self.steps]
        for unit in apart:
            self.steps.catch_up(unit.averaging.communicator.sums.steps.number)
        for unit in apart:
            unit.forward_steps.count_by(self.steps)

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

    # --- forward ----------------------------------------------------------------------------------------------------

    def open_forward(self, handle: Handle, module: nn.Module) -> None:
        """Called before every forward of a unit; the outermost one opens an iteration, or goes on with the open one."""
        running = self.running
        if self.iteration is not None and self.iteration.backward is not None:
            if running:
                refuse_lost_backward(self.iteration, self.handles[0].name)
            else:
                self.abort("its backward did not finish")
        index = self._index[handle]
        if not running:
            self.handled = sys.exception()
            self.call = module  # before anything changes: whoever finds it, and no call, cleans up
            try:
                self._begin_forward()
            except Exception:
                self.replicated.leave_call()
                self.call = None
                raise
        for outer in running:
            if outer != index:
                self._enclosing[index][outer] = None
        running.append(index)

    def _begin_forward(self) -> None:
        self._count_sums()
        self.steps.open(going_on=self.iteration is not None)
        self.steps.look_ahead(self._communicators)
        doubtful, self._doubtful = self._doubtful, ()
        refuse_doubtful(doubtful, self.handles)
        self._preparation.prepare()  # this may raise
        share_buffers(self.replicated.enter_call())
        if self.iteration is None:
            self.iteration = Iteration()

    def enter(self, handle: Handle) -> None:
        """`handle`'s module is about to compute."""
        index = self._index[handle]
        if not self._verified:
            check_order(self.handles, index, handle.mesh_info)
        self.order.record(index)
        self._gather(index, *self.order.next_units(PREFETCH_DEPTH))
        while True:
            try:
                handle.wait_for_unshard()
                return
            except CommunicationError as error:
                if not catch_up(self.handles, self.steps, error):
                    raise
                self._gather(index)

    def _gather(self, *indices: int) -> None:
        """Launch what is not there yet: a unit's all-gather, and those of the units that come next."""
        for index in indices:
            handle = self.handles[index]
            if handle.phase is Phase.SHARDED or handle.phase is Phase.SHARDED_POST_FORWARD:
                handle.unshard_in_step()

    def leave(self, handle: Handle, output: Any, since: int, *, complete: bool) -> Any:
        """`handle`'s module has computed `output`, in a call that began when autograd's next node had the number `since`.

        Args:
            complete: whether all modules of its unit have computed.

        Returns:
            What the caller gets.
        """
        assert self.iteration is not None
        keep = False
        if torch.is_grad_enabled():
            output, keep = handle.outputs.watch(output, since, count=True)
            index = self._index[handle]
            self.iteration.finished.forward_finished(index)
            if keep:
                self.iteration.untracked[index] = None
        if complete and not keep:
            handle.settle_after_forward()
        return output

    def close_forward(self) -> None:
        """The outermost forward has ended."""
        self.running.pop()
        if self.running:
            return
        refuse_lost_backward(self.iteration, self.handles[0].name)
        self.replicated.leave_call()
        if not self._verified:
            mesh_info = next(handle.mesh_info for handle in self.handles if handle.mesh_info.all.size > 1)
            check_order(self.handles, len(self.handles), mesh_info)
            self._verified = True
        self.order.complete()
        for handle in self.handles:
            if handle.phase is Phase.GATHERING and not handle.kept_by:
                handle.reshard()  # prefetched for nothing
            elif handle.phase is Phase.UNSHARDED and not torch.is_grad_enabled() and not handle.kept_by:
                handle.reshard()  # no backward will come
        iteration = self.iteration
        if not torch.is_grad_enabled() and iteration is not None and not (iteration.finished.next_units(1) or iteration.pinned):
            self.iteration = None
        self.steps.behind = False
        self.call = None

    def on_error(self, handle: Handle) -> None:
        """A forward of `handle`'s module raised; called from the innermost annotated module outwards."""
        if not self.failure:
            error = sys.exception()
            self.failure = f"previous step of unit '{handle.name}' ended with {type(error).__name__}"
            self.reason = f"unit '{handle.name}' raised {type(error).__name__}: {first_line(error)}"
            note_of_mixing(error, [other for other in self.handles if other is not handle and not other.calls.depth])
        if self.running:
            self.running.pop()
        if not self.running:
            self.abort(self.failure, self.reason)
            self.failure = ""

    def is_left(self, entering: nn.Module | None = None) -> bool:
        """Whether a forward was begun, and is neither ended nor under way; `entering` is about to be called."""
        return self.call is not None and calls_of(self.call) <= (self.call is entering)

    def settle(self) -> None:
        if self.is_left():
            self.recover_from_interrupt()
        elif self.iteration is not None and self.iteration.backward is not None and not in_backward():
            self.leave_failed_backward()

    def recover_from_interrupt(self) -> None:
        """A forward ended without a word. All of this may be interrupted, and done again."""
        self.steps.behind = True
        for unit in self.units:
            unit.forget_calls()
        close_interrupted()
        self.replicated.forget_calls()
        self.abort("its forward was interrupted")

    # --- backward ---------------------------------------------------------------------------------------------------

    def _open_backward(self) -> Iteration:
        iteration = self.iteration
        if iteration is not None and iteration.backward is not None:
            if iteration.lost_backward:
                refuse_lost_backward(iteration, self.handles[0].name)
            return iteration
        iteration = self.iteration = iteration or Iteration()
        end = end_of_backward()
        iteration.open_backward(end)  # before anything changes: whoever finds it open, and no backward, cleans up
        end.join(self)
        for handle in self.handles:
            if handle.phase is not Phase.SHARDED:
                handle.versions.look_up()
        self.replicated.enter_backward()
        return iteration

    def enter_backward(self, index: int, builds_graph: bool) -> None:
        """Backward is about to go through an output of unit `index`."""
        try:
            self._enter_backward(index, builds_graph)
        except BaseException:
            if self.iteration is not None:
                self.iteration.lose_backward()  # it may not have been opened yet
            self.leave_failed_backward()
            raise

    def _enter_backward(self, index: int, builds_graph: bool) -> None:
        iteration = self._open_backward()
        handle = self.handles[index]
        entering = index not in iteration.active
        if entering:
            iteration.finished.enter(index)
            self._leave_backward(iteration, entered=index)
            iteration.active.append(index)
            iteration.entered[index] = None
            iteration.to_reduce[index] = None
            if builds_graph:
                self._keep_for_graph(iteration, index)
            handle.gradients.expect()
        self._gather(index, *iteration.finished.next_units(PREFETCH_DEPTH))
        handle.wait_for_unshard()
        if entering:
            handle.calls.show()  # parts of the unit may be recomputed by themselves: guards let them pass now

    def _keep_for_graph(self, iteration: Iteration, index: int) -> None:
        iteration.builds_graph = True
        if index not in iteration.pinned:
            iteration.pinned[index] = None
            self.handles[index].keep_for(self)

    def _unpin(self, iteration: Iteration) -> None:
        for index in iteration.pinned:
            self.handles[index].keep_no_longer_for(self)

    def _leave_backward(self, iteration: Iteration, entered: int) -> None:
        """See Note [When a unit is left in backward]. A unit may share its outputs with the one around it: neither is left."""
        staying = []
        around = self._enclosing[entered]
        for index in iteration.active:
            if index in around or entered in self._enclosing[index]:
                staying.append(index)
                continue
            handle = self.handles[index]
            if handle.outputs.pending <= 0 and index not in iteration.untracked:
                self._reduce(iteration, index)
                iteration.reducing.make_room(REDUCTIONS_IN_FLIGHT + 1)
            handle.calls.hide()
            if not handle.kept_by:
                handle.reshard()
        iteration.active = staying

    def _reduce(self, iteration: Iteration, index: int) -> None:
        iteration.to_reduce.pop(index, None)
        handle = self.handles[index]
        if iteration.builds_graph:
            refuse_graph(handle.gradients)
        elif handle.parameters.trainable or handle.gradients.due:
            iteration.reducing.launch(handle.gradients, saves_memory=self._saves_memory)

    turn = -1  # of the end of a backward; roots follow each other as their outputs do

    def launch_rest(self) -> None:
        """Backward is at its end: launch the reductions of whatever has not been left."""
        iteration = self.iteration
        if iteration is None or iteration.backward is None:
            return
        for index, handle in enumerate(self.handles):
            late = handle.gradients.phase is GradPhase.ARRIVING  # brought gradients, but was not entered, or had been left
            if late or handle.gradients.due or index in iteration.to_reduce or index in iteration.untracked:
                self._reduce(iteration, index)

    def finish_backward(self) -> None:
        iteration = self.iteration
        if iteration is None or iteration.backward is None:
            return
        iteration.reducing.make_room(0, second=0)
        for index in iteration.active:
            self.handles[index].calls.hide()
        if iteration.builds_graph or self.running:
            self._go_on(iteration)
        else:
            self._conclude(iteration)
        for handle in [handle for handle in self.handles if handle.gradients.waiting]:
            handle.gradients.waiting.call()

    def _conclude(self, iteration: Iteration) -> None:
        """A backward has ended that nothing follows before the next forward."""
        self._unpin(iteration)
        for handle in self.handles:
            handle.gradients.end()
            handle.outputs.forget_pending()
            if handle.phase is not Phase.SHARDED and not handle.kept_by:
                handle.reshard()
        self.iteration = None

    def _go_on(self, iteration: Iteration) -> None:
        """A backward has ended in the middle of a forward, or is one that another goes through."""
        for index in iteration.entered:
            handle = self.handles[index]
            handle.gradients.end()
            if not handle.kept_by and not handle.calls.depth:
                handle.reshard()
        self.iteration = iteration.next()

    # --- after an error ---------------------------------------------------------------------------------------------

    def leave_failed_backward(self) -> None:
        """It raised. Who clears gradients or makes an optimizer before the next forward finds the sharded parameters."""
        self.steps.behind = self.steps.behind or not isinstance(sys.exception(), Exception | None)
        iteration = self.iteration
        if iteration is not None and iteration.backward is not None:
            iteration.lose_backward()
            for index, handle in enumerate(self.handles):
                handle.calls.set_to(self.running.count(index))
                handle.gradients.lose()
            iteration.active = []
            self.replicated.leave_failed_backward()
            say_farewell(self.handles, "its backward did not finish")

    def abort(self, why: str, reason: str = "") -> None:
        """Give up whatever is in flight, free whatever is unsharded, forget unreduced gradients."""
        self._doubtful += tuple([handle for handle in self.handles if not handle.parameters.swap.intact()])
        say_farewell(self.handles, reason or why)
        logger.warning("%s; state was reset", why if why.startswith("previous") else f"previous step: {why}")
        reset(self.handles)
        if self.iteration is not None:
            self._unpin(self.iteration)
        self.replicated.abort()
        self.order.abandon()
        self.iteration = None
        self.running.clear()
        self.call = None
