"""Over which ranks the parameters of a unit are sharded and replicated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch.distributed.device_mesh import DeviceMesh

from composable.comm.backends import comm_of, comm_of_messages, group_of_all, subgroup_of
from composable.comm.base import Comm
from composable.errors import AnnotationError

_CPU: Final = torch.device("cpu")


@dataclass(frozen=True)
class MeshInfo:
    """A mesh, and the comms over it by role.

    | | `shard` | `replicate` | `all` |
    |---|---|---|---|
    | `fully_shard` | all ranks | None | `shard` |
    | `fully_shard` on a mesh of two dimensions | the shard dimension | the other one | both |
    | `replicate` | this rank | all ranks | `replicate` |
    | no process group | this rank | None | `shard` |

    Attributes:
        mesh: None where there is no process group; parameters stay plain tensors then.
        post_forward: among consecutive ranks of `shard`, for `reshard_after_forward=<number of
            ranks>`.
        device: of parameters while modules compute with them.
        shard_dim: the dimension of the mesh that parameters are sharded over.
    """

    mesh: DeviceMesh | None
    shard: Comm
    all: Comm
    replicate: Comm | None = None
    post_forward: Comm | None = None
    device: torch.device = _CPU
    shard_dim: int = 0

    @property
    def replicas(self) -> list[list[int]]:
        """The global ranks that each replica is sharded over; empty unless the mesh has two
        dimensions.
        """
        if self.mesh is None or self.mesh.ndim == 1:
            return []
        found: list[list[int]] = self.mesh.mesh.movedim(self.shard_dim, -1).tolist()
        return found

    def with_shards_by(self, exchange: Callable[[Comm], Comm]) -> MeshInfo:
        """The same, where other comms of the same ranks gather and reduce-scatter."""
        near = None if self.post_forward is None else exchange(self.post_forward)
        return replace(self, shard=exchange(self.shard), post_forward=near)

    def __deepcopy__(self, memo: dict[int, object]) -> MeshInfo:
        return self

    def __getstate__(self) -> dict[str, Any]:
        if self.mesh is not None:
            raise AnnotationError(
                "a sharded or replicated module holds process groups and cannot be pickled; save"
                " its state_dict() (torch.distributed.checkpoint writes it from all ranks), or call"
                " remove() with its module and verb first"
            )
        return self.__dict__


def mesh_info_of_shards(
    mesh: DeviceMesh,
    device: torch.device,
    *,
    shard_dim: int = 0,
    post_forward_ranks: int | None = None,
) -> MeshInfo:
    """Parameters are sharded over `shard_dim` of a mesh of one or two dimensions, and replicated
    over the other one.

    Args:
        post_forward_ranks: divides the number of ranks of the shard dimension.
    """
    group = mesh.get_group(shard_dim)
    shard, every = comm_of_messages(group, device), comm_of(group, device)
    replicate = post_forward = None
    if post_forward_ranks is not None:
        assert shard.size % post_forward_ranks == 0, "checked where the user passes it"
        near = subgroup_of(group, post_forward_ranks, device)
        post_forward = comm_of_messages(near, device)
    if mesh.ndim == 2 and mesh.size(1 - shard_dim) > 1:
        replicas = mesh.get_group(1 - shard_dim)
        replicate = comm_of_messages(replicas, device)
        ranks = mesh.mesh.flatten().tolist()
        every = comm_of(group_of_all([group, replicas], ranks, device), device)
    return MeshInfo(mesh, shard, every, replicate, post_forward, device, shard_dim)


def mesh_info_of_replicas(mesh: DeviceMesh | None, device: torch.device) -> MeshInfo:
    """Parameters are replicated over a mesh of one dimension."""
    alone = comm_of(None, device)
    if mesh is None:
        return MeshInfo(None, alone, alone, device=device)
    group = mesh.get_group()
    replicate = comm_of_messages(group, device)
    return MeshInfo(mesh, alone, comm_of(group, device), replicate, device=device)


def communication_device(mesh: DeviceMesh, device: torch.device) -> torch.device:
    """The device on which a mesh's collectives run, and where parameters that are on `device` now
    will live.
    """
    if device.type == mesh.device_type:
        return device
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())
