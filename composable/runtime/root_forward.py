"""One forward of one root: who is unsharded when, and what ranks check in the first one. Moves no bytes itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from composable.config import FreeUnlessLast
from composable.device.collectives import Steps
from composable.device.host_home import wait_for_traffic
from composable.errors import CommunicationError
from composable.model.interrupts import calls_of
from composable.plan.phases import Phase
from composable.plan.schedule import CallNesting, ForwardOrder
from composable.runtime.buffer_broadcast import share_buffers
from composable.runtime.cast_unit import use_casts
from composable.runtime.divergence import catch_up, check_order
from composable.runtime.handle import Handle
from composable.runtime.last_units import last_units_of, refuse_writes
from composable.runtime.mesh_info import is_left_alone, left_alone
from composable.runtime.prefetch import gather_with_next
from composable.runtime.preparation import Preparation
from composable.runtime.readers import Readers
from composable.runtime.root_backward import RootBackward
from composable.runtime.step import refuse_doubtful, refuse_lost_backward
from composable.runtime.sums_in_step import SumsInStep


class RootForward:
    """The forwards of one root's units, within that of the outermost one.

    Attributes:
        order: of the units, as recorded.
        call: the outermost module whose forward is under way. See Note [What an interrupt leaves].
        handled: the exception that was being handled when that began.
    """

    __slots__ = (
        "_abort", "_backward", "_doubtful", "_handles", "_index", "_known", "_last_units", "_nesting", "_preparation",
        "_presences", "_readers", "_steps", "_sums", "_verified", "_without_mesh", "call", "handled", "order"
    )  # fmt: skip

    def __init__(
        self,
        handles: Sequence[Handle],
        nesting: CallNesting,
        steps: Steps,
        preparation: Preparation,
        readers: Readers,
        sums: SumsInStep,
        known: Sequence[Handle],
        backward: RootBackward,
        abort: Callable[[str], None],
    ) -> None:
        """`known` are the handles, too: first those that other ranks know from former roots."""
        self._handles = handles
        self._without_mesh = tuple([handle for handle in handles if handle.mesh_info.mesh is None])
        self._index = {handle: index for index, handle in enumerate(handles)}
        self._last_units = [last_units_of(handle.mesh_info) for handle in handles]
        self._nesting = nesting
        self._steps = steps
        self._presences = [each.presence for handle in handles for each in handle.mesh_info.communicators]
        self._preparation = preparation
        self._readers = readers
        self._sums = sums
        self._known = tuple(known)
        self._backward = backward
        self._abort = abort
        self._verified = all(handle.mesh_info.all.size == 1 for handle in handles)
        self._doubtful: tuple[Handle, ...] = ()  # showed unsharded parameters while users could act
        self.order = ForwardOrder()
        self.call: nn.Module | None = None
        self.handled: BaseException | None = None

    def open(self, handle: Handle, module: nn.Module) -> None:
        """Called before every forward of a unit; the outermost one opens an iteration, or goes on with the open one."""
        running, iteration = self._nesting.running, self._backward.iteration
        if iteration is not None and iteration.backward is not None:
            if running:
                refuse_lost_backward(iteration, self._handles[0].name)
            else:
                self._abort("its backward did not finish")
        index = self._index[handle]
        if not running:
            self.handled = sys.exception()
            self.call = module  # before anything changes: whoever finds it, and no call, cleans up
            try:
                self._begin(handle)
            except Exception:
                self._readers.leave_call()
                self.call = None
                raise
        self._nesting.enter(index)

    def _begin(self, outermost: Handle) -> None:
        if self._without_mesh and is_left_alone(None):
            raise left_alone("fully_shard", self._without_mesh[0].name)
        self._sums.claim()
        going_on = self._backward.iteration is not None
        if not going_on and self._backward.pinned:
            self._backward.unpin(unless_waiting=not torch.is_grad_enabled())
        self._steps.open(going_on=going_on)
        self._steps.evaluates = not (going_on or torch.is_grad_enabled())
        self._steps.look_ahead(self._presences)
        doubtful, self._doubtful = self._doubtful, ()
        refuse_doubtful(doubtful, self._handles)
        self._last_units[self._index[outermost]].enter(outermost)
        self._preparation.prepare()  # this may raise
        found = self._readers.enter_call()
        share_buffers(found)
        use_casts(found, trains=self._preparation.trains)
        self._backward.expect()

    def enter(self, handle: Handle) -> None:
        """`handle`'s module is about to compute."""
        index = self._index[handle]
        self._last_units[index].enter(handle)
        self.order.record(index)
        while True:
            try:
                if not self._verified:
                    check_order(self._handles, self._known, index, handle.mesh_info)
                gather_with_next(self._handles, index, self.order)
                return
            except CommunicationError as error:
                if not catch_up(self._handles, self._steps, error):
                    raise

    def leave(self, handle: Handle, output: Any, since: int, *, complete: bool) -> Any:
        """`handle`'s module has computed `output`, in a call that began when autograd's next node had the number `since`.

        Args:
            complete: whether all modules of its unit have computed.

        Returns:
            What the caller gets.
        """
        keep = False
        index, with_grad = self._index[handle], torch.is_grad_enabled()
        if with_grad:
            output, keep = handle.outputs.watch(output, since, count=True)
            iteration = self._backward.iteration
            assert iteration is not None
            iteration.finished.forward_finished(index)
            if keep:
                iteration.untracked[index] = None
        if complete and not keep:
            if with_grad and isinstance(handle.after_forward, FreeUnlessLast):
                self._last_units[index].leave(handle)
            else:
                handle.reshard_after_forward()
        running = self._nesting.running
        running.pop()
        if not running:
            self._close()
        return output

    def _close(self) -> None:
        """The outermost forward has ended."""
        refuse_lost_backward(self._backward.iteration, self._handles[0].name)
        self._readers.leave_call()
        if not self._verified:
            mesh_info = next(handle.mesh_info for handle in self._handles if handle.mesh_info.all.size > 1)
            check_order(self._handles, self._known, len(self._handles), mesh_info)
            self._verified = True
        self.order.complete()
        no_grad = not torch.is_grad_enabled()
        all_frozen = not any(handle.outputs.pending for handle in self._handles)  # and nobody asks for inputs' gradients
        for handle in self._handles:
            refuse_writes(handle)  # now: the error belongs to the forward that wrote
            if handle.phase is Phase.GATHERING and not handle.kept_by:
                handle.reshard()  # prefetched for nothing
            elif handle.phase is Phase.UNSHARDED and (no_grad or (all_frozen and handle.is_last)) and not handle.kept_by:
                handle.reshard()  # no backward will come
        iteration = self._backward.iteration
        if no_grad and iteration is not None:
            waiting = iteration.finished.next_units(1) or self._backward.pinned
            if self._steps.evaluates or not waiting:
                self._backward.drop()
        wait_for_traffic()
        self._steps.behind = False
        self.call = None

    def is_left(self, entering: nn.Module | None = None) -> bool:
        """Whether a forward was begun, and is neither ended nor under way; `entering` is about to be called."""
        return self.call is not None and calls_of(self.call) <= (self.call is entering)

    def doubt(self) -> None:
        """Note the units whose modules show unsharded parameters: a `zero_grad` may have missed the sharded ones."""
        self._doubtful += tuple([handle for handle in self._handles if not handle.parameters.swap.intact()])

    def end(self) -> None:
        """Nothing is under way any more."""
        self._nesting.running.clear()
        self.call = None
