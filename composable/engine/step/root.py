"""The phases of one step: which units are entered and left, and freed when. What is gathered ahead
is in `gather_order.py`, what is reduced when in `post_backward.py`; docs/tour.md follows a step
line by line.

In this file: what belongs to one step (`Step`, `Iteration`), the end of a backward (`BackwardEnd`),
`Root` (forward, backward, a lost step), which root a call has (`root_for_call`, `plan_root`), and
reductions without a backward (`launch_held`, `land_held`).

State machine of a `Root`; what may change its phase is in this file, and the phase is what its
`Step` says. What runs is the forward in row FORWARD, and the backward in row BACKWARD:

| phase    | a forward begins  | a backward begins | what runs ends   | what runs raises | `reset` |
|----------|-------------------|-------------------|------------------|------------------|---------|
| IDLE     | FORWARD           | BACKWARD          | -                | -                | -       |
| FORWARD  | -         | BACKWARD | WAITING, or IDLE if nothing waits | IDLE             | IDLE    |
| WAITING  | FORWARD           | BACKWARD          | -                | -                | IDLE    |
| BACKWARD | FORWARD, by reset | -    | IDLE, or on with what is open | LOST             | IDLE    |
| LOST     | FORWARD, by reset | refused           | -                | -                | IDLE    |

Laws:

* Collectives are launched where a forward or a backward enters or leaves a unit, at the end of a
  backward, and by explicit calls; not because a gradient arrived, since which gradients arrive
  differs between ranks (`post_backward.py` has the details). Two exceptions: buckets of
  `Buckets` are launched when they are full, but all of them in every backward and in one order;
  and a unit that was reduced before its last gradient came is reduced once more at the end
  (`Root.on_gradient`).
* At the end of a backward every reduction is launched before any of them is landed. On a hybrid
  mesh the second stage is launched when its first has been waited for. Every wait is for something
  that was launched earlier in the one sequence that all ranks run.
* What must not survive a step is in `Step`, `UnitStep` and `Reduction`, which are dropped. A step
  is lost on all ranks or on none: `Root.reset`.
* Nothing stays gathered from one root forward to the next outside of `unshard()`,
  `keep_unsharded`, what graphs of `create_graph=True` need, and what a backward that is to come may
  read unseen (`UNSEEN`).

When backward leaves a unit. Backward enters a unit at the graph nodes of its outputs. It leaves the
unit when it enters another one that neither encloses it nor lies in it: autograd runs the newest
nodes first, so between the first and the last node of a call only nodes of that call and of calls
inside it run. The parameters are freed then, and not when the last gradient has arrived, because a
frozen parameter may still be needed.
"""

from __future__ import annotations

import enum
import logging
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import RLock, get_ident
from threading import enumerate as enumerate_threads
from traceback import walk_stack
from typing import Any, Final, NoReturn
from weakref import WeakSet, WeakValueDictionary, ref

import torch
from torch import nn

from composable.comm.base import compare_launches
from composable.comm.ledger import debug_enabled
from composable.compilation import untraced
from composable.contract.hooks import drop_calls
from composable.contract.tree import TreeWatch
from composable.engine.gradients.agreed import agreed_by
from composable.engine.gradients.post_backward import Due, PostBackward
from composable.engine.gradients.unit_gradients import UnitKind
from composable.engine.params.param import ManagedParam
from composable.engine.step.compiled import NOT_ON, refuse_compiled, why_not
from composable.engine.step.gather_order import CLOCK, REMEMBERED, Forward, GatherOrder
from composable.engine.step.observer import DECISIONS, OBSERVERS, Observer, notify
from composable.engine.step.prepare import Preparation, broadcast_buffers, is_called, modules_inside
from composable.engine.step.unit import Need, Unit, UnitCall, rename_below, unit_of, units_below
from composable.errors import CommunicationError, DifferentiationError, PhaseError, first_line
from composable.memory.elastic import keep_idle_memory, release_idle_memory
from composable.memory.offload import wait_for_traffic
from composable.memory.streams import streams_of
from composable.torch_private import backward_id, in_backward, on_backward_end, outside_transforms

logger = logging.getLogger("composable")


class Phase(enum.Enum):
    """Where a root is in a step."""

    IDLE = "no step is under way"
    FORWARD = "a forward of the outermost module runs"
    WAITING = "a forward has ended, and its backward may come"
    BACKWARD = "a backward runs, maybe inside of a forward"
    LOST = "a backward raised"


@dataclass(slots=True, eq=False)
class Iteration:
    """One or more forwards and their backward.

    Attributes:
        stream: that the forward computes on; autograd ends a backward on whatever stream the caller
            has.
        began: when its last forward did, or, without one, its backward, on the clock of `CLOCK`.
        in_forward: `Forward.number` of the one that backward is in.
        read_at_rest: by forward, a parameter whose at-rest form autograd accumulated on while
            backward was in that forward.
        entered: `Forward.entered` of its last forward with gradients.
        finished: units that gather and whose forward has ended, newest last. Backward will probably
            enter them in reverse, and gathers ahead by it.
        last: units that `reshard_after_forward=None` keeps until a forward enters another unit over
            the same ranks.
        end: None until a backward begins; then a weak reference to its `BackwardEnd`, dead if that
            backward raised.
        active: units that backward has entered and not left.
        due: what is to be reduced, and what is in flight.
    """

    stream: Any
    began: int = field(default_factory=partial(next, CLOCK))
    in_forward: int | None = None
    read_at_rest: dict[int | None, tuple[Unit, ManagedParam]] = field(default_factory=dict)
    entered: list[Unit] = field(default_factory=list)
    finished: deque[Unit] = field(default_factory=partial(deque, maxlen=REMEMBERED))
    last: dict[Unit, None] = field(default_factory=dict)
    end: ref[BackwardEnd] | None = None
    active: dict[Unit, None] = field(default_factory=dict)
    due: Due = field(default_factory=Due)


