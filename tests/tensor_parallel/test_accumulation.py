"""Gradients of tensor-parallel parameters that are accumulated before they are reduced."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from composable import fully_shard, no_sync, reduce_gradients
from tests.helpers.world import spmd
from tests.tensor_parallel.models import (
    GPT,
    Block,
    batches,
    full,
    loss_of,
    made,
    mesh_of,
    parallelize_gpt,
)


def _gradients(model: Any) -> dict[str, torch.Tensor]:
    return {
        name: full(parameter.grad)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


@pytest.mark.parametrize("shape", [(2, 2), (2, 1, 2)])
@pytest.mark.parametrize("first", ["no_sync", "reduced"])
@spmd(ranks=4)
def test_accumulated_gradients_are_those_of_one_process(shape: tuple[int, ...], first: str) -> None:
    if len(shape) == 3:
        mesh = mesh_of(*shape, names=("replicate", "shard", "tp"))
        dp = mesh["replicate", "shard"]
    else:
        mesh = mesh_of(*shape)
        dp = mesh["dp"]
    model, alone = made(GPT), made(GPT)
    parallelize_gpt(model, mesh["tp"])  # type: ignore[arg-type]
    fully_shard(model, mesh=dp, policy={Block})
    ranks = dp.size()
    rank = dp.mesh.flatten().tolist().index(torch.distributed.get_rank())
    inputs, whole = batches(model, rank, ranks, 3), batches(alone, -1, ranks, 3)
    for batch in whole:
        loss_of(alone, batch).backward()
    if first == "reduced":
        loss_of(model, inputs[0]).backward()
    with no_sync(model):
        for batch in inputs[first == "reduced" : 2]:
            loss_of(model, batch).backward()
    grad = model.head.weight.grad  # type: ignore[union-attr]
    assert isinstance(grad, DTensor)
    assert dp.size() == 1 or any(isinstance(each, Partial) for each in grad.placements[1:])
    loss_of(model, inputs[2]).backward()
    torch.testing.assert_close(_gradients(model), _gradients(alone))
    for p in model.parameters():
        assert isinstance(p.grad, DTensor)
        assert p.grad._spec == p._spec  # type: ignore[attr-defined]


@spmd(ranks=4)
def test_gradients_accumulated_over_shards_and_reduced_later_are_those_of_one_process() -> None:
    for shape in ((2, 1, 2), (1, 2, 2)):
        mesh = mesh_of(*shape, names=("replicate", "shard", "tp"))
        dp = mesh["replicate", "shard"]
        model, alone = made(GPT), made(GPT)
        parallelize_gpt(model, mesh["tp"])  # type: ignore[arg-type]
        fully_shard(model, mesh=dp, policy={Block})
        rank = dp.mesh.flatten().tolist().index(torch.distributed.get_rank())
        for batch in batches(alone, -1, 2, 3):
            loss_of(alone, batch).backward()
        with no_sync(model, level="replicate"):
            for batch in batches(model, rank, 2, 3):
                loss_of(model, batch).backward()
        reduce_gradients(model)
        torch.testing.assert_close(_gradients(model), _gradients(alone))


class _Scale(nn.Module):
    """Whose gradient over tp is `Partial` if rows are distributed there, and `Replicate` if not."""

    def __init__(self, tp: Any) -> None:
        super().__init__()
        weight = torch.arange(1.0, 5.0, dtype=torch.float64)
        self.weight = nn.Parameter(distribute_tensor(weight, tp, [Replicate()]))

    def forward(self, x: torch.Tensor, *, distributed: bool) -> torch.Tensor:
        weight: Any = self.weight
        distributed_x = distribute_tensor(
            x, weight.device_mesh, [Shard(0) if distributed else Replicate()]
        )
        return full((distributed_x * weight).square().sum())


@spmd(ranks=4)
def test_gradients_add_up_whatever_placements_each_backward_brings() -> None:
    mesh = mesh_of(2, 2)
    weight, x = torch.arange(1.0, 5.0).double(), torch.arange(8.0).double().view(2, 4)
    expected = sum(2 * weight * (x + rank).square().sum(0) for rank in (0, 1)) / 2
    x += mesh.get_local_rank("dp")
    for first, second, last in itertools.product((True, False), repeat=3):
        model = fully_shard(_Scale(mesh["tp"]), mesh=mesh["dp"])
        parameter: Any = model.weight
        with no_sync(model):
            for distributed in (first, second):
                model(x, distributed=distributed).backward()
        held = parameter.grad
        assert held.placements == (Replicate(), Partial("avg"))
        torch.testing.assert_close(held.full_tensor(), 2 * expected)
        model(x, distributed=last).backward()
        torch.testing.assert_close(full(parameter.grad), 3 * expected)
        assert parameter.grad.placements == parameter.placements
