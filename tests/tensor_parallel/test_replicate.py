"""`replicate` over tensor-parallel parameters, which rest as the user made them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composable import (
    MixedPrecisionPolicy,
    clip_grad_norm_,
    full_state_dict,
    fully_shard,
    no_sync,
    remove,
    replicate,
    summon_full_params,
)
from tests.helpers.world import spmd
from tests.tensor_parallel.models import (
    GPT,
    MLP,
    assert_trains_as_one_process,
    batches,
    full,
    loss_of,
    made,
    mesh_of,
    parallelize_gpt,
    parallelize_mlp,
    train,
)


def _annotate(model: nn.Module, mesh: Any, **options: Any) -> None:
    parallelize_gpt(model, mesh["tp"]) if isinstance(model, GPT) else parallelize_mlp(
        model, mesh["tp"]
    )
    before = dict(model.named_parameters())
    replicate(model, mesh=mesh["dp"], **options)
    assert all(before[name] is parameter for name, parameter in model.named_parameters())


@pytest.mark.parametrize(
    "options", [{}, {"bucket_cap_mb": 1e-5}, {"gradient_as_bucket_view": True}]
)
@spmd(ranks=4)
def test_it_trains_as_one_process(options: dict[str, Any]) -> None:
    mesh = mesh_of(2, 2)
    kind = MLP if "gradient_as_bucket_view" in options else partial(GPT, tied=bool(options))
    for clip in (None, clip_grad_norm_) if not options else (None,):
        assert_trains_as_one_process(
            kind, partial(_annotate, mesh=mesh, **options), mesh["dp"], optimizer="AdamW", clip=clip
        )


@spmd(ranks=4)
def test_gradients_are_accumulated_and_shown_reduced() -> None:
    mesh = mesh_of(2, 2)
    model, alone = made(GPT), made(GPT)
    _annotate(model, mesh)
    inputs, whole = batches(model, mesh["dp"].get_local_rank(), 2), batches(alone, -1, 2)
    for batch in whole:
        loss_of(alone, batch).backward()
    loss_of(model, inputs[0]).backward()
    with no_sync(model):
        loss_of(model, inputs[1]).backward()
    loss_of(model, inputs[2]).backward()
    for (name, parameter), plain in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert parameter.grad.placements == parameter.placements, name  # type: ignore[union-attr, attr-defined]
        torch.testing.assert_close(full(parameter.grad), plain.grad)  # type: ignore[arg-type]
    with summon_full_params(model):
        pass
    for found in (full_state_dict(model, rank0_only=False), model.state_dict()):
        torch.testing.assert_close({n: full(t) for n, t in found.items()}, dict(alone.state_dict()))
    remove(model, replicate)
    assert model.norm.weight.grad is not None


def _nothing(model: nn.Module) -> None:
    model.to(next(model.parameters()).dtype)


def _memory(model: nn.Module) -> None:
    model._apply(torch.clone)


@pytest.mark.parametrize("verb", [replicate, fully_shard])
@pytest.mark.parametrize("move", [_nothing, _memory])
@spmd(ranks=4)
def test_to_exchanges_parameters_with_new_ones(
    move: Callable[[nn.Module], None], verb: Callable[..., None]
) -> None:
    """Before the first step, and by one rank before the second. torch exchanges a `DTensor` with
    what `to` makes of it, also where that is of the same memory: hooks stay behind.
    """
    mesh = mesh_of(2, 2)
    model, alone = made(MLP), made(MLP)
    parallelize_mlp(model, mesh["tp"])
    verb(model, mesh=mesh["dp"], grad_reduce="sum")
    rank = mesh["dp"].get_local_rank()
    inputs, whole = batches(model, rank, 2), batches(alone, -1, 2)
    for step in range(2):
        if step == 0 or rank == 1:
            move(model)
        loss_of(model, inputs[step]).backward()
        loss_of(alone, whole[step]).backward()
        norm = clip_grad_norm_(model.parameters(), 1e9)
        for (name, parameter), plain in zip(
            model.named_parameters(), alone.parameters(), strict=True
        ):
            assert parameter.grad is not None, name
            assert plain.grad is not None
            plain.grad *= 2
            torch.testing.assert_close(full(parameter.grad), plain.grad)
        torch.testing.assert_close(
            norm,
            nn.utils.get_total_norm([p.grad for p in alone.parameters() if p.grad is not None]),
        )
        model.zero_grad()
        alone.zero_grad()


@spmd(ranks=4)
def test_they_may_stand_beside_shards() -> None:
    mesh = mesh_of(2, 2)

    def annotate(model: nn.Module) -> None:
        for block in model:  # type: ignore[attr-defined]
            parallelize_mlp(block, mesh["tp"])
        replicate(model[0], mesh=mesh["dp"])  # type: ignore[index]
        fully_shard(model, mesh=mesh["dp"])

    for clip in (None, clip_grad_norm_):
        assert_trains_as_one_process(
            lambda: nn.Sequential(MLP(), MLP()), annotate, mesh["dp"], clip=clip
        )


@spmd(ranks=4)
def test_one_that_is_frozen_beside_shards_keeps_the_gradient_that_is_there() -> None:
    mesh = mesh_of(2, 2)
    model = nn.Sequential(MLP(), MLP())
    for block in model:
        parallelize_mlp(block, mesh["tp"])
    replicate(model[0], mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    x = torch.ones(2, next(iter(model[0].parameters())).shape[1])
    model(x).sum().backward()
    frozen = next(iter(model[0].parameters()))
    before = frozen.grad
    assert isinstance(before, DTensor)
    expected = before.full_tensor().clone()
    loss = model(x).sum()
    frozen.requires_grad_(False)
    loss.backward()
    assert isinstance(frozen.grad, DTensor)
    assert torch.equal(frozen.grad.full_tensor(), expected)


class _Stops(torch.autograd.Function):
    """Raises in the first backward, when the layers behind it have their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, steps: list[int]) -> Tensor:
        ctx.steps = steps
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.steps.append(1)
        if len(ctx.steps) == 1:
            raise ZeroDivisionError
        return gradient, None


