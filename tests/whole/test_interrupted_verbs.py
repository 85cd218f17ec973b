"""KeyboardInterrupt at a line of a verb, or of `remove`: everything is annotated or nothing, and the next call works."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from linecache import getline
from types import FrameType
from typing import Any, Final

import pytest
import torch
from torch import nn

from composable import checkpoint, fully_shard, registry, remove, replicate
from composable.errors import AlreadyAnnotatedError, AnnotationError, NotAnnotatedError
from composable.model import transaction
from composable.model.contract import contract, on_undo
from composable.model.transaction import running
from tests.helpers.interrupts import Interrupter, Line, Model


class _Interrupter(Interrupter):
    """Python looks for interrupts at calls and at the ends of loops, not between the word `try` and what follows."""

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if getline(frame.f_code.co_filename, frame.f_lineno).strip() == "try:":
            return self._line
        return super()._line(frame, event, arg)


def _nothing(model: Model) -> None:
    return None


_Change = Callable[[Model], object]

# What is there before, what is interrupted, and of how many lines one is tried.
_CALLS: Final[dict[str, tuple[_Change, _Change, int]]] = {
    "fully_shard": (_nothing, lambda model: fully_shard(model, policy={Line}), 79),
    "replicate": (_nothing, lambda model: replicate(model, policy={Line}), 79),
    "checkpoint": (_nothing, lambda model: checkpoint(model, policy={Line}), 37),
    "a second verb": (checkpoint, lambda model: fully_shard(model, policy={Line}), 97),
    "next to replicas": (lambda model: replicate(model.embed), lambda model: fully_shard(model, policy={Line}), 97),
    "remove fully_shard": (lambda model: fully_shard(model, policy={Line}), lambda model: remove(model, fully_shard), 29),
    "remove replicate": (replicate, lambda model: remove(model, replicate), 5),
    "remove checkpoint": (checkpoint, lambda model: remove(model, checkpoint), 1),
}


def _look(model: Model) -> list[Any]:
    """What an annotation leaves on a model."""
    held = [(name, id(parameter), sorted(vars(parameter))) for name, parameter in model.named_parameters()]
    hooks = [
        (name, sorted(registry(module)), len(module._forward_pre_hooks), len(module._forward_hooks), sorted(vars(module)))
        for name, module in model.named_modules()
    ]
    return [held, hooks]


def _made(prepare: _Change) -> Model:
    torch.manual_seed(0)
    model = Model()
    prepare(model)
    return model


def _interrupted(call: str) -> Iterator[tuple[Model, str, bool]]:
    """Models at which the call was interrupted at one line after the other; where; and whether they have changed."""
    prepare, change, stride = _CALLS[call]
    counter = _Interrupter()
    with counter.at_work():
        change(_made(prepare))
    assert counter.seen > stride
    for at in range(1, counter.seen, stride):
        model = _made(prepare)
        before = _look(model)
        interrupter = _Interrupter(at)
        try:
            with interrupter.at_work():
                change(model)
        except KeyboardInterrupt:
            pass
        else:
            continue  # Python drops what is raised inside `__del__`, and some lines do not run every time
        yield model, f"line {at}, {interrupter.where}", _look(model) != before


@pytest.mark.parametrize("call", _CALLS)
def test_an_interrupted_call_has_done_everything_or_nothing_and_can_be_made_again(call: str) -> None:
    plain = _made(_nothing)
    x = torch.ones(3, 6)
    for model, where, changed in _interrupted(call):
        assert not running(), where
        assert not transaction.is_rolling_back(), where
        torch.testing.assert_close(model(x), plain(x))
        try:
            _CALLS[call][1](model)
            done = False
        except (AlreadyAnnotatedError, NotAnnotatedError):
            done = True
        assert done == changed, where
        for each in (model, plain):
            each.zero_grad()
            each(x).square().mean().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)


@contract()
def _tag(module: nn.Module, *, fails: bool = False) -> None:
    @on_undo
    def untag() -> None:
        module.undone = vars(module).get("undone", 0) + 1
        if module.undone == 1:
            raise KeyboardInterrupt

    if fails:
        raise ValueError("as planned")


def test_an_interrupt_while_a_verb_is_taken_back_is_raised_when_that_is_done() -> None:
    layer = nn.Linear(2, 2)
    before = dict(vars(layer))
    with pytest.raises(KeyboardInterrupt) as interrupt:
        _tag(layer, fails=True)
    assert isinstance(interrupt.value.__cause__, ValueError)
    assert vars(layer) == before
    assert not running()
    _tag(layer)


def test_what_undoes_an_annotation_is_called_again_when_an_interrupt_ended_it() -> None:
    layer = nn.Linear(2, 2)
    _tag(layer)
    with pytest.raises(KeyboardInterrupt):
        remove(layer, _tag)
    assert layer.undone == 2
    assert not registry(layer)


def test_a_verb_that_was_interrupted_does_not_count_as_running() -> None:
    model = _made(_nothing)
    for at in range(1, 400, 11):
        with pytest.raises(KeyboardInterrupt), _Interrupter(at).at_work():
            checkpoint(model, policy={Line})
        with pytest.raises(AnnotationError, match=r"on_undo\(\) was called while no verb is running"):
            on_undo(list)
