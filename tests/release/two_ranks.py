"""Both verbs on the ranks of torchrun, against one process.

--export: also write safetensors.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from model import Block, build

import composable


def train(model: torch.nn.Module, rank: int, ranks: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(4):
        batch = torch.randn(8, 5, generator=torch.Generator().manual_seed(step))
        loss = model(batch.chunk(ranks)[rank]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if ranks > 1:
            dist.all_reduce(mean)
        losses.append(float(mean) / ranks)
    return losses


def made() -> torch.nn.Module:
    torch.manual_seed(0)
    return build()


def main() -> None:
    expected = train(made(), 0, 1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sharded, replicated = made(), made()
    composable.fully_shard(sharded, policy={Block})
    composable.replicate(replicated)
    for verb, model in (("fully_shard", sharded), ("replicate", replicated)):
        losses = train(model, rank, ranks)
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
        if rank == 0:
            said = ", ".join(f"{loss:.4f}" for loss in losses)
            print(f"{verb} on {ranks} ranks: losses {said}, as in one process")
    if "--export" in sys.argv:
        composable.export(sharded, "exported")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    # As the interpreter ends, threads of a process group that a DeviceMesh still holds abort the
    # process now and then ("terminate called without an active exception"), as after FSDP2.
    os._exit(0)
