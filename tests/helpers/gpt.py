"""A small model whose units have names and classes of all kinds, and what is asked of policies; knows no policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from composable.errors import PolicyError


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(4, 2)
        self.mlp = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(x + self.attn(x, x, x)[0])


class WideBlock(Block):
    pass


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList([Block(), WideBlock(), Block()])
        self.head = nn.Linear(4, 8, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.emb(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def fqns(root: nn.Module, picked: dict[nn.Module, Any]) -> list[str]:
    names = {module: name for name, module in root.named_modules()}
    return [names[module] for module in picked]


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(PolicyError) as caught:
        call()
    return str(caught.value)
