"""Forward hooks: order, errors and copies."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from composable.contract.hooks import (
    OUTERMOST_FIRST,
    attach,
    detach,
    dispatcher_of,
    drop_calls,
    hooks_attached,
)
from tests.contract.verbs import COPIERS


class Noting:
    """A bracket that logs its calls, and raises in the one named `fails`."""

    def __init__(self, name: str, log: list[str], fails: str = "") -> None:
        self.name = name
        self.log = log
        self.fails = fails

    def _note(self, what: str) -> None:
        self.log.append(f"{what} {self.name}")
        if self.fails == what:
            raise MemoryError(f"{self.name} fails to {what}")

    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self._note("enter")
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self._note("leave")
        return output

    def on_error(self, module: nn.Module) -> None:
        self._note("on_error")


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
ENTERED: Final = [
    "enter fully_shard",
    "enter replicate",
    "enter offload_activations",
    "enter checkpoint",
]
LEFT: Final = [
    "leave checkpoint",
    "leave offload_activations",
    "leave replicate",
    "leave fully_shard",
]
INSIDE_OUT: Final = [name.removeprefix("leave ") for name in LEFT]


# --- the order ----------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(itertools.permutations(OUTERMOST_FIRST)))
def test_brackets_nest_in_one_order_whatever_the_order_of_the_verbs(order: tuple[str, ...]) -> None:
    module, log = _annotated(order)
    module(X)
    assert log == [*ENTERED, *LEFT]


def test_brackets_of_other_verbs_nest_inside_in_the_order_of_their_calls() -> None:
    module, log = _annotated(("theirs", "checkpoint", "mine", "fully_shard"))
    module(X)
    assert log[:4] == ["enter fully_shard", "enter checkpoint", "enter theirs", "enter mine"]


def test_all_annotations_share_one_pair_of_hooks_that_is_removed_with_the_last() -> None:
    module, log = Failing(), []
    for name in OUTERMOST_FIRST:
        attach(module, name, Noting(name, log))
    assert (len(module._forward_pre_hooks), len(module._forward_hooks)) == (1, 1)
    detach(module, OUTERMOST_FIRST[1])
    module(X)
    inner = [
        "enter offload_activations",
        "enter checkpoint",
        "leave checkpoint",
        "leave offload_activations",
    ]
    assert log == ["enter fully_shard", *inner, "leave fully_shard"]
    detach(module, OUTERMOST_FIRST[0])
    detach(module, OUTERMOST_FIRST[2])
    detach(module, OUTERMOST_FIRST[3])
    detach(module, OUTERMOST_FIRST[3])  # done twice is done once
    assert (len(module._forward_pre_hooks), len(module._forward_hooks)) == (0, 0)
    assert dispatcher_of(module) is None


def test_the_hooks_run_before_earlier_hooks_of_the_user() -> None:
    module, log = Failing(), []
    module.register_forward_pre_hook(lambda *_: log.append("the user's"))
    attach(module, "fully_shard", Noting("fully_shard", log))
    module(X)
    assert log == ["enter fully_shard", "the user's", "leave fully_shard"]


class Changing(Noting):
    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return tuple(arg + self.name for arg in args), {
            key: value + self.name for key, value in kwargs.items()
        }

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return output + self.name.upper()


class Echo(nn.Module):
    def forward(self, one: str, *, other: str) -> str:
        return f"{one} {other} "


def test_every_bracket_can_change_inputs_and_outputs() -> None:
    module = Echo()
    for name, text in zip(reversed(OUTERMOST_FIRST), "dcba", strict=True):
        attach(module, name, Changing(text, []))
    assert module("x", other="y") == "xabcd yabcd DCBA"


# --- exceptions ---------------------------------------------------------------------------------


def test_a_forward_that_raises_calls_on_error_innermost_first() -> None:
    module, log = _annotated()
    module.error = ValueError("as planned")
    with pytest.raises(ValueError, match="as planned"):
        module(X)
    assert log == [*ENTERED, *(f"on_error {name}" for name in INSIDE_OUT)]
    module.error = None
    log.clear()
    module(X)
    assert log == [*ENTERED, *LEFT], "a call after a failed one is complete"


def test_a_bracket_that_raises_in_enter_gets_on_error_with_those_around_it() -> None:
    module, log = _annotated(replicate="enter")
    with pytest.raises(MemoryError, match="replicate fails to enter"):
        module(X)
    assert log == [
        "enter fully_shard",
        "enter replicate",
        "on_error replicate",
        "on_error fully_shard",
    ]


def test_a_bracket_that_raises_in_leave_calls_on_error_of_those_around_it() -> None:
    module, log = _annotated(checkpoint="leave")
    with pytest.raises(MemoryError, match="checkpoint fails to leave"):
        module(X)
    assert log == [
        *ENTERED,
        "leave checkpoint",
        "on_error offload_activations",
        "on_error replicate",
        "on_error fully_shard",
    ]


def test_a_forward_that_returns_none_has_not_failed_even_in_an_except_block() -> None:
    log: list[str] = []

    class Silent(nn.Module):
        def forward(self) -> None:
            return None

    module = Silent()
    attach(module, "fully_shard", Noting("fully_shard", log))
    module()
    try:
        raise ValueError("handled")
    except ValueError:
        module()
    assert log == ["enter fully_shard", "leave fully_shard"] * 2


def test_a_forward_that_raises_in_an_except_block_calls_on_error() -> None:
    module, log = _annotated(("fully_shard",))
    module.error = KeyError("the second")
    try:
        raise ValueError("the first")
    except ValueError:
        with pytest.raises(KeyError):
            module(X)
    assert log == ["enter fully_shard", "on_error fully_shard"]


def test_a_module_that_calls_itself_enters_the_brackets_once_per_call() -> None:
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
    assert log == [
        "enter it",
        "depth 1",
        "enter it",
        "depth 0",
        "on_error it",
        "caught",
        "leave it",
    ]


def test_a_users_hook_that_raises_before_ours_calls_nothing() -> None:
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


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), SystemExit(), GeneratorExit()], ids=lambda e: type(e).__name__
)
def test_drop_calls_closes_an_interrupted_call_from_the_inside_out(error: BaseException) -> None:
    """torch calls no forward hook for exceptions that are not an Exception."""
    module, log = _annotated()
    module.error = error
    with pytest.raises(type(error)):
        module(X)
    assert log == ENTERED
    log.clear()
    drop_calls(module)
    assert log == [f"on_error {name}" for name in INSIDE_OUT]
    drop_calls(module)
    drop_calls(nn.Linear(1, 1))
    assert len(log) == len(INSIDE_OUT), "a second time, or without hooks, nothing is called"


def test_a_bracket_that_raises_in_on_error_leaves_no_open_call() -> None:
    module, log = _annotated()
    dispatcher: Any = dispatcher_of(module)
    dispatcher.brackets["checkpoint"].on_error = None  # cannot be called
    module.error = ValueError("as planned")
    with pytest.raises(ValueError, match="as planned"), pytest.warns(match="not callable"):
        module(X)
    log.clear()
    drop_calls(module)
    assert log == []


def test_later_calls_are_complete_even_if_an_interrupted_one_was_not_dropped() -> None:
    module, log = _annotated()
    module.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        module(X)
    log.clear()
    module.error = None
    module(X)
    assert log == [*ENTERED, *LEFT]
    module.error = ValueError("as planned")
    log.clear()
    with pytest.raises(ValueError, match="as planned"):
        module(X)
    assert log == [*ENTERED, *(f"on_error {name}" for name in INSIDE_OUT)]


def test_a_bracket_can_be_left_out_of_a_call() -> None:
    module, log = _annotated()
    dispatcher = dispatcher_of(module)
    assert dispatcher is not None
    args, kwargs = dispatcher.before(module, (X,), {"key": 1}, without="checkpoint")
    assert args[0] is X
    assert kwargs == {"key": 1}
    assert dispatcher.after(module, args, X) is X
    assert log == [*ENTERED[:-1], *LEFT[1:]]


# --- copies -------------------------------------------------------------------------------------


@COPIERS
def test_a_copy_has_hooks_and_brackets_of_its_own_and_no_open_calls(
    duplicate: Callable[[nn.Module], nn.Module],
) -> None:
    module, log = _annotated()
    module.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        module(X)
    module.error = None
    clone = duplicate(module)
    dispatcher: Any = dispatcher_of(clone)
    assert dispatcher is not dispatcher_of(module)
    assert hooks_attached(clone)
    theirs = dispatcher.brackets["checkpoint"].log
    drop_calls(clone)
    assert theirs == ENTERED
    clone(X)
    assert theirs == [*ENTERED, *ENTERED, *LEFT]
    assert log == ENTERED


@pytest.mark.parametrize("hooks", ["_forward_pre_hooks", "_forward_hooks"])
def test_cleared_hooks_are_noticed(hooks: str) -> None:
    module, _ = _annotated()
    assert hooks_attached(module)
    getattr(module, hooks).clear()
    assert not hooks_attached(module)
    assert not hooks_attached(nn.Linear(1, 1))
