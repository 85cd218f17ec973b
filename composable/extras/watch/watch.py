"""`watch`: what goes wrong in a step is named before it spreads.

A step, from `watch` to a finding: `_Bracket` and `_StepObserver` notify `RankObserver` of forwards,
backwards and messages. `RankObserver` looks at values (`findings.py`) and digests (`agreement.py`).
Before the optimizer steps, which all ranks do, `Watch.end_step` exchanges the first finding of each
rank: two integers, and the text only if there is a finding. Operators of a unit run again at once
(`repeat.py`); calls that are kept run again from a folder (`incident.py`, `replay.py`).

| event                                      | notified by                     | to               |
|--------------------------------------------|---------------------------------|------------------|
| a forward begins, units are entered, left  | `_StepObserver`, of `OBSERVERS` | `RankObserver`   |
| a module is about to compute, has computed | `_Bracket`                      | `RankObserver`   |
| backward comes to a unit, and ends         | `_StepObserver`                 | `RankObserver`   |
| a message is launched                      | `_StepObserver.launching`       | `RankObserver`   |
| gradients have landed, are unscaled        | `_StepObserver`                 | `Watch`          |
| an optimizer steps                         | `_before_step`                  | `Watch.end_step` |
| `together` has lost the step               | `_StepObserver`                 | `RankObserver`   |
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial, wraps
from itertools import count
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Self
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary
from typing_extensions import override

from composable.checked import NonNegativeInt, PositiveInt
from composable.comm.backends import is_distributed
from composable.comm.base import Columns, GroupComm, observe_launches
from composable.comm.launch import Launch, LaunchKind
from composable.compilation import backward_will_be_compiled, untraced, unwrapped
from composable.contract.hooks import detach, dispatcher_of
from composable.contract.tree import annotation_of, names_below
from composable.contract.values import parameters_of, tensors_in
from composable.errors import (
    AlreadyAnnotatedError,
    NonFiniteError,
    NotReproducedError,
    RanksDisagreeError,
    unit_name,
)
from composable.extras.watch import incident
from composable.extras.watch.agreement import Agreement, Named
from composable.extras.watch.findings import (
    GRADIENT,
    HINT,
    INPUT,
    OUTPUT,
    PARAMETER,
    Checks,
    Finding,
    First,
    hint,
    not_finite,
    not_reproduced,
    overflow,
)
from composable.extras.watch.incident import (
    ModuleCall,
    call_of,
    is_forward,
    keep_gradient,
    version_of,
)
from composable.extras.watch.repeat import Repeat, candidates_in
from composable.seams import (
    Call,
    Observer,
    Param,
    ReducePlan,
    Root,
    StandIn,
    Unit,
    checked_on_all_ranks,
    comms_of_model,
    is_part_of_backward,
    label_of,
    observe,
    open_scope,
    stepped_in_backward,
    units_in,
)
from composable.torch_private import is_transformed, step_hooks

logger = logging.getLogger("composable")

VARIABLE: Final = "COMPOSABLE_WATCH"
AGREE: Final = 100  # steps from one comparison of digests to the next
_NEVER: Final = (1 << 62) - 1  # later than every clock
_LAUNCH: Final = Launch("exchange of what watch has found")
# A scaler that begins at 2 ** 16 and halves is at 1 by then: infinities are not the scale's.
_EXPECTED_IN_A_ROW: Final = 24
# Parameters are what they are before the first forward, whose inputs are seen at the same clock.
_AT_REST: Final = (-1, 0)
_NAME: Final = "watch"  # of brackets
# As they began, since they communicate in turn. Weak: brackets of a model have its watch.
_OPEN: Final[list[ReferenceType[Watch]]] = []
# What ends that they are notified: models that nobody watches would pay for it, too.
_LISTENING: Final[list[Callable[[], object]]] = []
_HOOKED: Final[WeakSet[Optimizer]] = WeakSet()
_ERRORS: Final[dict[str, type[RuntimeError]]] = {
    "not finite": NonFiniteError,
    "ranks differ": RanksDisagreeError,
    "not reproduced": NotReproducedError,
}


@checked_on_all_ranks
def watch(
    module: nn.Module,
    *,
    every: PositiveInt = 1,
    action: Literal["warn", "raise"] = "warn",
    agree: NonNegativeInt = AGREE,
    folder: str | os.PathLike[str] | None = None,
    repeat: bool = False,
) -> Watch:
    """Name what goes wrong in a step, before it spreads: rank, unit, phase, tensor, step.

    The watch looks for two things: the first value that is not finite, and ranks that differ in
    values that must be equal.

    Values that are not finite: the watch looks at parameters before a step, at inputs and outputs
    of units, at their gradients, and at gradients of parameters on each rank before the reduction.
    The host does not wait for the device until the optimizer steps. Then the ranks exchange the
    first finding of each rank. Every `every` steps this costs one read of these tensors, and a
    small message.

    An infinity in gradients that a loss scaler has scaled is expected. The watch counts it, and
    reports it once. It reports negative infinities in inputs and outputs, such as those of masks,
    only if a NaN follows from them.

    Ranks that differ: every `agree` steps the ranks compare digests. They compare parameters and
    landed gradients of replicas, gathered parameters with the rank that owns the rows, buffers that
    the program does not write to, and hyper-parameters of optimizers that are plain values. If
    dropout drops the same positions on all ranks, a hint says so. The watch does not compare units
    with communication hooks, or replicas that train apart under `local_steps`.

    Under a pipeline schedule, call this after the first step, because torch runs the stages in that
    step on uninitialised memory.

    All ranks call this after they annotate the model, between two steps. `COMPOSABLE_WATCH=1` in
    the environment of all ranks watches every annotated model. `COMPOSABLE_WATCH=raise` also sets
    `action="raise"`.

    Args:
        module: an annotated module, or one that contains some.
        every: look for values that are not finite in one of this many steps.
        action: "warn" logs each finding once, "raise" also raises it on all ranks before the
            optimizer steps. Hints are logged only.
        agree: compare the ranks every this many steps; 0 for never.
        folder: where each rank writes the data with which `python -m composable replay` runs the
            unit of a finding again, once for each kind of finding. For this, the inputs of units
            and the gradients of their outputs stay in memory until the optimizer steps.
        repeat: look for a machine that computes wrongly. In each step, the next unit runs each
            operator of its forward and backward twice in a row on the same tensors, and the watch
            compares the bits. This costs the computation of one unit. If a kernel is not
            deterministic, a hint says so. Python code, modules, hooks and random generators run
            once. Not repeated are units that contain units, tensor-parallel and compiled units,
            operators that are not torch's own or are on tensors of subclasses, and operators under
            a `TorchDispatchMode`, such as selective checkpointing.

    Returns:
        The watch, with its `findings` and `hints`. `remove()` ends it. As a context manager, it
        ends with its body.

    Raises:
        NotAnnotatedError: no annotated module in `module`.
        AlreadyAnnotatedError: `module` is already watched.
        ArgumentError: `every` is less than 1, or `action` is unknown.

    Example:
        >>> fully_shard(model, policy={Block})
        >>> watch(model, action="raise")
    """
    module = unwrapped(module)
    units = units_in(module, caller="watch")
    for unit in units:
        if _watch_of(unit) is not None:
            raise AlreadyAnnotatedError(
                f"watch: unit '{unit.name}' is watched already; call remove() on what the first"
                f" watch returned, or leave {VARIABLE} out of the environment"
            )
    fqns = names_below(module)
    names = {unit: fqns.get(id(unit.modules[0]), unit.name) for unit in units}
    observer = RankObserver(names, int(every), int(agree), keeps=folder is not None, repeat=repeat)
    return Watch(names, observer, action, folder)


class Watch:
    """What `watch` returns.

    Args:
        names: the FQNs of the units that are watched.
        observer: what this rank sees of them.
        action, folder: see `watch`.

    Attributes:
        findings: all of them, the same on every rank.
        hints: observations that are not errors: effects of a loss scaler or a seed, and reasons why
            a unit cannot be compared.
        overflows: number of steps in which gradients had infinities because a loss scaler had
            scaled them.
        observer: what this rank sees.

    Example:
        >>> watching = watch(model)
        >>> loss_of(model, batch).backward()
        >>> for finding in watching.findings:
        ...     print(finding)
    """

    def __init__(
        self,
        names: Mapping[Unit, str],
        observer: RankObserver,
        action: str,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        self.findings: list[Finding] = []
        self.hints: list[Finding] = []
        self.overflows = 0
        self.observer = observer
        # also while `local_steps` keeps replicas apart
        units = list(names)
        self._comms = [units[0].spec.mesh_info.all, *comms_of_model(units)[1:]]
        self._action = action
        self._folder = None if folder is None else Path(folder)
        self._written: set[str] = set()  # kinds of findings
        self._ranks: list[int] = []  # all that have a part of the model, from the last exchange
        # numbers, which are never given again: one rank may keep what is not used any more
        self._optimizers: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._numbers = count()
        self._in_a_row = 0  # overflows
        self._reported: set[tuple[str, ...]] = set()
        self._not_repeatable: set[str] = set()  # units of which that was said
        for unit in observer.places:
            for module in unit.modules:
                if (dispatcher := dispatcher_of(module)) is not None:
                    dispatcher.add(_NAME, _Bracket(self))
        _OPEN[:] = [*map(ref, _watches()), ref(self)]
        if not _LISTENING:
            steps = _StepObserver()
            _LISTENING.extend((observe(steps), observe_launches(launching=steps.launching)))

    @property
    def step(self) -> int:
        """The number of the step that is under way: of steps of the optimizer since `watch`."""
        return self.observer.step

    def remove(self) -> None:
        """End it, on all ranks, between two steps."""
        if self in _watches():  # otherwise it has ended, and its modules may have another one
            _OPEN[:] = [ref(each) for each in _watches() if each is not self]
            for unit in self.observer.places:
                for module in unit.modules:
                    detach(module, _NAME)
            # not where a model is collected: observers notified just then would miss an event
            while _LISTENING and not _OPEN:
                _LISTENING.pop()()
        self.observer.lose_step()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    # --- what ends a step ------------------------------------------------------------------------

    def note(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step parameters of the model."""
        if optimizer not in self._optimizers:
            self._optimizers[optimizer] = next(self._numbers)
        if self.observer.compares:
            self.observer.agreement.note_options(self._optimizers[optimizer], optimizer)

    def unscales(self) -> None:
        """A scaler is about to look for infinities: it may skip the step of the optimizer."""
        self.observer.scaled = True
        if open_scope() is None:  # in `join` ranks without data are notified when optimizers step
            self.end_step()

    def landed(self) -> None:
        """A backward has landed its gradients; an optimizer in backward has stepped, too."""
        if self.observer.ran and open_scope() is None:
            params = (param.at_rest for unit in self.observer.places for param in unit.params)
            if stepped_in_backward(params) is not None:
                self.end_step()

    def end_step(self) -> None:
        """Exchange what the ranks have found; all of them call it.

        Optimizers do before they step. Call it by hand where a step is given up.

        Raises:
            NonFiniteError: a value is not finite, with `action="raise"`.
            RanksDisagreeError: ranks differ, with `action="raise"`.
            NotReproducedError: an operator that ran again computed other bits, with
                `action="raise"`.
        """
        observer = self.observer
        if not observer.ran:
            return
        found: list[Finding] = []
        if observer.looks:
            found += self._first_not_finite()
        if observer.compares:
            found += self._first_difference()
        if observer.repeat is not None and observer.repeat.unit in observer.ran:
            found += self._run_again(observer.repeat)
        self._write(found)
        observer.end_step()
        self._report(found)

    # --- the exchange ----------------------------------------------------------------------------

    def _first_not_finite(self) -> Iterator[Finding]:
        scaled = self.observer.scaled
        expected = scaled and self._in_a_row < _EXPECTED_IN_A_ROW
        first, in_gradients = self.observer.first_not_finite(scaled=expected)
        mine = [_NEVER if first is None else first.seen.clock, -int(in_gradients and scaled)]
        clock, overflows = self._lowest(mine)
        self._in_a_row = self._in_a_row + 1 if overflows else 0
        if overflows:
            self.overflows += 1
            if self.overflows == 1 and clock == _NEVER:
                yield overflow(self.step)
        if clock != _NEVER:
            yield not_finite(self.step, self._said(first))

    def _first_difference(self) -> list[Finding]:
        found = self.observer.agreement.compare(self.step, self.observer.named)
        # ranks of other replicas and shards see it, too
        if self._lowest([-len(found)]) == [0]:
            return []
        said = [each for _, some in self._said(found) for each in some]
        hints = [each for each in said if each.kind == HINT]
        return [*[each for each in said if each.kind != HINT][:1], *hints[:1]]

    def _run_again(self, repeat: Repeat) -> list[Finding]:
        name = self.observer.places[repeat.unit].name
        differs, why = repeat.found
        if self._lowest([-int(bool(differs or why))]) == [0]:
            return []
        said = self._said((differs, why))
        wrong = {rank: text for rank, (text, _) in said if text}
        if wrong:
            return [not_reproduced(self.step, name, wrong)]
        reasons = {rank: text for rank, (_, text) in said if text}
        if name in self._not_repeatable:
            return []
        self._not_repeatable.add(name)
        what = f"unit '{name}' is not repeatable: {next(iter(reasons.values()))}"
        return [hint(self.step, list(reasons), what, unit=name)]

    def _lowest(self, values: Sequence[int]) -> list[int]:
        """The lowest over all ranks, one by one."""
        lowest = list(values)
        for comm in self._comms:
            lowest, _ = comm.min_max(lowest, _LAUNCH)
        return lowest

    def _said(self, mine: Any) -> list[tuple[int, Any]]:
        """What each rank says, by its number among all."""
        said = [(_rank(), mine)]
        for comm in self._comms:
            said = [each for some in comm.all_gather_objects(said, _LAUNCH) for each in some]
        self._ranks = [rank for rank, _ in said]
        return said

    # --- what becomes of findings ----------------------------------------------------------------

    def _write(self, found: Sequence[Finding]) -> None:
        """Write the first finding of each kind to the folder."""
        for finding in found:
            if self._folder is None or finding.kind in (*self._written, HINT):
                continue
            self._written.add(finding.kind)
            observer = self.observer
            names = {unit: name for name, unit in observer.named}
            unit = next((each for each, name in names.items() if name == finding.unit), None)
            gathered = observer.agreement.gathered if observer.compares else {}
            more = {
                "ranks": self._ranks,
                "gathered": {f"{k.unit} {k.name} {k.owner}": v for k, v in gathered.items()},
            }
            calls = observer.calls.get(finding.unit, [])
            try:
                incident.write(self._folder, finding, _rank(), unit, calls, names, more)
            except (OSError, RuntimeError) as error:  # of this rank alone
                logger.warning("watch: rank %d has written no incident: %s", _rank(), error)

    def _report(self, found: Sequence[Finding]) -> None:
        self.findings += [finding for finding in found if finding.kind != HINT]
        self.hints += [finding for finding in found if finding.kind == HINT]
        for finding in found:
            if finding.place not in self._reported:
                self._reported.add(finding.place)
                if all(comm.rank == 0 for comm in self._comms):  # of those that have the model
                    logger.warning("%s", finding)
        errors = [finding for finding in found if finding.kind in _ERRORS]
        if errors and self._action == "raise":
            raise _ERRORS[errors[0].kind](str(errors[0]))


