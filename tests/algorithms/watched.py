"""Programs, and faults that are planted in them, for `watch`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from composable import MixedPrecisionPolicy, checkpoint, fully_shard, no_sync, replicate, skipped
from composable.torch_private import local_tensor
from tests.helpers.world import current_device

WIDTH: Final = 5


@dataclass(frozen=True)
class Fault:
    """What goes wrong, and where.

    Attributes:
        kind: "forward", "backward" or "weight" (the gradient of a weight) of a block; "between"
            blocks, in code of the root, forward or backward; "batch"; "loss", its gradient; or
            "at rest", a parameter.
        block: its number.
    """

    kind: str
    rank: int = 0
    step: int = 0
    block: int = 0
    value: float = float("nan")

    def strikes(self, kind: str, rank: int, step: int, block: int) -> bool:
        return (self.kind, self.rank, self.step, self.block) == (kind, rank, step, block)


class _Spoiled(torch.autograd.Function):
    """The same value, whose first gradient is spoiled."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: float) -> Tensor:
        ctx.value = value
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone()
        gradient.view(-1)[-1] = ctx.value
        return gradient, None


class Plant:
    """The fault of one run, which modules ask."""

    def __init__(self, fault: Fault | None) -> None:
        self.fault, self.step = fault, 0
        self.rank = dist.get_rank()  # also where one process runs the module again

    def forward(self, kind: str, x: Tensor, block: int = 0) -> Tensor:
        if self.fault is not None and self.fault.strikes(kind, self.rank, self.step, block):
            x = x.clone()
            x.view(-1)[0] = self.fault.value
        return x

    def backward(self, kind: str, x: Tensor, block: int = 0) -> Tensor:
        if self.fault is not None and self.fault.strikes(kind, self.rank, self.step, block):
            spoiled: Tensor = _Spoiled.apply(x, self.fault.value)  # type: ignore[no-untyped-call]
            return spoiled
        return x


class Block(nn.Module):
    table: Tensor

    def __init__(self, plant: Plant, number: int) -> None:
        super().__init__()
        self.plant, self.number = plant, number
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("table", torch.arange(WIDTH) / WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        plant, number = self.plant, self.number
        weight = plant.backward("weight", self.up.weight, number)
        y = nn.functional.linear(self.norm(x + self.table.to(x.dtype)), weight, self.up.bias)
        y = self.dropout(self.down(plant.backward("backward", y, number).tanh()))
        return plant.forward("forward", x + y * (mask + 1).exp(), number)  # of -inf: 0


class Model(nn.Module):
    def __init__(self, plant: Plant, blocks: int = 3) -> None:
        super().__init__()
        self.plant = plant
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.blocks = nn.ModuleList(Block(plant, number) for number in range(blocks))
        self.skips = self.recomputes = False

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(WIDTH, device=x.device)
        mask[0] = -torch.inf  # as attention has it
        x = self.stem(x)
        for number, block in enumerate(self.blocks):
            if self.skips and (self.plant.step + self.plant.rank + number) % 3 == 0:
                x = skipped(block, x)
            elif self.recomputes:
                x = torch_checkpoint(block, x, mask, use_reentrant=True)
            else:
                x = block(x, mask)
            x = self.plant.forward("between forward", x.tanh(), number)
            x = self.plant.backward("between backward", x, number)
        y: Tensor = self.head(x)
        return y


# --- programs ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """How a model is annotated, and trained.

    Attributes:
        backwards: in each step; all but the last are under `no_sync`.
        dtype: of `torch.autocast`; None without it.
    """

    annotate: Callable[[Model], object]
    backwards: int = 1
    dtype: torch.dtype | None = None

    def build(self, fault: Fault | None = None) -> tuple[Model, Plant]:
        torch.manual_seed(0)
        plant = Plant(fault)
        model = Model(plant).to(current_device())
        self.annotate(model)
        torch.manual_seed(1 + dist.get_rank())  # of dropout
        return model, plant

    def backward(self, model: Model, plant: Plant) -> Tensor:
        device = current_device()
        for number in range(self.backwards):
            generator = torch.Generator().manual_seed(
                plant.step * 100 + number * 10 + dist.get_rank()
            )
            x = plant.forward("batch", torch.randn(3, WIDTH, generator=generator)).to(device)
            last = number == self.backwards - 1
            with no_sync(model, enabled=not last):
                with torch.autocast(device.type, self.dtype) if self.dtype else nullcontext():
                    y = plant.backward("loss", model(x))
                loss = y.float().square().mean()
                loss.backward()
        return loss.detach()


def _sharded(model: Model, **options: Any) -> None:
    fully_shard(model, policy={Block}, **options)


def _hybrid(model: Model) -> None:
    mesh = init_device_mesh(current_device().type, (2, dist.get_world_size() // 2))
    fully_shard(model, policy={Block}, mesh=mesh)


def _replicated(model: Model) -> None:
    for block in model.blocks:
        replicate(block)
    replicate(model)


def _mixed(model: Model) -> None:
    replicate(model.blocks[1])
    fully_shard(model, policy={Block})


def _checkpointed(model: Model) -> None:
    for block in model.blocks:
        checkpoint(block)
    fully_shard(model, policy={Block})


def _reentrant(model: Model) -> None:
    model.recomputes = True
    fully_shard(model, policy={Block})


def _skipping(model: Model) -> None:
    model.skips = True
    fully_shard(model, policy={Block})


PROGRAMS: Final[dict[str, Program]] = {
    "shards": Program(_sharded),
    "shards, kept": Program(partial(_sharded, reshard_after_forward=False)),
    "hybrid": Program(_hybrid),
    "replicate": Program(_replicated),
    "replicate in shards": Program(_mixed),
    "checkpoint": Program(_checkpointed),
    "reentrant checkpoint": Program(_reentrant),
    "accumulation": Program(_sharded, backwards=2),
    "replicate, accumulation": Program(_replicated, backwards=2),
    "autocast": Program(_sharded, dtype=torch.bfloat16),
    "bfloat16": Program(
        partial(_sharded, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    ),
}
SKIPPING: Final = Program(_skipping)


@torch.no_grad()
def spoil_at_rest(model: Model, fault: Fault) -> str:
    """Write to a value at rest of a block on the fault's rank; returns the parameter's FQN below
    the block, or nothing if that rank has no row.
    """
    names = ["up.weight", "down.weight", "norm.weight", "up.bias"]
    name = names[fault.step % len(names)]
    parameter = model.blocks[fault.block].get_parameter(name)
    local = local_tensor(parameter)
    if dist.get_rank() == fault.rank and local.numel():
        local.view(-1)[0] = fault.value
    return name


@contextmanager
def closing(watch: Any) -> Iterator[Any]:
    try:
        yield watch
    finally:
        watch.remove()