@dataclass(slots=True, eq=False)
class Step:
    """What is under way in a root. It lives from step to step, and is dropped when one is lost: one
    step is an `Iteration`. What units know of it is in `UnitStep`.

    Attributes:
        iteration: None if no backward is to come, and none runs.
        forward: the forward of the outermost module that is under way.
        running: units whose forward is under way, outermost first.
        history: calls of units with gradients, as they began, from the first on whose backward has
            not come. Recomputation looks for them; a checkpoint that runs one of more than
            `REMEMBERED` calls again does not enter the units around it first.
        thread: `{None: the thread that runs the forward}`. A dict, since `setdefault` is atomic: of
            two threads one wins.
    """

    iteration: Iteration | None = None
    forward: Forward | None = None
    running: list[Unit] = field(default_factory=list)
    history: deque[UnitCall] = field(default_factory=partial(deque, maxlen=REMEMBERED))
    thread: dict[None, int] = field(default_factory=dict)


class BackwardEnd:
    """The end of one backward, for all roots that take part: first all launch, then all wait.

    It is queued on autograd's engine, which calls it when the backward ends. If the backward
    raised, the engine destroys it without a call: before the caller sees the error, on an
    accelerator up to some milliseconds later.
    """

    def __init__(self) -> None:
        # that take part; emptied when the backward has ended without an error
        self.roots: list[Root] = []

    @untraced  # torch.compile runs it as it is
    @outside_transforms  # of torch.func
    def __call__(self) -> None:
        try:
            with torch.no_grad():
                for root in self.roots:
                    root.launch_remaining()
                for root in self.roots:
                    root.finish_backward()
            self.roots = []
            notify(Observer.gradients_landed)
        except BaseException:
            self._restore()  # now: the traceback keeps this object
            raise

    @untraced
    def __del__(self) -> None:
        self._restore()

    def _restore(self) -> None:
        roots, self.roots = self.roots, []
        for root in roots:
            root.on_failed_backward()


ROOTS: Final[WeakSet[Root]] = WeakSet()
# Of which reductions were launched outside of backward, and have not landed.
UNLANDED: Final[dict[Root, None]] = {}
# Held while a backward that raised is put back, which with an accelerator a thread of autograd
# does, and where a forward takes the step away.
_LOSING: Final = RLock()
# by the number of autograd's pass
_ENDS: Final[WeakValueDictionary[int, BackwardEnd]] = WeakValueDictionary()


def _end_of_backward(root: Root) -> BackwardEnd:
    number = backward_id()  # autograd's, of the pass that this thread is in
    end = _ENDS.get(number)
    if end is None:
        refuse_compiled(root)
        end = _ENDS[number] = BackwardEnd()
        on_backward_end(end)  # queued on autograd's engine
    end.roots.append(root)
    return end


