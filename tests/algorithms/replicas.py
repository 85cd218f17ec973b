"""Replicas that train apart: annotated models, and the same replicas by plain loops in one
process.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from composable import full_state_dict, fully_shard, register_comm_hook, replicate
from tests.helpers.world import current_device
from tests.state.models import Block, Net, plain

Batch = tuple[Tensor, Tensor]
Start = Callable[[Any], Optimizer]


def batch(step: int, replica: int) -> Batch:
    """Ranks of one replica share a batch, so that their mean gradient is that of one process."""
    generator = torch.Generator().manual_seed(1000 * replica + step)
    one, other = (
        torch.randint(7, (6,), generator=generator),
        torch.randint(7, (6,), generator=generator),
    )
    return one.to(current_device()), other.to(current_device())


def backward(model: nn.Module, step: int, replica: int) -> float:
    inputs, targets = batch(step, replica)
    loss = nn.functional.cross_entropy(model(inputs), targets)
    loss.backward()
    return loss.item()


def grid(replicas: int) -> DeviceMesh:
    shape = (replicas, dist.get_world_size() // replicas)
    return init_device_mesh(current_device().type, shape, mesh_dim_names=("replicate", "shard"))


def _hybrid(model: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh=mesh, policy={Block})


def _replicated(model: nn.Module, mesh: DeviceMesh) -> None:
    replicate(model)


def _views(model: nn.Module, mesh: DeviceMesh) -> None:
    """Gradients live in buckets from step to step."""
    replicate(model, gradient_as_bucket_view=True)


def _mixed(model: nn.Module, mesh: DeviceMesh) -> None:
    """A replicated unit inside hybrid ones."""
    assert isinstance(model, Net)
    replicate(model.blocks[1])
    fully_shard(model, mesh=mesh, policy={Block})


PLANS: Final[dict[str, Callable[[nn.Module, DeviceMesh], None]]] = {
    "hybrid": _hybrid,
    "replicate": _replicated,
    "views": _views,
    "replicate inside hybrid": _mixed,
}
# Name of the plan, ranks, replicas.
WORLDS: Final = [
    ("hybrid", 2, 2), ("hybrid", 4, 2), ("hybrid", 4, 1),
    ("replicate", 1, 1), ("replicate", 2, 2), ("replicate", 3, 3), ("views", 2, 2),
]  # fmt: skip


def annotated(plan: str, replicas: int) -> tuple[Net, int]:
    """The model, and the replica that this rank belongs to."""
    model, mesh = plain(), grid(replicas)
    PLANS[plan](model, mesh)
    return model, mesh.get_local_rank("replicate")


def keep_gradients_local(model: nn.Module, plan: str) -> None:
    """By torch's hook, which returns what it is given."""
    register_comm_hook(model, None, noop_hook, stage="all_reduce" if plan == "hybrid" else None)


def by_hand(
    replicas: int,
    steps: int,
    start: Start,
    at_end_of_step: Callable[[int, list[Net]], None] | None = None,
) -> list[Net]:
    """Train copies of one model apart."""
    models = [copy.deepcopy(plain()) for _ in range(replicas)]
    optimizers = [start(model.parameters()) for model in models]
    for step in range(steps):
        for replica, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            backward(model, step, replica)
            optimizer.step()
            optimizer.zero_grad()
        if at_end_of_step is not None:
            at_end_of_step(step, models)
    return models


@torch.no_grad()
def average_by_hand(models: Sequence[nn.Module]) -> None:
    for parameters in zip(*(model.parameters() for model in models), strict=True):
        mean = torch.stack(parameters).mean(0)
        for parameter in parameters:
            parameter.copy_(mean)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def assert_same_parameters(model: nn.Module, expected: nn.Module) -> None:
    found = full_state_dict(model, rank0_only=False)
    for name, value in expected.named_parameters():
        torch.testing.assert_close(
            found[name], value.detach().cpu(), rtol=1e-4, atol=1e-5, msg=name
        )
