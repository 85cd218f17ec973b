"""Parameters that rest on the host: the numbers of a copy whose parameters do not, alone and with
all that goes with them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
)
from torch.distributed.tensor import DTensor, Shard

from composable import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    apply_optimizer_in_backward,
    checkpoint,
    clip_grad_norm_,
    fully_shard,
    no_sync,
    offload_activations,
    reduce_gradients,
    register_comm_hook,
    replicate,
    step_on_shards,
)
from composable.torch_private import local_of
from tests.accelerator import sim
from tests.accelerator.copies import (
    Block,
    assert_at_home,
    assert_equal,
    at_rest_again,
    copies_of,
    mesh_of,
    model_of,
    one_batch,
    train,
    x_of,
)
from tests.helpers.world import current_device, spmd

Options = dict[str, Any]
WAYS: Final[dict[str, Options]] = {
    "plain": {},
    "one unit": {"policy": None},
    "ordinary memory": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "bfloat16": {"mp_policy": "bf16"},
    "kept after forward": {"reshard_after_forward": False},
    "regrouped": {"reshard_after_forward": 2},
    "a sum": {"grad_reduce": "sum"},
    "bfloat16, summed in float32": {"mp_policy": MixedPrecisionPolicy("bf16", "fp32")},
}
Stages = tuple[str | None, ...]
_BOTH: Final = ("reduce_scatter", "all_reduce")
hooked = pytest.mark.parametrize("hooked", [False, True])


class _Means:
    """Makes the library's means; says what hooks are handed where parameters rest on the host."""

    def __init__(self, rests: str = "cpu") -> None:
        self.calls = 0
        self._rests = rests

    def __call__(self, group: dist.ProcessGroup, bucket: Any) -> torch.futures.Future[Tensor]:
        self.calls += 1
        assert {each.device for each in (bucket.buffer(), *bucket.gradients())} == {
            current_device()
        }
        for parameter in bucket.parameters():
            assert parameter.device.type == local_of(parameter).device.type == self._rests
        summed = dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()
        return summed.then(lambda done: done.value()[0] * bucket.scale)


def _hook(models: tuple[nn.Module, nn.Module], stages: Stages = (None,)) -> list[_Means]:
    """Has hooks reduce the gradients of the model that offloads, and the library those of the other
    one.
    """
    hooks = [_Means() for _ in stages]
    for stage, hook in zip(stages, hooks, strict=True):
        register_comm_hook(models[1], None, hook, stage=stage)
    return hooks


@hooked
@spmd(ranks=[1, 2, 4])
@pytest.mark.parametrize("way", WAYS)
def test_steps_are_those_of_a_model_that_does_not_offload(way: str, hooked: bool) -> None:
    if dist.get_world_size() > 1 or (way != "regrouped" and not hooked):
        models = copies_of(**WAYS[way])
        hooks = _hook(models) if hooked else []
        train(models, one_batch)
        assert all(hook.calls == (3 if way == "one unit" else 12) for hook in hooks)


