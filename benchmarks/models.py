"""The models that are trained, and their batches; must not know how they are scaled."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """A pre-norm transformer block: 12 parameters. (batch, time, width) -> the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, time, 3, self.heads, width // self.heads)
        # (batch, heads, time, width of a head) each
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))


class GPT(nn.Module):
    """A byte-level decoder. (batch, time) of int64 -> (batch, time, vocabulary)."""

    def __init__(
        self, *, layers: int, width: int, heads: int, context: int, vocabulary: int = 256
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class ConvBlock(nn.Module):
    """A residual block: 6 parameters. Group norm: it has no buffers, which only some contenders
    would synchronise.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(8, channels)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(8, channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.conv1(F.relu(self.norm1(x)))
        return x + self.conv2(F.relu(self.norm2(x)))


class ConvNet(nn.Module):
    """(batch, 3, height, width) -> (batch, classes)."""

    def __init__(self, *, channels: int, depth: int, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 4, stride=4)
        self.blocks = nn.ModuleList(ConvBlock(channels) for _ in range(depth))
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=(2, 3)))


class Chain(nn.Module):
    """`count` square matrices, one after the other: a unit with as many parameters as one likes."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            torch.randn(width, width) * width**-0.5 for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x + F.linear(x, weight)
        return x


class Chains(nn.Module):
    """(batch, width) -> (batch, 1)."""

    def __init__(self, *, units: int, params: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Chain(width, params) for _ in range(units))
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Tall(nn.Module):
    """Two tall matrices: cheap to compute with, and yet every one of thousands of ranks owns a row
    of each.
    """

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(rows, width) * rows**-0.5)
        self.down = nn.Parameter(torch.randn(rows, width) * rows**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(F.linear(x, self.up)) @ self.down


class Talls(nn.Module):
    """(batch, width) -> (batch, width)."""

    def __init__(self, *, units: int, rows: int, width: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Tall(rows, width) for _ in range(units))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class WideBlock(nn.Module):
    """A block with grouped-query attention, heads 128 wide, and a gated MLP. (batch, time, width)
    -> the same.
    """

    def __init__(self, width: int, hidden: int, key_width: int) -> None:
        super().__init__()
        self.norm_attention = nn.RMSNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, key_width, bias=False)
        self.value = nn.Linear(width, key_width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm_mlp = nn.RMSNorm(width)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm_attention(x)
        # (batch, heads, time, width of a head) each
        query, key, value = (
            layer(normed).unflatten(-1, (-1, 128)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        normed = self.norm_mlp(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class WideModel(nn.Module):
    """A decoder of 70.6 billion parameters (with 80 layers), for the meta device. (batch, time) ->
    (..., vocabulary).
    """

    def __init__(
        self, layers: int = 80, width: int = 8192, hidden: int = 28672, vocabulary: int = 128256
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(WideBlock(width, hidden, width // 8) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@dataclass(frozen=True)
class Task:
    """A model, which of its modules are units (beside the root), and one rank's batches."""

    model: nn.Module
    units: type[nn.Module]
    loss: Callable[[nn.Module, int], Tensor]
    title: str

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())


BATCHES = 8  # different ones, used in turn


def gpt_task(
    *,
    layers: int,
    width: int,
    heads: int,
    batch: int,
    time: int,
    seed: int,
    rank: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> Task:
    torch.manual_seed(seed)
    with device:  # a large one takes minutes to initialise on the host
        model = GPT(layers=layers, width=width, heads=heads, context=time).to(dtype)
    generator = torch.Generator().manual_seed(seed + 1 + rank)
    tokens = torch.randint(256, (BATCHES, batch, time + 1), generator=generator).to(device)

    def loss(called: nn.Module, step: int) -> Tensor:
        window = tokens[step % BATCHES]
        return F.cross_entropy(called(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())

    size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    kind = "" if dtype == torch.float32 else f" in {str(dtype).removeprefix('torch.')}"
    title = (
        f"GPT of {size:.1f} M parameters{kind} ({layers} layers, width {width}), {batch} x {time}"
        " tokens"
    )
    return Task(model, Block, loss, title)


def conv_task(
    *, channels: int, depth: int, batch: int, side: int, seed: int, rank: int, device: torch.device
) -> Task:
    torch.manual_seed(seed)
    model = ConvNet(channels=channels, depth=depth).to(device)
    generator = torch.Generator().manual_seed(seed + 1 + rank)
    images = torch.randn((BATCHES, batch, 3, side, side), generator=generator).to(device)
    classes = torch.randint(10, (BATCHES, batch), generator=generator).to(device)

    def loss(called: nn.Module, step: int) -> Tensor:
        return F.cross_entropy(called(images[step % BATCHES]), classes[step % BATCHES])

    size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    title = (
        f"ConvNet of {size:.1f} M parameters ({depth} blocks, {channels} channels), {batch} images"
        f" of {side} x {side}"
    )
    return Task(model, ConvBlock, loss, title)


def vector_task(
    model: nn.Module, units: type[nn.Module], *, width: int, device: torch.device, title: str
) -> Task:
    """A model of vectors, trained towards zero on one batch: for host time, where the computation
    hardly matters.
    """
    batch = torch.ones(2, width, device=device)

    def loss(called: nn.Module, step: int) -> Tensor:
        return called(batch).square().mean()

    return Task(model.to(device), units, loss, title)


SIZES = ("gpt", "large", "small", "deep", "conv", "tiny")


def task_of(size: str, *, seed: int, rank: int, device: torch.device) -> Task:
    """One of `SIZES`; `tiny` is for smoke runs. For accelerators: `large` has blocks as large as
    those of 7B models, `deep` so many small ones that the host decides.
    """
    if size == "conv":
        return conv_task(
            channels=256, depth=6, batch=4, side=64, seed=seed, rank=rank, device=device
        )
    layers, width, heads, batch, time = {
        "gpt": (6, 768, 12, 2, 128),
        "large": (6, 4096, 32, 1, 2048),
        "small": (4, 256, 8, 2, 128),
        "deep": (12, 256, 8, 2, 128),
        "tiny": (2, 64, 2, 2, 16),
    }[size]
    shape = {"layers": layers, "width": width, "heads": heads, "batch": batch, "time": time}
    dtype = torch.bfloat16 if size == "large" else torch.float32
    return gpt_task(**shape, seed=seed, rank=rank, device=device, dtype=dtype)


ADAMW_FLAGS = ("default", "foreach", "fused")


def add_adamw(options: argparse.ArgumentParser, default: str) -> None:
    """Add `--adamw`: torch's implementations; its default on CPU is a loop over the parameters, on
    CUDA `foreach`.
    """
    options.add_argument(
        "--adamw",
        choices=ADAMW_FLAGS,
        default=default,
        help="implementation of AdamW, for all alike",
    )


def adamw(
    parameters: Iterable[nn.Parameter], flag: str, *, rate: float = 1e-4
) -> torch.optim.AdamW:
    foreach, fused = (True if flag == "foreach" else None), (True if flag == "fused" else None)
    return torch.optim.AdamW(parameters, lr=rate, foreach=foreach, fused=fused)
