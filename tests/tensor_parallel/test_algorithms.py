"""Replicas that are not alike: over tensor-parallel parameters as over plain ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from composable import average_parameters, fully_shard, join, local_steps
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


def _train(model: nn.Module, rank: int, algorithm: str) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    uneven = algorithm == "join"
    with join(model, optimizer) if uneven else local_steps(model, optimizer, every=2):
        for batch in batches(model, rank, 2, 3 + rank if uneven else 4):
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    if not uneven:
        average_parameters(model)


@pytest.mark.parametrize("algorithm", ["join", "local_steps"])
@spmd(ranks=4)
def test_they_do_what_they_do_without_tensor_parallel(algorithm: str) -> None:
    mesh = mesh_of(2, 1, 2, names=("replicate", "shard", "tp"))
    dp = mesh["replicate", "shard"]
    model, plain = made(GPT), made(GPT)
    parallelize_gpt(model, mesh["tp"])  # type: ignore[arg-type]
    for each in (model, plain):
        fully_shard(each, mesh=dp, policy={Block})
        _train(each, mesh["replicate"].get_local_rank(), algorithm)
    torch.testing.assert_close(
        {name: full(p).detach() for name, p in model.named_parameters()},
        {name: full(p).detach() for name, p in plain.named_parameters()},
    )
