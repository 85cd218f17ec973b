"""Modules hold one form of their parameters or the other; hooks of users are called for the
gradient that they see.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from composable.contract.tree import Place
from composable.engine.params.param import (
    ManagedParam,
    ParameterSwap,
    ParamInfo,
    defer_hooks,
    memory_order,
    move_hooks,
    run_gradient_hooks,
    run_post_accumulate_hooks,
)

# --- what modules hold ---------------------------------------------------------------------------


def _managed(*places: tuple[nn.Module, str]) -> ManagedParam:
    """With a compute form of its own."""
    param = ManagedParam(ParamInfo("p", tuple(Place(module, name) for module, name in places)))
    param.compute = nn.Parameter(torch.zeros(2, 2))
    return param


def test_modules_hold_compute_parameters_while_they_are_swapped_in() -> None:
    module = nn.Linear(2, 2)
    params = [_managed((module, name)) for name in ("bias", "weight")]
    swap = ParameterSwap(params)
    for _ in range(2):
        swap.swap_in()
        assert [module.bias, module.weight] == [param.compute for param in params]
        assert [name for name, _ in module.named_parameters()] == [
            "weight",
            "bias",
        ], "names keep their order"
        swap.swap_out()
        assert all(
            one is param.at_rest
            for one, param in zip((module.bias, module.weight), params, strict=True)
        )


def test_a_tied_parameter_changes_in_all_its_places() -> None:
    """Also in an RNN, which computes with a list of its own that follows attributes only."""
    one, other, rnn = nn.Linear(2, 2), nn.Linear(2, 2), nn.RNN(2, 2)
    other.weight = rnn.weight_hh_l0 = one.weight
    param = _managed((one, "weight"), (other, "weight"), (rnn, "weight_hh_l0"))
    swap = ParameterSwap([param])
    swap.swap_in()
    assert one.weight is other.weight is rnn.weight_hh_l0 is param.compute
    assert any(weight is param.compute for weight in rnn._flat_weights)
    swap.swap_out()
    assert one.weight is other.weight is rnn.weight_hh_l0 is param.at_rest
    fresh = nn.Parameter(torch.ones(2, 2))
    other.weight = None
    param.register(fresh)
    assert one.weight is rnn.weight_hh_l0 is param.registered is fresh
    assert any(weight is fresh for weight in rnn._flat_weights)
    assert other.weight is None, "a place that was emptied stays empty"


@pytest.mark.parametrize("kind", [nn.Linear, nn.RNN])
def test_a_parameter_that_the_user_registered_stays_where_it_is(kind: type[nn.Module]) -> None:
    module = kind(2, 2)
    name = next(iter(module._parameters))
    param = _managed((module, name))
    swap = ParameterSwap([param])
    theirs = nn.Parameter(torch.ones(2, 2))
    setattr(module, name, theirs)
    swap.swap_in()
    assert getattr(module, name) is theirs
    setattr(module, name, param.at_rest)
    swap.swap_in()
    setattr(module, name, theirs)
    swap.swap_out()
    assert getattr(module, name) is theirs


def test_the_order_of_memory_is_that_of_the_strides() -> None:
    images = torch.zeros(2, 3, 4, 5)
    assert memory_order(images) == memory_order(torch.zeros(3, 1).expand(3, 4)) == ()
    assert memory_order(images.to(memory_format=torch.channels_last)) == (0, 2, 3, 1)
    assert memory_order(torch.zeros(4, 3).t()) == (1, 0)


# --- hooks --------------------------------------------------------------------------------------


def test_hooks_move_with_what_removes_them() -> None:
    source, target = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    calls: list[str] = []
    tensor_hook = source.register_hook(lambda gradient: calls.append("tensor hook"))
    after = source.register_post_accumulate_grad_hook(
        lambda parameter: calls.append("post-accumulate hook")
    )
    move_hooks(source, target)
    source.sum().backward()
    assert calls == []
    target.sum().backward()
    assert calls == ["tensor hook", "post-accumulate hook"]
    tensor_hook.remove()
    after.remove()
    target.sum().backward()
    assert len(calls) == 2


def test_tensor_hooks_change_a_gradient_one_after_the_other() -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.register_hook(lambda gradient: gradient + 1.0)
    parameter.register_hook(lambda gradient: None)
    parameter.register_hook(lambda gradient: gradient * 2.0)
    assert run_gradient_hooks(parameter, torch.ones(2)).tolist() == [4.0, 4.0]


def _deferred(parameter: nn.Parameter, calls: list[str], name: str = "engine") -> None:
    def arrived(tensor: Tensor) -> None:
        calls.append(name)

    defer_hooks(parameter, arrived)


def test_deferred_hooks_wait_until_they_are_run() -> None:
    """Hooks of before and of after, in their order; those that were removed are not called."""
    parameter, calls = nn.Parameter(torch.ones(2)), []
    add = partial(calls.append)
    parameter.register_post_accumulate_grad_hook(lambda _: add("before"))
    _deferred(parameter, calls)
    parameter.register_post_accumulate_grad_hook(lambda _: add("after"))
    gone = parameter.register_post_accumulate_grad_hook(lambda _: add("removed"))
    gone.remove()
    parameter.sum().backward()
    assert calls == ["engine"]
    run_post_accumulate_hooks(parameter)
    assert calls == ["engine", "before", "after"]


@pytest.mark.parametrize("again", [False, True])
def test_hooks_are_called_by_autograd_again_when_they_are_no_longer_deferred(again: bool) -> None:
    parameter, calls = nn.Parameter(torch.ones(2)), []
    _, undo = defer_hooks(parameter, lambda _: calls.append("engine"))
    handle = parameter.register_post_accumulate_grad_hook(lambda _: calls.append("user"))
    if again:  # built anew: the users' hooks are neither lost nor deferred twice
        _, undo = defer_hooks(parameter, lambda _: calls.append("new engine"))
        parameter.sum().backward()
        assert calls == ["new engine"]
        run_post_accumulate_hooks(parameter)
        assert calls.pop() == "user"
        calls.clear()
    undo()
    parameter.sum().backward()
    assert calls == ["user"]
    handle.remove()
    parameter.sum().backward()
    assert calls == ["user"]


def test_a_handle_removes_its_hook_after_hooks_were_deferred_anew() -> None:
    """A unit that is built anew ends the deferral and begins another: of one table of hooks."""
    parameter, calls = nn.Parameter(torch.ones(2)), []
    _, undo = defer_hooks(parameter, lambda _: calls.append("engine"))
    handle = parameter.register_post_accumulate_grad_hook(lambda _: calls.append("user"))
    undo()
    _, undo = defer_hooks(parameter, lambda _: calls.append("new engine"))
    handle.remove()
    parameter.sum().backward()
    run_post_accumulate_hooks(parameter)
    assert calls == ["new engine"]


def test_deferred_hooks_move_as_hooks_of_the_user() -> None:
    source, target = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    calls: list[str] = []
    _deferred(source, calls)
    source.register_post_accumulate_grad_hook(lambda _: calls.append("user"))
    move_hooks(source, target)
    target.sum().backward()
    assert calls == ["user"]
    source.sum().backward()
    assert calls == ["user"]
