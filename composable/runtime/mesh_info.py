"""Where a unit's parameters are spread: a mesh and the communicators over it, by role; knows no parameter."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final
from weakref import ref

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from composable.device.collectives import Communicator, is_distributed, reference_to
from composable.errors import AnnotationError, MeshError

_CPU: Final = torch.device("cpu")


@dataclass(frozen=True, slots=True, weakref_slot=True)
class MeshInfo:
    """Where a unit's parameters are spread: a mesh, and the communicators over it by what they are for.

    Without a mesh there is one rank and no process group: parameters stay the plain tensors that they are.

    Attributes:
        shard: among the ranks that parameters are cut over.
        all: among all ranks of the mesh, which train together: for checks, and to say farewell.
        replicate: among the ranks that have the same shards; None where there is one such rank only.
        post_forward: among some consecutive ranks of those that parameters are cut over, for `ReshardTo`.
        group: of `all`; not kept, see `let_go_when_destroyed`.
        shard_dim: the dimension of the mesh that parameters are cut over; along the other one, if any, they are the same.
    """

    mesh: DeviceMesh | None
    shard: Communicator
    all: Communicator
    replicate: Communicator | None = None
    post_forward: Communicator | None = None
    device: torch.device = _CPU
    group: ref[dist.ProcessGroup] | None = None
    shard_dim: int = 0

    @staticmethod
    def over_one_dimension(mesh: DeviceMesh | None, communicator: Communicator, device: torch.device = _CPU) -> MeshInfo:
        """All ranks of the mesh do everything together."""
        group = None if mesh is None else reference_to(mesh.get_group())
        return MeshInfo(mesh, communicator, communicator, device=device, group=group)

    @property
    def communicators(self) -> tuple[Communicator, ...]:
        """Each once."""
        roles = (self.all, self.shard, self.replicate, self.post_forward)
        return tuple(dict.fromkeys(each for each in roles if each is not None))

    @property
    def place(self) -> tuple[ref[dist.ProcessGroup], torch.device] | None:
        """All ranks as a group, and the device: where both are the same, the same ranks move tensors alike."""
        return None if self.group is None else (self.group, self.device)

    @property
    def replicas(self) -> list[list[int]]:
        """The global ranks that each replica is cut over; nothing where there are no replicas."""
        if self.mesh is None or self.mesh.ndim == 1:
            return []
        found: list[list[int]] = self.mesh.mesh.movedim(self.shard_dim, -1).tolist()
        return found

    def __deepcopy__(self, memo: dict[int, object]) -> MeshInfo:
        return self  # copies of a model train over the same ranks

    def __reduce__(self) -> tuple[Any, ...]:
        if self.mesh is not None:
            raise AnnotationError(
                "a sharded or replicated module stands on process groups and cannot be pickled; save its state_dict() "
                "(torch.distributed.checkpoint writes it from all ranks), or call remove() with its module and verb first"
            )
        return MeshInfo, (None, self.shard, self.all)


def is_left_alone(mesh: DeviceMesh | None) -> bool:
    """Whether a unit was annotated in a process without a group, and so has no mesh, while the process has a group now."""
    return mesh is None and is_distributed() and dist.get_world_size() > 1


def left_alone(verb: str, unit: str) -> MeshError:
    """Each rank would train the unit by itself."""
    return MeshError(
        f"unit '{unit}' was annotated before there was a process group: each of the {dist.get_world_size()} ranks would train "
        f"it by itself. Call remove(module, {verb}) and annotate again, now that init_process_group has run; to train on this "
        f"rank alone, pass mesh=DeviceMesh(device, [{dist.get_rank()}])"
    )


def refuse_other_replicas(units: Iterable[tuple[str, MeshInfo]]) -> None:
    """Units of one model that are replicated as well as sharded must be so over the same ranks.

    Raises:
        MeshError: two of them, which are named, are not.
    """
    hybrid = [(name, mesh_info.replicas) for name, mesh_info in units if mesh_info.replicas]
    for name, replicas in hybrid:
        first, others = hybrid[0]
        if replicas != others:
            raise MeshError(
                f"the mesh of unit '{name}' has the replicas {replicas} (ranks that hold one copy together), that of unit "
                f"'{first}' has {others}; units of one model that are sharded and replicated must have the same. Pass one "
                "mesh to both"
            )
