"""A tensor with FSDP2's extension protocol: rows of bytes with a scale each; knows no verb."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils import _pytree as pytree

_aten = torch.ops.aten
# what returns a tensor of the class
_KEPT = {
    _aten.detach.default, _aten.split.Tensor, _aten.new_zeros.default, _aten.slice.Tensor,
    _aten.copy_.default, _aten.view.default, _aten.as_strided.default, _aten.clone.default,
    _aten.empty_like.default, _aten._to_copy.default,
}  # fmt: skip


def quantised(values: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes, and a scale per row."""
    values = values.float()  # lower precisions may round 127 up
    scales = values.abs().amax(1).clamp(min=1e-12) / 127 if values.numel() else values[:, :0].sum(1)
    return (values / scales[:, None]).round().to(torch.int8), scales


def dequantised(octets: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return (octets.float() * scales[:, None]).to(dtype)


class Rows(Tensor):
    """A weight in full precision, which is sent as bytes.

    Attributes:
        outs: what `out` was, in the order of calls.
        asked: meshes, outer sizes, strides and classes of modules that were passed.
    """

    values: Tensor
    outs: ClassVar[list[Any]] = []
    asked: ClassVar[list[Any]] = []

    @staticmethod
    def __new__(cls, values: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(
            cls, values.shape, values.stride(), dtype=values.dtype, device=values.device
        )

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.values})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(Rows, lambda t: t.values, (args, kwargs or {}))
        made = func(*args, **kwargs)
        return pytree.tree_map_only(Tensor, cls, made) if func in _KEPT else made

    def __tensor_flatten__(self) -> Any:
        return ["values"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, meta: Any, size: Any, stride: Any) -> Any:
        return cls(inner["values"])

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        assert mesh.ndim == 1
        Rows.asked.append((mesh, tuple(outer_size), tuple(outer_stride), type(module).__name__))
        return quantised(self.values), ("of this gather", mp_policy)

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None
    ) -> Any:
        assert metadata[0] == "of this gather"
        octets, scales = outputs
        assert (octets.dtype, scales.dtype) == (torch.int8, torch.float32)
        Rows.outs.append(out)
        whole = dequantised(octets, scales, param_dtype)
        if out is None:
            return whole, (octets, scales, whole)
        with torch.no_grad(), _unsafe_preserve_version_counter(out):  # as FSDP2 needs it
            out.copy_(whole)
        return None


class PaddingRows(Rows):
    """One that pads by itself, as FSDP2 asks for."""

    def fsdp_pre_all_gather(  # type: ignore[override]
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        rows = -(-outer_size[0] // mesh.size())
        padded = self.values.new_zeros(rows, *outer_size[1:])
        padded[: len(self.values)] = self.values
        return quantised(padded), ("of this gather", mp_policy)


class MeshOnly(Rows):
    """The first form of the protocol."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        return quantised(self.values), ("of this gather", None)


class Releasing(Rows):
    """One that computes with a copy, and needs what was gathered no more."""

    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> bool:
        return True


torch.serialization.add_safe_globals([Rows])  # of distributed checkpoints


class Emulated(nn.Linear):
    """What a linear computes whose weight was sent in bytes."""

    def forward(self, x: Tensor) -> Tensor:
        octets, scales = quantised(self.weight.detach())
        sent = dequantised(octets, scales, self.weight.dtype)
        return nn.functional.linear(x, self.weight + (sent - self.weight).detach(), self.bias)


class Net(nn.Module):
    """Two blocks and a head; sizes may not divide."""

    def __init__(
        self, kind: type[nn.Linear] = nn.Linear, hidden: int = 8, *, frozen: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(kind(6, hidden), nn.Tanh(), kind(hidden, 6)) for _ in range(2)
        )
        self.head = nn.Linear(6, 3)
        if frozen:
            for linear in self.linears():
                linear.weight.requires_grad_(False)

    def linears(self) -> list[nn.Linear]:
        return [each for block in self.blocks for each in block if isinstance(each, nn.Linear)]  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)  # type: ignore[no-any-return]


def with_rows(model: Net, kind: type[Rows] = Rows) -> Net:
    """Let the weights of the blocks be sent as bytes."""
    for linear in model.linears():
        trains = linear.weight.requires_grad
        linear.weight = nn.Parameter(kind(linear.weight.detach()), requires_grad=trains)
    return model
