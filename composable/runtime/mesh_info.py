"""Where a unit's parameters are spread: a mesh and the communicators over it, by role; knows no parameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from composable.device.collectives import Communicator
from composable.errors import AnnotationError


@dataclass(frozen=True, slots=True)
class MeshInfo:
    """Where a unit's parameters are spread: a mesh, and the communicators over it by what they are for.

    Without a mesh there is one rank and no process group: parameters stay the plain tensors that they are.

    Attributes:
        shard: among the ranks that parameters are cut over.
        all: among all ranks of the mesh, which train together: for checks, and to say farewell.
        post_forward: among neighbours of the former, for `ReshardTo`.
        group: of `all`.
    """

    mesh: DeviceMesh | None
    shard: Communicator
    all: Communicator
    post_forward: Communicator | None = None
    device: torch.device = torch.device("cpu")  # noqa: RUF009
    group: dist.ProcessGroup | None = None

    @staticmethod
    def over_one_dimension(
        mesh: DeviceMesh | None,
        communicator: Communicator,
        post_forward: Communicator | None = None,
        device: torch.device = torch.device("cpu"),  # noqa: B008
    ) -> MeshInfo:
        """All ranks of the mesh do everything together."""
        group = None if mesh is None else mesh.get_group()
        return MeshInfo(mesh, communicator, communicator, post_forward, device, group)

    @property
    def communicators(self) -> tuple[Communicator, ...]:
        """Each once."""
        return tuple(dict.fromkeys(each for each in (self.all, self.shard, self.post_forward) if each is not None))

    @property
    def place(self) -> tuple[dist.ProcessGroup, torch.device] | None:
        """All ranks as a group, and the device: where both are the same, the same ranks move tensors alike."""
        return None if self.group is None else (self.group, self.device)

    def __deepcopy__(self, memo: dict[int, object]) -> MeshInfo:
        return self  # copies of a model train over the same ranks

    def __reduce__(self) -> tuple[Any, ...]:
        if self.mesh is not None:
            raise AnnotationError(
                "a sharded or replicated module stands on process groups and cannot be pickled; save its state_dict() "
                "(torch.distributed.checkpoint writes it from all ranks), or call remove() with its module and verb first"
            )
        return MeshInfo, (None, self.shard, self.all)
