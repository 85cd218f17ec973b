"""`watch`: what goes wrong in a step is named before it spreads.

A bracket around the forwards of each unit's modules sees inputs and outputs, and tensor hooks on
them see their gradients. Gradients of parameters are seen on their rank in the messages that are
about to be reduced (`LAUNCHING`). Before the optimizer steps, which all ranks do, the ranks
exchange what each has seen first: two integers, and the words only where there is something to say.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final, Self
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from typing_extensions import override

from composable.algorithms.narration import open_scope
from composable.algorithms.together import LOST
from composable.algorithms.watch.agreement import Agreement, comms_of
from composable.algorithms.watch.checks import (
    GRADIENT,
    INPUT,
    OUTPUT,
    PARAMETER,
    Checks,
    First,
    version_of,
)
from composable.algorithms.watch.findings import Finding, show
from composable.algorithms.watch.incident import (
    Call,
    call_of,
    end_call,
    is_forward,
    keep_gradient,
    of_unit,
    write,
)
from composable.algorithms.watch.repeat import Repeat, candidates_in
from composable.api.scopes import units_in
from composable.comm import is_distributed
from composable.comm.base import LAUNCHING, GroupComm
from composable.compilation import backward_will_be_compiled, untraced, unwrapped
from composable.contract.hooks import detach, dispatcher_of
from composable.contract.tree import names_below
from composable.contract.values import tensors_in
from composable.engine.gradients.arrival import ArrivalBucket
from composable.engine.gradients.grad_bucket import GradBucket
from composable.engine.gradients.reduction import Plan
from composable.engine.params.param import labels_of
from composable.engine.params.param_group import ParamGroup
from composable.engine.step.observer import HEARERS, Observer
from composable.engine.step.root import Root
from composable.engine.step.unit import Unit, UnitCall, units_below
from composable.errors import (
    AlreadyAnnotatedError,
    AnnotationError,
    NonFiniteError,
    NotReproducedError,
    RanksDisagreeError,
    few,
    unit_name,
)
from composable.memory.torch_private import is_transformed, step_hooks
from composable.optim.in_backward import is_part_of_backward, stepped_in_backward
from composable.optim.shared import parameters_of
from composable.optim.stand_in import is_stand_in
from composable.state.whole import comms_of_model

logger = logging.getLogger("composable")

VARIABLE: Final = "COMPOSABLE_WATCH"
_MODES: Final = ("warn", "raise")
_NAME: Final = "watch"  # of the bracket
_NOTHING: Final = (1 << 62) - 1  # later than every clock
_GRADIENTS: Final = "gradient "  # labels of messages begin so
_LABEL: Final = "exchange of what watch has found"
# A scaler that begins at 2 ** 16 and halves is at 1 by then: infinities are not the scale's.
AGREE: Final = 100  # steps from one comparison of digests to the next
_EXPECTED_IN_A_ROW: Final = 24
_DROPOUTS: Final = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
_ERRORS: Final[dict[str, type[RuntimeError]]] = {
    "not finite": NonFiniteError,
    "ranks differ": RanksDisagreeError,
    "not reproduced": NotReproducedError,
}


class Place:
    """A unit, by its names below the watched model.

    Attributes:
        name: its FQN; `around` is that of the unit around it, or empty.
        reads, makes: the order of checks of one tensor, see `Seen`.
    """

    __slots__ = ("around", "makes", "name", "reads")

    def __init__(self, name: str, around: str, depth: int) -> None:
        self.name, self.around = name, around
        self.reads, self.makes = (0, -depth), (1, depth)


class _Bracket:
    """Around the forwards of one module of a unit; inert in copies of the model."""

    __slots__ = ("_place", "_unit", "_watch")

    def __init__(
        self, watch: Watch | None = None, unit: Unit | None = None, place: Place | None = None
    ) -> None:
        self._watch, self._unit, self._place = watch, unit, place

    def __deepcopy__(self, memo: object) -> _Bracket:
        return _Bracket()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Bracket, ()

    @untraced
    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        watch, unit, place = self._watch, self._unit, self._place
        if watch is not None and unit is not None and place is not None:
            if not unit.modules:  # the annotation was removed
                detach(module, _NAME)
            else:
                return watch.entered(unit, place, module, args, kwargs)
        return args, kwargs

    def leave(self, module: nn.Module, output: Any) -> Any:
        watch, unit, place = self._watch, self._unit, self._place
        if watch is not None and unit is not None and place is not None and unit.modules:
            watch.left(unit, place, output)
        return output

    def on_error(self, module: nn.Module) -> None:
        return None


class _GradientHook:
    """What autograd calls with the gradient of an input or output."""

    __slots__ = ("_forward", "_maker", "_name", "_order", "_place", "_unit", "_watch")

    def __init__(self, watch: Watch, name: str, unit: Unit, place: Place, *, made: bool) -> None:
        self._watch, self._name, self._unit, self._place = watch, name, unit, place
        self._maker = (place.around or place.name) if made else place.name
        self._order = place.makes if made else place.reads
        self._forward = _forward_of(unit)

    @untraced
    def __call__(self, gradient: Tensor) -> None:
        watch = self._watch
        if watch.looks:
            seen = [(self._name, gradient)]
            watch.checks.look(
                seen, GRADIENT, self._place.name, self._maker, self._order, forward=self._forward
            )
        if watch.compares and self._order is self._place.reads:
            # the unit was gathered for backward, and is not left yet
            watch.agreement.note_gathered(self._unit, self._place.name, "in backward")


class _Ear(Observer):
    """Hears of steps for all watches, and keeps no model alive.

    There is one, which no watch that is collected takes out of the lists of hearers: others that
    hear would miss what is said at that moment.
    """

    def __init__(self) -> None:
        self._backward: ReferenceType[Root] | None = None  # whose gradients are reduced now
        self._undo: list[Callable[[], object]] = []

    def begin(self) -> None:
        """A model is watched."""
        if not self._undo:
            LAUNCHING.append(self.launching)
            self._undo = [HEARERS.add(self), partial(LAUNCHING.remove, self.launching)]

    def end(self) -> None:
        """A watch was closed."""
        if not _open_watches():
            for undo in self._undo:
                undo()
            self._undo = []

    @override
    def enters(self, root: Root, call: UnitCall) -> None:
        for watch in _watches([call.unit]):
            watch.enters(root, call)

    @override
    def leaves(self, root: Root, call: UnitCall, keep: bool) -> None:
        for watch in _watches([call.unit]):
            watch.checks.clock += 1

    @override
    def opens_backward(self, root: Root) -> None:
        self._backward = ref(root)

    @override
    def comes_back(self, root: Root, call: UnitCall) -> None:
        self._backward = ref(root)
        for watch in _watches([call.unit]):
            watch.checks.come_back(call.number)

    @override
    def ends_backward(self, root: Root) -> None:
        self._backward = ref(root)
        for unit in root.units:
            for watch in _watches([unit]):
                watch.ran[unit] = None

    @override
    def gradients_landed(self) -> None:
        for watch in _open_watches():
            watch.landed()

    @override
    def communicates(self, what: str, parameters: Sequence[Tensor], *args: Any) -> None:
        if what == "reduce":
            units = _units_of(parameters)
            self._backward = ref(units[0].root) if units and units[0].root else None
        elif what == "unscale":
            for watch in _watches(_units_of(parameters)):
                watch.unscales()

    def launching(self, comm: GroupComm, label: str, args: Sequence[Any]) -> None:
        root = None if self._backward is None else self._backward()
        if root is not None and label.startswith(_GRADIENTS):
            for watch in _open_watches():
                if watch.looks:
                    watch.launching(root, label, args)


_EAR: Final = _Ear()


class Watch:
    """What `watch` returns, which makes it.

    Args:
        units: that are watched.
        names: their FQNs below the model.
        every, on, agree, folder, repeat: see `watch`.

    Attributes:
        findings: all of them, the same on every rank.
        step: the number of the step that is under way: of steps of the optimizer since `watch`.
        overflows: steps in which gradients had infinities because a loss scaler had scaled them.
        checks, agreement: of this step.
        places: of the units that are watched.
        ran: those of the roots that had a backward since the last exchange, on all ranks alike.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        names: dict[Unit, str],
        every: int = 1,
        on: str = "warn",
        agree: int = AGREE,
        folder: str | os.PathLike[str] | None = None,
        *,
        repeat: bool = False,
    ) -> None:
        self.findings: list[Finding] = []
        self.step = 0
        self.overflows = 0
        self.checks = Checks()
        self.ran: dict[Unit, None] = {}
        # weak: a module below several models would keep them all
        self.places = WeakKeyDictionary({unit: _place_of(unit, names) for unit in units})
        self._comms = comms_of_model(units)
        self._on_stream = units[0].mesh_info.all.traits.on_stream  # to read is to wait
        # by the label of their message, in one backward
        self._buckets: dict[str, tuple[Unit, Place, GradBucket]] = {}
        self.agreement = Agreement()
        self._every, self._on, self._agree = every, on, agree
        self._folder = None if folder is None else Path(folder)
        self._calls: dict[str, list[Call]] = {}  # of units in this step, if there is a folder
        self._written: set[str] = set()  # kinds of findings
        # numbers, which are never given again
        self._optimizers: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._numbers = count()
        self._scaled = False
        self._in_a_row = 0  # overflows
        self._trains = False  # the last forward began with gradients
        self._begun: set[str] = set()  # units whose parameters were looked at in this step
        self._heard: set[str] = set()  # whose gradients were
        # Outputs that were looked at, and their versions: they are the inputs of other units.
        self._known: dict[int, tuple[ReferenceType[Tensor], int]] = {}
        self._handles: list[Any] = []  # of hooks on leaves, which outlive the step
        self._reported: set[tuple[str, ...]] = set()
        # weak, as `places`; all ranks have as many, whichever of them are gone
        self._in_turn = [ref(unit) for unit in (candidates_in(units) if repeat else ())]
        self._repeat = self._next_repeat()
        self._is_open = True
        for unit, place in self.places.items():
            _WATCHES[unit] = ref(self)
            for module in unit.modules:
                if (dispatcher := dispatcher_of(module)) is not None:
                    dispatcher.add(_NAME, _Bracket(self, unit, place))
        _OPEN[:] = [*(each for each in _OPEN if each() is not None), ref(self)]
        _EAR.begin()

    def close(self) -> None:
        """End it, on all ranks, between two steps."""
        if self._is_open:
            self._is_open = False
            _OPEN.remove(ref(self))
            for unit in list(self.places):
                _WATCHES.pop(unit, None)
                for module in unit.modules:
                    detach(module, _NAME)
        _EAR.end()
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- what is seen ----------------------------------------------------------------------------

    @property
    def looks(self) -> bool:
        """Whether this step is one of those that are looked at."""
        return self.step % self._every == 0

    @property
    def compares(self) -> bool:
        """Whether the ranks compare digests at the end of this step."""
        return self._agree > 0 and self.step % self._agree == 0

    @property
    def _looks_now(self) -> bool:
        # inside of a forward with gradients: reentrant checkpointing turns them off
        return self.looks and (self._trains or torch.is_grad_enabled())

    def enters(self, root: Root, call: UnitCall) -> None:
        """Hear that a unit is entered; with the outermost one a forward begins.

        Args:
            root: whose forward it is.
            call: of the unit.
        """
        self.checks.clock += 1
        if call.root is not root or root.step.running:
            return
        self._trains = torch.is_grad_enabled()
        if self.compares and self._trains:
            self.agreement.begin(self._named_units())
            if any(module.training and module.p > 0 for module in _dropouts(root)):
                self.agreement.note_draws(root.units[0].mesh_info.device)
        if self._looks_now:
            for unit in root.units:
                if (place := self.places.get(unit)) is not None and place.name not in self._begun:
                    self._begun.add(place.name)
                    self._look_at_rest(unit, place)

    def _look_at_rest(self, unit: Unit, place: Place) -> None:
        for group in unit.groups:
            named = partial(_at_rest, group)
            if group.shard is None or self._on_stream:
                self.checks.look(named(), PARAMETER, place.name, place.name)
            else:
                self.checks.look_together([group.shard], named, PARAMETER, place.name)

    def entered(
        self, unit: Unit, place: Place, module: nn.Module, args: Any, kwargs: Any
    ) -> tuple[Any, Any]:
        """Look at the inputs of a module that is about to compute.

        Args:
            unit: of the module.
            place: its names.
            module: that computes.
            args: its inputs.
            kwargs: its inputs by name.

        Returns:
            What it computes with.
        """
        in_training = self._trains and unit.step.calls[-1].number is not None
        if self.compares and in_training:  # one rank alone may evaluate
            self.agreement.note_gathered(unit, place.name, "in forward")
        if not self._looks_now:
            return args, kwargs
        if self._folder is not None and in_training and is_forward() and not is_transformed():
            call = call_of(unit, module, args, kwargs)
            self._calls.setdefault(place.name, []).append(call)
        named = list(_named(INPUT, (*enumerate(args), *kwargs.items())))
        maker = place.around or place.name
        for usual in (False, True):  # what requires no gradient may be a mask
            fresh = [(n, t) for n, t in named if t.requires_grad != usual and not self._knows(t)]
            self.checks.look(
                fresh, INPUT, place.name, maker, usual=usual, forward=_forward_of(unit)
            )
        self._watch_gradients(unit, place, named, made=False)
        repeat = self._repeated(unit)
        return (args, kwargs) if repeat is None else repeat.begin(module, args, kwargs)

    def left(self, unit: Unit, place: Place, output: Any) -> None:
        """Look at the outputs of a module that has computed.

        Args:
            unit: of the module.
            place: its names.
            output: what it returned.
        """
        if not self._looks_now:
            return
        several = isinstance(output, (tuple, list))
        items = (
            output.items()
            if isinstance(output, dict)
            else enumerate(output if several else [output])
        )
        named = list(_named(OUTPUT, items))
        self.checks.look(named, OUTPUT, place.name, place.name, forward=_forward_of(unit))
        for _, tensor in named:
            self._known[id(tensor)] = ref(tensor), version_of(tensor)
        number = unit.step.calls[-1].number
        begun = (each for each in reversed(self._calls.get(place.name, ())) if not each.ended)
        call = next((each for each in begun if each.forward == number), None)
        if call is not None:
            end_call(call, output)
        self._watch_gradients(unit, place, named, made=True, call=call)
        repeat = self._repeated(unit)
        if repeat is not None:
            repeat.end(output)

    def _next_repeat(self) -> Repeat | None:
        """Of the units in turn, on all ranks the same one."""
        unit = self._in_turn[self.step % len(self._in_turn)]() if self._in_turn else None
        return None if unit is None else Repeat(unit)

    def _repeated(self, unit: Unit) -> Repeat | None:
        """What repeats this call of `unit`, if anything; no recomputation."""
        repeat = self._repeat
        if repeat is None or repeat.unit is not unit or unit.step.calls[-1].number is None:
            return None
        return repeat

    def _named_units(self) -> list[tuple[Unit, str]]:
        return [(unit, place.name) for unit, place in self.places.items()]

    def _knows(self, tensor: Tensor) -> bool:
        found = self._known.get(id(tensor))
        return found is not None and found[0]() is tensor and found[1] == version_of(tensor)

    def _watch_gradients(
        self,
        unit: Unit,
        place: Place,
        named: Iterable[tuple[str, Tensor]],
        *,
        made: bool,
        call: Call | None = None,
    ) -> None:
        if backward_will_be_compiled():
            return
        for index, (name, tensor) in enumerate(named):
            # hooks on parameters are the engine's matter; the messages have their gradients
            if not tensor.requires_grad or isinstance(tensor, nn.Parameter):
                continue
            hook = _GradientHook(self, f"gradient of {name}", unit, place, made=made)
            handle = tensor.register_hook(hook)
            if call is not None:
                tensor.register_hook(partial(keep_gradient, call.gradients, index))
            if tensor.grad_fn is None:
                self._handles.append(handle)

    def launching(self, root: Root, label: str, args: Sequence[Any]) -> None:
        """Look at a message with gradients that is about to be reduced.

        Args:
            root: whose gradients these are; another model may have the same labels.
            label: of the message.
            args: of `GroupComm._start`.
        """
        if label not in self._buckets:
            self._buckets = {
                bucket.reducer.label: (unit, place, bucket)
                for unit, place in self.places.items()
                for bucket in (*unit.gradients.buckets, *self._by_arrival(unit))
            }
        found = self._buckets.get(label)
        if found is None or found[0].root is not root:
            return
        _, place, bucket = found
        plan = _plan_of(bucket, args)
        if plan is None:
            return
        self._heard.add(place.name)
        named = partial(_gradients_in, bucket, plan, args)
        if self._repeat is not None and self.places[self._repeat.unit] is place:
            self._repeat.note_weights(bucket, named())
        if self._on_stream:
            self.checks.look(named(), GRADIENT, place.name, place.name, place.makes)
        else:
            self.checks.look_together(args[-1], named, GRADIENT, place.name, place.makes)

    def _by_arrival(self, unit: Unit) -> list[ArrivalBucket]:
        roots = [unit.root] if unit.root is not None else []
        buckets = [each for root in roots for each in root.post_backward.buckets.buckets]
        return [bucket for bucket in buckets if bucket.unit is unit.gradients]

    def _look_at_landed(self) -> None:
        """Gradients that were in no message that is known: of one rank, or of users' hooks."""
        for unit, place in self.places.items():
            if unit.trains and place.name not in self._heard:
                there = [
                    (param.fqn, gradient)
                    for param in unit.params
                    if (gradient := param.at_rest.grad) is not None
                ]
                self.checks.look(there, GRADIENT, place.name, place.name, place.makes)

    # --- the end of a step -----------------------------------------------------------------------

    def landed(self) -> None:
        """A backward has landed its gradients; maybe it has stepped, too."""
        self._buckets = {}
        if self.ran and open_scope() is None:
            params = (param.at_rest for unit in self.places for param in unit.params)
            if stepped_in_backward(params) is not None:
                self.end_step()

    def unscales(self) -> None:
        """A scaler is about to look for infinities: it may skip the step of the optimizer."""
        self._scaled = True
        if open_scope() is None:  # there ranks without data are not told yet
            self.end_step()

    def note(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step parameters of the model."""
        if optimizer not in self._optimizers:
            self._optimizers[optimizer] = next(self._numbers)
        if self.compares:
            self.agreement.note_options(self._optimizers[optimizer], optimizer)

    def end_step(self) -> None:
        """Exchange what the ranks have found; all of them call it.

        Optimizers do before they step. Call it by hand where a step is given up.

        Raises:
            NonFiniteError: a value is not finite, with `on="raise"`.
            RanksDisagreeError: ranks differ, with `on="raise"`.
            NotReproducedError: a unit that ran again computed other bits, with `on="raise"`.
        """
        if not self.ran:
            return
        found: list[Finding] = []
        if self.looks:
            self._look_at_landed()
            found += self._first_not_finite()
        if self.compares:
            found += self._first_difference()
        if self._repeat is not None and self._repeat.unit in self.ran:
            found += self._run_again(self._repeat)
        self._write(found)
        self._end()
        self.step += 1
        self._repeat = self._next_repeat()
        self._report(found)

    def lose_step(self) -> None:
        """All ranks have lost the step, and have seen different parts of it."""
        self._end()
        self.checks.drop()
        self.agreement.drop()
        self._repeat = self._next_repeat()

    def _end(self) -> None:
        for calls in self._calls.values():
            for call in calls:  # whoever keeps the loss keeps hooks that have them
                call.gradients.clear()
        if self._repeat is not None:
            self._repeat.drop()
        for handle in self._handles:
            handle.remove()
        self._handles, self._known, self._buckets, self._calls = [], {}, {}, {}
        self._begun, self._heard = set(), set()
        self.ran, self._scaled = {}, False

    def _first_not_finite(self) -> Iterator[Finding]:
        scaled = self._scaled and self._in_a_row < _EXPECTED_IN_A_ROW
        first, overflow = self.checks.end(scaled=scaled)
        clock, overflows = self._lowest(
            [_NOTHING if first is None else first.seen.clock, -int(overflow and self._scaled)]
        )
        self._in_a_row = self._in_a_row + 1 if overflows else 0
        if overflows:
            self.overflows += 1
            if self.overflows == 1 and clock == _NOTHING:
                yield _overflow(self.step)
        if clock != _NOTHING:
            yield _finding(self.step, self._said((first, self._call_of(first))))

    def _first_difference(self) -> list[Finding]:
        self.agreement.note_rest(self._named_units())
        found = self.agreement.compare(self.step, comms_of(self.places))
        # ranks of other replicas and shards hear of it, too
        if self._lowest([-len(found)]) == [0]:
            return []
        said = [each for _, some in self._said(found) for each in some]
        hints = [each for each in said if each.kind == "hint"]
        return [*[each for each in said if each.kind != "hint"][:1], *hints[:1]]

    def _run_again(self, repeat: Repeat) -> list[Finding]:
        name = self.places[repeat.unit].name
        differs, why = repeat.run()
        if self._lowest([-int(bool(differs or why))]) == [0]:
            return []
        said = [(rank, *texts) for rank, texts in self._said((differs, why)) if any(texts)]
        wrong = [rank for rank, text, _ in said if text]
        if not wrong:
            ranks = tuple(rank for rank, _, _ in said)
            what = f"unit '{name}' cannot be compared with itself: {said[0][2]}"
            return [Finding("hint", self.step, ranks, name, "", "", what)]
        return [
            Finding(
                "not reproduced", self.step, tuple(wrong), name, "again",
                next(text for rank, text, _ in said if rank == wrong[0]),
                "a unit that ran again computed other bits",
                (("made by", "the machine: two later runs have the same bits, the first has not"),),
            )
        ]  # fmt: skip

    def _lowest(self, values: Sequence[int]) -> list[int]:
        """The lowest over all ranks, one by one."""
        lowest = list(values)
        for comm in self._comms:
            lowest, _ = comm.min_max(lowest, _LABEL)
        return lowest

    def _said(self, mine: Any) -> list[tuple[int, Any]]:
        """What each rank says, by its number among all."""
        said = [(dist.get_rank() if is_distributed() else 0, mine)]
        for comm in self._comms:
            said = [each for some in comm.all_gather_objects(said, _LABEL) for each in some]
        return said

    def _write(self, found: Sequence[Finding]) -> None:
        """Write the first finding of each kind to the folder."""
        rank = dist.get_rank() if is_distributed() else 0
        for finding in found:
            if finding.kind in (*self._written, "hint"):
                continue
            self._written.add(finding.kind)
            ranks = [number for number, _ in self._said(None)]
            if self._folder is None:
                continue
            unit = next((u for u, place in self.places.items() if place.name == finding.unit), None)
            calls = self._calls.get(finding.unit, [])
            last = len(calls) - 1
            call = calls[min(finding.call, last) if finding.call >= 0 else last] if calls else None
            more = {
                "ranks": ranks,
                "gathered": self.agreement.last if self.compares else {},
                "why": _why_not_again(unit),
            }
            if unit is not None and not more["why"]:
                more |= of_unit(unit, dict(self._named_units()), len(calls), call)
            try:
                write(self._folder, finding, rank, more)
            except (OSError, RuntimeError) as error:  # of this rank alone
                logger.warning("watch: rank %d has written no incident: %s", rank, error)

    def _call_of(self, first: First | None) -> int:
        """Which call of its unit in this step the finding is in; -1 for the last."""
        calls = [] if first is None else self._calls.get(first.seen.maker, [])
        numbers = [call.forward for call in calls]
        wanted = None if first is None else first.seen.forward
        return numbers.index(wanted) if wanted is not None and wanted in numbers else -1

    def _report(self, found: Sequence[Finding]) -> None:
        self.findings += found
        for finding in found:
            if finding.place not in self._reported:
                self._reported.add(finding.place)
                if all(comm.rank == 0 for comm in self._comms):  # of those that have the model
                    show(finding)
        errors = [finding for finding in found if finding.kind in _ERRORS]
        if errors and self._on == "raise":
            raise _ERRORS[errors[0].kind](str(errors[0]))


def _why_not_again(unit: Unit | None) -> str:
    """Why one process cannot run the unit of a finding again; empty if it can."""
    if unit is None:
        return "it is about no unit"
    below = [param for each in units_below(unit.modules) for param in each.params]
    if not all(param.info.form.is_whole for param in below):
        return "its parameters are tensor-parallel"
    if stepped_in_backward([param.at_rest for param in below]):
        return "backward has stepped the unit's parameters"
    return ""


def _place_of(unit: Unit, names: dict[Unit, str]) -> Place:
    own = names[unit]
    # the longest name of another unit that it lies below
    outer = [
        name
        for other, name in names.items()
        if other is not unit and (not name or own.startswith(f"{name}."))
    ]
    around = unit_name(max(outer, key=len)) if outer else ""
    return Place(unit_name(own), around, len(outer))


def _dropouts(root: Root) -> Iterator[Any]:
    for module in root.modules:
        yield from (below for below in module.modules() if isinstance(below, _DROPOUTS))


def _forward_of(unit: Unit) -> int | None:
    """The number of the forward that runs; None if nobody will say that its backward came."""
    return None if backward_will_be_compiled() else unit.step.calls[-1].number


def _named(kind: str, items: Iterable[tuple[Any, Any]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors in inputs or outputs, with names: `input 0`, `input mask`, `output 1.2`."""
    for key, value in items:
        tensors = tensors_in(value)
        for index, tensor in enumerate(tensors):
            yield f"{kind} {key}" + (f".{index}" if len(tensors) > 1 else ""), tensor


def _at_rest(group: ParamGroup) -> list[tuple[str, Tensor]]:
    return [(param.fqn, param.at_rest) for param in group.params]


def _plan_of(bucket: GradBucket, args: Sequence[Any]) -> Plan | None:
    """The plan of a message, whose launch is called with `args` (`GroupComm._start`)."""
    plans: Iterable[Plan] = bucket.reducer.plans.values()
    if args[0] == "all_reduce":
        numel, first = args[-1][0].numel(), bucket.reducer.plans.get(bucket.trainable)
        plans = [each for each in (first, *plans) if each is not None]
        return next((each for each in plans if each.layout.numel == numel), None)
    return next((each for each in plans if each.sent is args[-1][-1]), None)


def _gradients_in(
    bucket: GradBucket, plan: Plan, args: Sequence[Any]
) -> Iterator[tuple[str, Tensor]]:
    """The gradients in a message, with the names of their parameters."""
    layout, params = plan.layout, bucket.params
    if args[0] == "all_reduce":
        views = plan.views(args[-1][0], layout.trainable)
        for index, view in zip(layout.trainable, views, strict=True):
            yield params[index].fqn, view
        return
    for (index, _), term in zip(layout.direct, args[-1], strict=False):
        yield params[index].fqn, term
    for index, start, numel in layout.columns:
        yield params[index].fqn, plan.rows[:, start : start + numel]


# --- findings ------------------------------------------------------------------------------------


def _overflow(step: int) -> Finding:
    return Finding(
        "hint", step, (0,), "", GRADIENT, "",
        "gradients have infinities, as is expected of a loss scaler, which skips the step."
        " The next ones are counted (`overflows`)",
    )  # fmt: skip


_MADE: Final = {
    PARAMETER: "the last step of the optimizer, a load, or a write",
    INPUT: "the code of unit '{maker}' before it calls unit '{unit}'",
    OUTPUT: "the forward of unit '{maker}'",
    GRADIENT: "the backward of unit '{maker}'",
}


def _finding(step: int, said: Sequence[tuple[int, tuple[First | None, int]]]) -> Finding:
    """Put what the ranks have seen first into words; the earliest decides."""
    calls = {rank: call for rank, (_, call) in said}
    seen = sorted(
        (
            (each.seen.clock, each.seen.order, rank, each)
            for rank, (each, _) in said
            if each is not None
        ),
        key=lambda row: row[:3],
    )
    (_, _, _, first), where = seen[0], seen[0][3].seen
    ranks = [rank for _, _, rank, each in seen if each.seen[2:6] == where[2:6]]
    others = [
        f"rank {rank} ({each.seen.unit}, {each.seen.tensor})"
        for _, _, rank, each in seen
        if rank not in ranks
    ]
    made = _MADE[where.phase].format(maker=where.maker, unit=where.unit)
    outermost = where.maker == where.unit
    if where.phase == INPUT and outermost:
        made = "the batch: it was there before the model was called"
    if where.phase == GRADIENT and where.tensor.startswith(f"gradient of {OUTPUT}") and outermost:
        made = "the loss, or what is between it and the model"
    tensor = where.tensor
    if where.phase in (INPUT, GRADIENT) and not outermost:
        tensor = f"{tensor} of unit '{where.unit}'"
    kind = str(where.dtype).removeprefix("torch.")
    return Finding(
        "not finite", step, tuple(ranks), where.maker, where.phase, tensor,
        f"{first.what} in the {where.phase}s",
        (
            ("is", f"{kind} {tuple(where.shape)}"),
            ("made by", made),
            ("also", few(others)),
        ),
        calls[ranks[0]],
    )  # fmt: skip


# --- optimizers, the environment -----------------------------------------------------------------

# weak: a watch has its units, and brackets of their modules have the watch
_WATCHES: Final[WeakKeyDictionary[Unit, ReferenceType[Watch]]] = WeakKeyDictionary()
_OPEN: Final[list[ReferenceType[Watch]]] = []  # as they began, since they communicate in turn
_HOOKED: Final[WeakSet[Optimizer]] = WeakSet()


def _units_of(parameters: Sequence[Tensor]) -> list[Unit]:
    owners = dict.fromkeys(
        label.owner for label in labels_of(parameters) if label is not None and label.owner
    )
    return [unit for owner in owners if isinstance(unit := owner(), Unit)]


def _open_watches() -> list[Watch]:
    return [watch for each in _OPEN if (watch := each()) is not None]


def _watches(units: Iterable[Unit]) -> list[Watch]:
    found = (_WATCHES[unit]() for unit in units if unit in _WATCHES)
    return list(dict.fromkeys(watch for watch in found if watch is not None))


def _lost(units: Iterable[Unit]) -> None:
    for watch in _watches(units):
        watch.lose_step()


@untraced
def _before_steps(optimizer: Optimizer, *_: Any) -> None:
    """Hook the optimizer itself.

    Its own hooks come behind all global ones, and so behind that by which `join` tells ranks
    without data of the step.
    """
    if _WATCHES and optimizer not in _HOOKED and not is_stand_in(optimizer):
        _HOOKED.add(optimizer)
        handle = optimizer.register_step_pre_hook(_before_step)
        # first of them: the last place is that of steps on shards
        step_hooks(optimizer)[0].move_to_end(handle.id, last=False)


@untraced
def _before_step(optimizer: Optimizer, *_: Any) -> None:
    if _WATCHES and not is_part_of_backward(optimizer):
        for watch in _watches(_units_of(parameters_of(optimizer))):
            watch.note(optimizer)
            watch.end_step()


class _Starter(Observer):
    """Watches every model that is trained."""

    def __init__(self, on: str) -> None:
        self._on = on

    @override
    def enters(self, root: Root, call: UnitCall) -> None:
        if call.root is root and not root.step.running and torch.is_grad_enabled():
            fresh = [unit for unit in root.units if unit not in _WATCHES]
            if fresh:
                Watch(fresh, {unit: _fqn(unit.name) for unit in fresh}, on=self._on)


def _fqn(name: str) -> str:
    return "" if name == unit_name("") else name


register_optimizer_step_pre_hook(_before_steps)
LOST.append(_lost)
if (_wanted := os.environ.get(VARIABLE, "0").strip()) not in ("", "0"):
    HEARERS.add(_Starter("raise" if _wanted == "raise" else "warn"))


def watch(
    model: nn.Module,
    every: int = 1,
    on: str = "warn",
    *,
    agree: int = AGREE,
    folder: str | os.PathLike[str] | None = None,
    repeat: bool = False,
) -> Watch:
    """Name what goes wrong in a step, before it spreads: rank, unit, phase, tensor, step.

    Two things are looked for: the first value that is not finite, and ranks that differ in what
    must be equal.

    Values that are not finite: looked at are parameters before a step, inputs and outputs of units,
    their gradients, and gradients of parameters on their rank, before they are reduced. Nothing
    waits for the device until the optimizer steps: then the ranks exchange what each has seen
    first. Every `every` steps that costs one read of what is looked at, and a small message.

    An infinity in gradients that a loss scaler has scaled is expected: it is counted, and said
    once. Infinities below zero in inputs and outputs, such as those of masks, are named only if a
    NaN follows from them.

    Ranks that differ: every `agree` steps the ranks compare digests of parameters and landed
    gradients of replicas, of gathered parameters with the rank whose rows they are, of buffers that
    no forward writes to, and the optimizers' hyper-parameters. If dropout would drop the same
    places on all ranks, a hint says so. Units with communication hooks are not compared.

    Under a pipeline schedule call it after the first step, in which torch runs stages on memory
    that was never written to.

    All ranks call it, between two steps, when the model is annotated. `COMPOSABLE_WATCH=1` in the
    environment of all ranks watches every annotated model, `COMPOSABLE_WATCH=raise` as `on="raise"`
    does.

    Args:
        model: an annotated module, or one that contains some.
        every: look at one step in so many.
        on: "warn" logs each finding once, "raise" also raises it on all ranks before the optimizer
            steps.
        agree: compare the ranks every so many steps; 0 for never.
        folder: where each rank writes what `python -m composable replay` needs to run the unit of
            a finding again, once for each kind of finding. Until the optimizer steps, the inputs
            of units and the gradients of their outputs stay in memory for it.
        repeat: in each step one unit, in turn, runs again before the optimizer steps, and its bits
            are compared: outputs, gradients of inputs, and of sharded parameters. It finds a
            machine that computes wrongly, at the cost of a unit; where kernels are not
            deterministic a hint says so. Left out are units with units inside, with hooks of the
            user's, compiled, tensor-parallel or with synchronised batch norms, other methods than
            forward, and calls to which several backwards come; gradients also where one output is
            computed from another. What a forward changes besides buffers and the generator (an
            attribute, Python's `random`) it changes twice. Not with torch.compile around the model,
            nor with collectives of your own in a unit.

    Returns:
        The watch, with its `findings`. `close()` ends it; it is also a context.

    Raises:
        NotAnnotatedError: no annotated module in `model`.
        AlreadyAnnotatedError: it is watched already.
        AnnotationError: `every` is less than 1, or `on` is unknown.

    Example:
        >>> fully_shard(model, policy={Block})
        >>> watch(model, on="raise")
    """
    if every < 1:
        raise AnnotationError(f"watch: every must be at least 1, got {every}")
    if on not in _MODES:
        raise AnnotationError(f"watch: on must be 'warn' or 'raise', got {on!r}")
    model = unwrapped(model)
    units = units_in("watch", model)
    for unit in units:
        if unit in _WATCHES:
            raise AlreadyAnnotatedError(
                f"watch: unit '{unit.name}' is watched already; call close() on what the first"
                " watch returned"
            )
    fqns = names_below(model)
    names = {unit: fqns.get(id(unit.modules[0]), unit.name) for unit in units}
    return Watch(units, names, every, on, agree, folder, repeat=repeat)