class Odd(nn.Module):
    """Parameters that lie otherwise, are cut otherwise, are integers, and that only even ranks use,
    or none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(8, 6).t())
        self.across = nn.Linear(6, 5, bias=False)
        self.table = nn.Parameter(torch.arange(5), requires_grad=False)
        self.even = nn.Parameter(torch.ones(5))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.across(x @ self.turned.t()) + self.table
        return y if dist.get_rank() % 2 else y * self.even


def odd(policy: CPUOffloadPolicy | None) -> nn.Module:
    torch.manual_seed(0)
    with torch.device("cpu"):
        model = Odd()
    return fully_shard(
        model,
        mesh=mesh_of(),
        offload_policy=policy,
        shard_placement_fn=lambda parameter: Shard(1) if parameter.shape == (5, 6) else None,
    )


@hooked
@spmd(ranks=[1, 2, 4])
def test_parameters_that_lie_otherwise_and_those_that_some_ranks_do_not_use(hooked: bool) -> None:
    models = odd(None), odd(CPUOffloadPolicy())
    if hooked:
        _hook(models)
    train(models, one_batch)


@spmd(ranks=2)
def test_a_backward_that_raises_leaves_a_model_that_trains_on() -> None:
    models = copies_of()

    def fail(_: Tensor) -> None:
        raise RuntimeError("as asked")

    for model in models:
        parameters = list(model.parameters())
        hook = model[1].register_forward_hook(
            lambda module, args, output: output.register_hook(fail) and None
        )
        with pytest.raises(RuntimeError, match="as asked"):
            one_batch(model, 3)
        hook.remove()
        assert at_rest_again(model, parameters)
        model.zero_grad()
    train(models, one_batch)


# --- several backwards --------------------------------------------------------------------------


def _two_batches(model: nn.Module, step: int) -> None:
    one_batch(model, 2 * step)
    one_batch(model, 2 * step + 1)


def _held(model: nn.Module, step: int) -> None:
    with no_sync(model):
        one_batch(model, 2 * step)
        one_batch(model, 2 * step + 2)
    one_batch(model, 2 * step + 1)


def _held_after_reduced(model: nn.Module, step: int) -> None:
    one_batch(model, 2 * step)
    with no_sync(model):
        one_batch(model, 2 * step + 1)
    reduce_gradients(model)


def _held_as_shards(model: nn.Module, step: int) -> None:
    with no_sync(model, level="replicate"):
        one_batch(model, 2 * step)
        one_batch(model, 2 * step + 2)
    one_batch(model, 2 * step + 1)


WINDOWS: Final = {
    "added up": _two_batches,
    "held": _held,
    "held after reduced": _held_after_reduced,
    "held as shards": _held_as_shards,
}


@spmd(ranks=[2, 4])
@pytest.mark.parametrize("window", WINDOWS)
def test_gradients_of_several_backwards_add_up(window: str) -> None:
    hybrid = dist.get_world_size() == 4
    if hybrid or window != "held as shards":
        every: list[Stages] = [("reduce_scatter",), ("all_reduce",), _BOTH] if hybrid else [(None,)]
        for stages in [(), *every]:
            mesh = mesh_of(2, 2) if hybrid else mesh_of()
            models = copies_of(mesh=mesh, mp_policy="bf16" if window == "held" else None)
            hooks = _hook(models, stages)
            train(models, WINDOWS[window])
            assert all(hook.calls for hook in hooks)


# --- what works on gradients and parameters -----------------------------------------------------


# with more the last bit may differ: torch's adds up over the host's group here, whose order is
# gloo's
@spmd(ranks=2)
@pytest.mark.parametrize("clip", [clip_grad_norm_, torch.nn.utils.clip_grad_norm_])
def test_clipping(clip: Callable[..., Any]) -> None:
    norms: list[float] = []

    def step_of(model: nn.Module, step: int) -> None:
        one_batch(model, step)
        norm = clip(model.parameters(), 0.01)
        norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))

    train(copies_of(), step_of)
    assert norms[::2] == norms[1::2]
    assert min(norms) > 0.01


@spmd(ranks=2)
@pytest.mark.parametrize("fused", [False, True])
def test_steps_on_shards_are_steps(fused: bool) -> None:
    models = copies_of()[1], copies_of()[1]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused) for model in models]
    step_on_shards(optimizers[0])
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            one_batch(model, step)
            optimizer.step()
        assert_equal(*models)


@pytest.mark.parametrize("fused", [False, True])
@spmd(ranks=2)
def test_an_infinity_on_one_rank_leaves_a_step_out_on_all(fused: bool) -> None:
    model = fully_shard(
        model_of(), policy={Block}, mesh=mesh_of(), offload_policy=CPUOffloadPolicy()
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    # what the scaler copies to the host comes late, and what a fused step copies
    optimizer.register_step_pre_hook(lambda *_: sim.native.sleep(20_000))
    scaler = torch.amp.GradScaler("sim", init_scale=8.0)
    for step in range(3):
        assert scaler.get_scale() == (4.0 if step > 1 else 8.0)
        before = [local_of(parameter).clone() for parameter in model.parameters()]
        scaler.scale(model(x_of(step)).square().mean()).backward()
        sim.native.sleep(20_000)
        if step == 1 and dist.get_rank() == 1:
            local_of(model.get_parameter("0.up.weight").grad)[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        changed = [
            not torch.equal(local_of(p), old)
            for p, old in zip(model.parameters(), before, strict=True)
        ]
        assert any(changed) == (step != 1), step
    assert all(local_of(parameter).isfinite().all() for parameter in model.parameters())


@spmd(ranks=2)
def test_hooks_find_gradients_that_have_arrived() -> None:
    seen: list[float] = []
    models = copies_of()
    for model in models:
        weight = model.get_parameter("0.up.weight")
        weight.register_hook(lambda gradient: seen.append(float(local_of(gradient).sum())))
        other = model.get_parameter("1.down.weight")
        other.register_post_accumulate_grad_hook(
            lambda parameter: seen.append(float(local_of(parameter.grad).sum()))
        )
    train(models, one_batch)
    half = [seen[start : start + 2] for start in range(0, 12, 2)]
    assert half[::2] == half[1::2]
    assert len(seen) == 12


@hooked
@spmd(ranks=[1, 2, 4])
def test_steps_in_backward_are_steps(hooked: bool) -> None:
    hybrid = dist.get_world_size() == 4
    models = copies_of(mesh=mesh_of(2, 2) if hybrid else mesh_of())
    if hooked:
        _hook(models, _BOTH if hybrid else (None,))
    for model in models:
        apply_optimizer_in_backward(torch.optim.AdamW, model.parameters(), {"lr": 0.01})
    for step in range(3):
        for model in models:
            one_batch(model, step)
        assert_equal(*models)
        assert_at_home(models[1])


@spmd(ranks=[2, 4])
def test_hooks_that_round_do_so_as_on_the_device() -> None:
    hybrid = dist.get_world_size() == 4
    models = copies_of(mesh=mesh_of(2, 2) if hybrid else mesh_of())
    for model in models:
        register_comm_hook(model, None, bf16_compress_hook, stage="all_reduce" if hybrid else None)
    train(models, one_batch)


@spmd(ranks=2)
def test_hooks_come_and_go_and_stay_when_parameters_come_home() -> None:
    models = copies_of()
    (hook,) = _hook(models)
    train(models, one_batch)
    models[1].to(current_device())
    train(models, one_batch, steps=1)
    assert hook.calls == 16
    other = copies_of()
    with register_comm_hook(other[1], None, allreduce_hook):
        train(other, one_batch)
    train(other, one_batch)


# --- with other annotations ---------------------------------------------------------------------


def _recompute(model: nn.Module) -> None:
    checkpoint(model, policy={Block})


def _offload(model: nn.Module) -> None:
    offload_activations(model, policy={Block}, min_bytes=0)


@spmd(ranks=2)
@pytest.mark.parametrize("annotate", [_recompute, _offload])
def test_other_verbs_change_nothing(annotate: Callable[[nn.Module], None]) -> None:
    models = copies_of()
    for model in models:
        annotate(model)
    train(models, one_batch)


@spmd(ranks=2)
def test_some_units_rest_on_the_host_and_others_on_the_device_or_are_replicated() -> None:
    def made(policy: CPUOffloadPolicy | None) -> nn.Module:
        model = model_of()
        model[2].to(current_device())
        replicate(model[2], mesh=mesh_of())
        chosen = {"offload_policy": policy}
        return fully_shard(model, policy={"0": chosen, "1": {}, "3": chosen}, mesh=mesh_of())

    models = made(None), made(CPUOffloadPolicy())
    assert [p.device.type for p in models[1].parameters()].count("sim") == 2 + 8
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    for step in range(3):
        norms = []
        for model, optimizer in zip(models, optimizers, strict=True):
            one_batch(model, step)
            norms.append(float(clip_grad_norm_(model, 0.01)))
            optimizer.step()
            optimizer.zero_grad()
        for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
            torch.testing.assert_close(local_of(one).cpu(), local_of(other).cpu())
        assert norms[0] == pytest.approx(norms[1])