class Root:
    """The units below the outermost annotated module that was called.

    Attributes:
        top: the unit that was called.
        modules: of that unit.
        units: of both verbs, in the order of `.modules()` at the first plan.
        agreed: what all ranks have alike about these units.
        order: in which forwards gather the units.
        shared: units below that are below another annotated model, too (an encoder of an actor and
            a critic). They are the units of a root of their own, whichever model calls them: one
            object reduces the gradients of a parameter.
        step: that is under way.
        post_backward: reduces gradients.
    """

    # Why the engine, and not the compiler, reduces the gradients of the last forward; empty if the
    # compiler does.
    eager_because: str = NOT_ON

    def __init__(self, top: Unit, units: Sequence[Unit], shared: Sequence[Unit]) -> None:
        self.top, self.modules = top, top.modules
        self.agreed = agreed_by(units)  # the first forward fills it, and all ranks alike change it
        self.units: list[Unit] = self.agreed.units()
        self.order = GatherOrder(self.units, self.agreed)
        self.step = Step()
        self._streams = streams_of(self.units[0].mesh_info.device)  # which one computes here
        self.post_backward = PostBackward([unit.gradients for unit in self.units], self.agreed)
        # replicated units next to shards
        self.beside = [unit for unit in self.units if unit.kind is UnitKind.BESIDE]
        self.watch_tree(shared)
        ROOTS.add(self)

    def watch_tree(self, shared: Sequence[Unit]) -> None:
        """It was planned: watch from now on whether modules come or go."""
        self.shared = list(shared)
        self._trees = [TreeWatch(module) for module in self.modules]
        self._preparation = Preparation(self)

    def tree_changed(self) -> bool:
        """Whether modules came or went since then."""
        return any(tree.changed() for tree in self._trees)

    def forget(self) -> None:
        """A unit came or went below: the next forward plans anew."""
        ROOTS.discard(self)
        for unit in self.units:
            if unit.root is self:  # not yet a newer one's
                unit.follow_root(None)

    @property
    def name(self) -> str:
        return self.units[0].name

    @property
    def ends_inside(self) -> bool:
        """Whether a backward around the one that ends goes on, of other roots (reentrant
        checkpointing).
        """
        mine = self._backward_iteration()
        others = (each._backward_iteration() for each in ROOTS)
        return mine is not None and any(each and each.end != mine.end for each in others)

    @property
    def running(self) -> Sequence[Unit]:
        """See `Step`."""
        return self.step.running

    def agree_anew(self) -> None:
        """All ranks have changed the same: compare and agree in the next step as in the first."""
        for unit in self.units:
            unit.agree_anew()
        self.forget()

    def stop_tracing(self, why: str) -> None:
        """The compiler does not reduce gradients any more."""
        self.eager_because = why
        self.agreed.stop_tracing(why)

    @property
    def phase(self) -> Phase:
        """See the table at the top of this file."""
        iteration = self.step.iteration
        if iteration is None:
            return Phase.IDLE
        if iteration.end is None:
            return Phase.FORWARD if self.step.running else Phase.WAITING
        end = iteration.end()
        return Phase.BACKWARD if end is not None and end.roots else Phase.LOST

    @property
    def in_step(self) -> bool:
        """Whether forwards or a backward are under way, or forwards wait for their backward."""
        return self.step.iteration is not None

    # --- forward ---------------------------------------------------------------------------------

    def pre_forward(self, call: UnitCall, inputs: object) -> None:
        """A module is about to compute.

        1. The outermost one begins the forward (`_begin`).
        2. With gradients, the units around note that this one ran inside: backward asks.
        3. Units that were kept after forward are freed, as memory is about to be taken.
        4. The unit is gathered, and others ahead (`GatherOrder.pre_forward`). Ranks may compare.
        5. If backward will enter the unit on all ranks, its outputs get a node, also where this
           rank uses no parameter of it (`UnitCall.anchors`). Not for units whose gradients are
           reduced by arrival, unless several roots share them.

        Args:
            inputs: of the module; None if this rank does not compute it.
        """
        unit, outermost = call.unit, not self.step.running
        if self.step.thread.setdefault(None, get_ident()) != get_ident() and not in_backward():
            self.refuse_second_thread(self.step.thread.get(None))
        if outermost:
            try:
                self._begin(call.module)
            except BaseException:  # of which `Visit.on_error` tells nobody
                self.step.thread.clear()
                self.step.forward = None
                raise
        step = self.step
        forward, iteration = step.forward, step.iteration
        assert forward is not None
        assert iteration is not None
        for outer in step.running if forward.with_gradients else ():
            # a module may call itself
            if outer is not unit and unit not in outer.relations.ran_inside:
                outer.relations.note_inside(unit)
        inside = (not outermost and unit.kind is not UnitKind.ARRIVAL) or (
            unit.relations.is_shared and self._is_called_by_another(unit)
        )
        step.running.append(unit)
        try:
            if iteration.last and not unit.is_unsharded:
                self._free_last(unit, iteration)
            self.order.pre_forward(unit, forward, inputs)
        except BaseException:
            self.on_error(unit)
            raise
        enters = inside and (unit.trains or self.order.enters_frozen(unit))
        call.take_place(forward.number, outermost=outermost, is_entered=enters)
        if torch.is_grad_enabled():
            step.history.append(call)

    def _begin(self, module: nn.Module) -> None:
        """The outermost forward begins.

        1. Reductions without a backward land. Roots of shared units give up a backward that has
           raised: this forward may not call their modules, and its backward opens them.
        2. What earlier steps kept for a backward is given up, if none is to come to it.
        3. Modules hold at-rest parameters, since 4. looks at what is registered.
        4. What users did to parameters is adopted or refused.
        5. What earlier forwards left gathered is freed: after a lost step some ranks have freed it
           and some have not. What scopes keep, and `unshard()` has just gathered, is the same on
           all.
        6. The iteration begins, or goes on with one more forward.
        7. What `unshard()` has gathered is shown, in an evaluation. A step uses it up.
        8. Replicated units next to shards are shown.
        9. With gradients: ranks agree on what trains, buffers follow one rank, the compiler is
           asked whether it will reduce.
        """
        land_held([self])
        for root in roots_of(self.shared) if not in_backward() else ():
            root.give_up_backward()
        grad = torch.is_grad_enabled()
        self._give_up_kept(grad=grad)
        saved = self.step.iteration is not None
        forward = self.step.forward = Forward(module, grad, saved)
        explicit = self._hide()
        try:
            if grad:
                notify(Observer.begins_forward, self)
            self.prepare()
        except BaseException:
            for unit in explicit:  # what is refused here ends no `unshard()`
                unit.show()
            raise
        for unit in self.units:
            if not unit.kept_by and unit not in explicit:
                unit.free(before_step=True)
        iteration = self.step.iteration or Iteration(None)
        self.step.iteration = iteration
        for unit in explicit if not grad else ():  # goes on behind this forward
            unit.show()
        iteration.stream, iteration.began = self._streams.here(), forward.number
        try:
            for unit in self.beside:
                unit.show_in_root()
            if grad:
                self.order.begin_training(forward)
                # as DDP does, in evaluation mode with gradients, too; of replicated units only
                broadcast_buffers(self.units, DECISIONS.source(), saved=saved)
                self.eager_because = why_not(self)
        except BaseException:
            self.on_error(self.units[0])
            raise
        keep_idle_memory(self)

    def _give_up_kept(self, *, grad: bool) -> None:
        """A forward begins: give up what no backward will need."""
        if not any(
            unit.step.pending > 0 or Need.GRAPH in unit.step.needed_by for unit in self.units
        ):
            # outputs were detached; what that forward has kept may have been written to since
            self.end_unseen()
        if self.step.iteration is not None:
            return  # another loss may use the graph of a gradient penalty
        # No step is open, since a backward without create_graph=True has ended. A graph of an
        # earlier gradient penalty lives until a forward with gradients, or a write to parameters.
        for unit in self.units:
            if Need.GRAPH in unit.step.needed_by and (
                grad or any(group.is_stale for group in unit.groups)
            ):
                unit.end_need(Need.GRAPH)

    def _hide(self) -> list[Unit]:
        """Modules hold at-rest parameters. Returns the units that `unshard()` has shown; after it,
        maybe `model.to(dtype)` was called.
        """
        for unit in self.units:
            if unit.step.to_run:  # a shared `[norm, head]`, between the two
                unit.swap_out()
        explicit = [unit for unit in self.units if Need.EXPLICIT in unit.kept_by]
        for unit in explicit:
            unit.hide()
        return explicit

    def prepare(self) -> None:
        """Adopt or refuse what users did to parameters since the last forward."""
        self._preparation.run()
        self.order.note_training()

    def _free_last(self, unit: Unit, iteration: Iteration) -> None:
        """Reshard the units that ran last, before `unit` is gathered. Those over other ranks stay:
        not all of these run `unit`.
        """
        for other in [*iteration.last]:
            if other is not unit and other.mesh_info.all is unit.mesh_info.all:
                del iteration.last[other]
                other.free()

    def post_forward(self, call: UnitCall, *, keep: bool) -> None:
        """A module has computed.

        Args:
            keep: its parameters must outlive forward: an output aliases them, or backward cannot be
                followed to the unit.
        """
        unit, iteration, grad = call.unit, self.step.iteration, torch.is_grad_enabled()
        assert iteration is not None
        self.step.running.pop()
        # A frozen unit is gathered ahead in backward only if an output of it is watched. (`pending`
        # is right on ranks without data, too, which follow others: `join`.)
        if grad and unit.gathers and (unit.trains or unit.step.pending > 0):
            iteration.finished.append(unit)
        if keep:
            unit.need(Need.UNSEEN if grad else Need.LENT)
        elif not unit.must_stay:
            self._reshard_after_forward(unit, iteration, grad=grad)
        if not self.step.running:
            self._end_forward(iteration, grad=grad)

    def _reshard_after_forward(self, unit: Unit, iteration: Iteration, *, grad: bool) -> None:
        """Do what `reshard_after_forward` says.

        | it is    | with gradients                                   | without               |
        |----------|--------------------------------------------------|-----------------------|
        | True     | it goes                                          | it goes               |
        | a number | a shard over so many ranks stays                 | it goes               |
        | None     | it stays until another unit runs (`_free_last`)  | it goes, unless left  |
        | False    | it stays                                         | it goes, unless left  |

        "left": an earlier call with gradients in the same forward left it there. This may be a call
        of one rank alone, which would then be the only one to gather the unit in backward.
        """
        after = unit.spec.reshard_after_forward
        if after is None and (grad or unit in iteration.last):
            iteration.last.pop(unit, None)  # it is the newest again
            iteration.last[unit] = None
        elif after is False and (grad or unit in iteration.finished):
            pass
        elif not grad or after is True:
            unit.reshard()
        else:
            for group in unit.groups:
                group.reshard_after_forward()

    def _end_forward(self, iteration: Iteration, *, grad: bool) -> None:
        """The outermost module has computed.

        1. Its order may be that of the next forwards.
        2. If nothing waits for a backward, the iteration ends. It goes on if it is older than the
           forward (a graph of a gradient penalty waits). If its backward inside of this forward
           raised, and that was caught, it is lost.
        3. What was needed by forward only is given up, also in shared units, of whose modules this
           forward may have called some.
        4. Units that no backward comes to are freed. About the others `_reshard_after_forward` has
           decided. (If some of a unit's modules have not run, it stays: fused losses may have read
           their weights.) An evaluation also frees what it found gathered.
        """
        forward = self.step.forward
        assert forward is not None
        if (entered := self.order.learn(forward)) and grad:
            iteration.entered = entered
        self.step.forward = None
        waits = any(
            unit.step.pending > 0 or Need.UNSEEN in unit.step.needed_by for unit in self.units
        )
        if not (waits or forward.goes_on or iteration.end is not None):
            self.step.iteration = None
        for unit in self.beside:
            unit.end_need(Need.ROOT_RUNS)
        stay = dict.fromkeys(iteration.finished) if waits and grad else {}
        for unit in self.units:
            # otherwise the forward of a model around this unit of several modules goes on
            if unit.step.to_run and not self._is_called_by_another(unit):
                unit.end_forward()
            if Need.LENT in unit.step.needed_by:
                unit.end_need(Need.LENT)
            if unit not in stay:
                unit.free()
        for unit in self.shared:
            if unit.step.to_run:
                unit.end_forward()
                if not unit.step.pending:  # its own root's backward is not to come
                    unit.free()
        release_idle_memory(self)
        wait_for_traffic()  # CPU offload
        self.step.thread.clear()

    def _is_called_by_another(self, unit: Unit) -> bool:
        return any(root.step.running and unit in root.shared for root in ROOTS)

    # --- backward --------------------------------------------------------------------------------

    def open_backward(self) -> Iteration:
        """A backward is under way from now on."""
        iteration, phase = self.step.iteration, self.phase
        if iteration is not None and phase is Phase.BACKWARD:
            return iteration
        if phase is Phase.LOST:
            raise PhaseError(
                f"a backward came to unit '{self.name}' after an earlier one of the same step had"
                " raised: what that one brought is lost, and on some ranks more than on others."
                " Run the forward again; it gives up the lost step"
            )
        if self.runs_elsewhere and self._streams.here() is None:  # a device's backward is in others
            self.refuse_second_thread(self.step.thread.get(None))
        land_held([self])
        notify(Observer.opens_backward, self)
        # buckets may be launched while gradients arrive
        by_arrival = DECISIONS.by_arrival() and self._takes_part_alone()
        if iteration is None:
            # its forward's iteration has ended: a second backward through one graph, or of one step
            iteration = self.step.iteration = Iteration(self._streams.here())
        keep_idle_memory(self)
        # the engine alone holds it: what raises below must not keep it with its traceback
        iteration.end = ref(_end_of_backward(self))
        for unit in self.units:
            if Need.EXPLICIT in unit.kept_by:
                unit.end_explicit()
        self._preparation.follow_freezing()  # what `requires_grad` says now decides
        for unit in self.beside:
            unit.show_in_root()
        self.post_backward.buckets.open(by_arrival=by_arrival)
        for unit in self.shared:
            # On all ranks: its buckets go out also if this rank's batch did not come to it, and a
            # recomputation differs from a forward only while its root is in a step. One with shards
            # that has no root was not computed since the tree changed.
            if unit.root is not None or unit.kind is UnitKind.ARRIVAL:
                root_of(unit).open_backward()
        return iteration

    def _backward_iteration(self) -> Iteration | None:
        """The iteration, if its backward is under way."""
        return self.step.iteration if self.phase is Phase.BACKWARD else None

    def _takes_part_alone(self) -> bool:
        """Whether no other root takes part in the backward that begins: none had a forward since
        the last one. Without a forward of its own since then, others may take part as they did in
        that one.

        Roots with older forwards do not count: their models may have been dropped, and each rank
        collects those at another time.
        """
        last = self.agreed.last_backward
        return self.step.iteration is not None and not any(
            root.step.iteration is not None and root.step.iteration.began > last
            for root in ROOTS
            if root is not self
        )

    def pre_backward(self, call: UnitCall) -> None:
        """Backward is about to go through an output that `call` made."""
        unit, iteration = call.unit, self.open_backward()
        if call.number is not None:
            if call.number in iteration.read_at_rest:
                self._refuse_read_at_rest(*iteration.read_at_rest[call.number])
            iteration.in_forward = call.number
        for each in OBSERVERS["pre_backward"]:
            each(self, call)
        call.note_backward()
        following: Iterable[Unit] = ()
        if unit not in iteration.active:
            following = self._enter(unit, iteration)
        if torch.is_grad_enabled():
            # create_graph=True: the new nodes need the parameters, and lie in no call
            iteration.due.build_graph()
            unit.need(Need.GRAPH)
        # another output of it: anew, if it was written to since
        self.order.gather(unit, following, self.step.forward)

    def _enter(self, unit: Unit, iteration: Iteration) -> Iterable[Unit]:
        """Backward comes to `unit`, in which it is not. Returns what will probably follow.

        First it leaves the other active units, the innermost first: they are freed, and reduced if
        no other forward of theirs waits for its backward, and it is not UNSEEN (these are reduced
        at the end: `remaining`). Ranks that skip `unit` (an expert, or replicated next to shards)
        leave them later, but in the same order: all ranks launch alike.

        | an active unit stays if it         | because                                             |
        |------------------------------------|-----------------------------------------------------|
        | encloses `unit`, or lies in it     | backward is in both                                 |
        | waits for one more backward, and   | where `unit` is skipped, backward may come to it    |
        | some ranks skip `unit`             | again next, without having left it                  |
        """
        ran_inside = unit.relations.ran_inside
        for other in [*reversed(iteration.active)]:
            is_nested = other in ran_inside or unit in other.relations.ran_inside
            comes_again = other.step.pending > 0
            fewer_ranks = unit.mesh_info.all.size < other.mesh_info.all.size
            some_skip = fewer_ranks or unit.kind is UnitKind.BESIDE
            if is_nested or (comes_again and some_skip):
                continue
            self._end_unit(other, iteration)
            if not comes_again and Need.UNSEEN not in other.step.needed_by:
                self.post_backward.end_unit(other.gradients, iteration.due)
        iteration.active[unit] = None
        unit.need(Need.BACKWARD)
        self.post_backward.begin_unit(unit.gradients, iteration.due)
        finished = iteration.finished
        if unit in finished:
            while finished.pop() is not unit:
                pass
        unit.swap_in()  # a checkpointed part of it may be recomputed without a call of the unit
        return reversed(finished)

    def on_gradient(self, unit: Unit, param: ManagedParam) -> None:
        """Autograd has accumulated a gradient."""
        due = self.open_backward().due
        if unit.kind is UnitKind.ARRIVAL:
            # may launch a bucket
            self.post_backward.buckets.arrived(param, builds_graph=due.builds_graph)
        elif unit.gradients not in due.to_reduce:
            # a parameter that was read outside of its module, or after the unit was left
            due.come_again(unit.gradients)
            notify(Observer.gradient_came, unit)

    def on_gradient_at_rest(self, unit: Unit, param: ManagedParam) -> None:
        """Autograd has accumulated on an at-rest parameter, and not on the form that modules
        compute with.

        Outside of forwards that is a penalty on parameters: the same on all ranks, and right. If
        backward is in the middle of a forward, the forward has mixed the parameter with this rank's
        batch. It runs the newest nodes first, so it is in the middle if it comes to another unit of
        the same forward afterwards: `pre_backward` looks.
        """
        iteration = self._backward_iteration()
        if iteration is not None:
            iteration.read_at_rest[iteration.in_forward] = unit, param

    def _refuse_read_at_rest(self, unit: Unit, param: ManagedParam) -> None:
        raise DifferentiationError(
            f"a forward of unit '{self.name}' read parameter '{param.fqn}' of unit '{unit.name}'"
            " outside of that unit's forward, where it is at rest: its gradient would be that of"
            " each rank's own batch, and not the mean. Annotate the module that reads it and its"
            " own as one unit, fully_shard([a, b]), or leave it to the unit around both. Penalties"
            " on parameters belong outside of forward"
        )

    def _end_unit(self, unit: Unit, iteration: Iteration) -> None:
        """Backward has gone through `unit`: free its parameters, before its gradients are copied
        into a message.
        """
        iteration.active.pop(unit, None)
        unit.post_backward(in_forward=bool(self.step.running))
        if len(unit.modules) == 1 or unit.step.pending <= 0:
            unit.free()  # of several modules: when backward has been in all that ran

    def launch_remaining(self) -> None:
        """Backward is at its end: launch what was not launched. Waits only where a launch needs it
        (first stages of hybrid meshes).
        """
        notify(Observer.ends_backward, self)
        iteration = self._backward_iteration()
        if iteration is None:
            return  # a forward inside of this backward has given up the step
        with self._streams.on(iteration.stream):
            units = {unit.gradients: unit for unit in self.units}
            unseen = [unit.gradients for unit in self.units if Need.UNSEEN in unit.step.needed_by]
            for gradients in self.post_backward.remaining(iteration.due, unseen):
                self._end_unit(units[gradients], iteration)
                self.post_backward.reduce(gradients, iteration.due)
            self.post_backward.launch_last(iteration.due)

    def finish_backward(self) -> None:
        """Land everything and end the iteration. What an open forward or a new graph still needs
        passes to a new one.
        """
        notify(Observer.lands_backward, self)
        iteration = self._backward_iteration()
        if iteration is None:
            return  # see `launch_remaining`
        if debug_enabled():
            self.order.compare_forwards(self.step.history)
        with self._streams.on(iteration.stream):
            self.post_backward.land(iteration.due)
            self._conclude(iteration)
            wait_for_traffic()
        if debug_enabled():
            for comm in dict.fromkeys(
                unit.mesh_info.all for unit in self.units if unit.mesh_info.all.size > 1
            ):
                compare_launches(comm)  # did all ranks launch the same?

    def _conclude(self, iteration: Iteration) -> None:
        following = None
        self.order.end_backward(iteration.entered)
        if self.step.running or iteration.due.builds_graph:
            following = Iteration(iteration.stream)
            following.finished, following.last = iteration.finished, iteration.last
        self.step.iteration = following
        calls = self.step.history
        while calls and not calls[0].waits:
            calls.popleft()
        for unit in self.units:
            unit.end_backward(in_forward=bool(self.step.running), goes_on=following is not None)
            # `reshard_after_forward=None`: until the open forward enters another unit
            if following is None or unit not in following.last:
                unit.free()
        if not self.step.running:
            release_idle_memory(self)

    def end_unseen(self) -> None:
        """All ranks come here, as an optimizer steps or an outermost forward begins: give up what
        is kept as `UNSEEN`. In the next forward they might judge differently what is out of date.
        """
        if self.phase is not Phase.WAITING:
            return  # optimizers in backward step while units are needed
        if not any(unit.step.pending > 0 for unit in self.units):
            self.step.iteration = None
        for unit in self.units:
            if Need.UNSEEN in unit.step.needed_by:
                unit.end_need(Need.UNSEEN)
                unit.free()

    # --- a second thread -------------------------------------------------------------------------

    @property
    def runs_elsewhere(self) -> bool:
        """Whether a forward is under way, and in another thread."""
        return self.step.thread.get(None, get_ident()) != get_ident()

    def refuse_second_thread(self, first: int | None) -> NoReturn:
        names = {thread.ident: thread.name for thread in enumerate_threads()}
        raise PhaseError(
            f"thread '{names.get(get_ident(), get_ident())}' came to unit '{self.name}' while"
            f" thread '{names.get(first, first)}' is in a forward or backward of it. A step is one"
            " thread's. Hold a lock around calls of the model; with shards, threads must come in"
            " one order on all ranks"
        )

    # --- a lost step -----------------------------------------------------------------------------
    #
    # | what raised | is noticed by | at once | in the next forward |
    # |---|---|---|---|
    # | a forward | `Visit.on_error`, innermost unit first | `on_error`: the outermost resets | - |
    # | a backward | `BackwardEnd.__del__` | `on_failed_backward` | `give_up_backward` resets |
    # | KeyboardInterrupt in a forward | nobody | - | `reset_interrupted` |
    #
    # `root_for_call` does what the last column says. All of it ends in `reset`.

    def on_error(self, unit: Unit) -> None:
        """A forward of `unit`'s module raised; called from the innermost annotated module
        outwards.
        """
        if unit in self.step.running:  # not if `_begin` raised, or `post_forward` has taken it out
            self.step.running.pop()
        if not self.step.running:
            self.reset(f"its forward raised {type(sys.exception()).__name__}")

    def on_failed_backward(self) -> None:
        """A backward raised. Modules hold at-rest parameters again, and a host frees what has been
        gathered; the next forward resets the rest. Waits for nothing.
        """
        with _LOSING:
            if self.phase is not Phase.LOST:
                return  # a forward has reset this step already, or another backward has begun
            for unit in self.units:
                unit.lose_backward()
                # with an accelerator a thread of autograd is here, beside the caller's next forward
                if not unit.step.calls and self._streams.here() is None and unit.is_unsharded:
                    unit.free()
            if not self.step.running:
                release_idle_memory(self)

    def give_up_backward(self) -> None:
        """No backward is under way: one that seems to be has raised."""
        if self.phase in (Phase.BACKWARD, Phase.LOST):
            self.reset("its backward did not finish")

    def reset(self, why: str = "") -> None:
        """Give up the step.

        1. What must not survive it is in `Step` and `UnitStep`: new ones take their place.
        2. Wait for what was launched, since all ranks launched the same; forget unreduced
           gradients, also those under `no_sync` (`PostBackward.drop`).
        3. Modules hold at-rest parameters, and what was gathered is freed, unless a scope keeps it.
        """
        with _LOSING:
            due, self.step = (self.step.iteration or Iteration(None)).due, Step()
        UNLANDED.pop(self, None)
        if why:
            logger.warning(
                "unit '%s': %s; the step is lost, and its state was reset", self.name, why
            )
        held = [unit.name for unit in self.units if unit.gradients.has_unreduced]
        if held:
            logger.warning(
                "gradients that were accumulated under no_sync are dropped (unit '%s' and others)",
                held[0],
            )
        errors = self.post_backward.drop(due)
        wait_for_traffic()  # gradients that have landed may be on their way to the host
        for unit in self.units:
            unit.drop_step()
            unit.swap_out()
            for group in unit.groups if not unit.must_stay else ():
                try:
                    group.reshard()
                except CommunicationError as error:
                    errors.append(error)  # what failed in flight must not keep the rest
            if Need.EXPLICIT in unit.kept_by:  # `unshard()` outlives a lost step
                unit.show()
        for unit in self.shared:  # of several modules, of which the lost forward has called some
            unit.end_forward()
        release_idle_memory(self)
        for each in errors:
            logger.warning("while unit '%s' was reset: %s", self.name, first_line(each))


