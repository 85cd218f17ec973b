"""The `mesh` argument: which ranks and which device a unit uses, and what the dimensions of a mesh
are for.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final, Literal, Protocol
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from composable.comm.backends import comm_of, is_distributed, world_group
from composable.comm.base import Comm, backend_of
from composable.comm.launch import Launch
from composable.comm.mesh_info import communication_device, mesh_info_of_shards
from composable.contract.tree import SHARD
from composable.errors import MeshError, RanksDisagreeError, kind_of
from composable.torch_private import flattened, root_of

logger = logging.getLogger("composable")

_CPU: Final = torch.device("cpu")
_ROLES: Final = ("replicate", "shard")


@dataclass(frozen=True, slots=True)
class MeshPlan:
    """A mesh, and the dimension that parameters are sharded over. Along the other one, if there is
    one, shards are the same.

    Attributes:
        named: the larger mesh of which `dp_mesh_dims` has named the dimensions, and which they are.
    """

    mesh: DeviceMesh
    shard_dim: int = 0
    named: tuple[DeviceMesh, tuple[int, ...]] | None = field(default=None, compare=False)

    def comm_of_all(self, device: torch.device) -> Comm:
        """The communicator of all ranks of the mesh. The first call for a mesh of two dimensions
        may make a process group.
        """
        at = communication_device(self.mesh, device)
        return mesh_info_of_shards(self.mesh, at, shard_dim=self.shard_dim).all

    def dims_beside(self, mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[int, ...]:
        """Which dimensions of a parameter's own mesh are not data parallel: all of them, or, where
        it is the larger mesh and the parameter `Replicate` along the named ones, the others.
        """
        whole, named = self.named or (None, ())
        if mesh != whole or not all(placements[dim].is_replicate() for dim in named):
            named = ()
        return tuple(dim for dim in range(mesh.ndim) if dim not in named)

    @property
    def rows(self) -> torch.Tensor:
        """The ranks of the mesh; those of the last dimension shard together."""
        return self.mesh.mesh.movedim(self.shard_dim, -1)

    @property
    def num_shards(self) -> int:
        """How many ranks shard together."""
        return self.mesh.size(self.shard_dim)


class MeshDims(Protocol):
    """Which dimensions of a mesh are data parallel: torch's `DataParallelMeshDims`, or alike."""

    @property
    def shard(self) -> str | tuple[str, ...] | None:
        """Those to shard over."""

    @property
    def replicate(self) -> str | tuple[str, ...] | None:
        """Those to replicate over."""


Mesh = (
    DeviceMesh
    | MeshPlan
    | dist.ProcessGroup
    | tuple[dist.ProcessGroup, dist.ProcessGroup]
    | Literal["hybrid"]
    | None
)


# --- devices ------------------------------------------------------------------------------------


def _accelerator() -> torch.device | None:
    return torch.accelerator.current_accelerator(check_available=True)


def _real_device(modules: Sequence[nn.Module]) -> torch.device | None:
    """The device of the first parameter that is not on the meta device."""
    parameters = chain.from_iterable(module.parameters() for module in modules)
    devices = (parameter.device for parameter in parameters)
    return next((device for device in devices if device.type != "meta"), None)


def device_of(modules: Sequence[nn.Module]) -> torch.device:
    """The device of the parameters of `modules`, or the one that they will be on once they leave
    the meta device.
    """
    return _real_device(modules) or _accelerator() or _CPU


_WARNED: Final[WeakSet[dist.ProcessGroup]] = WeakSet()


