"""Stop anywhere and go on, with as many ranks as there are: run it twice, the second time with
another number of ranks.

torchrun --standalone --nproc-per-node=2 examples/resume.py runs/resume
torchrun --standalone --nproc-per-node=4 examples/resume.py runs/resume
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from composable import fully_shard

BATCH = 24  # rows over all ranks, so the number of ranks does not change the result


def batch_of(step, rank, ranks):
    generator = torch.Generator().manual_seed(step)
    rows = torch.randn(BATCH, 32, generator=generator)
    return rows.tensor_split(ranks)[rank]


def main(folder):
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1)
    )
    fully_shard(model, policy={nn.Linear})
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
        if rank == 0:
            print(f"goes on after step {step}, with {ranks} ranks")

    for number in range(step, step + 10):
        rows = batch_of(number, rank, ranks)
        loss = (model(rows) - rows.sum(dim=1, keepdim=True)).square().mean()
        # gradients are means over ranks: the batch's mean, as all ranks have equally many rows
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    mean = loss.detach().clone()
    dist.all_reduce(mean)
    if rank == 0:
        print(f"step {step + 10}: loss {mean.item() / ranks:.4f}")
    weights, state = get_state_dict(model, optimizer)
    counter["step"].fill_(step + 10)
    dcp.save(
        {"model": weights, "optimizer": state, "counter": counter},
        checkpoint_id=folder / f"step{step + 10:06}",
    )
    dist.barrier()  # wait until all ranks have written
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1] if sys.argv[1:] else "runs/resume"))
