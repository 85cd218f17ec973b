"""The `mesh` argument: which ranks and which device a unit uses, and what the dimensions of a mesh are for."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composable.comm import Comm, backend_of, comm_of, group_of_both, is_distributed, world_group
from composable.contract.traversal import SHARD
from composable.errors import AnnotationError, CommunicationError, MeshError, RanksDisagreeError
from composable.policies.base import kind_of

logger = logging.getLogger("composable")

Mesh = DeviceMesh | dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup] | None

_CPU: Final = torch.device("cpu")
_ROLES: Final = ("replicate", "shard")


@dataclass(frozen=True, slots=True)
class Spread:
    """A mesh and the roles of its dimensions.

    Attributes:
        shard_dim: the dimension of the mesh that parameters are sharded over.
        replicate_dim: the dimension along which ranks hold the same shards; None for a mesh of one dimension.
    """

    mesh: DeviceMesh
    shard_dim: int = 0
    replicate_dim: int | None = None

    def group(self, device: torch.device) -> dist.ProcessGroup:
        """The process group of all ranks of the mesh. The first call for a mesh of two dimensions may create it."""
        shard = self.mesh.get_group(self.shard_dim)
        if self.replicate_dim is None:
            return shard
        return group_of_both(shard, self.mesh.get_group(self.replicate_dim), _ranks_of(self.mesh), device)

    def in_words(self) -> str:
        ranks = self.mesh.mesh
        if self.replicate_dim is None:
            return f", over ranks {ranks.tolist()}"
        return f", over the replicas {ranks.movedim(self.shard_dim, -1).tolist()}"


def _ranks_of(mesh: DeviceMesh) -> list[int]:
    ranks: list[int] = mesh.mesh.flatten().tolist()
    return ranks


# --- devices ----------------------------------------------------------------------------------------------------------


def _accelerator() -> torch.device | None:
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def _real_device(modules: Sequence[nn.Module]) -> torch.device | None:
    """The device of the first parameter that is not on the meta device; None if there is none."""
    parameters = chain.from_iterable(module.parameters() for module in modules)
    return next((parameter.device for parameter in parameters if parameter.device.type != "meta"), None)


def device_of(modules: Sequence[nn.Module]) -> torch.device:
    """The device of the parameters of `modules`, or the one that they will be on once they leave the meta device."""
    return _real_device(modules) or _accelerator() or _CPU


def communication_device(mesh: DeviceMesh, device: torch.device) -> torch.device:
    """The device on which a mesh's parameters live and its collectives run.

    Args:
        device: that of the parameters now.
    """
    if device.type == mesh.device_type:
        return device
    if mesh.device_type == "cpu":
        return _CPU
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def _device_type(verb: str, modules: Sequence[nn.Module], group: dist.ProcessGroup) -> str:
    """The type of device that the ranks of a process group train on: that of their parameters.

    Parameters may be on the meta device on some ranks. If the group serves several types, the ranks agree here, since what
    they do next must not depend on where one rank's parameters are.

    Raises:
        RanksDisagreeError: parameters are on the host on some ranks, and on an accelerator on others.
    """
    accelerator = _accelerator()
    if accelerator is None:
        return "cpu"
    if backend_of(group, _CPU) == "undefined":
        return accelerator.type
    if backend_of(group, accelerator) == "undefined":
        return "cpu"
    own = _real_device(modules)
    comm = comm_of(group, _CPU)
    flags = [int(own is not None and own.type == "cpu"), int(own is not None and own.type != "cpu")]
    on_host, on_accelerator = comm.min_max(flags, label=f"device of {verb}() across ranks")[1]
    if on_host and on_accelerator:
        here = "on the meta device" if own is None else f"on {own}"
        raise RanksDisagreeError(
            f"{verb}: the module's parameters are on cpu on some ranks and on {accelerator.type} on others ({here} on this one)"
            ". Move the module to the same type of device on every rank before annotating it."
        )
    if on_host and backend_of(group, accelerator) != backend_of(group, _CPU):
        _warn_of_host(group, accelerator)
    return "cpu" if on_host else accelerator.type


_warned: Final[WeakKeyDictionary[dist.ProcessGroup, None]] = WeakKeyDictionary()


def _warn_of_host(group: dist.ProcessGroup, accelerator: torch.device) -> None:
    """Log, once per group, that a module trains on the host though its group serves an accelerator, too."""
    if group not in _warned:
        _warned[group] = None
        logger.warning(
            "a module that is being annotated is on the host, and so it trains there, though its process group serves %s, too; "
            "if it should train there, call module.to('%s') first, or pass a mesh of that device",
            accelerator.type,
            accelerator.type,
        )


# --- from the argument to a mesh --------------------------------------------------------------------------------------

# One mesh per group and device type, so that all parameters share it. Weakly, since a mesh holds its groups.
_MESHES: Final[WeakKeyDictionary[dist.ProcessGroup, WeakValueDictionary[str, DeviceMesh]]] = WeakKeyDictionary()


def _once(key: dist.ProcessGroup, name: str, make: Callable[[], DeviceMesh]) -> DeviceMesh:
    meshes = _MESHES.setdefault(key, WeakValueDictionary())
    mesh = meshes.get(name)
    if mesh is None:
        mesh = meshes[name] = make()
    return mesh


def spread_over(verb: str, mesh: Mesh, modules: Sequence[nn.Module], device_type: str | None = None) -> Spread | None:
    """The mesh that `mesh` stands for; None in a single process without a process group.

    All ranks call it together: what a process group does not say, they ask each other.

    Args:
        device_type: the type of device that a process group is used with, if the ranks have agreed on it.

    Raises:
        MeshError: the mesh has more dimensions than the verb accepts, or their names do not say what they are for; it is not a
            mesh, does not contain this rank, or there is no process group.
        RanksDisagreeError: ranks have their parameters on different types of devices.
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
    hybrid = verb == SHARD
    if hybrid and isinstance(mesh, tuple) and len(mesh) == 2:
        for each in mesh:
            if not isinstance(each, dist.ProcessGroup):
                raise _not_a_mesh(verb, each)
        spread = Spread(_mesh_of_pair(verb, modules, *mesh), shard_dim=1, replicate_dim=0)
    elif isinstance(mesh, dist.ProcessGroup):
        group, kind = mesh, device_type or _device_type(verb, modules, mesh)
        spread = Spread(_once(group, kind, lambda: DeviceMesh.from_group(group, kind)))
    elif isinstance(mesh, DeviceMesh):
        if mesh.ndim > 1 + hybrid:
            takes = "one dimension" + (", or of two: one to replicate over and one to shard over" if hybrid else "")
            said = f": {mesh.mesh_dim_names}" if mesh.mesh_dim_names else ""
            raise MeshError(
                f"{verb} takes a mesh of {takes}; this one has {mesh.ndim}{said}. To use all of its ranks "
                "together, pass mesh=DeviceMesh(mesh.device_type, mesh.mesh.flatten()); to train a model on each part of them, "
                "pass a slice, mesh[...]."
            )
        replicate_dim, shard_dim = (None, 0) if mesh.ndim == 1 else _roles(verb, mesh)
        if mesh.get_coordinate() is None:
            raise MeshError(f"{verb}: this rank is not part of the mesh {mesh.mesh.tolist()}.")
        spread = Spread(mesh, shard_dim, replicate_dim)
    else:
        raise _not_a_mesh(verb, mesh)
    if verb == SHARD:
        _refuse_unordered(verb, spread)
    return spread


