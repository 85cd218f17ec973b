"""Where a unit's parameters are spread: a mesh and the communicators over it; knows no parameter."""

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
    """Where a unit's parameters are spread: a mesh, its communicator, and the communicator among neighbours for `ReshardTo`.

    Without a mesh there is one rank and no process group: parameters stay the plain tensors that they are.
    """

    mesh: DeviceMesh | None
    communicator: Communicator
    post_forward: Communicator | None = None
    device: torch.device = torch.device("cpu")  # noqa: RUF009

    @property
    def place(self) -> tuple[dist.ProcessGroup, torch.device] | None:
        """The group that the mesh stands for, and the device: where both are the same, the same ranks move tensors alike."""
        return None if self.mesh is None else (self.mesh.get_group(), self.device)

    def __deepcopy__(self, memo: dict[int, object]) -> MeshInfo:
        return self  # copies of a model train over the same ranks

    def __reduce__(self) -> tuple[Any, ...]:
        if self.mesh is not None:
            raise AnnotationError(
                "a sharded or replicated module stands on process groups and cannot be pickled; save its state_dict() "
                "(torch.distributed.checkpoint writes it from all ranks), or call remove() with its module and verb first"
            )
        return MeshInfo, (None, self.communicator)
