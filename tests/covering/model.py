"""The model that the programs of the table train, and how it is distributed over dimensions of a
mesh that are not data parallel; knows no verb.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from tests.extensions.rows import Rows, dequantised, quantised
from tests.meshes.mixtral import MoE, distribute_experts
from tests.tensor_parallel.models import WIDTH

HIDDEN: Final = 7  # no number of ranks divides it
SEQUENCE: Final = 4
EXPERTS: Final = 4


class Linear(nn.Linear):
    """A linear that may compute with what its weight is when it was sent as bytes.

    Attributes:
        emulates: it does. Only in the model of one process.
    """

    emulates = False

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.used(), self.bias)

    def used(self) -> Tensor:
        """The weight that it computes with."""
        if not self.emulates:
            return self.weight
        octets, scales = quantised(self.weight.detach())
        sent = dequantised(octets, scales, self.weight.dtype)
        return self.weight + (sent - self.weight).detach()


class Up(Linear):
    """The linear of a block that is a unit inside of a unit."""


class Head(Linear):
    """The last linear.

    Attributes:
        gives: weights come along with the output, as fused losses take them.
    """

    gives = False

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return (y, self.weights()) if self.gives else y

    def weights(self) -> dict[str, Tensor]:
        """Parameters and views of some."""
        weight, bias = self.used(), self.bias
        return {"all": weight, "turned": weight.t(), "cut": bias[1:], "one": bias.detach()[0]}


class Block(nn.Module):
    """A residual MLP behind a norm.

    Attributes:
        mesh: all of it is `DTensor`s over that mesh, inputs too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.split = nn.Identity()  # where sequence parallel cuts sequences
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = Up(WIDTH, HIDDEN), Linear(HIDDEN, WIDTH)
        self.mesh: DeviceMesh | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mesh is None:
            return x + self._computed(x)
        rows = [Shard(0), Replicate()]
        y: Any = self._computed(DTensor.from_local(x, self.mesh, rows, run_check=False))
        return x + y.redistribute(placements=rows).to_local().clone()

    def _computed(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.norm(self.split(x))).tanh())  # type: ignore[no-any-return]


class Routed(MoE):
    """Experts to which tokens go by their places, so that no rounding sends one elsewhere."""

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x.flatten(0, 1))
        experts = torch.arange(len(rows), device=x.device) % EXPERTS
        order = experts.argsort(stable=True)
        weights = self.router(rows).sigmoid().gather(1, experts.unsqueeze(1))
        y = torch.zeros_like(rows).index_copy(0, order, self._route(rows[order], experts[order]))
        return x + (y * weights).view_as(x)


class Net(nn.Module):
    """Three blocks between two linears, with a linear that some calls leave out.

    Attributes:
        recompute: how torch's checkpoints are put around blocks: None, or `use_reentrant`.
    """

    def __init__(self, *, experts: bool) -> None:
        super().__init__()
        self.first = Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.moe = Routed(EXPERTS) if experts else None
        self.extra, self.head = Linear(WIDTH, WIDTH), Head(WIDTH, WIDTH)
        self.recompute: bool | None = None
        with torch.no_grad():  # as small as a linear's
            for parameter in [] if self.moe is None else self.moe.experts.parameters():
                parameter.mul_(0.3)

    def forward(self, x: Tensor, *, extra: bool = True, turned: bool = False) -> Any:
        """`turned`: from the last block to the first."""
        x = self.first(x)
        for block in reversed(self.blocks) if turned else self.blocks:
            if self.recompute is None or not torch.is_grad_enabled():
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.recompute)
        if self.moe is not None:
            x = self.moe(x)
        if extra:
            x = x + self.extra(x)
        return self.head(x)

    def linears(self) -> Iterator[tuple[str, Linear]]:
        for name, module in self.named_modules():
            if isinstance(module, Linear):
                yield name, module


def with_rows(model: Net) -> None:
    """Let all weights be sent as bytes that are not distributed over something else already."""
    made: dict[int, nn.Parameter] = {}  # tied ones stay tied
    for _, linear in model.linears():
        weight = linear.weight
        if id(weight) in made:
            linear.weight = made[id(weight)]
        elif not isinstance(weight, DTensor):
            rows = nn.Parameter(Rows(weight.detach()), requires_grad=weight.requires_grad)
            if weight.grad_dtype != weight.dtype:
                rows.grad_dtype = weight.grad_dtype
            linear.weight = made[id(weight)] = made[id(rows)] = rows


# --- over dimensions beside data parallel -------------------------------------------------------

Distribute = Callable[[Net, DeviceMesh], None]


def nowhere(model: Net, mesh: DeviceMesh) -> None:
    pass


def over_tp(model: Net, mesh: DeviceMesh) -> None:
    """Linears of blocks are cut; norms stay plain."""
    for block in model.blocks:
        # as a DTensor, which knows that rows are uneven
        up = ColwiseParallel(use_local_output=False)
        parallelize_module(block, mesh["tp"], {"up": up, "down": RowwiseParallel()})


def over_sequences(model: Net, mesh: DeviceMesh) -> None:
    """Norms see parts of sequences: their gradients are summed over tp."""
    for block in model.blocks:
        split = PrepareModuleInput(
            input_layouts=(Replicate(),),
            desired_input_layouts=(Shard(1),),
            use_local_output=False,
        )
        plan = {
            "split": split,
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
            "down": RowwiseParallel(),
        }
        parallelize_module(block, mesh["tp"], plan)  # type: ignore[arg-type]


def over_all(model: Net, mesh: DeviceMesh) -> None:
    """Parameters of blocks are `DTensor`s over the whole mesh."""
    cuts = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
    for block in model.blocks:
        block.mesh = mesh  # type: ignore[assignment]
        for name, parameter in list(block.named_parameters()):
            cut = Shard(cuts[name]) if name in cuts else Replicate()
            distributed = distribute_tensor(parameter.detach(), mesh, [Replicate(), cut])
            owner, _, own = name.rpartition(".")
            setattr(block.get_submodule(owner), own, nn.Parameter(distributed))


def over_experts(model: Net, mesh: DeviceMesh) -> None:
    holder = nn.Module()
    holder.blocks = nn.ModuleList([model.moe])  # type: ignore[list-item]
    distribute_experts(holder, mesh["ep"])
