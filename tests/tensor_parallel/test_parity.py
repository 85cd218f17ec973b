"""Tensor-parallel parameters under `fully_shard` train as one process does."""

from __future__ import annotations

from torch import nn

from composable import fully_shard
from tests.helpers.world import spmd
from tests.tensor_parallel.models import (
    MLP,
    assert_trains_as_one_process,
    mesh_of,
    parallelize_mlp,
)


@spmd(ranks=4)
def test_an_mlp_trains_as_one_process() -> None:
    mesh = mesh_of(2, 2)

    def annotate(model: nn.Module) -> None:
        parallelize_mlp(model, mesh["tp"])
        fully_shard(model, mesh=mesh["dp"])

    assert_trains_as_one_process(MLP, annotate, mesh["dp"])