def _rank() -> int:
    return dist.get_rank() if is_distributed() else 0


# --- what notifies a watch -----------------------------------------------------------------------


def _watches() -> list[Watch]:
    return [watching for each in _OPEN if (watching := each()) is not None]


def _watch_of(unit: Unit) -> Watch | None:
    """The one that has this unit."""
    return next((each for each in _watches() if unit in each.observer.places), None)


def _watches_of(units: Iterable[Unit]) -> list[Watch]:
    units = list(units)
    return [each for each in _watches() if any(unit in each.observer.places for unit in units)]


class _Bracket:
    """Around the forwards of one module of a unit; inert in copies of the model."""

    __slots__ = ("_watch",)

    def __init__(self, watching: Watch | None = None) -> None:
        self._watch = watching

    def __deepcopy__(self, memo: object) -> _Bracket:
        return _Bracket()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Bracket, ()

    def _unit_of(self, module: nn.Module) -> Unit | None:
        """None in copies, and when the annotation was removed."""
        annotation = annotation_of(module)
        if self._watch is None or annotation is None:
            return None
        unit: Unit = annotation.state
        return unit if unit in self._watch.observer.places else None

    @untraced
    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        unit = self._unit_of(module)
        if self._watch is not None and unit is not None:
            self._watch.observer.pre_forward(unit, module, args, kwargs)
        else:
            detach(module, _NAME)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        unit = self._unit_of(module)
        if self._watch is not None and unit is not None:
            self._watch.observer.post_forward(unit, output)
        return output

    def on_error(self, module: nn.Module) -> None:
        unit = self._unit_of(module)
        if self._watch is not None and unit is not None:
            self._watch.observer.raised(unit)


