"""What the user may pass as `mesh`, and what it becomes; shards nothing."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Final
from weakref import WeakKeyDictionary, WeakValueDictionary

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
    group_of_both,
    is_distributed,
    let_go_when_destroyed,
    reference_to,
    subgroup_of,
    world_group,
)
from composable.errors import CommunicationError, MeshError
from composable.runtime.mesh_info import MeshInfo

logger = logging.getLogger("composable")

Mesh = DeviceMesh | dist.ProcessGroup | None


def device_of(module: nn.Module) -> torch.device:
    """The device that a module's parameters are on, or will be once they leave the meta device."""
    for parameter in module.parameters():
        if parameter.device.type != "meta":
            return parameter.device
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator or torch.device("cpu")


_MESHES: WeakKeyDictionary[dist.ProcessGroup, WeakValueDictionary[str, DeviceMesh]] = WeakKeyDictionary()


def _mesh_over(group: dist.ProcessGroup, device_type: str) -> DeviceMesh:
    """One mesh per group and device type, so that all parameters share it."""
    made = _MESHES.setdefault(group, WeakValueDictionary())
    mesh = made.get(device_type)
    if mesh is None:
        mesh = made[device_type] = DeviceMesh.from_group(group, device_type)
        if device_type == "cpu":
            _tell_of_accelerator(group)
    return mesh


def _tell_of_accelerator(group: dist.ProcessGroup) -> None:
    """Say, once per group, that training goes on on the host, if the group was made for an accelerator as well."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None and backend_of(group, accelerator) not in ("undefined", backend_of(group, torch.device("cpu"))):
        logger.warning(
            "a module that is being annotated is on the host, and so it trains there, though its process group serves %s, too; "
            "if it should train there, call module.to('%s') first, or pass a mesh of that device",
            accelerator.type,
            accelerator.type,
        )


def device_for_numbers(group: dist.ProcessGroup, device: torch.device | None) -> torch.device:
    """The device that a group's collectives move numbers on, made on `device`, or by ranks that have none."""
    here = torch.device("cpu") if device is None else device
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or (device is not None and backend_of(group, device) != "undefined"):
        return here
    if backend_of(group, accelerator) in ("undefined", backend_of(group, torch.device("cpu"))):
        return here
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _type_for(group: dist.ProcessGroup, device: torch.device) -> str:
    """The type of device that parameters on `device` are spread over: an accelerator's, where the group serves no other."""
    if backend_of(group, device) != "undefined" or not torch.accelerator.is_available():
        return device.type
    accelerator = torch.accelerator.current_accelerator()
    return accelerator.type if accelerator is not None else device.type


@dataclass(frozen=True, slots=True)
class Spread:
    """A mesh, and what its dimensions are for.

    Attributes:
        group: of all its ranks.
        shard: the dimension that parameters are cut over.
        replicate: the dimension along which the ranks hold the same; None where the mesh has one dimension.
    """

    mesh: DeviceMesh
    group: dist.ProcessGroup
    shard: int = 0
    replicate: int | None = None


def spread_over(verb: str, mesh: Mesh, device: torch.device, *, hybrid: bool = False) -> Spread | None:
    """What `mesh` means; None in a single process without a process group.

    Args:
        hybrid: the verb takes meshes of two dimensions, too.

    Raises:
        MeshError: the mesh has more dimensions than the verb takes, or their names do not say which is which; it is no mesh,
            does not hold this rank, or there is no process group.
    """
    if mesh is None:
        if not is_distributed():
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise MeshError(
                    f"{verb}: WORLD_SIZE is {os.environ['WORLD_SIZE']}, but there is no process group. "
                    "Call torch.distributed.init_process_group first."
                )
            return None
        mesh = world_group()
    if isinstance(mesh, dist.ProcessGroup):
        made = _mesh_over(mesh, _type_for(mesh, device))
        let_go_when_destroyed(made)
        return Spread(made, mesh)
    if not isinstance(mesh, DeviceMesh):
        raise _no_mesh(verb, mesh)
    if mesh.ndim > 1 + hybrid:
        raise _too_many_dimensions(verb, mesh, hybrid=hybrid)
    replicate, shard = (None, 0) if mesh.ndim == 1 else _roles(verb, mesh)
    if mesh.get_coordinate() is None:
        raise MeshError(f"{verb}: this rank is not part of the mesh {mesh.mesh.tolist()}.")
    group = mesh.get_group(shard)
    if replicate is not None:
        group = group_of_both(group, mesh.get_group(replicate), ranks_of(mesh), communication_device(mesh, device))
    let_go_when_destroyed(mesh)
    return Spread(mesh, group, shard, replicate)


def _no_mesh(verb: str, given: object) -> MeshError:
    if given is dist.GroupMember.NON_GROUP_MEMBER:  # what new_group gives ranks that are none of its own
        return MeshError(
            f"{verb}: rank {dist.get_rank()} is no member of the process group that was passed as mesh. Annotate the module on "
            "the ranks of the group alone, or pass a group that holds this rank."
        )
    return MeshError(f"{verb}: expected a DeviceMesh, a ProcessGroup or None as mesh, got {type(given).__name__}.")


_ROLES: Final = ("replicate", "shard")


