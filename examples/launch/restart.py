"""A job that goes on where it was when torchrun starts its ranks again.

TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc-per-node=2 --max-restarts=3 \
    examples/launch/restart.py FOLDER

Each life then has a store of its own; a shared one holds the addresses of ranks that are gone.
"""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from composable import fully_shard

STEPS = 6


def main(folder):
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    fully_shard(model, policy={nn.Linear})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    start = torch.zeros((), dtype=torch.int64)
    last = os.path.join(folder, "last")
    if os.path.exists(last):  # written when a checkpoint was whole
        weights, state = get_state_dict(model, optimizer)
        saved: dict[str, Any] = {"model": weights, "optimizer": state, "step": start}
        with open(last) as file:
            dcp.load(saved, checkpoint_id=os.path.join(folder, file.read()))
        set_state_dict(
            model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"]
        )
        start = saved["step"]

    for step in range(int(start), STEPS):
        batch = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        loss = model(batch.chunk(ranks)[rank]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step}: loss {mean:.4f}", flush=True)

        weights, state = get_state_dict(model, optimizer)
        saved = {"model": weights, "optimizer": state, "step": torch.tensor(step + 1)}
        dcp.save(saved, checkpoint_id=os.path.join(folder, f"step-{step + 1}"))
        if rank == 0:
            with open(last + ".new", "w") as file:
                file.write(f"step-{step + 1}")
            os.replace(last + ".new", last)
        if os.environ.get("DIES_AT") == f"{rank}:{step}:{os.environ['TORCHELASTIC_RESTART_COUNT']}":
            os._exit(1)  # as if the machine had taken it away
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