# --- which root a call has ----------------------------------------------------------------------


def roots_of(units: Iterable[Unit]) -> list[Root]:
    return [root for root in dict.fromkeys(unit.root for unit in units) if root is not None]


def plan_root(unit: Unit) -> Root:
    """Plan the modules of `unit` and what is below them as one tree: when the outermost annotated
    module is called, and again after a unit or a module came or went below it.

    1. Find the units: those below the modules, and those that are replicated next to shards
       elsewhere, if modules below read a parameter of theirs. Units that are or were below another
       annotated model, too, are shared: they have a root of their own, whichever model calls them,
       because one object must reduce the gradients of a parameter.
    2. Name the units below the modules.
    3. Their former roots give up backwards that have raised. A former root of the same units goes
       on: modules that are not annotated have changed.
    4. Otherwise make a root, which the units follow from now on.

    A plan depends on annotations only, and not on which models are alive, because ranks may collect
    a dropped model at different times.
    """
    units = units_below(unit.modules)
    relations = unit.relations
    inside = (each.relations.number for each in relations.below)
    known = {relations.number, *relations.around, *inside}
    shared = [
        each
        for each in units
        if not known.issuperset(each.relations.around.keys() - {each.relations.number})
    ]
    owners = [unit_of(each) for module in unit.modules for each in module.parameters()]
    units += [owner for owner in owners if owner is not None and owner.kind is UnitKind.BESIDE]
    units = [each for each in dict.fromkeys(units) if each not in shared]
    rename_below(unit.modules, units)
    for former in roots_of(units):
        if not in_backward():  # checkpointing runs a part again: the backward goes on
            former.give_up_backward()
        if former.top is unit and set(former.units) == set(units):
            former.watch_tree(shared)
            return former
    root = Root(unit, units, shared)
    for each in units:
        each.follow_root(root)
    for each in shared:
        each.relations.share()
    return root


