"""A byte-level GPT and how it trains, written as for one device.

The architecture is GPT-2's (Radford et al. 2019) without biases, with rotary positions (Su et al. 2021), from which a model
this small learns much faster; the output head is not tied.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from composable.demo.options import HEAD_WIDTH, Options
from composable.demo.text import VOCABULARY

WARM_UP_STEPS: Final = 20


class Rotary(nn.Module):
    """Turn each pair of channels by an angle that grows with the position, (..., time, head width) to the same."""

    cos: Tensor
    sin: Tensor

    def __init__(self, context: int) -> None:
        super().__init__()
        frequencies = 10000.0 ** (-torch.arange(0, HEAD_WIDTH, 2) / HEAD_WIDTH)
        angles = torch.outer(torch.arange(context), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        left, right = x.chunk(2, dim=-1)
        return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)


class Attention(nn.Module):
    """Causal self-attention, (batch, time, width) to the same."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.heads = width // HEAD_WIDTH
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.rotary = Rotary(context)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, HEAD_WIDTH).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(self.rotary(q), self.rotary(k), v, is_causal=True)
        result: Tensor = self.out(y.transpose(1, 2).reshape(b, t, c))
        return result


class Block(nn.Module):
    """One transformer block, (batch, time, width) to the same."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(width)
        self.attention = Attention(width, context)
        self.norm_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        result: Tensor = x + self.mlp(self.norm_2(x))
        return result


class GPT(nn.Module):
    """Bytes, int64 (batch, time), to logits, float32 (batch, time, 256)."""

    def __init__(self, *, layers: int, width: int, context: int) -> None:
        super().__init__()
        self.tok_emb = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, context) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                # Projections back into the residual stream are scaled down by the number of additions to it.
                scale = (2 * layers) ** -0.5 if name.endswith(("attention.out.weight", "mlp.2.weight")) else 1.0
                nn.init.normal_(p, std=0.02 * scale)

    def forward(self, idx: Tensor) -> Tensor:
        x = self.tok_emb(idx)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def build(options: Options) -> GPT:
    """The model of a run: the same weights on every rank and in the un-annotated process."""
    torch.manual_seed(options.seed)
    return GPT(layers=options.layers, width=options.width, context=options.context)


def loss_of(model: nn.Module, idx: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats per byte."""
    return F.cross_entropy(model(idx).flatten(0, 1), targets.flatten())


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    """AdamW over all parameters of `model`, which may be annotated."""
    return torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, idx: Tensor, targets: Tensor, *, peak: float, step: int
) -> Tensor:
    """One step; returns the loss of this process's rows, a scalar without a graph.

    The learning rate warms up to `peak` and then falls with the square root of the step. It depends on the step alone and not
    on how long the run will be, so a continued run follows the same curve.
    """
    for group in optimizer.param_groups:
        group["lr"] = peak * min((step + 1) / WARM_UP_STEPS, (WARM_UP_STEPS / (step + 1)) ** 0.5)
    loss = loss_of(model, idx, targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()
