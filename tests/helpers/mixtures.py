"""A mixture of experts: a router and a head that all ranks share, and on each slice of a mesh
another expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composable import fully_shard, replicate
from tests.helpers.compare import full
from tests.helpers.world import current_device


class Expert(nn.Module):
    """Its gradients are of another size on every slice; one parameter has no dimensions, and no
    rank a part of it.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(10 + number)
        self.up, self.scale = nn.Linear(5, 5), nn.Parameter(torch.tensor(2.0 + 3 * number))

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x) * self.scale


class Mixture(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router, self.head = nn.Linear(7, 5), nn.Linear(5, 3)
        self.expert = Expert(number)

    def forward(self, x: Tensor, *, expert: bool = True) -> Tensor:
        x = self.router(x)
        return self.head(x + self.expert(x) if expert else x)


def sharded(model: Mixture, copies: DeviceMesh) -> None:
    fully_shard(model.expert, mesh=copies)
    fully_shard(model, policy={"head": {}})


def _shards_in_a_replica(model: Mixture, copies: DeviceMesh) -> None:
    fully_shard(model.expert, mesh=copies)
    replicate(model)


def _replica_in_shards(model: Mixture, copies: DeviceMesh) -> None:
    replicate(model.expert, mesh=copies)
    fully_shard(model, policy={"head": {}})


def _replicated(model: Mixture, copies: DeviceMesh) -> None:
    replicate(model.expert, mesh=copies)
    replicate(model)


def side_by_side(model: Mixture, copies: DeviceMesh) -> None:
    fully_shard(model.router)
    fully_shard(model.head)
    fully_shard(model.expert, mesh=copies)


def _replicas_beside_shards(model: Mixture, copies: DeviceMesh) -> None:
    replicate(model.router)
    replicate(model.head)
    fully_shard(model.expert, mesh=copies)


Annotate = Callable[[Mixture, DeviceMesh], None]
NESTED: Final[dict[str, Annotate]] = {
    "shards in shards": sharded,
    "shards in a replica": _shards_in_a_replica,
    "a replica in shards": _replica_in_shards,
    "a replica in a replica": _replicated,
}
SCHEMES: Final[dict[str, Annotate]] = {
    **NESTED,
    "shards side by side": side_by_side,
    "replicas beside shards": _replicas_beside_shards,
}


def mixture(annotate: Annotate) -> tuple[Mixture, DeviceMesh]:
    mesh = init_device_mesh(
        current_device().type, (2, dist.get_world_size() // 2), mesh_dim_names=("experts", "copies")
    )
    model = Mixture(mesh.get_local_rank("experts")).to(current_device())
    annotate(model, mesh["copies"])
    return model, mesh


def batch() -> Tensor:
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(dist.get_rank())).to(
        current_device()
    )


def all_gradients(model: Mixture, mesh: DeviceMesh) -> list[Tensor]:
    """Of what all ranks share, and of all experts, each once."""
    mine = [full(p.grad).cpu() for p in model.expert.parameters() if p.grad is not None]
    of_all: list[Any] = [None] * mesh.size(0)
    dist.all_gather_object(of_all, mine, group=mesh.get_group("experts"))
    shared = [
        full(p.grad).cpu()
        for layer in (model.router, model.head)
        for p in layer.parameters()
        if p.grad is not None
    ]
    return [*shared, *(gradient for each in of_all for gradient in each)]


def norm_of(gradients: list[Tensor], order: float) -> Tensor:
    return torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(each.double(), order) for each in gradients]), order
    )


def agree(norm: Tensor) -> None:
    """On the very bits: otherwise ranks scale shared gradients apart."""
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, full(norm).item())
    assert len(dict.fromkeys(of_all)) == 1, of_all
