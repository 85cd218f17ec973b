"""An infinity on one rank only, in a gradient of any kind, and all ranks skip the step; the norm of
a pipeline's stages.
"""

from __future__ import annotations

from typing import Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from composable import clip_grad_norm_, fully_shard, replicate
from composable.errors import ArgumentError, ClippingError
from tests.helpers.compare import full
from tests.helpers.world import current_device, spmd

KINDS: Final = ("replicated", "rows", "columns", "both", "hybrid", "plain")


class Model(nn.Module):
    """One layer of each kind."""

    def __init__(self) -> None:
        super().__init__()
        for name in KINDS:
            setattr(self, name, nn.Linear(4, 4, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = layer(x)
        return x


def _model() -> Model:
    """Units over the rows, over the columns and over all of a mesh, copied over one of the two,
    replicated, and left alone.
    """
    torch.manual_seed(0)
    model = Model().to(current_device())
    size = dist.get_world_size()
    grid = init_device_mesh(
        current_device().type, (2, size // 2), mesh_dim_names=("replicate", "shard")
    )
    replicate(model.replicated)
    fully_shard(model.rows, mesh=grid["shard"], sync_module_states="broadcast")
    fully_shard(model.columns, mesh=grid["replicate"], sync_module_states="broadcast")
    fully_shard(model.hybrid, mesh=grid)
    fully_shard(model, policy={nn.Linear}, ignored_params=[model.plain.weight])
    return model


@spmd(ranks=[2, 4])
def test_all_ranks_skip_a_step_if_one_rank_has_an_infinity_in_a_gradient_of_any_kind() -> None:
    for number, kind in enumerate((None, *KINDS)):
        rank = number % dist.get_world_size()
        model = _model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        scaler = torch.amp.GradScaler(current_device().type, init_scale=8.0)
        scaler.scale(model(torch.ones(2, 4, device=current_device())).sum()).backward()
        if kind is not None and dist.get_rank() == rank:
            gradient = getattr(model, kind).weight.grad
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            local.view(-1)[0] = torch.inf
        before = [full(parameter) for parameter in model.parameters()]
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        stepped = [
            not torch.equal(one, full(other))
            for one, other in zip(before, model.parameters(), strict=True)
        ]
        assert stepped == [kind is None] * len(KINDS), (kind, rank)
        assert scaler.get_scale() == (8.0 if kind is None else 4.0)


@spmd(ranks=4)
def test_ranks_agree_where_no_unit_has_all_of_them() -> None:
    grid = init_device_mesh(current_device().type, (2, 2), mesh_dim_names=("replicate", "shard"))
    for kind in (0, 1):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(current_device())
        fully_shard(model[0], mesh=grid["shard"], sync_module_states="broadcast")
        fully_shard(model[1], mesh=grid["replicate"], sync_module_states="broadcast")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        scaler = torch.amp.GradScaler(current_device().type, init_scale=8.0)
        scaler.scale(model(torch.ones(2, 4, device=current_device())).sum()).backward()
        if dist.get_rank() == 1:
            model[kind].weight.grad.to_local().fill_(torch.inf)  # type: ignore[operator,union-attr]
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 4.0, kind


@spmd(ranks=[2, 4])
@pytest.mark.parametrize("order", [2.0, 3.0, float("inf")])
def test_the_norm_of_a_pipeline_is_that_of_all_stages(order: float) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    stages = init_device_mesh(current_device().type, (2, size // 2), mesh_dim_names=("pp", "dp"))
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4).to(current_device()) for _ in range(2)]
    for number, layer in enumerate(layers):
        layer(torch.full((2, 4), 1.0 + number, device=current_device())).square().sum().backward()
    expected = torch.nn.utils.clip_grad_norm_(
        [p for layer in layers for p in layer.parameters()], 1.0, order
    )
    clipped = [p.grad for p in layers[rank // (size // 2)].parameters()]
    mine = nn.Linear(4, 4).to(current_device())
    mine.load_state_dict(layers[rank // (size // 2)].state_dict())
    fully_shard(mine, mesh=stages["dp"])
    mine(
        torch.full((2, 4), 1.0 + rank // (size // 2), device=current_device())
    ).square().sum().backward()
    torch.testing.assert_close(
        clip_grad_norm_(mine, 1.0, order, pp_group=stages["pp"].get_group()), expected
    )
    for one, other in zip(clipped, mine.parameters(), strict=True):
        assert other.grad is not None
        torch.testing.assert_close(full(other.grad), one)
    one_stage = mine if rank // (size // 2) else []
    norm = clip_grad_norm_(one_stage, float("inf"), order, pp_group=stages["pp"].get_group())
    assert norm > 0, "a stage without parameters takes part"


@spmd(ranks=4)
def test_a_group_that_is_no_pipelines_is_refused() -> None:
    grid = init_device_mesh(current_device().type, (2, 2), mesh_dim_names=("pp", "dp"))
    model = fully_shard(
        nn.Linear(4, 4).to(current_device()), mesh=grid["dp"], sync_module_states="broadcast"
    )
    model(torch.ones(2, 4, device=current_device())).sum().backward()
    with pytest.raises(ClippingError, match="parameters are sharded over pp_group"):
        clip_grad_norm_(model, 1.0, pp_group=grid["dp"].get_group())
    with pytest.raises(
        ArgumentError, match="pp_group must be a ProcessGroup or None, got a DeviceMesh"
    ):
        clip_grad_norm_(model, 1.0, pp_group=grid["pp"])  # type: ignore[arg-type]
