"""A few numbers on which all ranks agree: for the norm of gradients, and for gradient scalers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from composable.comm import backend_of, reduce_numbers
from composable.memory.torch_private import local_of

Groups = tuple[dist.ProcessGroup, ...]


def local_tensor(tensor: Tensor) -> Tensor:
    """The part of `tensor` that is on this rank."""
    return local_of(tensor) if isinstance(tensor, DTensor) else tensor


def groups_sharded_over(mesh: DeviceMesh, placements: Sequence[Placement]) -> Groups:
    """The process groups over which the parts of a DTensor add up to the whole; none on a rank outside of its mesh."""
    if mesh.get_coordinate() is None:
        return ()
    sharded = [dim for dim, placement in enumerate(placements) if mesh.size(dim) > 1 and not placement.is_replicate()]
    return tuple(map(mesh.get_group, sharded))


def reduce_over(group: dist.ProcessGroup, numbers: Tensor, label: str, *, largest: bool) -> Tensor:
    """The sum, or the largest, of all ranks' `numbers` (1-D), one by one, on the device that they are on here."""
    device = _communication_device(group, numbers.device)
    return reduce_numbers(numbers.to(device), group, largest=largest, label=label).to(numbers.device)


def _communication_device(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Where `group` sends numbers that were computed on `device`.

    Numbers on the host come from parameters under CPU offload, or from a pipeline stage without parameters, while other stages
    send from the accelerator: so the accelerator is preferred if it has a backend of its own.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device.type != "cpu" or accelerator is None:
        return device
    there, here = backend_of(group, accelerator), backend_of(group, device)
    return device if there in ("undefined", here) else torch.device(accelerator.type, torch.accelerator.current_device_index())
