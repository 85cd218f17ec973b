"""Notify a watch of the events of a step: forwards, backwards, launches, optimizers' steps.

| event                                      | notified by                   | to               |
|--------------------------------------------|-------------------------------|------------------|
| a forward begins, units are entered, left  | `_StepObserver`, of `OBSERVERS` | `RankObserver`   |
| a module is about to compute, has computed | `_Bracket`                    | `RankObserver`   |
| backward comes to a unit, and ends         | `_StepObserver`               | `RankObserver`   |
| a message is launched                      | `_StepObserver.launching`     | `RankObserver`   |
| gradients have landed, are unscaled        | `_StepObserver`               | `Watch`          |
| an optimizer steps                         | `_before_step`                | `Watch.end_step` |
| `together` has lost the step               | `_StepObserver`               | `RankObserver`   |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, Final, Protocol
from weakref import ReferenceType, WeakSet, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from typing_extensions import override

from composable.comm.base import Columns, GroupComm, observe_launches
from composable.comm.launch import Launch
from composable.compilation import untraced
from composable.contract.hooks import detach, dispatcher_of
from composable.contract.tree import annotation_of
from composable.contract.values import parameters_of
from composable.extras.watch.rank_observer import RankObserver, message_of
from composable.seams import (
    Call,
    Observer,
    Root,
    StandIn,
    Unit,
    is_part_of_backward,
    label_of,
    observe,
)
from composable.torch_private import step_hooks

_NAME: Final = "watch"  # of brackets


class Listener(Protocol):
    """What is notified; `watch.py` has it, and imports this file."""

    observer: RankObserver

    def unscales(self) -> None:
        """Gradients are about to be unscaled."""

    def landed(self) -> None:
        """Gradients have landed."""

    def note(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step."""

    def end_step(self) -> None:
        """A step ends."""


# As they began, since they communicate in turn. Weak: brackets of a model have its watch.
_OPEN: Final[list[ReferenceType[Listener]]] = []
_HOOKED: Final[WeakSet[Optimizer]] = WeakSet()


def _watches() -> list[Listener]:
    return [watch for each in _OPEN if (watch := each()) is not None]


def watch_of(unit: Unit) -> Listener | None:
    """The one that has this unit."""
    return next((each for each in _watches() if unit in each.observer.places), None)


def _watches_of(units: Iterable[Unit]) -> list[Listener]:
    units = list(units)
    return [each for each in _watches() if any(unit in each.observer.places for unit in units)]


def begin(watch: Listener) -> None:
    """Tell `watch` of its model from now on."""
    for unit in watch.observer.places:
        for module in unit.modules:
            if (dispatcher := dispatcher_of(module)) is not None:
                dispatcher.add(_NAME, _Bracket(watch))
    _OPEN[:] = [*map(ref, _watches()), ref(watch)]
    _listen()


def end(watch: Listener) -> None:
    """Tell it no more."""
    if watch not in _watches():
        return  # ended already; its modules may have another one
    _OPEN[:] = [ref(each) for each in _watches() if each is not watch]
    for unit in watch.observer.places:
        for module in unit.modules:
            detach(module, _NAME)
    # not where a model is collected: observers that are notified just then would miss an event
    while _LISTENING and not _OPEN:
        _LISTENING.pop()()


class _Bracket:
    """Around the forwards of one module of a unit; inert in copies of the model."""

    __slots__ = ("_watch",)

    def __init__(self, watch: Listener | None = None) -> None:
        self._watch = watch

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
            return self._watch.observer.pre_forward(unit, module, args, kwargs)
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
        if (watch := watch_of(call.unit)) is not None:
            watch.observer.checks.advance()
            if call.root is root and not root.running:
                watch.observer.begin_forward(root)

    @override
    def post_forward(self, root: Root, call: Call, keep: bool) -> None:
        if (watch := watch_of(call.unit)) is not None:
            watch.observer.checks.advance()

    @override
    def pre_backward(self, root: Root, call: Call) -> None:
        if (watch := watch_of(call.unit)) is not None:
            watch.observer.checks.pre_backward(call.number)

    @override
    def ends_backward(self, root: Root) -> None:
        for watch in _watches():
            watch.observer.end_backward(root)

    @override
    def gradients_landed(self) -> None:
        for watch in _watches():
            watch.landed()

    @override
    def loses(self, units: Sequence[Unit]) -> None:
        for watch in _watches_of(units):
            watch.observer.lose_step()

    @override
    def communicates(self, what: str, parameters: Sequence[Tensor], *args: Any) -> None:
        if what == "unscale":
            for watch in _watches_of(_units_of(parameters)):
                watch.unscales()

    def launching(
        self, comm: GroupComm, launch: Launch, collective: str, tensors: Columns, option: Any
    ) -> None:
        if (message := message_of(launch, tensors)) is None:
            return
        for unit in _units_of(message.params[:1]):
            if (watch := watch_of(unit)) is not None and watch.observer.looks:
                watch.observer.launching(unit, message)


_LISTENING: Final[list[Callable[[], object]]] = []  # what ends it


def _listen() -> None:
    """Until the last watch is closed: models that nobody watches pay for it, too."""
    if not _LISTENING:
        observer = _StepObserver()
        _LISTENING.extend((observe(observer), observe_launches(launching=observer.launching)))


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
    steps: dict[Listener, int] = {}
    _end_step(optimizer, steps)
    # the optimizer itself, the closure, and what some optimizers take besides
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": _watched(optimizer, kwargs["closure"], steps)}
    if len(args) > 1 and callable(args[1]):
        return (args[0], _watched(optimizer, args[1], steps), *args[2:]), kwargs
    return None


def _end_step(optimizer: Optimizer, steps: dict[Listener, int]) -> None:
    """A step ends where there was one, whose number goes into `steps`."""
    for watch in _watches_of(_units_of(parameters_of(optimizer))):
        watch.note(optimizer)
        if watch.observer.ran:
            steps.setdefault(watch, watch.observer.step)
        watch.end_step()


def _watched(
    optimizer: Optimizer, closure: Callable[[], Any], steps: dict[Listener, int]
) -> Callable[[], Any]:
    """A closure that ends a step when it has made the gradients, before the optimizer uses them.

    It may be called several times, also after a backward outside of it (SAM); these are one step.
    """

    @wraps(closure)
    def evaluate() -> Any:
        again = [*steps.items()]
        for watch, step in again:
            watch.observer.evaluate_again(step)
        try:
            loss = closure()
            _end_step(optimizer, steps)
        finally:
            for watch, step in again:
                watch.observer.evaluated(step)
        return loss

    return evaluate


class WatchAll(Observer):
    """Calls `watch` with the units of every model that is trained."""

    def __init__(self, watch: Callable[[list[Unit]], object]) -> None:
        self._watch = watch

    @override
    def pre_forward(self, root: Root, call: Call) -> None:
        if call.root is root and not root.running and torch.is_grad_enabled():
            fresh = [unit for unit in root.units if watch_of(unit) is None]
            if fresh:
                self._watch(fresh)


register_optimizer_step_pre_hook(_before_steps)