def _role_of(name: str) -> str:
    """What the name of a dimension says: a role, or nothing."""
    said = [role for role in _ROLES if role in name.lower()]
    return said[0] if len(said) == 1 else ""


def _roles(verb: str, mesh: DeviceMesh) -> tuple[int, int]:
    """The dimension of a mesh of two that is replicated over, and the one that is sharded over."""
    names = mesh.mesh_dim_names
    if names is None:
        return 0, 1
    said = [_role_of(name) for name in names]
    if sorted(said) != sorted(_ROLES):
        raise MeshError(
            f"{verb}: of a mesh of two dimensions, one is sharded over and the other one replicated over. The names of this "
            f"one, {names}, do not say which. Have one of them contain 'replicate' and the other one 'shard', as in "
            "init_device_mesh(..., mesh_dim_names=('dp_replicate', 'dp_shard')); to shard over one dimension alone, pass "
            f'mesh["{names[0]}"] or mesh["{names[1]}"].'
        )
    return said.index("replicate"), said.index("shard")


def _too_many_dimensions(verb: str, mesh: DeviceMesh, *, hybrid: bool) -> MeshError:
    names = mesh.mesh_dim_names or ()
    everybody = mesh.size() == dist.get_world_size()
    cure = "leave mesh= out" if everybody else "pass mesh=DeviceMesh(mesh.device_type, mesh.mesh.flatten())"
    takes = (
        "a mesh of one dimension, or of two: one to replicate over and one to shard over"
        if hybrid
        else ("a mesh of one dimension")
    )
    slices = [name for role in _ROLES[not hybrid :] for name in names if _role_of(name) == role] or list(names[-1:])
    part = "slice such as mesh[" + ", ".join(f'"{name}"' for name in slices) + "]" if names else "mesh over some of them"
    return MeshError(
        f"{verb} takes {takes}; this one has {mesh.ndim}{f': {names}' if names else ''}. To use all of its "
        f"ranks together, {cure}. A {part} makes each part of the ranks train a model of its own."
    )


def refuse_unordered(verb: str, spread: Spread) -> None:
    """Process groups number their ranks in ascending order, and a mesh as it lists them. Where these differ, a shard would be
    one rank's to whom gathers it, and another's to whom loads it.

    Raises:
        MeshError: they do, along the dimension that is sharded over.
    """
    ranks = spread.mesh.mesh.movedim(spread.shard, -1)
    if not ranks.equal(ranks.sort(-1).values):
        along = "" if ranks.ndim == 1 else f" along dimension {spread.shard}, which is sharded over"
        raise MeshError(
            f"{verb}: the mesh {spread.mesh.mesh.tolist()} does not list its ranks in ascending order{along}, as process "
            f"groups do. Pass DeviceMesh(mesh.device_type, mesh.mesh.sort({spread.shard}).values"
            f"{', mesh_dim_names=mesh.mesh_dim_names' if spread.mesh.mesh_dim_names else ''}), or make it by init_device_mesh."
        )


def meeting_place(verb: str, spread: Spread | None, device: torch.device) -> Communicator:
    """Where all ranks meet before any of them does something with a module.

    Raises:
        CommunicationError: some do not come.
    """
    if spread is None:
        return LocalCommunicator()
    try:
        return communicator_of(spread.group, communication_device(spread.mesh, device))
    except CommunicationError as error:
        raise CommunicationError(
            f"{verb}: all ranks of the mesh call it together, and first of all find each other; on this rank that ended with: "
            f"{error}"
        ) from error


def ranks_of(mesh: DeviceMesh | dist.ProcessGroup) -> list[int]:
    """The global ranks of a mesh or a group."""
    if isinstance(mesh, DeviceMesh):
        found: list[int] = mesh.mesh.flatten().tolist()
        return found
    return dist.get_process_group_ranks(mesh)


def mesh_info_of(spread: Spread | None, device: torch.device, after: AfterForward) -> MeshInfo:
    """Where a unit's parameters are spread.

    Raises:
        MeshError: `reshard_after_forward` is a number of ranks that the mesh cannot be cut into.
    """
    if spread is None:
        return MeshInfo.over_one_dimension(None, LocalCommunicator())
    mesh, at = spread.mesh, communication_device(spread.mesh, device)
    shard_group = spread.group if spread.replicate is None else mesh.get_group(spread.shard)
    shard = communicator_of(shard_group, at)
    post_forward = replicate = None
    if isinstance(after, ReshardTo):
        if after.ranks < 1 or shard.size % after.ranks:
            place = "the mesh" if spread.replicate is None else "the shard dimension of the mesh"
            raise MeshError(
                f"reshard_after_forward={after.ranks}: {place} has {shard.size} ranks, which {after.ranks} does not divide."
            )
        post_forward = communicator_of(subgroup_of(shard_group, after.ranks, at), at)
    everybody = shard
    if spread.replicate is not None and mesh.size(spread.replicate) > 1:
        replicate = communicator_of(mesh.get_group(spread.replicate), at)
        everybody = replicate if shard.size == 1 else communicator_of(spread.group, at)
    return MeshInfo(mesh, shard, everybody, replicate, post_forward, at, reference_to(spread.group), spread.shard)


def communication_device(mesh: DeviceMesh, device: torch.device) -> torch.device:
    """The device that a mesh's parameters live on and its collectives move tensors on."""
    if device.type == mesh.device_type:
        return device
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())
