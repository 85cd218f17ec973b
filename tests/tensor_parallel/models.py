"""Models whose parameters are distributed over a tensor-parallel mesh, and their training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.utils import clip_grad_norm_

from tests.helpers.meshes import shared_mesh
from tests.helpers.world import current_device

VOCABULARY: Final = 12
WIDTH: Final = 6


class MLP(nn.Module):
    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class Attention(nn.Module):
    """Two heads, as many of them as the local weights have."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k = nn.Linear(WIDTH, WIDTH, bias=False)
        self.v = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each(x).unflatten(-1, (-1, WIDTH // 2)).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.mlp = nn.LayerNorm(WIDTH), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def mesh_of(*shape: int, names: tuple[str, ...] = ("dp", "tp")) -> DeviceMesh:
    return shared_mesh(current_device().type, shape, names)


def parallelize_mlp(model: nn.Module, tp: DeviceMesh) -> None:
    # as a DTensor, which knows that rows are uneven
    up = ColwiseParallel(use_local_output=False)
    parallelize_module(model, tp, {"up": up, "down": RowwiseParallel()})


def parallelize_gpt(model: GPT, tp: DeviceMesh) -> None:
    """Sequence parallel: norms are replicated over tp, and their gradients are `Partial`."""
    tied = model.head.weight is model.embedding.weight
    parallelize_module(
        model,
        tp,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    if tied:  # which torch has untied
        model.head.weight = model.embedding.weight
    to_whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    for block in model.blocks:
        parallelize_module(
            block,
            tp,
            {
                "norm1": SequenceParallel(),
                "attention": to_whole,
                "attention.q": ColwiseParallel(),
                "attention.k": ColwiseParallel(),
                "attention.v": ColwiseParallel(),
                "attention.out": RowwiseParallel(output_layouts=Shard(1)),
                "norm2": SequenceParallel(),
                "mlp": to_whole,
                "mlp.up": ColwiseParallel(),
                "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
            },
        )


def batches(model: nn.Module, rank: int, ranks: int, steps: int = 3) -> list[Tensor]:
    """The inputs of one rank of `ranks` data-parallel ones, two rows each; rank -1 has all rows."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(steps):
        if isinstance(model, GPT):
            whole = torch.randint(VOCABULARY, (2 * ranks, 4), generator=generator)
        else:
            whole = torch.randn(2 * ranks, WIDTH, generator=generator, dtype=torch.float64)
        found.append(whole if rank < 0 else whole[2 * rank : 2 * rank + 2])
    return found


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    out = model(batch)
    if isinstance(model, GPT):
        return nn.functional.cross_entropy(out[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
    return out.square().mean()


OPTIMIZERS: Final[dict[str, Callable[[Any], torch.optim.Optimizer]]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
}


def train(
    model: nn.Module, inputs: list[Tensor], optimizer: str = "SGD", clip: Any = None
) -> list[Tensor]:
    """Losses."""
    stepper, losses = OPTIMIZERS[optimizer](model.parameters()), []
    for batch in inputs:
        loss = loss_of(model, batch)
        loss.backward()
        if clip is not None:
            losses.append(full(clip(model.parameters(), 0.01)))
        stepper.step()
        stepper.zero_grad()
        losses.append(full(loss).detach())
    return losses


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def made(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def assert_trains_as_one_process(
    kind: Callable[[], nn.Module],
    annotate: Callable[[nn.Module], None],
    dp: DeviceMesh,
    *,
    optimizer: str = "SGD",
    clip: Any = None,
    norm: float = 2.0,
    steps: int = 3,
) -> nn.Module:
    """Train `kind()` annotated over `dp`, and a copy in this process alone; compare all."""
    model = made(kind)
    alone = copy.deepcopy(model)
    annotate(model)
    ranks, rank = dp.size(), sorted(dp.mesh.flatten().tolist()).index(dist.get_rank())
    losses = train(
        model, batches(model, rank, ranks, steps), optimizer, clip and partial(clip, norm_type=norm)
    )
    expected = train(
        alone,
        batches(alone, -1, ranks, steps),
        optimizer,
        clip and partial(clip_grad_norm_, norm_type=norm),
    )
    own = torch.stack(losses)
    if clip is None:
        means = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(means, own)
        own = torch.stack(means).mean(0)
        torch.testing.assert_close(own, torch.stack(expected))
    else:
        torch.testing.assert_close(own[::2], torch.stack(expected)[::2])
    assert_same_parameters(model, alone)
    return model


def assert_same_parameters(model: nn.Module, alone: nn.Module, **tolerance: Any) -> None:
    expected = dict(alone.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            full(parameter).detach(), expected[name].detach(), msg=f"{name} differs", **tolerance
        )
