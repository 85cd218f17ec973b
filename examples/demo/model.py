"""A byte-level GPT and how it trains, written as for one device.

The architecture is GPT-2's (Radford et al. 2019) without biases, with rotary positions (Su et al.
2021), from which a model this small learns much faster; the output head is not tied.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.demo.options import HEAD_WIDTH, Options
from examples.demo.text import VOCABULARY

WARM_UP_STEPS: Final = 20
ADAMW: Final[dict[str, Any]] = {"betas": (0.9, 0.95), "weight_decay": 0.1}


class Rotary(nn.Module):
    """Turn each pair of channels by an angle that grows with the position, (..., time, head width)
    to the same.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, context: int) -> None:
        super().__init__()
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(context, HEAD_WIDTH // 2), persistent=False)

    def reset_parameters(self) -> None:
        """Compute the angles: on the meta device, where the model is built, they would have no
        values.
        """
        frequencies = 10000.0 ** (-torch.arange(0, HEAD_WIDTH, 2) / HEAD_WIDTH)
        angles = torch.outer(torch.arange(len(self.cos)), frequencies)
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        left, right = x.chunk(2, dim=-1)
        return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)


class ResidualLinear(nn.Linear):
    """A projection back into the residual stream; its weights are scaled down by the number of
    additions to that.
    """

    def __init__(self, inputs: int, width: int, layers: int) -> None:
        super().__init__(inputs, width, bias=False)
        self.scale = (2 * layers) ** -0.5


class Attention(nn.Module):
    """Causal self-attention, (batch, time, width) to the same."""

    def __init__(self, width: int, context: int, layers: int) -> None:
        super().__init__()
        self.heads = width // HEAD_WIDTH
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.rotary = Rotary(context)
        self.out = ResidualLinear(width, width, layers)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, HEAD_WIDTH).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(self.rotary(q), self.rotary(k), v, is_causal=True)
        result: Tensor = self.out(y.transpose(1, 2).reshape(b, t, c))
        return result


class Block(nn.Module):
    """One transformer block, (batch, time, width) to the same."""

    def __init__(self, width: int, context: int, layers: int) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(width)
        self.attention = Attention(width, context, layers)
        self.norm_2 = nn.LayerNorm(width)
        up = nn.Linear(width, 4 * width, bias=False)
        self.mlp = nn.Sequential(up, nn.GELU(), ResidualLinear(4 * width, width, layers))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        result: Tensor = x + self.mlp(self.norm_2(x))
        return result


class GPT(nn.Module):
    """Bytes, int64 (batch, time), to logits, float32 (batch, time, 256)."""

    def __init__(self, *, layers: int, width: int, context: int) -> None:
        super().__init__()
        self.tok_emb = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, context, layers) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, idx: Tensor) -> Tensor:
        x = self.tok_emb(idx)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def initialise(module: nn.Module) -> None:
    """Fill the parameters and buffers of one module."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(
            module.weight, std=0.02 * (module.scale if isinstance(module, ResidualLinear) else 1.0)
        )
    elif isinstance(module, nn.LayerNorm | Rotary):
        module.reset_parameters()


def shapes(options: Options) -> GPT:
    """The model of a run on the meta device: without memory and values."""
    with torch.device("meta"):
        return GPT(layers=options.layers, width=options.width, context=options.context)


def build(options: Options) -> GPT:
    """The model of a run in one process."""
    model = shapes(options).to_empty(device="cpu")
    torch.manual_seed(options.seed)
    return model.apply(initialise)


def loss_of(model: nn.Module, idx: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats per byte."""
    return F.cross_entropy(model(idx).flatten(0, 1), targets.flatten())


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    """AdamW over all parameters of `model`, which may be annotated."""
    return torch.optim.AdamW(model.parameters(), **ADAMW)


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    idx: Tensor,
    targets: Tensor,
    *,
    peak: float,
    step: int,
) -> Tensor:
    """One step; returns the loss of this process's rows, a scalar without a graph.

    The learning rate warms up to `peak` and then falls with the square root of the step. It depends
    on the step alone and not on how long the run will be, so a continued run follows the same
    curve.
    """
    for group in optimizer.param_groups:
        group["lr"] = peak * min((step + 1) / WARM_UP_STEPS, (WARM_UP_STEPS / (step + 1)) ** 0.5)
    loss = loss_of(model, idx, targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()
