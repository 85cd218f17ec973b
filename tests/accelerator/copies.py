"""A model that rests on the host, and a copy that does not."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from composable import CPUOffloadPolicy, fully_shard
from composable.torch_private import local_of
from tests.helpers.world import current_device

# seconds in which modules hold at-rest parameters after a backward that raised; it takes
# milliseconds
PATIENCE: Final = 5.0


class Block(nn.Module):
    """Cut, uneven, whole and frozen parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 27)
        self.down = nn.Linear(27, 8)
        self.norm = nn.LayerNorm(8)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.frozen = nn.Parameter(torch.full((8,), 0.25), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x)))) * self.scale + self.frozen


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    with torch.device("cpu"):
        return nn.Sequential(Block(), Block(), nn.Linear(8, 8), Block())


def mesh_of(*shape: int) -> DeviceMesh:
    if len(shape) < 2:
        return init_device_mesh("sim", (dist.get_world_size(),))
    return init_device_mesh("sim", shape, mesh_dim_names=("replicate", "shard"))


def x_of(step: int) -> Tensor:
    torch.manual_seed(100 * step + dist.get_rank())
    with torch.device("cpu"):
        return torch.randn(4, 8).to(current_device())


def copies_of(**options: Any) -> tuple[nn.Module, nn.Module]:
    """One that does not offload, and one that does."""
    made = []
    offload = options.pop("offload_policy", CPUOffloadPolicy())
    options = {"policy": {Block}, "mesh": mesh_of(), **options}
    for policy in (None, offload):
        made.append(fully_shard(model_of(), offload_policy=policy, **options))
    return made[0], made[1]


def at_rest_again(model: nn.Module, parameters: list[nn.Parameter]) -> bool:
    """Whether modules hold `parameters` some time after a backward that raised, which a thread of
    autograd's has to drop.
    """
    deadline = time.monotonic() + PATIENCE
    while any(one is not other for one, other in zip(model.parameters(), parameters, strict=True)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def assert_at_home(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.device == local_of(parameter).device == torch.device("cpu"), name
        gradient = parameter.grad
        if gradient is not None:
            assert isinstance(gradient, DTensor)
            assert gradient.device == local_of(gradient).device == torch.device("cpu"), name


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    for (name, first), (_, second) in zip(
        one.named_parameters(), other.named_parameters(), strict=True
    ):
        assert isinstance(first, DTensor)
        assert isinstance(second, DTensor)
        assert first.placements == second.placements
        assert torch.equal(local_of(first).cpu(), local_of(second)), name
        assert (first.grad is None) == (second.grad is None), name
        if first.grad is not None:
            assert torch.equal(local_of(first.grad).cpu(), local_of(second.grad)), name


def train(
    models: tuple[nn.Module, nn.Module], step_of: Callable[[nn.Module, int], None], steps: int = 3
) -> None:
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    for step in range(steps):
        for model, optimizer in zip(models, optimizers, strict=True):
            step_of(model, step)
            optimizer.step()
        assert_equal(*models)
        assert_at_home(models[1])
        for optimizer in optimizers:
            optimizer.zero_grad()


def one_batch(model: nn.Module, step: int) -> None:
    model(x_of(step)).square().mean().backward()
