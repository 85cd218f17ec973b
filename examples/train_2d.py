"""Train with tensor-parallel and data-parallel ranks, stop, and go on with other sizes of both:
run it several times.

torchrun --standalone --nproc-per-node=4 examples/train_2d.py --tp 2
torchrun --standalone --nproc-per-node=2 examples/train_2d.py --tp 1
torchrun --standalone --nproc-per-node=4 examples/train_2d.py --tp 4
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from composable import clip_grad_norm_, describe, fully_shard

BATCH = 24  # rows of all data-parallel ranks together


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


def make_model(mesh):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), Block(32), Block(32), nn.Linear(32, 1))
    for block in (model[1], model[2]):  # first tensor parallel, then fully_shard shards each part
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["dp"], policy={Block})


def main(folder, tp, steps):
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size() // tp, tp), mesh_dim_names=("dp", "tp"))
    dp, rank = mesh["dp"].size(), mesh["dp"].get_local_rank()
    model = make_model(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    step, counter = 0, {"step": torch.zeros((), dtype=torch.int64)}
    # .metadata is written last: a checkpoint without it is incomplete
    whole = sorted(path.parent for path in folder.glob("*/.metadata"))
    if whole:
        weights, state = get_state_dict(model, optimizer)
        dcp.load(
            {"model": weights, "optimizer": state, "counter": counter}, checkpoint_id=whole[-1]
        )
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
        step = int(counter["step"])
    if dist.get_rank() == 0:
        print(f"begins after step {step}: dp {dp} x tp {tp}")
        print(describe(model))

    for number in range(step, step + steps):
        generator = torch.Generator().manual_seed(number)
        batch = torch.randn(BATCH, 16, generator=generator)
        rows = batch.tensor_split(dp)[rank]  # tensor-parallel ranks have the same rows
        loss = (model(rows) - rows.sum(dim=1, keepdim=True)).square().mean()
        loss.backward()
        clip_grad_norm_(model, 10.0)
        optimizer.step()
        optimizer.zero_grad()
        if number % 5 == 4:
            mean = loss.detach() / dp
            dist.all_reduce(mean, group=mesh["dp"].get_group())
            if dist.get_rank() == 0:
                print(f"step {number + 1:2}: loss {mean.item():.4f}")

    weights, state = get_state_dict(model, optimizer)
    counter["step"].fill_(step + steps)
    dcp.save(
        {"model": weights, "optimizer": state, "counter": counter},
        checkpoint_id=folder / f"step{step + steps:06}",
    )
    dist.barrier()  # wait until all ranks have written
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs/train_2d"))
    parser.add_argument("--tp", type=int, default=2, help="tensor-parallel ranks")
    parser.add_argument("--steps", type=int, default=20)
    main(**vars(parser.parse_args()))