def root_of(unit: Unit) -> Root:
    """The root that `unit` has, or gets."""
    return unit.root or plan_root(unit)


def planned_roots(units: Sequence[Unit]) -> list[Root]:
    """The roots of these units; units that have none get one."""
    for unit in units:
        root_of(unit)
    return roots_of(units)


def root_for_call(unit: Unit, module: nn.Module, *, computes: bool) -> Root:
    """The root of a forward of `module` that begins.

    | the root of `unit` | is |
    |---|---|
    | none | planned |
    | in a forward of this thread, which calls `unit` | kept |
    | in a forward of another thread, which is in it | refused: a step is one thread's |
    | in a forward that an interrupt has ended without a word | reset |
    | in a backward of another thread | refused |
    | in a backward that raised | reset |
    | in no forward, and modules below have changed | planned anew |
    """
    root = unit.root
    if root is None:
        return plan_root(unit)
    if root.step.running:
        first, forward = root.step.thread.get(None), root.step.forward
        if first != get_ident() and not in_backward():
            if forward is None or is_called([forward.module], first):  # None: it begins or ends
                root.refuse_second_thread(first)
        # `join` and `skipped` enter it without a call on the stack. A forward may call itself, or
        # `generate` is called in the role of one.
        elif (
            forward is None
            or forward.module is not module
            or not computes
            or modules_inside("_call_impl", "_call_as_forward").count(module) > 1
        ):
            return root
        # an interrupt has ended the forward, in another thread or before it is entered again here
        reset_interrupted(root, "its forward did not end", entering=module)
    else:
        if root.phase is Phase.BACKWARD and not in_backward() and (first := _runs_backward()):
            root.refuse_second_thread(first)
        root.give_up_backward()
    # from where it was planned, as on ranks whose modules are as before
    if root.tree_changed() and plan_root(root.top) is not root:
        root.forget()
    return root_of(unit)


