"""Hooks that reduce gradients of parameters at rest on the host: the numbers, waits and memory of the library's own sums."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, bf16_compress_hook

from composable import CPUOffloadPolicy, MixedPrecisionPolicy, apply_optimizer_in_backward, register_comm_hook
from composable.memory.torch_private import local_of
from tests.accelerator.test_offloaded_parameters import WAYS, WINDOWS, odd
from tests.accelerator.twins import assert_at_home, assert_equal, mesh_of, one_batch, train, twins_of
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
