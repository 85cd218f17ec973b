"""Gradient scalers where slices of a mesh hold other experts: a step that one of them skips is
skipped by all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import Shard, distribute_tensor

from composable import fully_shard, replicate
from tests.helpers.compare import full
from tests.helpers.mixtures import NESTED, Mixture, batch, mixture
from tests.helpers.world import current_device, spmd


@spmd(ranks=[2, 4])
@pytest.mark.parametrize("scheme", NESTED)
@pytest.mark.parametrize("apart", [False, True], ids=["one optimizer", "one for experts"])
def test_a_step_that_one_expert_skips_is_skipped_by_all(scheme: str, apart: bool) -> None:
    model, mesh = mixture(NESTED[scheme])
    shared = [*model.router.parameters(), *model.head.parameters()]
    lists = [shared, list(model.expert.parameters())] if apart else [list(model.parameters())]
    optimizers = [torch.optim.SGD(each, lr=0.1) for each in lists]
    scaler = torch.amp.GradScaler(current_device().type, init_scale=4.0)
    for bad in (0, 1, None):
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaler.scale(model(batch()).square().mean()).backward()
        if mesh.get_local_rank("experts") == bad:
            assert model.expert.up.weight.grad is not None
            model.expert.up.weight.grad.mul_(torch.inf)
        before = {name: full(parameter).clone() for name, parameter in model.named_parameters()}
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        moved = {
            name: not torch.equal(before[name], full(parameter))
            for name, parameter in model.named_parameters()
        }
        skipped = [name for name, each in moved.items() if not each]
        of_optimizer = [name for name in moved if not apart or name.startswith("expert.")]
        assert skipped == ([] if bad is None else of_optimizer)
        assert scaler.get_scale() == {0: 2.0, 1: 1.0, None: 1.0}[bad]


@spmd(ranks=[2, 4])
@pytest.mark.parametrize("scheme", NESTED)
@pytest.mark.parametrize("apart", [False, True], ids=["one optimizer", "one for experts"])
def test_a_scaler_asks_all_slices_whatever_gradients_an_expert_has(
    scheme: str, apart: bool
) -> None:
    """Of one slice, no gradients of the expert, which are in a dtype of their own; of another one,
    infinities.
    """
    mesh = init_device_mesh(
        current_device().type, (2, dist.get_world_size() // 2), mesh_dim_names=("experts", "copies")
    )
    model = Mixture(mesh.get_local_rank("experts")).to(current_device())
    model.expert.bfloat16()
    model.forward = partial(_in_two_dtypes, model)  # type: ignore[method-assign]
    NESTED[scheme](model, mesh["copies"])
    shared = [*model.router.parameters(), *model.head.parameters()]
    lists = [shared, list(model.expert.parameters())] if apart else [list(model.parameters())]
    optimizers = [torch.optim.SGD(each, lr=0.1) for each in lists]
    scaler = torch.amp.GradScaler(current_device().type, init_scale=4.0)
    works = mesh.get_local_rank("experts") == 1
    scaler.scale(model(batch(), expert=works).square().mean()).backward()
    if works:
        assert model.expert.up.weight.grad is not None
        model.expert.up.weight.grad.mul_(torch.inf)
    before = full(model.router.weight).clone()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert torch.equal(before, full(model.router.weight)) != apart


def _in_two_dtypes(model: Mixture, x: Tensor, *, expert: bool) -> Tensor:
    x = model.router(x)
    return model.head(x + model.expert(x.bfloat16()).float() if expert else x)


@spmd(ranks=[2, 4])
@pytest.mark.parametrize("kind", [torch.amp.GradScaler, ShardedGradScaler])
def test_a_fused_optimizer_of_experts_which_is_notified_by_the_scaler_skips_the_step_on_all_ranks(
    kind: Any,
) -> None:
    """It unscales by itself; and no gradient of what all ranks share is in its list, which would
    tell the others.
    """
    model, mesh = mixture(NESTED["shards in shards"])
    optimizer = torch.optim.AdamW(model.expert.parameters(), fused=True)
    scaler = kind(current_device().type, init_scale=4.0)
    scaler.scale(model(batch()).square().mean()).backward()
    if mesh.get_local_rank("experts") == 1:
        assert model.expert.up.weight.grad is not None
        model.expert.up.weight.grad.mul_(torch.inf)
    before = [full(parameter).clone() for parameter in model.expert.parameters()]
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert all(
        torch.equal(then, full(parameter))
        for then, parameter in zip(before, model.expert.parameters(), strict=True)
    )


@spmd(ranks=4)
def test_a_parameter_on_other_ranks_is_passed_over() -> None:
    """Pipelines hold parameters of all stages, and train those of one."""
    mesh = DeviceMesh(current_device().type, [0, 1])
    elsewhere = nn.Parameter(
        distribute_tensor(torch.ones(4, device=current_device()), mesh, [Shard(0)])
    )
    model = fully_shard(nn.Linear(7, 3).to(current_device()), sync_module_states="broadcast")
    optimizer = torch.optim.SGD([*model.parameters(), elsewhere], lr=0.1)
    scaler = torch.amp.GradScaler(current_device().type, init_scale=4.0)
    scaler.scale(model(batch()).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0


@spmd(ranks=2)
@pytest.mark.parametrize("verb", [fully_shard, replicate])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_scaler_looks_for_infinities_whatever_dtype_is_the_default(
    verb: Callable[..., nn.Module], dtype: torch.dtype
) -> None:
    torch.set_default_dtype(dtype)
    model = verb(nn.Linear(3, 5)).to(current_device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(current_device().type, init_scale=4.0)
    x = torch.ones(2, 3, device=current_device())
    for infinite in (False, True):
        before = full(model.weight).clone()
        optimizer.zero_grad()
        bad = infinite and dist.get_rank() == 1
        scaler.scale(model(x * torch.inf if bad else x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, full(model.weight)) == infinite