class _Stopping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.steps = nn.Linear(6, 6), MLP(), []

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(_Stops.apply(self.first(x), self.steps))
        return y


@pytest.mark.parametrize("beside_shards", [False, True])
@spmd(ranks=2)
def test_a_lost_step_leaves_no_gradients_of_this_rank_alone(beside_shards: bool) -> None:
    torch.manual_seed(0)
    model, mesh = _Stopping(), mesh_of(2, 1)
    alone = copy.deepcopy(model)
    alone.steps.append(1)
    parallelize_mlp(model.inner, mesh["tp"])
    replicate(model.inner, mesh=mesh["dp"])
    (fully_shard if beside_shards else replicate)(model, mesh=mesh["dp"])
    x = torch.randn(2, 3, 6)
    mine = x[mesh["dp"].get_local_rank()]
    with pytest.raises(ZeroDivisionError):
        model(mine).square().mean().backward()
    model(mine).square().mean().backward()  # nobody has cleared gradients
    alone(x).square().mean().backward()
    for (name, parameter), plain in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(full(parameter.grad), plain.grad, msg=name)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dtype", "policy"),
    [
        (torch.float32, MixedPrecisionPolicy("bf16", "fp32")),
        (torch.bfloat16, MixedPrecisionPolicy(None, "fp32")),
        (torch.bfloat16, MixedPrecisionPolicy(None, "fp32", keep_grads_in_reduce_dtype=True)),
        (torch.float32, MixedPrecisionPolicy(None, "bf16")),
    ],
)
@spmd(ranks=4)
def test_it_computes_and_reduces_in_other_dtypes_as_shards_do(
    dtype: torch.dtype, policy: MixedPrecisionPolicy
) -> None:
    mesh = mesh_of(2, 2)
    model = made(GPT).to(dtype)
    other = copy.deepcopy(model)
    parallelize_gpt(other, mesh["tp"])  # type: ignore[arg-type]
    fully_shard(other, mesh=mesh["dp"], mp_policy=policy)
    _annotate(model, mesh, mp_policy=policy)
    inputs = batches(model, mesh["dp"].get_local_rank(), 2)
    for each in (model, other):
        loss_of(each, inputs[0]).backward()
        with no_sync(each):
            loss_of(each, inputs[1]).backward()
        loss_of(each, inputs[2]).backward()
    # terms of lower precision that are added in another order
    close = {"rtol": 3e-2, "atol": 1e-3} if policy.reduce_dtype is torch.bfloat16 else {}
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert one.grad is not None
        assert two.grad is not None
        assert one.grad.dtype == two.grad.dtype
        torch.testing.assert_close(full(one.grad), full(two.grad), **close)
        one.grad = two.grad = None
    if policy.keep_grads_in_reduce_dtype:
        return  # torch's optimizers take gradients of the parameters' dtype
    torch.testing.assert_close(train(model, inputs), train(other, inputs), **close)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(full(one), full(two), **close)


@pytest.mark.parametrize("beside_shards", [False, True])
@spmd(ranks=2)
def test_one_data_parallel_rank_has_the_gradients_of_one_process(beside_shards: bool) -> None:
    mesh = mesh_of(1, 2)

    def annotate(model: Any) -> None:
        parallelize_gpt(model, mesh["tp"])
        replicate(model.blocks[1] if beside_shards else model, mesh=mesh["dp"])
        if beside_shards:
            fully_shard(model, mesh=mesh["dp"])

    for clip in (None, clip_grad_norm_):
        assert_trains_as_one_process(GPT, annotate, mesh["dp"], optimizer="AdamW", clip=clip)
    model, alone = made(GPT), made(GPT)
    annotate(model)
    for step, batch in enumerate(batches(alone, -1, 1, 3)):
        with no_sync(model, enabled=step == 1):
            loss_of(model, batch).backward()
        loss_of(alone, batch).backward()
    for (name, parameter), plain in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert parameter.grad.placements == parameter.placements, name  # type: ignore[union-attr, attr-defined]
        torch.testing.assert_close(full(parameter.grad), plain.grad, msg=name)  # type: ignore[arg-type]
