"""Train small adapters on a frozen model: frozen shards have no gradients, no optimizer state and
no reduction.

torchrun --standalone --nproc-per-node=2 examples/adapters.py
"""

import torch
import torch.distributed as dist
from torch import nn

from composable import describe, fully_shard


class Adapted(nn.Module):
    """A frozen linear layer and a low-rank correction that is learned."""

    def __init__(self, frozen, rank=4):
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.frozen(x) + self.up(self.down(x))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.linear = (
            nn.LayerNorm(width).requires_grad_(False),
            Adapted(nn.Linear(width, width)),
        )

    def forward(self, x):
        return x + self.linear(self.norm(x)).relu()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(48) for _ in range(4)), nn.Linear(48, 4))
    fully_shard(model, policy={Block})  # units may mix frozen and trained parameters
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)

    torch.manual_seed(1 + dist.get_rank())
    for step in range(30):
        rows = torch.randn(32, 48)
        loss = nn.functional.cross_entropy(model(rows), rows[:, :4].argmax(dim=1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 10 == 9:
            print(f"step {step + 1:2}: loss {loss.item():.3f}")
    if dist.get_rank() == 0:
        every = sum(parameter.numel() for parameter in model.parameters())
        print(f"{sum(parameter.numel() for parameter in trained)} of {every} elements are trained")
        print(describe(model))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