def _device_type(verb: str, modules: Sequence[nn.Module], group: dist.ProcessGroup) -> str:
    """The type of device that the ranks of a process group train on: that of their parameters.

    If the group serves several types the ranks agree here, since what they do next must not depend
    on where one rank's parameters are, which may be the meta device.
    """
    accelerator = _accelerator()
    if accelerator is None or backend_of(group, accelerator) == "undefined":
        return "cpu"
    kind = accelerator.type
    if backend_of(group, _CPU) == "undefined":
        return kind
    own = _real_device(modules)
    flags = [int(own is not None and own.type == "cpu"), int(own is not None and own.type != "cpu")]
    on_host, on_accelerator = comm_of(group, _CPU).min_max(
        flags, launch=Launch(f"device of {verb}() across ranks")
    )[1]
    if on_host and on_accelerator:
        here = "on the meta device" if own is None else f"on {own}"
        raise RanksDisagreeError(
            f"{verb}: the module's parameters are on cpu on some ranks and on {kind} on others"
            f" ({here} on this one). Move the module to the same type of device on every rank"
            " before annotating it."
        )
    # gloo serves tensors of accelerators, too, if it must
    is_for_both = backend_of(group, accelerator) != backend_of(group, _CPU)
    if on_host and is_for_both and group not in _WARNED:
        _WARNED.add(group)
        logger.warning(
            "a module that is being annotated is on the host, and so it trains there, though its"
            " process group serves %s, too; if it should train there, call module.to('%s') first,"
            " or pass a mesh of that device",
            kind,
            kind,
        )
    return "cpu" if on_host else kind


# --- from the argument to a mesh ----------------------------------------------------------------

# One mesh per group and device type, so that all parameters share it. Weakly, since a mesh holds
# its groups.
_MESHES: Final[WeakKeyDictionary[dist.ProcessGroup, WeakValueDictionary[str, DeviceMesh]]] = (
    WeakKeyDictionary()
)


def _once(key: dist.ProcessGroup, name: str, make: Callable[[], DeviceMesh]) -> DeviceMesh:
    meshes = _MESHES.setdefault(key, WeakValueDictionary())
    mesh = meshes.get(name)
    if mesh is None:
        mesh = meshes[name] = make()
    return mesh


def mesh_plan_for(
    verb: str, given: Mesh, modules: Sequence[nn.Module], device_type: str | None = None
) -> MeshPlan | None:
    """The mesh that an argument stands for; None in a single process without a process group.

    All ranks call it together: what a process group does not say, they ask each other.

    Args:
        device_type: the type of device that a process group is used with, if the ranks have agreed
            on it. No pair of groups is taken then, whose ranks ask each other.
    """
    if given is None:
        if is_distributed():
            return mesh_plan_for(verb, world_group(), modules, device_type)
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise MeshError(
                f"{verb}: WORLD_SIZE is {os.environ['WORLD_SIZE']}, but there is no process group. "
                "Call torch.distributed.init_process_group first."
            )
        return None
    if isinstance(given, dist.ProcessGroup):
        group, kind = given, device_type or _device_type(verb, modules, given)
        return MeshPlan(_once(group, kind, lambda: DeviceMesh.from_group(group, kind)))
    if verb == SHARD and device_type is None and isinstance(given, tuple) and len(given) == 2:
        for each in given:
            if not isinstance(each, dist.ProcessGroup):
                raise _not_a_mesh(verb, each)
        kind = _device_type(verb, modules, given[0])
        return MeshPlan(_mesh_of_pair(verb, kind, *given), shard_dim=1)
    if verb == SHARD and isinstance(given, str) and given == "hybrid":
        return MeshPlan(_mesh_of_hosts(verb, modules, device_type), shard_dim=1)
    mesh = given.mesh if isinstance(given, MeshPlan) else given
    if not isinstance(mesh, DeviceMesh):
        raise _not_a_mesh(verb, mesh)
    if mesh.ndim > 1 + (verb == SHARD):
        takes = "one dimension" + (
            ", or of two: one to replicate over and one to shard over" if verb == SHARD else ""
        )
        said = f": {mesh.mesh_dim_names}" if mesh.mesh_dim_names else ""
        raise MeshError(
            f"{verb} takes a mesh of {takes}; this one has {mesh.ndim}{said}. To use all of its"
            " ranks together, pass mesh=DeviceMesh(mesh.device_type, mesh.mesh.flatten()); to"
            " train a model on each part of them, pass a slice, mesh[...], or name the"
            " data-parallel dimensions in dp_mesh_dims=."
        )
    if mesh.get_coordinate() is None:
        raise MeshError(f"{verb}: this rank is not part of the mesh {mesh.mesh.tolist()}.")
    plan = given if isinstance(given, MeshPlan) else MeshPlan(mesh, _shard_dim(verb, mesh))
    # Process groups sort their ranks: shard i would be one rank's for collectives and another's for
    # `DTensor`.
    if verb == SHARD and not plan.rows.equal(plan.rows.sort(-1).values):
        raise MeshError(
            f"{verb}: the mesh {mesh.mesh.tolist()} does not list its ranks in ascending order"
            f" along dimension {plan.shard_dim}, which is sharded over, as process groups do."
            f" Make it by init_device_mesh, or of mesh.mesh.sort({plan.shard_dim}).values."
        )
    return plan