def _runs_backward() -> int | None:
    """Another thread that waits in a backward."""
    for thread, frame in sys._current_frames().items():
        names = [each.f_code.co_name for each, _ in walk_stack(frame)]
        if thread != get_ident() and "_engine_run_backward" in names:
            return thread
    return None


def prepare_roots(units: Sequence[Unit]) -> None:
    """These are about to be gathered outside of forwards. Follow what users have changed now, on
    all ranks: a forward of one rank alone would gather again what it finds changed.
    """
    with torch.no_grad():
        for root in planned_roots(units):
            # what is shown, offloaded or between two of its modules holds other tensors, on purpose
            if root.phase in (Phase.IDLE, Phase.WAITING) and not any(
                unit.kept_by or unit.shown_by or unit.is_offloaded or unit.step.to_run
                for unit in root.units
            ):
                root.prepare()


# --- a lost step, and reductions without a backward ---------------------------------------------


def reset_interrupted(root: Root, why: str = "", entering: nn.Module | None = None) -> None:
    """Give up the step, also of shared units that its forward was in, and close what a
    KeyboardInterrupt left open: torch does not tell forward hooks of it.
    """
    for each in (root, *(other for other in roots_of(root.shared) if other.step.running)):
        each.reset(why)
    for module in dict.fromkeys(below for top in root.modules for below in top.modules()):
        drop_calls(module, keep=int(module is entering))  # of the module's forward hooks
    notify(Observer.interrupted)