class _StepObserver(Observer):
    """Is notified of steps for all watches, and keeps no model alive."""

    @override
    def pre_forward(self, root: Root, call: Call) -> None:
        if (watching := _watch_of(call.unit)) is not None:
            watching.observer.checks.advance()
            if call.root is root and not root.running:
                watching.observer.begin_forward(root)

    @override
    def post_forward(self, root: Root, call: Call, keep: bool) -> None:
        if (watching := _watch_of(call.unit)) is not None:
            watching.observer.checks.advance()

    @override
    def pre_backward(self, root: Root, call: Call) -> None:
        if (watching := _watch_of(call.unit)) is not None:
            watching.observer.checks.pre_backward(call.number)

    @override
    def ends_backward(self, root: Root) -> None:
        for watching in _watches():
            watching.observer.end_backward(root)

    @override
    def gradients_landed(self) -> None:
        for watching in _watches():
            watching.landed()

    @override
    def loses(self, units: Sequence[Unit]) -> None:
        for watching in _watches_of(units):
            watching.observer.lose_step()

    @override
    def communicates(self, what: str, parameters: Sequence[Tensor], *args: Any) -> None:
        if what == "unscale":
            for watching in _watches_of(_units_of(parameters)):
                watching.unscales()

    def launching(
        self, comm: GroupComm, launch: Launch, collective: str, tensors: Columns, option: Any
    ) -> None:
        if (message := message_of(launch, tensors)) is None:
            return
        for unit in _units_of(message.params[:1]):
            if (watching := _watch_of(unit)) is not None and watching.observer.looks:
                watching.observer.launching(unit, message)


