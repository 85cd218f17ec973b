"""A few steps over all ranks, however these were started.

torchrun --standalone --nproc-per-node=2 examples/launch/train.py
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from composable import fully_shard


def main(mesh=None):
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    fully_shard(model, policy={nn.Linear}, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(4):
        batch = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        loss = model(batch.chunk(ranks)[rank]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step}: loss {mean:.4f}", flush=True)
    if rank == 0:
        weight = next(model.parameters())
        assert isinstance(weight, DTensor)
        print("mesh", weight.device_mesh.mesh.tolist(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])  # "hybrid": shard inside of a host, replicate across