def end_interrupted(units: Iterable[Unit]) -> None:
    """All ranks come here, between two steps: give up forwards that a KeyboardInterrupt or a
    SystemExit has ended.
    """
    for root in roots_of(units):
        forward = root.step.forward
        if forward is not None and root.step.running and not is_called([forward.module]):
            reset_interrupted(root, "its forward did not end")


def reset(modules: Sequence[nn.Module]) -> None:
    """Give up the step that the roots of these modules are in."""
    for root in roots_of(units_below(modules)):
        reset_interrupted(root)


@torch.no_grad()
def launch_held(units: Sequence[Unit]) -> list[Root]:
    """Launch the reduction of what these units accumulated under `no_sync`, without a backward.
    Returns their roots, which `land_held` waits for.
    """
    roots = planned_roots(units)
    for root in roots:
        root.give_up_backward()
        land_held([root])
        try:
            root.post_backward.compare_held(root.name)
            root.post_backward.launch_held()
        except BaseException:
            root.reset()
            raise
        UNLANDED[root] = None
    return roots


def land_held(roots: Iterable[Root] = UNLANDED) -> None:
    """Wait for what `launch_held` launched for these roots, unless it has landed."""
    unlanded = [root for root in roots if root in UNLANDED]
    for root in unlanded:  # nothing is left of it if a hook of a user's has stepped an optimizer
        UNLANDED.pop(root, None)
        try:
            with torch.no_grad():
                root.post_backward.land_held()
        except BaseException:
            root.reset()
            raise
        wait_for_traffic()
    if unlanded:
        notify(Observer.gradients_landed)