def _units_of(parameters: Sequence[Tensor]) -> list[Unit]:
    labels = filter(None, map(label_of, parameters))
    owners = dict.fromkeys(label.owner for label in labels if label.owner is not None)
    return [unit for owner in owners if (unit := owner()) is not None]


@untraced
def _before_steps(optimizer: Optimizer, *_: Any) -> None:
    """Hook the optimizer itself.

    Its own hooks come behind all global ones, and so behind that by which `join` tells ranks
    without data of the step.
    """
    if _OPEN and optimizer not in _HOOKED and not isinstance(optimizer, StandIn):
        _HOOKED.add(optimizer)
        handle = optimizer.register_step_pre_hook(_before_step)
        # first of them: the last place is that of steps on shards
        step_hooks(optimizer)[0].move_to_end(handle.id, last=False)


@untraced
def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any] | None:
    if not _OPEN or is_part_of_backward(optimizer):
        return None
    steps: dict[Watch, int] = {}
    _end_step(optimizer, steps)
    # the optimizer itself, the closure, and what some optimizers take besides
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": _watched(optimizer, kwargs["closure"], steps)}
    if len(args) > 1 and callable(args[1]):
        return (args[0], _watched(optimizer, args[1], steps), *args[2:]), kwargs
    return None


def _end_step(optimizer: Optimizer, steps: dict[Watch, int]) -> None:
    """A step ends where there was one, whose number goes into `steps`."""
    for watching in _watches_of(_units_of(parameters_of(optimizer))):
        watching.note(optimizer)
        if watching.observer.ran:
            steps.setdefault(watching, watching.observer.step)
        watching.end_step()