def mesh_plan_of_dims(verb: str, mesh: Mesh, dims: Any) -> Mesh:
    """The dimensions of `mesh` that torch's `DataParallelMeshDims` names, several of one role
    flattened; `mesh` itself if `dims` is None.

    Process groups are made where torch makes them: all ranks of `mesh` call it together.
    """
    if dims is None:
        return mesh
    if not isinstance(mesh, DeviceMesh) or not mesh.mesh_dim_names:
        raise MeshError(
            f"{verb}: dp_mesh_dims names dimensions of mesh=, which must be a DeviceMesh with"
            f" names, got {kind_of(mesh)}. Make it by init_device_mesh(device, shape,"
            " mesh_dim_names=...)"
        )
    said = {role: getattr(dims, role, None) for role in _ROLES}
    named = {
        role: (names,) if isinstance(names, str) else tuple(names)
        for role, names in said.items()
        if names
    }
    _refuse_different_dims(verb, mesh, named)
    needed = "shard" if verb == SHARD else "replicate"
    if needed not in named or (verb != SHARD and len(named) > 1):
        other = "" if verb == SHARD else ", and none to shard over"
        raise MeshError(
            f"{verb}: dp_mesh_dims={dims!r} must name a dimension to {needed} over{other}:"
            f" DataParallelMeshDims({needed}='dp')."
            + (" To replicate only, call replicate()" if verb == SHARD else "")
        )
    found = {}
    for role, names in named.items():
        try:
            part = mesh[names]
        except (KeyError, RuntimeError) as error:
            raise MeshError(
                f"{verb}: dp_mesh_dims names {role}={said[role]!r}, and the dimensions of the mesh"
                f" are {mesh.mesh_dim_names}. Name some of these, each once and in their order"
            ) from error
        found[role] = part if part.ndim == 1 else flattened(part, "_".join(names))
    every = mesh.mesh_dim_names
    indices = tuple(every.index(name) for names in named.values() for name in names)
    if len(found) == 1:
        return MeshPlan(found[needed], named=(mesh, indices))
    shard, replicate = found["shard"], found["replicate"]
    both = joint_mesh(verb, replicate, MeshPlan(shard), _CPU)
    return MeshPlan(both, shard_dim=1, named=(mesh, indices))


def _refuse_different_dims(verb: str, mesh: DeviceMesh, named: dict[str, tuple[str, ...]]) -> None:
    """Raise on all ranks of `mesh` if they name other dimensions: the groups that are made next
    need all of them.
    """
    launch = Launch(f"dp_mesh_dims of {verb}()")
    said = {repr(named): dist.get_rank()}  # by the first rank that says so
    for comm in comms_along(mesh, communication_device(mesh, _CPU)):
        for gathered in comm.all_gather_objects(said, launch):
            said |= {text: min(rank, said.get(text, rank)) for text, rank in gathered.items()}
    if len(said) > 1:
        (rank, text), (other_rank, other), *_ = sorted((rank, text) for text, rank in said.items())
        raise RanksDisagreeError(
            f"{verb}: dp_mesh_dims names {text} on rank {rank} and {other} on rank {other_rank}."
            " Name the same dimensions on every rank of mesh="
        )


