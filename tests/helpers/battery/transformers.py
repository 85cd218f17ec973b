"""Transformers and mixtures of experts, written out; knows no annotation but the experts' own
groups.
"""

from __future__ import annotations

import functools
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from composable import fully_shard
from tests.helpers.battery.case import Case, mean_square, rows, words

VOCABULARY: Final = 23
WIDTH: Final = 12
LENGTH: Final = 5


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            self.qkv(self.norm1(x)).view(batch, length, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Transformer(nn.Module):
    """A language model whose output layer is its embedding, with buffers of several dtypes that
    forward reads.
    """

    shift: Tensor
    offset: Tensor

    def __init__(self, *, batch_norm: bool = False, dropout: float = 0.0, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        self.blocks = nn.ModuleList([Block(dropout) for _ in range(layers)])
        self.batch_norm = nn.BatchNorm1d(WIDTH) if batch_norm else None
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("shift", torch.randn(WIDTH) * 0.1)
        self.register_buffer("offset", torch.ones(1, dtype=torch.long), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions
        x = x + self.shift + self.offset.to(x.dtype) * 0.1
        for block in self.blocks:
            x = block(x)
        if self.batch_norm is not None:
            x = self.batch_norm(x.transpose(1, 2)).transpose(1, 2)
        return self.head(self.norm(x))


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class ExpertLayer(nn.Module):
    """A shared gate and an expert that only this rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.expert = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sigmoid(self.gate(x)) * self.expert(x)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(7, WIDTH)
        self.layers = nn.Sequential(ExpertLayer(), ExpertLayer())
        self.leave = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.layers(self.enter(x)))


def _different_experts(model: nn.Module, rank: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".expert." in name:
                parameter.add_(
                    torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                )


@functools.cache
def _group_of_this_rank(world: dist.ProcessGroup) -> dist.ProcessGroup:
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size(world))]
    group = groups[dist.get_rank(world)]
    assert isinstance(group, dist.ProcessGroup)
    return group


def _shard_experts_over_their_own_groups(model: nn.Module) -> None:
    assert dist.group.WORLD is not None
    for layer in model.modules():
        if isinstance(layer, ExpertLayer):
            fully_shard(layer.expert, mesh=_group_of_this_rank(dist.group.WORLD))


TRANSFORMERS: Final = (
    Case(
        "transformer with tied embedding",
        Transformer,
        words(VOCABULARY, 2, LENGTH),
        next_token_loss,
        (Block,),
    ),
    Case(
        "transformer with BatchNorm",
        lambda: Transformer(batch_norm=True),
        words(VOCABULARY, 2, LENGTH),
        next_token_loss,
        (Block,),
        joined=False,
    ),
    Case(
        "mixture of experts",
        Experts,
        rows(4, 7),
        mean_square,
        (ExpertLayer,),
        personalize=_different_experts,
        prepare=_shard_experts_over_their_own_groups,
        own=("layers.0.expert.", "layers.1.expert."),
        joined=False,
    ),
)
