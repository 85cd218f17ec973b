"""One backward of one root: who is unsharded and who is reduced when, and how it ends. Moves no bytes itself."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Final

from composable.config import Keep
from composable.device.collectives import Steps
from composable.device.host_home import wait_for_traffic
from composable.device.streams import streams_of
from composable.plan.phases import GradPhase, Phase
from composable.plan.schedule import CallNesting
from composable.runtime.backward_end import end_of_backward
from composable.runtime.divergence import say_farewell
from composable.runtime.gradients import decide, refuse_graph, refuse_inside_forward
from composable.runtime.handle import Handle, written_to
from composable.runtime.prefetch import gather_with_next
from composable.runtime.readers import Readers
from composable.runtime.step import Iteration, refuse_lost_backward

REDUCTIONS_IN_FLIGHT: Final = 1  # while the next one is launched


def saves_memory(handles: Sequence[Handle]) -> bool:
    """Whether what is not needed any more is given back before more is taken: waiting for it holds nobody up."""
    return any(handle.mesh_info.shard.capabilities.saves_memory for handle in handles)


class RootBackward:
    """The backwards of one root's units. A participant of their end, see `composable.runtime.backward_end`.

    Attributes:
        iteration: what forwards have left for backward, and the backward that is open.
        pinned: units, by number, that graphs which backwards have built keep unsharded. See Note [Backward through a backward].
    """

    __slots__ = ("_handles", "_nesting", "_readers", "_saves_memory", "_steps", "_streams", "iteration", "pinned")

    turn = -1  # of the end of a backward; roots follow each other as their outputs do

    def __init__(self, handles: Sequence[Handle], nesting: CallNesting, steps: Steps, readers: Readers) -> None:
        self._handles = handles
        self._nesting = nesting
        self._steps = steps
        self._readers = readers
        self._saves_memory = saves_memory(handles)
        self._streams = streams_of(handles[0].mesh_info.device)
        self.iteration: Iteration | None = None
        self.pinned: dict[int, None] = {}
        for index, handle in enumerate(handles):
            handle.outputs.on_backward = partial(self.enter, index)
            handle.gradients.on_unexpected = self._open

    def expect(self) -> None:
        """A forward begins, or goes on, to which a backward may come."""
        if self.iteration is None:
            self.iteration = Iteration()
        self.iteration.stream = self._streams.here()

    def drop(self) -> None:
        """No backward will come to what forwards have left."""
        self.iteration = None

    @property
    def is_open(self) -> bool:
        """Whether a backward was opened and not closed; it may have raised."""
        return self.iteration is not None and self.iteration.backward is not None

    def _open(self) -> Iteration:
        iteration = self.iteration
        if iteration is not None and iteration.backward is not None:
            if iteration.lost_backward:
                refuse_lost_backward(iteration, self._handles[0].name)
            return iteration
        iteration = self.iteration = iteration or Iteration(self._streams.here())
        end = end_of_backward()
        iteration.open_backward(end)  # before anything changes: whoever finds it open, and no backward, cleans up
        end.join(self)
        for index, handle in enumerate(self._handles):
            if handle.is_last and index not in self.pinned:
                handle.drop_if_stale()  # recomputations go by what the shards say now, in this unit as in the others
            elif handle.phase is not Phase.SHARDED:
                handle.versions.look_up()
        self._readers.enter_backward()
        return iteration

    def enter(self, index: int, builds_graph: bool) -> None:
        """Backward is about to go through an output of unit `index`."""
        try:
            iteration, handle = self.iteration, self._handles[index]
            if iteration is None or iteration.backward is None or iteration.backward() is None:
                iteration = self._open()
            entering = index not in iteration.active
            if entering:
                iteration.finished.enter(index)
                self._leave(iteration, entered=index)
                iteration.active.append(index)
                iteration.entered[index] = None
                iteration.to_reduce[index] = None
                if builds_graph:
                    self._pin(iteration, index)
                handle.gradients.expect()
            ahead = gather_with_next(self._handles, index, iteration.finished, saves_memory=self._saves_memory)
            if entering and self._saves_memory and iteration.finished.next_units(1):
                iteration.reducing.give_back_beside(handle.gradients, self._streams, iteration.stream, beside_next=ahead)
            if entering:
                handle.calls.use_unsharded()  # parts of the unit may be recomputed by themselves: guards let them pass now
        except BaseException:
            if self.iteration is not None:
                self.iteration.lose_backward()  # it may not have been opened yet
            self.leave_failed_backward()
            raise

    def _pin(self, iteration: Iteration, index: int) -> None:
        """The backward that goes through unit `index` builds a graph."""
        iteration.builds_graph = True
        if index not in self.pinned:
            self.pinned[index] = None
            self._handles[index].keep_for(self)

    def unpin(self, *, unless_waiting: bool = False) -> None:
        """A forward begins that is not part of the step before: whatever graphs of that step were for, they have had it.

        Args:
            unless_waiting: not while graphs may wait, whose parameters nobody has written to: evaluations may come between.
        """
        pinned = [self._handles[index] for index in self.pinned]
        if unless_waiting and not any(map(written_to, pinned)):
            return
        for handle in pinned:
            handle.keep_no_longer_for(self)
        self.pinned = {}
        for handle in pinned:
            if handle.phase is not Phase.SHARDED and not _stays(handle):
                handle.reshard()

    def _leave(self, iteration: Iteration, entered: int) -> None:
        """See Note [When a unit is left in backward]. A unit may share its outputs with the one around it: neither is left."""
        staying = []
        around = self._nesting.around
        for index in iteration.active:
            if index in around[entered] or entered in around[index]:
                staying.append(index)
                continue
            handle = self._handles[index]
            if self._saves_memory:
                _free(handle)
            if handle.outputs.pending <= 0 and index not in iteration.untracked:
                self._reduce(iteration, index)
                iteration.reducing.make_room(REDUCTIONS_IN_FLIGHT + 1)
            if not self._saves_memory:
                _free(handle)
        iteration.active = staying

    def _reduce(self, iteration: Iteration, index: int) -> None:
        iteration.to_reduce.pop(index, None)
        handle = self._handles[index]
        if iteration.builds_graph:
            refuse_graph(handle.gradients)
        elif handle.parameters.trainable or handle.gradients.due:
            iteration.reducing.launch(handle.gradients, saves_memory=self._saves_memory)

    def launch_rest(self) -> None:
        """Backward is at its end: launch the reductions of whatever has not been left."""
        iteration = self.iteration
        if iteration is None or iteration.backward is None:
            return
        with self._streams.on(iteration.stream):
            for index, handle in enumerate(self._handles):
                late = handle.gradients.phase is GradPhase.ARRIVING  # brought gradients, but was not entered, or had been left
                if late or handle.gradients.due or index in iteration.to_reduce or index in iteration.untracked:
                    self._reduce(iteration, index)

    def finish_backward(self) -> None:
        iteration = self.iteration
        if iteration is None or iteration.backward is None:
            return
        with self._streams.on(iteration.stream):
            iteration.reducing.make_room(0, second=0)
            for index in iteration.active:
                self._handles[index].calls.use_sharded()
            if iteration.builds_graph or self._nesting.running:
                self._go_on(iteration)
            else:
                self._conclude()
            wait_for_traffic()
        for handle in [handle for handle in self._handles if handle.gradients.hooks.waiting]:
            handle.gradients.hooks.call()

    def _conclude(self) -> None:
        """A backward has ended that nothing follows before the next forward."""
        for handle in self._handles:
            handle.gradients.end()
            handle.outputs.pending = 0  # no backward will come to the forwards that have been
            if handle.phase is not Phase.SHARDED and not _stays(handle):
                handle.reshard()
        self.iteration = None

    def _go_on(self, iteration: Iteration) -> None:
        """A backward has ended in the middle of a forward, or is one that another goes through."""
        if self._nesting.running:
            for handle in self._handles:
                refuse_inside_forward(handle.gradients)
        for index in iteration.entered:
            handle = self._handles[index]
            handle.gradients.end()
            if not _stays(handle) and not handle.calls.depth:
                handle.reshard()
        for handle in self._handles:
            decide(handle.gradients)
        self.iteration = iteration.next()

    def leave_failed_backward(self) -> None:
        """It raised. Who clears gradients or makes an optimizer before the next forward finds the sharded parameters."""
        self._steps.behind = self._steps.behind or not isinstance(sys.exception(), Exception | None)
        iteration = self.iteration
        if iteration is not None and iteration.backward is not None:
            iteration.lose_backward()
            for index, handle in enumerate(self._handles):
                handle.calls.set_to(self._nesting.running.count(index))
                handle.gradients.lose()
            iteration.active = []
            self._readers.leave_failed_backward()
            say_farewell(self._handles, "its backward did not finish")


def _free(handle: Handle) -> None:
    """Backward has left it."""
    handle.calls.use_sharded()
    if not _stays(handle):
        handle.reshard()


def _stays(handle: Handle) -> bool:
    """Whether the unit stays unsharded after backward: kept by somebody, or kept after forward and frozen. The next forward
    frees it if somebody has written to its shards, see Note [Stale parameters]."""
    return bool(handle.kept_by) or (isinstance(handle.after_forward, Keep) and not handle.parameters.trainable)
