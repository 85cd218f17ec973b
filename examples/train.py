"""Train a small model over all ranks, clip, save, and load again.

torchrun --standalone --nproc-per-node=2 examples/train.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from composable import checkpoint, clip_grad_norm_, describe, fully_shard


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


def main():
    dist.init_process_group("gloo")
    # the same weights on all ranks: fully_shard raises an error if some differ
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(256, 64), *(Block(64) for _ in range(4)), nn.Linear(64, 256))

    checkpoint(model, policy={Block})  # drop activations, recompute them in backward
    fully_shard(model, policy={Block})  # each block is a unit; the model is the unit of the rest
    # after fully_shard: it holds the sharded parameters
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    torch.manual_seed(1 + dist.get_rank())  # other data on every rank from here on
    for step in range(20):
        idx = torch.randint(0, 256, (8, 32))
        loss = nn.functional.cross_entropy(model(idx).transpose(1, 2), (idx + 1) % 256)
        loss.backward()  # gradients are means over all ranks
        norm = clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 5 == 4:
            said = f"norm of the gradients {norm.item():.3f}"
            print(f"step {step + 1:2}: loss {loss.item():.3f}, {said}")

    with tempfile.TemporaryDirectory() as folder:  # a real run needs a folder that all ranks see
        folders = [folder]
        dist.broadcast_object_list(folders)
        weights, state = get_state_dict(model, optimizer)
        # every rank writes its shards
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folders[0])
        # also works with another number of ranks
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folders[0])
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
        dist.barrier()
    if dist.get_rank() == 0:
        print(describe(model))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