def _mesh_of_pair(
    verb: str, modules: Sequence[nn.Module], shard: dist.ProcessGroup, replicate: dist.ProcessGroup
) -> DeviceMesh:
    """The mesh of two dimensions, (replicate, shard), whose row and column through this rank are two process groups."""
    device_type = _device_type(verb, modules, shard)
    device = _CPU if device_type == "cpu" else torch.device(device_type, torch.accelerator.current_device_index())
    row = dist.get_process_group_ranks(shard)
    # A rank knows its own row and column only. The ranks of its column know the other rows.
    rows = comm_of(replicate, device).all_gather_objects(row, label=f"ranks of the mesh of {verb}()")
    column = [each[row.index(dist.get_rank())] if len(each) == len(row) else -1 for each in rows]
    distinct = {rank for each in rows for rank in each}
    if column != dist.get_process_group_ranks(replicate) or len(distinct) != len(rows) * len(row):
        raise MeshError(
            f"{verb}: the pair of process groups (shard, replicate) does not make a mesh: replicas are sharded over the ranks "
            f"{rows}, and ranks {dist.get_process_group_ranks(replicate)} are to hold the same shards as this rank. Give every "
            "rank the group of its row and the group of its column."
        )
    return _once(
        shard,
        f"{device_type}, {rows}",
        lambda: DeviceMesh.from_group(
            [replicate, shard], device_type, mesh=torch.tensor(rows, dtype=torch.int, device="cpu"), mesh_dim_names=_ROLES
        ),
    )


