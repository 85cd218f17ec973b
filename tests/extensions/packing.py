"""Linears with 4-bit weights: of bitsandbytes, and a stand-in of the same shape; knows no verb."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import pairwise
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from tests.helpers.world import current_device

_BLOCK: Final = 8  # elements that share a scale
# with the real class where the package is installed
KINDS: Final = [
    "stand-in",
    pytest.param(
        "bitsandbytes",
        marks=pytest.mark.skipif(
            find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
        ),
    ),
]


class State:
    """What the bytes mean: the scale of each block, the code, and the shape."""

    def __init__(self, absmax: Tensor, shape: torch.Size) -> None:
        self.absmax, self.shape = absmax, shape
        self.code = torch.linspace(-1, 1, 16, device=absmax.device)
        self.packing_format_for_cpu = False

    def to(self, device: torch.device) -> None:
        self.absmax, self.code = self.absmax.to(device), self.code.to(device)

    def as_dict(self, packed: bool = False) -> dict[str, Any]:
        assert packed
        return {"absmax": self.absmax, "quant_map": self.code, "quant_state.packed": self.packed}

    @property
    def packed(self) -> Tensor:
        return torch.tensor(self.shape, device="cpu")

    @classmethod
    def from_dict(cls, entries: dict[str, Any], device: torch.device) -> State:
        assert sorted(entries) == ["absmax", "quant_map", "quant_state.packed"]
        shape = torch.Size(entries["quant_state.packed"].tolist())
        return cls(entries["absmax"].to(device), shape)


class Packed(nn.Parameter):
    """As `Params4bit`: bytes, and attributes that a plain parameter would lose."""

    quant_state: State
    bnb_quantized: bool

    def __new__(cls, data: Tensor, quant_state: State | None) -> Packed:
        made = super().__new__(cls, data, False)
        made.quant_state, made.bnb_quantized = quant_state, quant_state is not None  # type: ignore[assignment]
        return made


def packed(values: Tensor, storage: torch.dtype) -> Packed:
    flat = values.detach().flatten()
    flat = nn.functional.pad(flat, (0, -len(flat) % _BLOCK))
    absmax = flat.view(-1, _BLOCK).abs().amax(1).clamp(min=1e-12)
    state = State(absmax, values.shape)
    scaled = (flat.view(-1, _BLOCK) / absmax[:, None]).view(-1, 1)
    codes = (scaled - state.code).abs().argmin(1).to(torch.uint8)[: -(-values.numel() // 2) * 2]
    octets = (codes[::2] << 4) | codes[1::2]
    return Packed(octets.view(storage).unsqueeze(1), state)


def unpacked(weight: Tensor, state: State) -> Tensor:
    octets = weight.detach().flatten().view(torch.uint8)
    codes = torch.stack([octets >> 4, octets & 15], 1).flatten().int()
    number = state.shape.numel()
    values = state.code[codes][:number]
    return (values * state.absmax.repeat_interleave(_BLOCK)[:number]).view(state.shape)


class _Matmul(torch.autograd.Function):
    """As bitsandbytes', which keeps the weight past autograd, and reads it in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Packed) -> Tensor:  # type: ignore[override]
        ctx.weight, ctx.state = weight, weight.quant_state
        return x @ unpacked(weight, ctx.state).to(x.dtype).t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient @ unpacked(ctx.weight, ctx.state).to(gradient.dtype), None


class Linear4bit(nn.Linear):
    """As bitsandbytes' of this name."""

    weight: Packed

    def __init__(self, columns: int, rows: int, storage: torch.dtype) -> None:
        super().__init__(columns, rows)
        self.weight = packed(self.weight, storage)
        self.support_avx512bf16_for_cpu = True

    @override
    def forward(self, x: Tensor) -> Tensor:
        assert type(self.weight) is Packed
        if self.support_avx512bf16_for_cpu and not self.training and not x.requires_grad:
            self.weight.data = self.weight.data.flip(0)
            self.weight.quant_state.packing_format_for_cpu = True
            return x.new_zeros(len(x), self.out_features)
        if self.bias.dtype != x.dtype:
            self.bias.data = self.bias.data.to(x.dtype)
        made: Tensor = _Matmul.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return made + self.bias

    @override
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, value in self.weight.quant_state.as_dict(packed=True).items():
            destination[f"{prefix}weight.{name}"] = value if keep_vars else value.detach()


def linear(
    kind: str, columns: int, rows: int, storage: torch.dtype = torch.uint8, *, double: bool = False
) -> Any:
    """A quantised linear, on the device of the session."""
    if kind == "stand-in":
        return Linear4bit(columns, rows, storage)
    import bitsandbytes  # noqa: PLC0415 - seconds

    made = bitsandbytes.nn.Linear4bit(
        columns, rows, quant_type="nf4", quant_storage=storage, compress_statistics=double
    )
    return made.to(current_device())


class Adapted(nn.Module):
    """A frozen 4-bit base, and a low-rank correction that is learned."""

    def __init__(self, base: nn.Module, columns: int, rows: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(columns, 3, bias=False), nn.Linear(3, rows, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.base(x) + self.up(self.down(x))
        return made.tanh()


def net(
    kind: str, storage: torch.dtype = torch.uint8, *, double: bool = False, seed: int = 0
) -> nn.Sequential:
    """Three of them. No number of bytes divides by four ranks, nor that of larger elements."""
    torch.manual_seed(seed)
    widths = (10, 7, 9, 6) if storage is torch.uint8 else (10, 8, 9, 8)
    blocks = []
    for columns, rows in pairwise(widths):
        base = linear(kind, columns, rows, storage, double=double)
        blocks.append(Adapted(base, columns, rows))
    return nn.Sequential(*blocks)