def _watched(
    optimizer: Optimizer, closure: Callable[[], Any], steps: dict[Watch, int]
) -> Callable[[], Any]:
    """A closure that ends a step when it has made the gradients, before the optimizer uses them.

    It may be called several times, also after a backward outside of it (SAM); these are one step.
    """

    @wraps(closure)
    def evaluate() -> Any:
        again = [*steps.items()]
        for watching, step in again:
            watching.observer.evaluate_again(step)
        try:
            loss = closure()
            _end_step(optimizer, steps)
        finally:
            for watching, step in again:
                watching.observer.evaluated(step)
        return loss

    return evaluate


# --- what this rank sees -------------------------------------------------------------------------

# A bracket around the forwards of each unit's modules sees inputs and outputs, and tensor hooks on
# them see their gradients. Gradients of parameters are seen in the messages that are about to be
# reduced. Nothing here waits for another rank.


class UnitPlace(NamedTuple):
    """A unit, by its names below the watched model.

    Attributes:
        name: its FQN.
        around: that of the unit around it; its own if there is none.
        depth: how many units are around it.
    """

    name: str
    around: str
    depth: int

    def order(self, *, made: bool) -> tuple[int, int]:
        """Of a gradient that came to what the unit made, or read: see `Seen`."""
        return (1, self.depth) if made else (0, -self.depth)


