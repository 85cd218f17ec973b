"""The parameter groups and gradient buckets of all ranks of a mesh, in one process. No process
group, no unit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from composable.comm.backends import LocalComm
from composable.comm.base import Traits
from composable.comm.mesh_info import MeshInfo
from composable.contract.tree import Place
from composable.engine.gradients.grad_bucket import GradBucket, SyncMode
from composable.engine.params.layout import ParamShape
from composable.engine.params.param import ManagedParam, ParamInfo
from composable.engine.params.param_group import GroupKey, ReplicatedGroup, ShardedGroup
from composable.engine.params.precision import Precision
from tests.comm.in_process import seats

CPU: Final = torch.device("cpu")
NAN: Final = float("nan")
FLOAT32: Final = Precision(*[torch.float32] * 4)
# By their bytes parameters are packed, all of them; or those that can travel in messages of their
# own.
PACKED: Final = Traits(direct_bytes=1 << 60, max_direct=0, align=1, on_stream=False)
DIRECT: Final = Traits(direct_bytes=0, max_direct=1 << 30, align=1, on_stream=False)


def infos_of_shards(
    shards: int, replicas: int = 1, traits: Traits | None = None, near: int | None = None
) -> list[MeshInfo]:
    """What every rank of a mesh knows, by rank.

    Args:
        near: neighbours that keep a shard after forward.
    """
    every = seats(shards * replicas, traits)
    rows = [seats(shards, traits) for _ in range(replicas)]
    columns = [seats(replicas, traits) for _ in range(shards)]
    neighbours = (
        []
        if near is None
        else [seat for _ in range(shards // near) for seat in seats(near, traits)]
    )
    numbers = torch.arange(shards * replicas)
    infos = []
    for rank in range(shards * replicas):
        replica, shard = divmod(rank, shards)
        if replicas == 1:
            mesh = DeviceMesh("cpu", numbers, _init_backend=False, _rank=rank)
            seat = rows[0][shard]
            infos.append(
                MeshInfo(mesh, seat, seat, post_forward=neighbours[shard] if neighbours else None)
            )
        else:
            mesh = DeviceMesh(
                "cpu", numbers.view(replicas, shards), _init_backend=False, _rank=rank
            )
            infos.append(
                MeshInfo(
                    mesh, rows[replica][shard], every[rank], columns[shard][replica], shard_dim=1
                )
            )
    return infos


def infos_of_replicas(ranks: int) -> list[MeshInfo]:
    every = seats(ranks)
    meshes = [
        DeviceMesh("cpu", torch.arange(ranks), _init_backend=False, _rank=rank)
        for rank in range(ranks)
    ]
    return [
        MeshInfo(mesh, LocalComm(CPU), seat, seat) for mesh, seat in zip(meshes, every, strict=True)
    ]


class Rank:
    """One rank's group and bucket of parameters p0, p1, ... that are registered on `module`."""

    def __init__(
        self,
        values: Sequence[Tensor],
        dims: Sequence[int | None],
        info: MeshInfo,
        precision: Precision = FLOAT32,
        *,
        shards: bool = True,
        rests: bool = False,
        factor: float = 1.0,
    ) -> None:
        self.module = nn.Module()
        for index, value in enumerate(values):
            self.module.register_parameter(f"p{index}", nn.Parameter(value.clone()))
        self.params = [
            ManagedParam(ParamInfo(f"p{index}", (Place(self.module, f"p{index}"),), dim))
            for index, dim in enumerate(dims)
        ]
        self.info, self.precision, self.shards, self.factor = info, precision, shards, factor
        self.rest_mesh = info.mesh if rests else None
        self.build()

    def build(self) -> None:
        """Again, too, from what is registered then."""
        args = self.params, GroupKey(self.precision, CPU, self.info)
        self.group = (
            ShardedGroup(*args)
            if self.shards
            else ReplicatedGroup(*args, rest_mesh=self.rest_mesh, read_apart=False)
        )
        self.group.rename("u")
        self.bucket = GradBucket(self.group, self.group.members, self.info, factor=self.factor)

    @property
    def at_rest(self) -> list[nn.Parameter]:
        return [param.at_rest for param in self.params]

    @property
    def compute(self) -> list[nn.Parameter]:
        return [param.compute for param in self.params]

    @property
    def grads(self) -> list[Tensor | None]:
        """Local parts of what users see."""
        return [
            None if param.at_rest.grad is None else local(param.at_rest.grad)
            for param in self.params
        ]

    def backward(self, gradients: Sequence[Tensor | None]) -> None:
        """Leave gradients on the compute parameters as autograd does: added to what is there."""
        for parameter, gradient in zip(self.compute, gradients, strict=True):
            if gradient is not None:
                parameter.grad = (
                    gradient if parameter.grad is None else parameter.grad.add_(gradient)
                )


def ranks_of(
    values: Sequence[Tensor],
    dims: Sequence[int | None],
    infos: Iterable[MeshInfo],
    *args: Any,
    **options: Any,
) -> list[Rank]:
    return [Rank(values, dims, info, *args, **options) for info in infos]


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def values_of(shapes: Iterable[ParamShape], seed: int = 0) -> list[Tensor]:
    """Small whole numbers, so that sums of them are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(1, 100, shape.shape, generator=generator).to(torch.float32)
        for shape in shapes
    ]


def each(ranks: Sequence[Rank], *steps: Callable[[Rank], object]) -> None:
    """Take each step on all ranks before the next one: collectives run when all have launched
    them.
    """
    for step in steps:
        for rank in ranks:
            step(rank)


def unshard(ranks: Sequence[Rank]) -> None:
    each(ranks, lambda rank: rank.group.unshard(), lambda rank: rank.group.wait_for_unshard())


def reduce(ranks: Sequence[Rank], mode: SyncMode = SyncMode.REDUCE) -> None:
    """Reduce what backward left, as the root does at the end of a backward."""
    each(
        ranks,
        lambda rank: rank.bucket.reduce(mode),
        lambda rank: rank.bucket.advance(),
        lambda rank: rank.bucket.land(),
        lambda rank: rank.bucket.decide(),
    )
