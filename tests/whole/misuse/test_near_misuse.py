"""Annotations that work, and are near to what `tests/refusals/` has as refused."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from composable import checkpoint, describe, fully_shard, offload_activations, registry, replicate
from composable.fsdp2 import fully_shard as face
from tests.helpers.battery import BATTERY, Case
from tests.helpers.battery.transformers import Block, Transformer
from tests.helpers.compare import assert_same_training, full_parameters
from tests.helpers.logged import logged
from tests.helpers.placed import placed
from tests.helpers.world import current_device, spmd


def _transformer() -> Transformer:
    torch.manual_seed(0)
    return placed(Transformer(), current_device())


def _mesh(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    return init_device_mesh(current_device().type, shape, mesh_dim_names=names)


# --- units ----------------------------------------------------------------------------------------


@spmd(ranks=[1, 2])
def test_a_parameter_in_two_units_of_a_policy_goes_to_the_module_around_both() -> None:
    def annotate(model: nn.Module, case: Case) -> None:
        fully_shard(model, policy={nn.Embedding, nn.Linear, Block})
        assert model.get_parameter("embedding.weight") is model.get_parameter("head.weight")

    assert_same_training(BATTERY["transformer with tied embedding"], annotate)


@spmd(ranks=2)
def test_a_policy_passes_over_containers_without_a_forward() -> None:
    for verb in (fully_shard, replicate, checkpoint, offload_activations):
        model = _transformer()
        with logged() as lines:
            verb(model, policy=lambda _: True)
        assert lines == [
            f"WARNING: {verb.__name__}: the policy picks ModuleList 'blocks'; containers without a"
            " forward are passed over"
        ]
        assert not registry(model.blocks)
        assert all(
            verb.__name__ in registry(module) for module in (model, model.embedding, *model.blocks)
        )


class _Experts(nn.Module):
    """Of several, stacked in one parameter."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(shape, device="meta"))
        self.bias = nn.Parameter(torch.empty(shape[0], device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,eoi->beo", x, self.up) + self.bias[:, None]


def _sharded(*shape: int, dim: int | None = None, verb: Any = None) -> tuple[list[str], list[int]]:
    """What is logged, and along which dimensions the large parameters are sharded."""
    model = nn.Sequential(_Experts(*shape), _Experts(*shape))
    placement = None if dim is None else (lambda p: Shard(dim) if p.ndim == 3 else None)
    with logged() as lines:
        if verb is None:
            fully_shard(model, policy={_Experts}, shard_placement_fn=placement)
        else:
            verb(model, shard_placement_fn=placement)
    return lines, [unit.up.placements[0].dim for unit in model]  # type: ignore[union-attr]


@spmd(ranks=4)
def test_a_large_parameter_that_would_leave_ranks_empty_is_sharded_along_another_dimension() -> (
    None
):
    assert _sharded(2, 512, 600) == ([], [1, 1])
    assert _sharded(5, 512, 600) == ([], [1, 1])  # two, two, one and none
    assert _sharded(2, 3, 200_000) == ([], [2, 2])
    for shape in ((4, 512, 600), (7, 512, 600), (2, 64, 64)):  # for all ranks; nearly; small
        assert _sharded(*shape) == ([], [0, 0])


@spmd(ranks=4)
def test_a_large_parameter_that_would_leave_ranks_empty_is_reported_once_with_what_to_write() -> (
    None
):
    reported = (
        "WARNING: fully_shard: parameter '{}' of unit '{}', (2, 512, 600), is sharded along"
        " dimension 0, which leaves some of 4 ranks empty: gathered, and in messages, it takes 2.0"
        " times its size. Shard it along dimension 1: shard_placement_fn=lambda parameter: Shard(1)"
        " if parameter.shape == (2, 512, 600) else None"
    )
    assert _sharded(2, 512, 600, dim=0) == ([reported.format("up", "0")], [0, 0])
    assert _sharded(2, 512, 600, verb=face) == ([reported.format("0.up", "(root)")], [0, 0])
    assert _sharded(2, 512, 600, dim=1, verb=face) == ([], [1, 1])
    assert _sharded(2, 64, 64, verb=face) == ([], [0, 0])


@spmd(ranks=4)
def test_tensor_parallel_experts_are_reported_with_the_shape_that_they_have() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for verb, dim in ((fully_shard, 1), (face, 0)):
        unit = _Experts(2, 512, 1200)
        distributed = distribute_tensor(
            unit.up.detach(), mesh["tp"], [Shard(0)], src_data_rank=None
        )
        unit.up = nn.Parameter(distributed)
        with logged() as lines:
            verb(unit, mesh=mesh["dp"])
        assert unit.up.placements == (Shard(0), Shard(dim))  # type: ignore[attr-defined]
        assert [line.count("parameter.shape == (2, 512, 1200)") for line in lines] == [1] * (
            not dim
        )


class _CallableList(nn.ModuleList):
    def forward(self, x: Tensor) -> Tensor:
        for module in self:
            x = module(x)
        return x


@spmd(ranks=2)
def test_a_container_with_a_forward_is_a_unit() -> None:
    model = fully_shard(_CallableList([nn.Linear(2, 2)]).to(current_device()))
    model(torch.ones(1, 2, device=current_device())).sum().backward()
    assert model[0].weight.grad is not None


@spmd(ranks=2)
def test_the_projection_that_attention_reads_itself_is_merged_under_a_policy() -> None:
    model = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).to(current_device())
    fully_shard(
        model,
        policy={
            nn.Linear,
            nn.MultiheadAttention,
            nn.modules.linear.NonDynamicallyQuantizableLinear,
        },
    )
    model(torch.ones(1, 3, 4, device=current_device())).sum().backward()
    assert [row.unit for row in describe(model).rows] == ["", "self_attn", "linear1", "linear2"]


# --- meshes -------------------------------------------------------------------------------------


@spmd(ranks=2)
def test_a_dimension_picked_by_name_and_a_process_group_are_meshes() -> None:
    mesh = _mesh(1, 2, names=("replicate", "shard"))
    for given in (mesh["shard"], dist.group.WORLD, dist.new_group([0, 1])):
        for verb in (fully_shard, replicate):
            model = _transformer()
            expected = {name: value.detach().clone() for name, value in model.named_parameters()}
            verb(model, mesh=given)
            assert describe(model).rows[0].ranks == 2
            for name, value in full_parameters(model).items():
                assert torch.equal(value, expected[name])
