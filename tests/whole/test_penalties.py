"""A loss may be made from sharded parameters, too: how autograd spreads the gradient of that part changes no number."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composable import fully_shard
from tests.helpers.world import current_device, spmd


def _penalty(model: nn.Module) -> Tensor:
    terms = [parameter.square().sum() for parameter in model.parameters()]
    return torch.stack([term.full_tensor() if isinstance(term, DTensor) else term for term in terms]).sum()


@pytest.mark.parametrize("rows", [1, 3, 4])
@spmd(ranks=2)
def test_a_penalty_on_parameters_trains_as_in_one_process(rows: int) -> None:
    """Of one row, DTensor makes gradients that every rank holds whole."""
    torch.manual_seed(0)
    model = nn.Linear(8, rows).to(current_device())
    plain = copy.deepcopy(model)
    fully_shard(model)
    everybody = torch.linspace(-1, 1, 4 * 8, device=current_device()).view(-1, 8)
    mine = everybody.chunk(dist.get_world_size())[dist.get_rank()]
    for each, x in ((model, mine), (plain, everybody)):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(3):
            (each(x).square().mean() + 0.1 * _penalty(each)).backward()
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert isinstance(one, DTensor)
        torch.testing.assert_close(one.full_tensor(), other)
