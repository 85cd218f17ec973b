"""What the user may pass as `mesh`, and what it becomes; shards nothing."""

from __future__ import annotations

import os
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composable.config import AfterForward, ReshardTo
from composable.device.collectives import (
    Communicator,
    LocalCommunicator,
    backend_of,
    communicator_of,
    is_distributed,
    subgroup_of,
    world_group,
)
from composable.errors import MeshError
from composable.runtime.mesh_info import MeshInfo

Mesh = DeviceMesh | dist.ProcessGroup | None


def device_of(module: nn.Module) -> torch.device:
    """The device that a module's parameters are on, or will be once they leave the meta device."""
    for parameter in module.parameters():
        if parameter.device.type != "meta":
            return parameter.device
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator or torch.device("cpu")


# Parameters keep their mesh, and the mesh its group: with the last of them, both go.
_MESHES: WeakValueDictionary[tuple[dist.ProcessGroup, str], DeviceMesh] = WeakValueDictionary()


def _mesh_over(group: dist.ProcessGroup, device_type: str) -> DeviceMesh:
    """One mesh per group and device type, so that all parameters share it."""
    mesh = _MESHES.get((group, device_type))
    if mesh is None:
        mesh = _MESHES[group, device_type] = DeviceMesh.from_group(group, device_type)
    return mesh


def _type_for(group: dist.ProcessGroup, device: torch.device) -> str:
    """The type of device that parameters on `device` are spread over: an accelerator's, where the group serves no other."""
    if backend_of(group, device) != "undefined" or not torch.accelerator.is_available():
        return device.type
    accelerator = torch.accelerator.current_accelerator()
    return accelerator.type if accelerator is not None else device.type


def group_of(verb: str, mesh: Mesh, device: torch.device) -> tuple[DeviceMesh | None, dist.ProcessGroup | None]:
    """The 1-D mesh and its group; (None, None) in a single process without a process group.

    Raises:
        MeshError: the mesh has several dimensions, is no mesh, does not hold this rank, or there is no process group.
    """
    if mesh is None:
        if not is_distributed():
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise MeshError(
                    f"{verb}: WORLD_SIZE is {os.environ['WORLD_SIZE']}, but there is no process group. "
                    "Call torch.distributed.init_process_group first."
                )
            return None, None
        return _mesh_over(world_group(), _type_for(world_group(), device)), world_group()
    if isinstance(mesh, DeviceMesh):
        return mesh, _one_dimension(verb, mesh)
    if isinstance(mesh, dist.ProcessGroup):
        return _mesh_over(mesh, _type_for(mesh, device)), mesh
    raise MeshError(f"{verb}: expected a DeviceMesh, a ProcessGroup or None as mesh, got {type(mesh).__name__}.")


def _one_dimension(verb: str, mesh: DeviceMesh) -> dist.ProcessGroup:
    if mesh.ndim == 1:
        if mesh.get_coordinate() is None:
            raise MeshError(f"{verb}: this rank is not part of the mesh {mesh.mesh.tolist()}.")
        return mesh.get_group()
    names = mesh.mesh_dim_names
    everybody = mesh.size() == dist.get_world_size()
    cure = "leave mesh= out" if everybody else "pass mesh=DeviceMesh(mesh.device_type, mesh.mesh.flatten())"
    part = f'slice such as mesh["{next((n for n in names if "shard" in n), names[-1])}"]' if names else "mesh over some of them"
    raise MeshError(
        f"{verb} takes a mesh of one dimension; this one has {mesh.ndim}{f': {names}' if names else ''}. To use all of its "
        f"ranks together, {cure}. A {part} makes each part of the ranks train a model of its own."
    )


def meeting_place(verb: str, mesh: Mesh, device: torch.device) -> Communicator:
    """Where all ranks meet before any of them does something with a module.

    Raises:
        MeshError: as `group_of`.
    """
    resolved, group = group_of(verb, mesh, device)
    if resolved is None or group is None:
        return LocalCommunicator()
    return communicator_of(group, communication_device(resolved, device))


def ranks_of(mesh: DeviceMesh | dist.ProcessGroup) -> list[int]:
    """The global ranks of a mesh or a group."""
    if isinstance(mesh, DeviceMesh):
        found: list[int] = mesh.mesh.flatten().tolist()
        return found
    return dist.get_process_group_ranks(mesh)


def ground_of(verb: str, mesh: Mesh, device: torch.device, after: AfterForward) -> MeshInfo:
    """Where a unit's parameters are spread.

    Raises:
        MeshError: as `group_of`, or `reshard_after_forward` is a number of ranks that the mesh cannot be cut into.
    """
    resolved, group = group_of(verb, mesh, device)
    if resolved is None or group is None:
        return MeshInfo.over_one_dimension(None, LocalCommunicator())
    at = communication_device(resolved, device)
    communicator = communicator_of(group, at)
    post_forward = None
    if isinstance(after, ReshardTo):
        if after.ranks < 1 or communicator.size % after.ranks:
            raise MeshError(
                f"reshard_after_forward={after.ranks}: the mesh has {communicator.size} ranks, "
                f"which {after.ranks} does not divide."
            )
        post_forward = communicator_of(subgroup_of(group, after.ranks, at), at)
    return MeshInfo.over_one_dimension(resolved, communicator, post_forward, at)


def communication_device(mesh: DeviceMesh, device: torch.device) -> torch.device:
    """The device that a mesh's parameters live on and its collectives move tensors on."""
    if device.type == mesh.device_type:
        return device
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())