def _mesh_of_hosts(verb: str, modules: Sequence[nn.Module], kind: str | None) -> DeviceMesh:
    """A mesh of two dimensions, (replicate, shard): ranks of one host shard together. Which these
    are says LOCAL_WORLD_SIZE, or, where the launcher sets none, the host's name.
    """
    if not is_distributed():
        raise MeshError(
            f"{verb}: mesh='hybrid' is over the ranks of all hosts, and there is no process group."
            " Call torch.distributed.init_process_group first."
        )
    group = world_group()
    kind = kind or _device_type(verb, modules, group)
    device = _CPU if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())
    gathered: list[tuple[str, str]] = comm_of(group, device).all_gather_objects(
        (os.environ.get("LOCAL_WORLD_SIZE", ""), socket.gethostname()),
        launch=Launch(f"ranks of the hosts of {verb}()"),
    )
    said, hosts = [list(each) for each in zip(*gathered, strict=True)]
    if not any(said) and hosts == sorted(hosts, key=hosts.index):  # ranks of a host in a row
        said = [str(hosts.count(host)) for host in hosts]
    size = int(said[0]) if said[0].isdecimal() else 0
    if len(set(said)) > 1 or not size or len(said) % size:
        each = ", ".join(f"rank {rank}: {text or 'none'}" for rank, text in enumerate(said))
        raise MeshError(
            f"{verb}: mesh='hybrid' shards over the LOCAL_WORLD_SIZE ranks of a host, which"
            f" torchrun sets; it must be one divisor of {len(said)} on all ranks ({each}). Without"
            " it the names of hosts count, and ranks of one host must be numbered in a row. Start"
            " as many ranks on each host, or pass a DeviceMesh."
        )
    shape = (len(said) // size, size)
    return _once(
        group,
        f"hybrid, {kind}, {size}",
        lambda: init_device_mesh(kind, shape, mesh_dim_names=_ROLES),
    )


def _mesh_of_pair(
    verb: str, kind: str, shard: dist.ProcessGroup, replicate: dist.ProcessGroup
) -> DeviceMesh:
    """The mesh of two dimensions, (replicate, shard), whose groups of this rank are two process
    groups.
    """
    replicas, shards = (
        DeviceMesh.from_group(group, kind, mesh_dim_names=(role,))
        for group, role in zip((replicate, shard), _ROLES, strict=True)
    )
    refusal = (
        "the pair of process groups (shard, replicate) does not make a mesh: this rank shards with"
        f" ranks {shards.mesh.tolist()}, and ranks {replicas.mesh.tolist()} are to hold the same"
        " shards. Give every rank its group of each of the two dimensions of one mesh."
    )
    return joint_mesh(verb, replicas, MeshPlan(shards), _CPU, refusal)


def comms_along(mesh: DeviceMesh, device: torch.device) -> list[Comm]:
    """The communicators of each dimension of `mesh`; none on a rank outside of it."""
    inside = mesh.get_coordinate() is not None
    return [comm_of(group, device) for group in mesh.get_all_groups()] if inside else []


def is_alone(mesh: DeviceMesh | None, tensors: Iterable[Tensor]) -> bool:
    """Whether a mesh has one rank, though there are others, and is no slice of a mesh over which
    one of `tensors` is tensor parallel.
    """
    if mesh is None or mesh.size() > 1 or not is_distributed() or dist.get_world_size() == 1:
        return False
    return not any(isinstance(each, DTensor) and each.device_mesh.size() > 1 for each in tensors)


def part_of(mesh: DeviceMesh, dims: Sequence[int]) -> DeviceMesh | None:
    if len(dims) == mesh.ndim:
        return mesh
    names = mesh.mesh_dim_names or ()
    return mesh[tuple(names[dim] for dim in dims)] if dims else None


def joint_mesh(
    verb: str, own: DeviceMesh, plan: MeshPlan, device: torch.device, refusal: str = ""
) -> DeviceMesh:
    """The mesh of the dimensions of `own`, and then those of `plan`, such as that of a parameter
    that is distributed over `own` already. No process group is made. All ranks of both call it
    together.
    """
    mesh, at = plan.mesh, communication_device(plan.mesh, device)
    launch, ranks = Launch(f"ranks of the mesh of {verb}()"), mesh.mesh.flatten().tolist()
    # A rank knows the ranks of its own meshes only; those along `plan` know others'. In a grid
    # all have the same distances to them, so that a simulated comm can answer for the others.
    distances = (own.mesh - dist.get_rank()).tolist()
    gathered = plan.comm_of_all(device).all_gather_objects(distances, launch)
    known = {
        rank: (torch.tensor(each, device="cpu") + rank).tolist()
        for rank, each in zip(sorted(ranks), gathered, strict=True)
    }
    mine = [known[rank] for rank in ranks]
    said = [mine]
    for comm in comms_along(own, at):
        said += comm.all_gather_objects(mine, launch)
    parts = [torch.tensor(each, device="cpu") for each in mine]
    fits = all(each == mine for each in said) and all(each.shape == own.shape for each in parts)
    if fits:
        block = torch.stack(parts, -1).view(*own.shape, *mesh.shape)
        place = tuple(own.get_coordinate() or ())
        fits = block[place].tolist() == mesh.mesh.tolist() and len(block.unique()) == block.numel()
    if not fits:
        refusal = refusal or (
            f"parameters are DTensors over ranks {own.mesh.tolist()}, and"
            f" mesh={mesh.mesh.tolist()}, which are not two parts of one mesh. Make one mesh,"
            " init_device_mesh(device, (dp, tp), mesh_dim_names=('dp', 'tp')), and take mesh['tp']"
            " and mesh['dp'] of it"
        )
        raise MeshError(f"{verb}: {refusal}")
    # torch wants names for all dimensions, each once
    both = [name for each in (own, mesh) for name in each.mesh_dim_names or ("dim",) * each.ndim]
    names = tuple(
        name if name != "dim" and both.count(name) == 1 else f"{name}_{dim}"
        for dim, name in enumerate(both)
    )
    groups = [*own.get_all_groups(), *mesh.get_all_groups()]
    kind = mesh.device_type
    return _once(
        groups[-1],
        f"{kind}, {own.ndim}, {names}, {mine}",
        lambda: DeviceMesh.from_group(groups, kind, mesh=block, mesh_dim_names=names),
    )


def _not_a_mesh(verb: str, given: object) -> MeshError:
    said = ""
    if given is dist.GroupMember.NON_GROUP_MEMBER:
        said = (
            ", which new_group() returns on ranks outside of the group: annotate the module on the"
            " ranks of the group alone"
        )
    return MeshError(
        f"{verb}: expected a DeviceMesh, a ProcessGroup or None as mesh, got"
        f" {type(given).__name__}{said}."
    )


def _shard_dim(verb: str, mesh: DeviceMesh) -> int:
    """The dimension of a mesh of one or two that is sharded over."""
    names = mesh.mesh_dim_names
    if names is None or mesh.ndim == 1:
        return mesh.ndim - 1
    said = ["".join(role for role in _ROLES if role in name.lower()) for name in names]
    if sorted(said) != sorted(_ROLES):
        raise MeshError(
            f"{verb}: of a mesh of two dimensions, one is sharded over and the other one replicated"
            f" over. The names of this one, {names}, do not say which: let one contain 'replicate'"
            " and the other one 'shard'. To shard over one dimension alone, pass"
            f' mesh["{names[0]}"] or mesh["{names[1]}"]; over both, name them'
            f" in dp_mesh_dims=DataParallelMeshDims(shard={names})."
        )
    return said.index("shard")


def own_mesh_plan(
    verb: str, name: str, given: DeviceMesh | MeshPlan, plan: MeshPlan
) -> MeshPlan | None:
    """The mesh that `shard_placement_fn` returned for a parameter; None if it is the unit's.

    All of its ranks must run the unit: it is a slice of the same mesh, or has ranks of the unit's.
    """
    own = mesh_plan_for(verb, given, ())
    assert own is not None, "a mesh was given"
    if own == plan:
        return None
    ranks = set(plan.mesh.mesh.flatten().tolist())
    if root_of(own.mesh) != root_of(plan.mesh) and not ranks.issuperset(
        own.mesh.mesh.flatten().tolist()
    ):
        raise MeshError(
            f"{verb}: shard_placement_fn gave '{name}' the mesh {own.mesh.mesh.tolist()}, which is"
            f" no part of the mesh that {plan.mesh.mesh.tolist()} was taken of. Take both of one"
            " mesh, which all ranks that run the module are in"
        )
    return own
