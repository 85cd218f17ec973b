"""Annotations nest in one order around a module's forward, and are told of its end however it ends."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from composable.model.hooks import (
    OUTERMOST_FIRST,
    Dispatcher,
    Guard,
    GuardRow,
    attach,
    detach,
    dispatcher_of,
)
from composable.model.removed_hooks import HookWatch


class Noting:
    """A bracket that writes down what it is told, and fails where it is asked to."""

    outermost = True

    def __init__(self, name: str, log: list[str], fails: str = "") -> None:
        self.name = name
        self.log = log
        self.fails = fails

    def _note(self, what: str) -> None:
        self.log.append(f"{what} {self.name}")
        if self.fails == what:
            raise MemoryError(f"{self.name} fails to {what}")

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self._note("enter")
        return args, kwargs

    def leave(self, module: nn.Module, output: Any) -> Any:
        self._note("leave")
        return output

    def on_error(self, module: nn.Module) -> None:
        self._note("on_error")

    def on_interrupt(self) -> None:
        self._note("on_interrupt")


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.error: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.error is not None:
            raise self.error
        return x


def _annotated(order: tuple[str, ...] = OUTERMOST_FIRST, **fails: str) -> tuple[Failing, list[str]]:
    module, log = Failing(), []
    for name in order:
        attach(module, name, Noting(name, log, fails.get(name, "")))
    return module, log


X: Final = torch.ones(2)
ENTERED: Final = ["enter fully_shard", "enter replicate", "enter offload_activations", "enter checkpoint"]
LEFT: Final = ["leave checkpoint", "leave offload_activations", "leave replicate", "leave fully_shard"]
INSIDE_OUT: Final = [name.removeprefix("leave ") for name in LEFT]


# --- the order --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(itertools.permutations(OUTERMOST_FIRST)))
def test_annotations_nest_alike_whatever_the_order_of_the_calls(order: tuple[str, ...]) -> None:
    module, log = _annotated(order)
    module(X)
    assert log == [*ENTERED, *LEFT]


def test_annotations_of_other_authors_nest_inside_ours_in_the_order_of_their_calls() -> None:
    module, log = _annotated(("theirs", "checkpoint", "mine", "fully_shard"))
    module(X)
    assert log[:4] == ["enter fully_shard", "enter checkpoint", "enter theirs", "enter mine"]


def test_one_pair_of_hooks_serves_all_annotations_and_goes_with_the_last() -> None:
    module, log = Failing(), []
    for name in OUTERMOST_FIRST:
        attach(module, name, Noting(name, log))
    assert (len(module._forward_pre_hooks), len(module._forward_hooks)) == (1, 1)
    detach(module, OUTERMOST_FIRST[1])
    module(X)
    inner = ["enter offload_activations", "enter checkpoint", "leave checkpoint", "leave offload_activations"]
    assert log == ["enter fully_shard", *inner, "leave fully_shard"]
    detach(module, OUTERMOST_FIRST[0])
    detach(module, OUTERMOST_FIRST[2])
    detach(module, OUTERMOST_FIRST[3])
    detach(module, OUTERMOST_FIRST[3])  # done twice is done once
    assert (len(module._forward_pre_hooks), len(module._forward_hooks)) == (0, 0)
    assert dispatcher_of(module) is None


def test_our_hooks_come_before_those_that_the_user_registered_earlier() -> None:
    module, log = Failing(), []
    module.register_forward_pre_hook(lambda *_: log.append("the user's"))
    attach(module, "fully_shard", Noting("fully_shard", log))
    module(X)
    assert log == ["enter fully_shard", "the user's", "leave fully_shard"]


class Changing(Noting):
    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return tuple(arg + self.name for arg in args), {key: value + self.name for key, value in kwargs.items()}

    def leave(self, module: nn.Module, output: Any) -> Any:
        return output + self.name.upper()


class Echo(nn.Module):
    def forward(self, one: str, *, other: str) -> str:
        return f"{one} {other} "


def test_inputs_and_outputs_go_through_every_annotation_in_turn() -> None:
    module = Echo()
    for name, text in zip(reversed(OUTERMOST_FIRST), "dcba", strict=True):
        attach(module, name, Changing(text, []))
    assert module("x", other="y") == "xabcd yabcd DCBA"


# --- exceptions -------------------------------------------------------------------------------------------------------


def test_brackets_are_told_of_a_forward_that_raises_from_the_inside_out() -> None:
    module, log = _annotated()
    module.error = ValueError("as planned")
    with pytest.raises(ValueError, match="as planned"):
        module(X)
    assert log == [*ENTERED, *(f"on_error {name}" for name in INSIDE_OUT)]


def test_a_bracket_that_fails_to_enter_is_told_with_those_around_it_only() -> None:
    module, log = _annotated(replicate="enter")
    with pytest.raises(MemoryError, match="replicate fails to enter"):
        module(X)
    assert log == ["enter fully_shard", "enter replicate", "on_error replicate", "on_error fully_shard"]


def test_those_around_a_bracket_that_fails_to_leave_are_told() -> None:
    module, log = _annotated(checkpoint="leave")
    with pytest.raises(MemoryError, match="checkpoint fails to leave"):
        module(X)
    assert log == [*ENTERED, "leave checkpoint", "on_error offload_activations", "on_error replicate", "on_error fully_shard"]


def test_a_call_after_a_failed_one_starts_afresh() -> None:
    module, log = _annotated()
    for error in (ValueError("first"), ValueError("second")):
        module.error = error
        with pytest.raises(ValueError, match=str(error)):
            module(X)
    module.error = None
    log.clear()
    module(X)
    assert log == [*ENTERED, *LEFT]


def test_a_forward_that_returns_none_has_not_failed_even_while_an_exception_is_handled() -> None:
    log: list[str] = []

    class Silent(nn.Module):
        def forward(self) -> None:
            return None

    module = Silent()
    attach(module, "fully_shard", Noting("fully_shard", log))
    module()
    try:
        raise ValueError("somebody else's")
    except ValueError:
        module()
    assert log == ["enter fully_shard", "leave fully_shard"] * 2


def test_brackets_are_told_of_a_forward_that_fails_while_an_exception_is_handled() -> None:
    module, log = _annotated(("fully_shard",))
    module.error = KeyError("the second")
    try:
        raise ValueError("the first")
    except ValueError:
        with pytest.raises(KeyError):
            module(X)
    assert log == ["enter fully_shard", "on_error fully_shard"]


def test_a_module_that_calls_itself_has_one_set_of_brackets_per_call() -> None:
    log: list[str] = []

    class Nested(nn.Module):
        def forward(self, depth: int) -> None:
            log.append(f"depth {depth}")
            if depth == 0:
                raise ValueError("at the bottom")
            try:
                self(depth - 1)
            except ValueError:
                log.append("caught")

    module = Nested()
    attach(module, "fully_shard", Noting("it", log))
    module(1)
    assert log == ["enter it", "depth 1", "enter it", "depth 0", "on_error it", "caught", "leave it"]


def test_a_users_hook_that_fails_before_ours_is_reported_as_it_is() -> None:
    """Ours has not been called then, and has nothing to clean up."""
    module, log = _annotated()

    def fail(*_: object) -> None:
        raise ValueError("the user's")

    for register in (
        lambda: module.register_forward_pre_hook(fail, prepend=True),
        lambda: register_module_forward_pre_hook(fail),
    ):
        handle = register()
        try:
            with pytest.raises(ValueError, match="the user's"):
                module(X)
        finally:
            handle.remove()
    assert log == []
    module(X)
    assert log[-1] == "leave fully_shard"


@pytest.mark.xfail(reason="after() cannot tell which call ended before its own hook had been called", strict=True)
def test_a_users_hook_that_fails_before_ours_in_an_inner_call_leaves_the_outer_one_alone() -> None:
    log: list[str] = []

    class Nested(nn.Module):
        def forward(self, depth: int) -> None:
            if depth:
                with self.register_forward_pre_hook(_fail, prepend=True), pytest.raises(ValueError, match="the user's"):
                    self(depth - 1)

    def _fail(*_: object) -> None:
        raise ValueError("the user's")

    module = Nested()
    attach(module, "fully_shard", Noting("it", log))
    module(1)
    assert log == ["enter it", "leave it"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(), GeneratorExit()], ids=lambda e: type(e).__name__)
def test_an_interrupted_call_is_forgotten_from_the_inside_out_before_the_next(error: BaseException) -> None:
    """torch tells hooks of an Exception only, so what an interrupted call has entered is found by the next one."""
    module, log = _annotated()
    module.error = error
    with pytest.raises(type(error)):
        module(X)
    assert log == ENTERED
    log.clear()
    module.error = None
    module(X)
    assert log == [*(f"on_interrupt {name}" for name in INSIDE_OUT), *ENTERED, *LEFT]
    log.clear()
    module(X)
    assert log == [*ENTERED, *LEFT], "once is enough"


def test_a_call_inside_a_call_is_not_taken_for_one_after_an_interrupt() -> None:
    log: list[str] = []

    class Nested(nn.Module):
        def forward(self, depth: int) -> None:
            if depth:
                self(depth - 1)

    module = Nested()
    attach(module, "fully_shard", Noting("it", log))
    module(2)
    assert log == ["enter it"] * 3 + ["leave it"] * 3


# --- copies -----------------------------------------------------------------------------------------------------------


def test_a_copied_module_has_a_dispatcher_and_brackets_of_its_own() -> None:
    module, log = _annotated()
    twin = copy.deepcopy(module)
    mine, other = dispatcher_of(module), dispatcher_of(twin)
    assert isinstance(other, Dispatcher)
    assert other is not mine
    assert other.attached_to(twin)
    twin(X)
    assert log == []
    assert next(bracket.log for bracket in other.brackets.values())[:4] == ENTERED  # type: ignore[attr-defined]


def test_a_pickled_module_has_a_dispatcher_that_works() -> None:
    module, _ = _annotated()
    twin = pickle.loads(pickle.dumps(module))
    twin(X)
    dispatcher = dispatcher_of(twin)
    assert dispatcher is not None
    assert dispatcher.attached_to(twin)
    assert next(iter(dispatcher.brackets.values())).log[-1] == "leave fully_shard"  # type: ignore[attr-defined]


@pytest.mark.parametrize("hooks", ["_forward_pre_hooks", "_forward_hooks"])
def test_hooks_that_somebody_cleared_are_missed(hooks: str) -> None:
    module, _ = _annotated()
    dispatcher = dispatcher_of(module)
    assert dispatcher is not None
    assert dispatcher.attached_to(module)
    other, _ = _annotated()
    watch = HookWatch([module, other])
    assert watch.all_attached()
    getattr(module, hooks).clear()
    assert not dispatcher.attached_to(module)
    assert not watch.all_attached()


def test_hooks_that_were_never_there_are_missed() -> None:
    module, _ = _annotated()
    assert not HookWatch([module, nn.Linear(1, 1)]).all_attached()
    assert HookWatch([]).all_attached()


# --- guards -----------------------------------------------------------------------------------------------------------


def test_a_guard_refuses_first_unless_it_stepped_aside() -> None:
    module, log = nn.Linear(2, 2), []
    module.register_forward_pre_hook(lambda *_: log.append("the user's"))

    def refuse(where: nn.Module) -> None:
        assert where is module
        log.append("refused")
        raise RuntimeError("sharded")

    guard = Guard(module, refuse)
    row = GuardRow([guard])
    with pytest.raises(RuntimeError, match="sharded"):
        module(torch.ones(1, 2))
    row.step_aside()
    module(torch.ones(1, 2))
    row.stand()
    with pytest.raises(RuntimeError, match="sharded"):
        module(torch.ones(1, 2))
    guard.remove()
    module(torch.ones(1, 2))
    assert log == ["refused", "the user's", "refused", "the user's"]
    assert len(module._forward_pre_hooks) == 1
