"""After an exception anywhere in a step the next step is as good as if there had been none."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Final
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable import describe, registry, replicate
from composable.engine.gradients.post_backward import Buckets
from composable.errors import PhaseError
from tests.helpers.battery import BATTERY, Case
from tests.helpers.compare import assert_same_gradients
from tests.helpers.schemes import SCHEMES
from tests.helpers.world import Pool, current_device, need_devices, spmd


class _Stop(BaseException):
    """Not an Exception, as KeyboardInterrupt is not."""


def _loss(output: Tensor) -> Tensor:
    return output.square().mean()


def _caught(act: Callable[[], object], kind: type[BaseException] = MemoryError) -> None:
    with pytest.raises(kind, match="as planned"):
        act()


def _inside(model: nn.Module) -> nn.Module:
    """A plain module in the unit that runs second of four times."""
    inside = model.get_submodule("other.up")
    assert isinstance(inside, nn.Linear)
    return inside


def _fail(*_: object, **__: object) -> None:
    raise MemoryError("as planned")


def in_forward(model: nn.Module, x: Tensor) -> None:
    with _inside(model).register_forward_pre_hook(_fail):
        _caught(lambda: model(x))


def in_forward_by_something_that_is_no_exception(model: nn.Module, x: Tensor) -> None:
    def stop(*_: object) -> None:
        raise _Stop("as planned")

    with _inside(model).register_forward_pre_hook(stop):
        _caught(lambda: model(x), _Stop)


def in_forward_without_gradients(model: nn.Module, x: Tensor) -> None:
    with _inside(model).register_forward_pre_hook(_fail), torch.no_grad():
        _caught(lambda: model(x))


def in_a_hook_on_the_unit(model: nn.Module, x: Tensor) -> None:
    with model.get_submodule("other").register_forward_hook(_fail):
        _caught(lambda: model(x))


def in_a_hook_on_the_root_before_the_engine(model: nn.Module, x: Tensor) -> None:
    with model.register_forward_hook(_fail, prepend=True):
        _caught(lambda: model(x))


def in_a_pre_hook_on_the_unit(model: nn.Module, x: Tensor) -> None:
    with model.get_submodule("other").register_forward_pre_hook(_fail):
        _caught(lambda: model(x))


def in_a_hook_on_the_root(model: nn.Module, x: Tensor) -> None:
    with model.register_forward_hook(_fail):
        _caught(lambda: model(x))


def in_forward_twice(model: nn.Module, x: Tensor) -> None:
    in_forward(model, x)
    in_forward(model, x)


def in_backward(model: nn.Module, x: Tensor) -> None:
    def spoil(module: nn.Module, args: object, output: Tensor) -> None:
        output.register_hook(_fail)

    with _inside(model).register_forward_hook(spoil):
        loss = _loss(model(x))
    _caught(loss.backward)
    model.zero_grad()


def in_backward_of_the_first_module(model: nn.Module, x: Tensor) -> None:
    output = model(x)
    output.register_hook(_fail)
    loss = _loss(output)
    _caught(loss.backward)
    model.zero_grad()


def in_the_second_of_two_forwards(model: nn.Module, x: Tensor) -> None:
    model(x)
    in_forward(model, x)


def between_forward_and_backward(model: nn.Module, x: Tensor) -> None:
    """The caller gives up: a loss that is never differentiated."""
    _loss(model(x))


def in_the_loss_and_retried_with_half_of_the_batch(model: nn.Module, x: Tensor) -> None:
    with _inside(model).register_forward_pre_hook(_fail):
        _caught(lambda: model(x))
    for half in x.chunk(2):
        _loss(model(half)).backward()


FAILURES: Final[dict[str, Callable[[nn.Module, Tensor], None]]] = {
    failure.__name__: failure
    for failure in (
        in_forward,
        in_forward_by_something_that_is_no_exception,
        in_forward_without_gradients,
        in_a_hook_on_the_unit,
        in_a_pre_hook_on_the_unit,
        in_a_hook_on_the_root,
        in_a_hook_on_the_root_before_the_engine,
        in_forward_twice,
        in_backward,
        in_backward_of_the_first_module,
        in_the_second_of_two_forwards,
        between_forward_and_backward,
        in_the_loss_and_retried_with_half_of_the_batch,
    )
}
_SCHEMES: Final = (
    "fully_shard by policy",
    "fully_shard as one unit",
    "fully_shard without resharding",
    "replicate",
    "replicate in small buckets",
    "replicate side by side",
    "fully_shard inside replicate",
    "replicate inside fully_shard",
    "checkpoint, then fully_shard",
)


def _side_by_side(model: nn.Module, case: Case) -> None:
    for child in model.children():
        replicate(child)


@pytest.mark.parametrize("scheme", _SCHEMES)
@pytest.mark.parametrize("failure", FAILURES)
@spmd(ranks=2)
def test_the_step_after_an_exception_is_a_good_one(failure: str, scheme: str) -> None:
    def program(model: nn.Module, x: Tensor) -> None:
        FAILURES[failure](model, x)
        if scheme.startswith("checkpoint"):
            # After an interrupt torch goes on saving tensors for the checkpointed forward until
            # this model runs again; nothing tells a hook of it. Without this forward another
            # model's next step would be caught by that.
            model(x)

    # The comparator takes a good step after the program and compares that, too.
    annotate = _side_by_side if scheme == "replicate side by side" else SCHEMES[scheme].annotate
    assert_same_gradients(BATTERY["a unit used several times"], annotate, program)


@spmd(ranks=2)
def test_what_a_failed_backward_has_launched_does_not_depend_on_the_garbage_collector() -> None:
    case = BATTERY["a unit used several times"]
    models = [case.model(0, 0, current_device()) for _ in range(2)]
    for model in models:
        SCHEMES["replicate in small buckets"].annotate(model, case)
    dropped, model = models
    abandoned = _loss(dropped(*case.inputs(0, 0, dist.get_rank(), current_device())))
    if dist.get_rank() == 1:
        del dropped, models, abandoned
        gc.collect()
    for step in range(3):
        (x,) = case.inputs(0, step, dist.get_rank(), current_device())
        in_backward(model, x)
        # Not ours: it would meet the reduction of a bucket if only one rank had launched that.
        total = torch.ones(3, device=current_device())
        dist.all_reduce(total)
        assert total.tolist() == [2.0] * 3
        _loss(model(x)).backward()


@pytest.mark.parametrize("scheme", [scheme for scheme in _SCHEMES if scheme in SCHEMES])
@spmd(ranks=2)
def test_a_second_backward_of_a_step_that_is_lost_is_refused(scheme: str) -> None:
    def program(model: nn.Module, x: Tensor) -> None:
        fails = [True]

        def spoil(module: nn.Module, args: object, output: Tensor) -> None:
            output.register_hook(lambda _: _fail() if fails else None)

        with _inside(model).register_forward_hook(spoil):
            output = model(x)
        _caught(_loss(output).backward)
        fails.clear()
        if any(registry(module) for module in model.modules()):
            with pytest.raises(
                PhaseError,
                match=(
                    r"^a backward came to unit '.*' after an earlier one of the same step had"
                    r" raised"
                ),
            ):
                output.sum().backward()
        model.zero_grad()

    assert_same_gradients(BATTERY["a unit used several times"], SCHEMES[scheme].annotate, program)


@spmd(ranks=2)
def test_a_second_backward_is_refused_also_if_the_first_raised_as_it_began() -> None:
    """The program keeps the error, whose traceback keeps frames of the library."""
    kept: list[MemoryError] = []

    def program(model: nn.Module, x: Tensor) -> None:
        losses = [_loss(model(x)), _loss(model(x))]
        if not any(registry(module) for module in model.modules()):
            return
        with mock.patch.object(Buckets, "open", _fail), pytest.raises(MemoryError) as failure:
            losses[0].backward()
        kept.append(failure.value)
        with pytest.raises(PhaseError, match="after an earlier one of the same step had raised"):
            losses[1].backward()
        model.zero_grad()

    case = BATTERY["a unit used several times"]
    assert_same_gradients(case, SCHEMES["fully_shard by policy"].annotate, program)
    assert kept


def _states_after(failure: str, scheme: str) -> list[str]:
    case = BATTERY["a unit used several times"]
    model = case.model(0, 0, current_device())
    SCHEMES[scheme].annotate(model, case)
    (x,) = case.inputs(0, 0, dist.get_rank(), current_device())
    FAILURES[failure](model, x)
    return [unit["state"] for unit in describe(model).to_dict()["units"]]


@pytest.mark.parametrize(
    "failure",
    [
        "in_forward",
        "in_forward_without_gradients",
        "in_a_hook_on_the_unit",
        "in_a_pre_hook_on_the_unit",
        "in_a_hook_on_the_root",
    ],
)
def test_an_exception_in_forward_frees_what_was_gathered(
    pool: Pool, failure: str, device: str
) -> None:
    need_devices(device, 2)
    # After the outermost forward what backward needs first may stay; the next forward frees it.
    schemes = ["fully_shard by hand", *(["fully_shard by policy"] if "root" not in failure else [])]
    for scheme in schemes:
        for states in pool.run(2, _states_after, failure, scheme, device=device):
            assert states == ["SHARDED"] * 3, scheme
