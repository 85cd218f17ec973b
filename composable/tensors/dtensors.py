"""Make `DTensor`s around local tensors, without a collective, and make whole tensors from
`DTensor`s.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from composable.errors import few
from composable.tensors.protocol import cloned
from composable.torch_private import dtensor_like, local_of
from composable.torch_private import wrap as wrap


def wrap_like(local: Tensor, like: DTensor) -> DTensor:
    """A `DTensor` around `local` that is distributed as `like`."""
    return wrap(local, like.device_mesh, like.placements, like.shape, like.stride())


def gradient_like(local: Tensor, parameter: Tensor) -> Tensor:
    """`local` as a gradient of `parameter`: a `DTensor` of the same placements, or itself."""
    if not isinstance(parameter, DTensor):
        return local
    own = local_of(parameter)
    if local.shape == own.shape and local.stride() == own.stride() and local.dtype == own.dtype:
        return dtensor_like(local, parameter)  # the usual case, 5 us instead of 50
    return wrap_like(local, parameter)


def gradient_of_shards(local: Tensor, parameter: Tensor, first: int, shard_dim: int) -> Tensor:
    """A gradient that is reduced over the shard dimension of the mesh, and not yet over the
    replicate dimension. The unit's dimensions of the mesh begin with `first`.
    """
    assert isinstance(parameter, DTensor)
    placements = [
        each if dim < first or dim == shard_dim else Partial("avg")
        for dim, each in enumerate(parameter.placements)
    ]
    return wrap(local, parameter.device_mesh, placements, parameter.shape, parameter.stride())


def is_unreduced(gradient: Tensor | None) -> bool:
    """Whether `gradient`, of a `DTensor`, was accumulated under `no_sync` and is not the mean over
    all ranks yet.
    """
    return isinstance(gradient, DTensor) and any(
        placement.is_partial() for placement in gradient.placements
    )


@torch.no_grad()
def whole_of(tensor: Tensor) -> Tensor:
    """Gather a whole copy of a parameter, gradient or optimizer state; all ranks of its mesh call
    this.

    One all-gather of one tensor, torch's own, which knows uneven shards and every placement.
    """
    if not isinstance(tensor, DTensor):
        return cloned(tensor.detach())
    local = local_of(tensor)
    if local.is_meta:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    device, detached = tensor.device_mesh.device_type, tensor.detach()
    if local.device.type != device:  # it rests on the host
        detached = gradient_like(local.to(device), tensor)
    assert isinstance(detached, DTensor)
    with torch.enable_grad():  # torch 2.11 raises without, in a dispatch mode
        whole: Tensor = detached.full_tensor()
    # Replicated, or over one rank, the whole is the local tensor itself.
    return cloned(whole) if whole.data_ptr() == local.data_ptr() else whole


def slices_at(
    place: Sequence[int],
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
) -> tuple[tuple[int, int], ...] | None:
    """What the rank at `place` of a mesh holds of a whole tensor: along each dimension, the first
    index and the one after the last. None for placements of classes that torch does not document.
    """
    slices = [(0, size) for size in shape]
    for index, count, placement in zip(place, mesh.shape, placements, strict=True):
        if type(placement) is Shard:
            # as `torch.chunk` cuts what the dimensions of the mesh before this one have left
            start, stop = slices[placement.dim]
            rows = -(-(stop - start) // count)
            start = min(start + index * rows, stop)
            slices[placement.dim] = start, min(start + rows, stop)
        elif type(placement) is not Replicate:  # in another order of ranks
            return None
    return tuple(slices)


def describe_mesh(mesh: DeviceMesh) -> str:
    """Like `the (2,) cpu mesh of ranks 0, 1`."""
    return (
        f"the {tuple(mesh.shape)} {mesh.device_type} mesh of ranks"
        f" {few([str(r) for r in mesh.mesh.flatten().tolist()])}"
    )
