"""torch's context parallel over one dimension, with parameters sharded over that and another one.

On a CPU torch has it for attention that is not causal, with the kernel that is made of plain
operators.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import mse_loss

from composable import checkpoint, fully_shard
from tests.helpers.world import spmd
from tests.meshes.test_dims import Dims
from tests.tensor_parallel.models import OPTIMIZERS, assert_same_parameters, made, mesh_of

WIDTH, LENGTH = 4, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unsqueeze(1) for each in self.qkv(x).chunk(3, -1))
        with sdpa_kernel([SDPBackend.MATH]):
            mixed = nn.functional.scaled_dot_product_attention(q, k, v)  # torch replaces it
        return x + self.out(mixed.squeeze(1)).tanh()


@spmd(ranks=4)
def test_sequences_are_split_as_parameters_are_flattened() -> None:
    mesh = mesh_of(2, 2, names=("dp", "cp"))
    model: Any = made(lambda: nn.Sequential(Block(), Block()))
    alone = copy.deepcopy(model)
    checkpoint(model[0])
    fully_shard(model, mesh=mesh, dp_mesh_dims=Dims(("dp", "cp")), policy={Block})
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(5, 2, 2, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    losses = []
    for each, rows in ((model, slice(*_row(mesh["dp"].get_local_rank()))), (alone, slice(0, 2))):
        optimizer = OPTIMIZERS["AdamW"](each.parameters())
        for x, y in data:
            x, y = x[rows].clone(), y[rows].clone()
            split = context_parallel(
                mesh["cp"],
                buffers=[x, y],
                buffer_seq_dims=[1, 1],
                no_restore_buffers={x, y},
            )
            with split if each is model else nullcontext():
                loss = mse_loss(each(x), y)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss = loss.detach()
            if each is model:
                dist.all_reduce(loss)
                loss /= 4
            losses.append(loss)
    torch.testing.assert_close(losses[:5], losses[5:])
    assert_same_parameters(model, alone)


def _row(rank: int) -> tuple[int, int]:
    return rank, rank + 1