def _place_of(unit: Unit, names: Mapping[Unit, str]) -> UnitPlace:
    own = names[unit]
    outer = [
        name
        for other, name in names.items()
        if other is not unit and (not name or own.startswith(f"{name}."))
    ]
    around = max(outer, key=len, default=own)
    return UnitPlace(unit_name(own), unit_name(around), len(outer))


class Message(NamedTuple):
    """A message of gradients.

    Attributes:
        tensors: what is sent.
        gradients: parts of these, with the names of their parameters.
        params: the parameters at rest.
    """

    tensors: Sequence[Tensor]
    gradients: list[tuple[str, Tensor]]
    params: Sequence[Tensor]


class RankObserver:
    """What this rank sees of a model.

    Args:
        names: the FQNs of its units below the model.
        every, agree: see `watch`.
        keeps: calls of units, to write them to a folder.
        repeat: see `watch`.

    Attributes:
        step: the number of the step that is under way.
        checks, agreement: of this step.
        places: of the units.
        ran: those of the roots that had a backward since the last exchange, on all ranks alike.
        scaled: a loss scaler has scaled the gradients of this step.
        calls: of units in this step, by name.
        repeat: the unit whose operators run again in this step, if one's do.
    """

    def __init__(
        self, names: Mapping[Unit, str], every: int, agree: int, *, keeps: bool, repeat: bool
    ) -> None:
        units = list(names)
        self.step = 0
        self.checks = Checks(on_stream=units[0].mesh_info.all.traits.on_stream)
        self.agreement = Agreement()
        # weak: a module below several models would keep them all
        self.places = WeakKeyDictionary({unit: _place_of(unit, names) for unit in units})
        self._every, self._agree, self._keeps = every, agree, keeps
        # weak, too; all ranks have as many, whichever of them are gone
        self._in_turn = [ref(unit) for unit in (candidates_in(units) if repeat else ())]
        self._trains = False  # the last forward began with gradients
        self._handles: list[Any] = []  # of hooks on leaves, which outlive the step
        self._begin_step()

    def _begin_step(self) -> None:
        self.ran: set[Unit] = set()
        self.scaled = False
        self.calls: dict[str, list[ModuleCall]] = {}
        turn = None
        if self._in_turn and self.looks:
            turn = self._in_turn[self.step // self._every % len(self._in_turn)]()
        self.repeat = None if turn is None else Repeat(turn)
        self._begun: set[str] = set()  # units whose parameters were looked at
        self._reduced: set[int] = set()  # ids of parameters whose gradients were
        self._known = WeakTensorKeyDictionary()  # outputs, which other units read, with versions

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

    @property
    def named(self) -> Named:
        """The units that are watched."""
        return [(place.name, unit) for unit, place in self.places.items()]

    # --- forward ---------------------------------------------------------------------------------

    def begin_forward(self, root: Root) -> None:
        """The outermost module of `root` is called."""
        self._trains = torch.is_grad_enabled()
        if self.compares and self._trains:
            self.agreement.begin(self.named, root)
        for unit in root.units if self._looks_now else ():
            place = self.places.get(unit)
            if place is not None and place.name not in self._begun:
                self._begun.add(place.name)
                for group in unit.groups:
                    shard = [] if group.shard is None else [group.shard]
                    rest = ((param.fqn, param.at_rest) for param in group.params)
                    self.checks.look_together(shard, rest, PARAMETER, place.name, _AT_REST)

    def pre_forward(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A module of a unit is about to compute."""
        place, number = self.places[unit], unit.forward_number
        in_training = self._trains and number is not None  # one rank alone may evaluate
        if self.compares and in_training:
            self.agreement.note_gathered(unit, place.name, "in forward")
        if looks := self._looks_now:
            if self._keeps and in_training and is_forward() and not is_transformed():
                self.calls.setdefault(place.name, []).append(call_of(unit, module, args, kwargs))
            named = list(_named(INPUT, (*enumerate(args), *kwargs.items())))
            fresh = [(n, each) for n, each in named if self._known.get(each) != version_of(each)]
            self.checks.look(fresh, INPUT, place.name, place.around, forward=_forward_of(unit))
            self._watch_gradients(unit, named, made=False)
        if self.repeat is not None and self.repeat.unit is unit:
            self.repeat.begin(module, looks=looks)

    def post_forward(self, unit: Unit, output: Any) -> None:
        """A module of a unit has computed."""
        if self.repeat is not None and self.repeat.unit is unit:
            self.repeat.end(output)
        if not self._looks_now:
            return
        place = self.places[unit]
        if isinstance(output, dict):
            items: Iterable[tuple[Any, Any]] = output.items()
        else:
            items = enumerate(output if isinstance(output, (tuple, list)) else [output])
        named = list(_named(OUTPUT, items))
        self.checks.look(named, OUTPUT, place.name, place.name, forward=_forward_of(unit))
        for _, tensor in named:
            self._known[tensor] = version_of(tensor)
        call = next(reversed(self.calls.get(place.name, ())), None)
        # not of a recomputation; of a module that calls itself the inner call is kept
        if call is None or call.outputs or call.forward != unit.forward_number:
            call = None
        else:
            call.end(output)
        self._watch_gradients(unit, named, made=True, call=call)

    def raised(self, unit: Unit) -> None:
        """A module of a unit that was entered has raised, or what came before it."""
        if self.repeat is not None and self.repeat.unit is unit:
            self.repeat.stop()

    # --- backward --------------------------------------------------------------------------------

    def _watch_gradients(
        self,
        unit: Unit,
        named: Iterable[tuple[str, Tensor]],
        *,
        made: bool,
        call: ModuleCall | None = None,
    ) -> None:
        if backward_will_be_compiled():
            return
        forward = _forward_of(unit)
        came = partial(self.gradient_came, unit, made=made, forward=forward)
        for index, (name, tensor) in enumerate(named):
            # hooks on parameters are the engine's matter; the messages have their gradients
            if not tensor.requires_grad or isinstance(tensor, nn.Parameter):
                continue
            handle = tensor.register_hook(partial(came, f"gradient of {name}"))
            if call is not None:
                tensor.register_hook(partial(keep_gradient, call.gradients, index))
            if tensor.grad_fn is None:
                self._handles.append(handle)

    @untraced
    def gradient_came(
        self, unit: Unit, name: str, gradient: Tensor, *, made: bool, forward: int | None
    ) -> None:
        """Autograd has the gradient of what a unit read, or `made`."""
        place = self.places[unit]
        if self.looks:
            maker = place.around if made else place.name
            order = place.order(made=made)
            seen = [(name, gradient)]
            self.checks.look(seen, GRADIENT, place.name, maker, order, forward=forward)
        if self.compares and not made:  # it was gathered for backward, and is not left yet
            self.agreement.note_gathered(unit, place.name, "in backward")

    def end_backward(self, root: Root) -> None:
        """A backward of `root` is at its end, on all ranks."""
        self.ran |= {unit for unit in root.units if unit in self.places}

    def launching(self, unit: Unit, message: Message) -> None:
        """A message with gradients of `unit` is about to be reduced."""
        place = self.places[unit]
        self._reduced.update(map(id, message.params))
        order = place.order(made=True)
        self.checks.look_together(message.tensors, message.gradients, GRADIENT, place.name, order)

    # --- the end of a step -----------------------------------------------------------------------

    def first_not_finite(self, *, scaled: bool) -> tuple[First | None, bool]:
        """See `Checks.end`."""
        for unit, place in self.places.items():
            # in no message that is known: of one rank, or of users' hooks
            landed = [
                (param.fqn, gradient)
                for param in (unit.params if unit.trains else ())
                if id(param.at_rest) not in self._reduced
                and (gradient := param.at_rest.grad) is not None
            ]
            order = place.order(made=True)
            self.checks.look(landed, GRADIENT, place.name, place.name, order)
        first, overflows = self.checks.end(scaled=scaled)
        if first is not None and first.seen.forward is not None:
            numbers = [call.forward for call in self.calls.get(first.seen.maker, ())]
            if first.seen.forward in numbers:
                first = first._replace(call=numbers.index(first.seen.forward))
        return first, overflows

    def end_step(self) -> None:
        """What was seen was said."""
        self.step += 1
        self._end()

    def evaluate_again(self, step: int) -> None:
        """An optimizer calls its closure once more: what follows belongs to a step that has ended.

        Args:
            step: the number of the step that the call before was in.
        """
        self.step = step
        self._begin_step()

    def evaluated(self, step: int) -> None:
        """It has called it: the step is over, too, without an exchange if no backward came."""
        if self.step == step:
            self.end_step()

    def lose_step(self) -> None:
        """All ranks have lost the step, and have seen different parts of it."""
        self.checks.drop()
        self.agreement.drop()
        self._end()

    def _end(self) -> None:
        for call in (call for calls in self.calls.values() for call in calls):
            call.end_step()
        if self.repeat is not None:
            self.repeat.drop()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._begin_step()


def _forward_of(unit: Unit) -> int | None:
    """The number of the forward that runs; None if nobody will say that its backward came."""
    return None if backward_will_be_compiled() else unit.forward_number


def _named(kind: str, items: Iterable[tuple[Any, Any]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors in inputs or outputs, with names: `input 0`, `input mask`, `output 1.2`."""
    for key, value in items:
        tensors = tensors_in(value)
        for index, tensor in enumerate(tensors):
            yield f"{kind} {key}" + (f".{index}" if len(tensors) > 1 else ""), tensor


def message_of(launch: Launch, tensors: Columns) -> Message | None:
    """The gradients that are about to be reduced.

    Args:
        launch: of any kind.
        tensors: outputs and inputs, or what is reduced in place.

    Returns:
        None for other launches. These are no gradients, or sums of the first stage, or they are
        what a communication hook sends, or copies in memory that somebody supplies.
    """
    sent = tensors[-1] if tensors else ()
    if launch.sender is None:  # built anew, and a lost step launches again what was before
        return None
    if launch.kind is LaunchKind.GATHER_SPARSE:
        param: Param = launch.sender
        return Message(sent, [(param.fqn, each) for each in sent], [param.at_rest])
    if launch.kind is not LaunchKind.REDUCE:
        return None
    plan: ReducePlan = launch.sender
    parts = plan.gradients_in(sent)
    if not parts:
        return None
    named = [(_name_of(plan.at_rest[index]), each) for index, each in parts.items()]
    return Message(sent, named, [plan.at_rest[index] for index in parts])


def _name_of(parameter: Tensor) -> str:
    label = label_of(parameter)
    return "" if label is None else label.fqn


# --- the environment -----------------------------------------------------------------------------


class _WatchAll(Observer):
    """Watches the units of every model that is trained."""

    def __init__(self, action: str) -> None:
        self._action = action

    @override
    def pre_forward(self, root: Root, call: Call) -> None:
        if call.root is root and not root.running and torch.is_grad_enabled():
            fresh = [unit for unit in root.units if _watch_of(unit) is None]
            if fresh:
                names = {unit: "" if unit.name == unit_name("") else unit.name for unit in fresh}
                observer = RankObserver(names, 1, AGREE, keeps=False, repeat=False)
                Watch(names, observer, self._action)


if (_wanted := os.environ.get(VARIABLE, "0").strip()) not in ("", "0"):
    observe(_WatchAll("raise" if _wanted == "raise" else "warn"))
register_optimizer_step_pre_hook(_before_steps)