def _not_a_mesh(verb: str, given: object) -> MeshError:
    if given is dist.GroupMember.NON_GROUP_MEMBER:  # new_group returns it on ranks outside of the group
        return MeshError(
            f"{verb}: rank {dist.get_rank()} is no member of the process group that was passed as mesh. Annotate the module on "
            "the ranks of the group alone, or pass a group that holds this rank."
        )
    return MeshError(f"{verb}: expected a DeviceMesh, a ProcessGroup or None as mesh, got {type(given).__name__}.")


def _roles(verb: str, mesh: DeviceMesh) -> tuple[int, int]:
    """The dimensions of a mesh of two that are replicated and sharded over."""
    names = mesh.mesh_dim_names
    if names is None:
        return 0, 1
    said = ["".join(role for role in _ROLES if role in name.lower()) for name in names]
    if sorted(said) != sorted(_ROLES):
        raise MeshError(
            f"{verb}: of a mesh of two dimensions, one is sharded over and the other one replicated over. The names of this "
            f"one, {names}, do not say which: let one contain 'replicate' and the other one 'shard'. To shard over one "
            f'dimension alone, pass mesh["{names[0]}"] or mesh["{names[1]}"].'
        )
    return said.index("replicate"), said.index("shard")


def _refuse_unordered(verb: str, spread: Spread) -> None:
    """Raise if the mesh lists its ranks in another order than process groups, which sort them.

    Shard i would be one rank's for collectives and another's for `DTensor`.
    """
    ranks = spread.mesh.mesh.movedim(spread.shard_dim, -1)
    if not ranks.equal(ranks.sort(-1).values):
        raise MeshError(
            f"{verb}: the mesh {spread.mesh.mesh.tolist()} does not list its ranks in ascending order along dimension "
            f"{spread.shard_dim}, which is sharded over, as process groups do. Make it by init_device_mesh, or of "
            f"mesh.mesh.sort({spread.shard_dim}).values."
        )


# --- communicators ----------------------------------------------------------------------------------------------------


def comm_of_all(verb: str, spread: Spread | None, device: torch.device) -> Comm:
    """The communicator of all ranks that call a verb together.

    Raises:
        CommunicationError: some ranks do not call it.
    """
    if spread is None:
        return comm_of(None, device)
    at = communication_device(spread.mesh, device)
    try:
        return comm_of(spread.group(at), at)
    except CommunicationError as error:
        raise CommunicationError(
            f"{verb}: all ranks of the mesh call it together, and connect to each other first; on this rank that ended with: "
            f"{error}"
        ) from error


def check_reshard_after_forward(spread: Spread | None, value: object) -> None:
    if not isinstance(value, int | None):
        raise AnnotationError(f"reshard_after_forward must be None, True, False or a number of ranks, got {kind_of(value)}")
    if spread is None or value is None or isinstance(value, bool):
        return
    size = spread.mesh.size(spread.shard_dim)
    if value < 1 or size % value:
        where = "the mesh" if spread.replicate_dim is None else "the shard dimension of the mesh"
        raise MeshError(f"reshard_after_forward={value}: {where} has {size} ranks, which {value} does not divide.")
