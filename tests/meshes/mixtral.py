"""A small mixture of experts as Mixtral: each token goes to two of the experts, which are
distributed over ranks; tokens travel by all-to-all.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.tensor_parallel.models import WIDTH

HIDDEN = 5


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class _Exchange(torch.autograd.Function):
    """Rows to other ranks of a group, and gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.back = received, sent, group
        found = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(found, rows.contiguous(), received, sent, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return _Exchange.apply(gradient, *ctx.back), None, None, None


class Experts(nn.Module):
    """Those of this rank; on one process, all of them."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(number, WIDTH, HIDDEN))
        self.down = nn.Parameter(torch.randn(number, HIDDEN, WIDTH))

    def forward(self, x: Tensor, experts: Tensor) -> Tensor:
        """Apply to each row the expert of its number."""
        up, down = _local(self.up), _local(self.down)
        y = torch.zeros_like(x)
        for number in range(len(up)):
            rows = (experts == number).nonzero().flatten()
            # smooth: at a kink, a rounding would give another gradient
            y = y.index_copy(0, rows, (x[rows] @ up[number]).tanh() @ down[number])
        return y


class MoE(nn.Module):
    def __init__(self, number: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, number, bias=False)
        self.experts = Experts(number)
        self.ep: DeviceMesh | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        weights, chosen = self.router(h).softmax(-1).topk(2)
        token = torch.arange(len(x)).repeat_interleave(2)
        order = chosen.flatten().argsort(stable=True)
        y = self._route(h[token[order]], chosen.flatten()[order])
        scaled = y * weights.flatten()[order].unsqueeze(-1)
        return x + torch.zeros_like(x).index_add(0, token[order], scaled)

    def _route(self, rows: Tensor, experts: Tensor) -> Tensor:
        """Send rows, in the order of their experts, to the ranks of these, and back."""
        if self.ep is None:
            return self.experts(rows, experts)
        group, ranks = self.ep.get_group(), self.ep.size()
        here = self.router.out_features // ranks  # experts of each rank
        sent = torch.bincount(experts // here, minlength=ranks)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        out, into = sent.tolist(), received.tolist()
        numbers = _Exchange.apply(experts % here, out, into, group)
        y = self.experts(_Exchange.apply(rows, out, into, group), numbers)
        return _Exchange.apply(y, into, out, group)


class Mixtral(nn.Module):
    def __init__(self, number: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(MoE(number) for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def distribute_experts(model: Any, ep: DeviceMesh) -> None:
    """Each rank of `ep` has some of the experts."""
    for block in model.blocks:
        block.ep = ep
        for name, parameter in block.experts.named_parameters():
            distributed = distribute_tensor(parameter.detach(), ep, [Shard(0)])
            setattr(block.experts, name, nn.Parameter(distributed))
