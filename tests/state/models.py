"""A small model with what state has trouble with, and the plans that it is annotated by."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

from composable import CPUOffloadPolicy, fully_shard, replicate
from tests.helpers.world import current_device


class Block(nn.Module):
    """Uneven sizes, a parameter of one element, and a buffer that is in no state dict."""

    table: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 9), nn.Linear(9, 5, bias=False)
        self.norm = nn.LayerNorm(5)
        self.scale = nn.Parameter(torch.empty(1))
        self.register_buffer("table", torch.empty(5), persistent=False)
        self.register_buffer("count", torch.empty((), dtype=torch.int64))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.scale)
        self.table.copy_(torch.arange(5))
        self.count.zero_()

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        hidden: Tensor = self.down(self.up(self.norm(x + self.table.to(x.dtype))).relu())
        return x + self.scale * hidden


class Net(nn.Module):
    """The weight of the head is that of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        output: Tensor = self.head(x)
        return output


def initialise(module: nn.Module) -> None:
    """What one process would do, for each module."""
    reset = getattr(module, "reset_parameters", None)
    if reset is not None:
        reset()


def plain(seed: int = 0) -> Net:
    """The model in one process."""
    with torch.device("meta"):
        model = Net()
    model.to_empty(device=current_device())
    model.head.weight = model.embed.weight
    torch.manual_seed(seed)
    return model.apply(initialise)


def tokens(seed: int) -> Tensor:
    return torch.randint(7, (6,), generator=torch.Generator().manual_seed(seed)).to(
        current_device()
    )


def train(model: nn.Module, optimizer: Optimizer, steps: Iterable[int]) -> list[float]:
    """The losses of these steps. Every rank has the same batch, so that one process's losses are
    those of all.
    """
    losses = []
    for step in steps:
        loss = nn.functional.cross_entropy(model(tokens(step)), tokens(step + 100))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _hybrid(model: nn.Module) -> None:
    ranks = torch.distributed.get_world_size()
    mesh = init_device_mesh(
        current_device().type, (2, ranks // 2), mesh_dim_names=("replicate", "shard")
    )
    fully_shard(model, mesh=mesh, policy={Block})


def _nested(model: nn.Module) -> None:
    assert isinstance(model, Net)
    replicate(model.blocks[1])
    fully_shard(model, policy={Block})


PLANS: Final[dict[str, Callable[[nn.Module], None]]] = {
    "fully_shard": lambda model: void(fully_shard(model, policy={Block})),
    "one unit": lambda model: void(fully_shard(model)),
    "hybrid": _hybrid,
    "replicate": lambda model: void(replicate(model)),
    "replicate inside fully_shard": _nested,
    "mixed precision": lambda model: void(fully_shard(model, policy={Block}, mp_policy="bf16")),
    "offloaded": lambda model: void(
        fully_shard(model, policy={Block}, offload_policy=CPUOffloadPolicy())
    ),
}


def void(_: object) -> None:
    """For lambdas that return nothing."""
