"""One rank meets a bad batch, and later a NaN: both are named, and the job goes on.

torchrun --standalone --nproc-per-node=2 examples/lost_steps.py
"""

import torch
import torch.distributed as dist
from torch import nn

from composable import describe, fully_shard, together, watch
from composable.errors import NonFiniteError


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def batch_of(step):
    """Vectors to negate. Rank 1 fails to read one batch, and all weights of another are zero."""
    x = torch.randn(16, 32)
    weight = torch.ones(16, 1)
    if dist.get_rank() == 1 and step == 12:
        raise OSError("cannot read shard 7 of the data")
    if dist.get_rank() == 1 and step == 17:
        weight.zero_()
    return x, -x, weight


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), Block(), Block(), nn.Linear(32, 32))
    fully_shard(model, policy={Block})
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    watched = watch(model, action="raise")

    torch.manual_seed(1 + dist.get_rank())
    for step in range(40):
        with together(model) as attempt:
            x, target, weight = batch_of(step)
            squares = (model(x) - target).square() * weight
            loss = squares.sum() / weight.sum()
            loss.backward()
        if attempt.lost:  # on all ranks alike
            say(f"step {step} is lost: {attempt.why}")
        else:
            try:
                optimizer.step()
            except NonFiniteError:  # raised on all ranks before the step; `watch` has printed where
                say(f"step {step} is left out")
        optimizer.zero_grad()
        if step % 10 == 9:
            say(f"step {step + 1:2}: loss {loss.item():.3f}")
    say(describe(model))
    watched.remove()
    dist.destroy_process_group()


def say(what):
    if dist.get_rank() == 0:
        print(what)


if __name__ == "__main__":
    main()
