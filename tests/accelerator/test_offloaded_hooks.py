"""Hooks that reduce gradients of parameters at rest on the host: the numbers, waits and memory of the library's own sums."""

from __future__ import annotations

import gc
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, bf16_compress_hook

from composable import CPUOffloadPolicy, MixedPrecisionPolicy, apply_optimizer_in_backward, register_comm_hook
from composable.device.private import local_of
from composable.errors import CommHookError, CommunicationError
from tests.accelerator import sim
from tests.accelerator.test_offloaded_parameters import WAYS, WINDOWS, odd
from tests.accelerator.twins import assert_at_home, assert_equal, mesh_of, one_batch, train, twins_of, x_of
from tests.helpers.world import current_device, spmd

_BOTH: Final = ("reduce_scatter", "all_reduce")
_WAYS: Final = {**WAYS, "summed in float32": {"mp_policy": MixedPrecisionPolicy("bf16", "fp32")}}
_STAGES: Final = [("reduce_scatter",), ("all_reduce",), _BOTH]


class _Means:
    """Makes the library's means; says what hooks are handed where parameters rest on the host."""

    def __init__(self, rests: str = "cpu") -> None:
        self.calls = 0
        self._rests = rests

    def __call__(self, group: dist.ProcessGroup, bucket: Any) -> torch.futures.Future[Tensor]:
        self.calls += 1
        assert {each.device for each in (bucket.buffer(), *bucket.gradients())} == {current_device()}
        for parameter in bucket.parameters():
            assert parameter.device.type == local_of(parameter).device.type == self._rests
        summed = dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()
        return summed.then(lambda done: done.value()[0] * bucket.scale)


def _hooked_twins(stages: tuple[str | None, ...] = (None,), **options: Any) -> tuple[tuple[nn.Module, nn.Module], list[_Means]]:
    """One that the library reduces on the device, and one that hooks do, and that offloads."""
    models = twins_of(**options)
    hooks = [_Means() for _ in stages]
    for stage, hook in zip(stages, hooks, strict=True):
        register_comm_hook(models[1], hook, stage=stage)
    return models, hooks


@spmd(ranks=[2, 4])
@pytest.mark.parametrize("way", _WAYS)
def test_steps_are_those_of_a_model_without_either(way: str) -> None:
    models, (hook,) = _hooked_twins(**_WAYS[way])
    train(models, one_batch)
    assert hook.calls == (3 if way == "one unit" else 12)


@spmd(ranks=[2, 4])
def test_parameters_that_lie_otherwise_and_those_that_some_ranks_do_not_use() -> None:
    models = odd(None), odd(CPUOffloadPolicy())
    register_comm_hook(models[1], _Means())
    train(models, one_batch)


@spmd(ranks=[2, 4])
@pytest.mark.parametrize("window", WINDOWS)
def test_gradients_of_several_backwards_add_up(window: str) -> None:
    hybrid = dist.get_world_size() == 4
    if not hybrid and window == "held as shards":
        return
    for stages in _STAGES if hybrid else [(None,)]:
        options = {"mesh": mesh_of(2, 2) if hybrid else mesh_of(), "mp_policy": "bf16" if window == "held" else None}
        models, hooks = _hooked_twins(stages, **options)
        train(models, WINDOWS[window])
        assert all(hook.calls for hook in hooks)


@spmd(ranks=[2, 4])
def test_hooks_that_round_do_so_as_on_the_device() -> None:
    hybrid = dist.get_world_size() == 4
    models = twins_of(mesh=mesh_of(2, 2) if hybrid else mesh_of())
    for model in models:
        register_comm_hook(model, bf16_compress_hook, stage="all_reduce" if hybrid else None)
    train(models, one_batch)


@spmd(ranks=[2, 4])
def test_steps_in_backward_are_steps() -> None:
    hybrid = dist.get_world_size() == 4
    models, _ = _hooked_twins(_BOTH if hybrid else (None,), mesh=mesh_of(2, 2) if hybrid else mesh_of())
    for model in models:
        apply_optimizer_in_backward(torch.optim.AdamW, model.parameters(), {"lr": 0.01})
    for step in range(3):
        for model in models:
            one_batch(model, step)
        assert_equal(*models)
        assert_at_home(models[1])


@spmd(ranks=2)
def test_hooks_come_and_go_and_stay_when_parameters_come_home() -> None:
    models, (hook,) = _hooked_twins()
    train(models, one_batch)
    models[1].to(current_device())
    train(models, one_batch, steps=1)
    assert hook.calls == 16
    other = twins_of()
    with register_comm_hook(other[1], allreduce_hook):
        train(other, one_batch)
    train(other, one_batch)


# --- hooks that fail ------------------------------------------------------------------------------------------------------


class _Fails(_Means):
    """In its second backward the third call fails, on all ranks, while what others made leaves for the host."""

    def __init__(self, how: str, fails: bool) -> None:
        super().__init__()
        self._how = how
        self._fails = fails

    def __call__(self, group: dist.ProcessGroup, bucket: Any) -> Any:
        future = super().__call__(group, bucket)
        if not self._fails or self.calls != 4 + 3:
            return future
        if self._how == "raises":
            raise MemoryError("as asked")
        if self._how == "raises afterwards":
            return future.then(_fail)
        if self._how == "on the host":
            return future.wait().cpu()
        return future.wait()[1:]


def _fail(_: object) -> None:
    raise MemoryError("as asked")


_FAILURES: Final[dict[str, type[Exception]]] = {
    "raises": MemoryError,
    "raises afterwards": CommunicationError,
    "on the host": CommHookError,
    "too short": CommHookError,
}


def _memory_after_a_forward(model: nn.Module) -> int:
    """What was in flight before is dropped by the forward."""
    with torch.no_grad():
        model(x_of(9))
    sim.synchronize()
    gc.collect()
    held: int = sim.native.memory(current_device().index)[0]
    return held


@spmd(ranks=[2, 4])
@pytest.mark.parametrize("how", _FAILURES)
def test_where_a_hook_fails_while_sums_leave_memory_comes_back_and_all_train_on(how: str) -> None:
    hybrid = dist.get_world_size() == 4
    for failing in _BOTH if hybrid else (None,):
        models = twins_of(mesh=mesh_of(2, 2) if hybrid else mesh_of())
        hooks = {stage: _Fails(how, stage == failing) for stage in (_BOTH if hybrid else (None,))}
        for stage, hook in hooks.items():
            register_comm_hook(models[1], hook, stage=stage)
        one_batch(models[1], 8)
        models[1].zero_grad()
        before = _memory_after_a_forward(models[1])
        sim.native.sleep(20_000)
        with pytest.raises(_FAILURES[how], match=r"as asked|must return the reduced gradients"):
            one_batch(models[1], 7)
        models[1].zero_grad()
        assert _memory_after_a_forward(models[1]) <= before
        train(models, one_batch)
