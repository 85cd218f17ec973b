"""Tensor-parallel parameters at an annotation: comparisons among the ranks of the user's meshes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from composable.api.mesh import MeshPlan, comms_along, joint_mesh, part_of
from composable.api.selection import Ignored, ids_of_ignored
from composable.checked import checked
from composable.comm import Comm
from composable.comm.launch import Launch
from composable.contract.tree import Managed, managed_parameters
from composable.engine.params.param import ParamForm
from composable.errors import AnnotationError, RanksDisagreeError, first_line, with_article
from composable.features.forms import (
    PART,
    DTensorForm,
    PartForm,
    form_of,
    mesh_and_placements,
    meta_like,
)
from composable.tensors.dtensors import describe_mesh


@contextmanager
def failures_shared_across(
    verb: str,
    modules: Sequence[nn.Module],
    ignored_params: Ignored,
    device: torch.device,
) -> Iterator[None]:
    """Around what the ranks of a unit agree on: a failure here is shared across parameters' meshes.

    It fails on all ranks over which parameters are tensor parallel, too.
    """
    ignored: Mapping[int, None] = {}
    with suppress(Exception):  # of which the validation tells
        ignored = ids_of_ignored(modules, ignored_params)
    found = [
        mesh_and_placements(each.tensor) for each in managed_parameters(modules, ignored=ignored)
    ]
    meshes = dict.fromkeys(each[0] for each in found if each is not None)
    comms = [comm for mesh in meshes for comm in comms_along(mesh, device)]
    with failures_shared_with(verb, comms, "tensor-parallel rank"):
        yield


@contextmanager
def failures_shared_with(verb: str, comms: Sequence[Comm], whom: str) -> Iterator[None]:
    """Around what all ranks of `comms` do: a failure here is raised on all of them."""
    launch = Launch(f"agreement of {verb}() with each other {whom}")
    try:
        yield
    except Exception as error:
        for comm in comms:
            comm.all_gather_objects(f"{type(error).__name__}: {first_line(error)}", launch)
        raise
    failed = ""
    for comm in comms:
        said = comm.all_gather_objects(failed, launch)
        failed = failed or next(filter(None, said), "")
    if failed:
        raise RanksDisagreeError(
            f"{verb}: another {whom} failed, so no rank annotates the module: {failed}"
        )


def forms_of(
    verb: str,
    parameters: Sequence[Managed[nn.Parameter]],
    mesh_plans: Sequence[MeshPlan | None],
    device: torch.device,
) -> list[ParamForm]:
    """Find what parameters are: plain, or distributed over a mesh of their own and that of a plan.

    All parameters of one pair of meshes share one joint mesh.
    """
    joints: dict[tuple[DeviceMesh | None, MeshPlan], DeviceMesh] = {}
    found: list[ParamForm] = []
    for managed, plan in zip(parameters, mesh_plans, strict=True):
        tensor, given = managed.tensor, mesh_and_placements(managed.tensor)
        if given is None or plan is None:
            found.append(form_of(tensor))
            continue
        mesh, placements = given
        dims = plan.dims_beside(mesh, placements)
        own = part_of(mesh, dims)
        if own is None:
            joints[own, plan] = plan.mesh
        elif (own, plan) not in joints:
            joints[own, plan] = joint_mesh(verb, own, plan, device)
            _refuse_different_placements(verb, own, parameters, device)
        plain = not isinstance(tensor, DTensor)
        shape = _whole_shape(verb, managed, device) if plain else tensor.shape
        kind = PartForm if plain else DTensorForm
        found.append(kind(meta_like(tensor, shape), joints[own, plan], dims))
    return found


def _refuse_different_placements(
    verb: str, mesh: DeviceMesh, parameters: Sequence[Managed[nn.Parameter]], device: torch.device
) -> None:
    """Raise if the ranks of `mesh` have distributed a parameter over it in different ways."""
    mine = [(each.fqn, str(mesh_and_placements(each.tensor))) for each in parameters]
    launch = Launch(f"placements of parameters of {verb}()")
    for comm in comms_along(mesh, device):
        gathered = comm.all_gather_objects(mine, launch)
        for rank, other in enumerate(gathered):
            for first, second in zip(gathered[0], other, strict=False):
                if first != second:
                    raise RanksDisagreeError(
                        f"{verb}: of the ranks over which parameters are tensor parallel, rank 0"
                        f" has '{first[0]}' with {first[1]} and rank {rank} has '{second[0]}' with"
                        f" {second[1]}. Distribute parameters alike on every rank"
                    )


def _whole_shape(verb: str, managed: Managed[nn.Parameter], device: torch.device) -> torch.Size:
    """Return the shape of the whole tensor that `declare_part` was given a part of.

    All ranks of its mesh call this.
    """
    mesh, placements = getattr(managed.tensor, PART)
    shape = list(managed.tensor.shape)
    launch, comms = Launch(f"shapes of parts of {verb}()"), comms_along(mesh, device)
    for comm, placement in reversed([*zip(comms, placements, strict=True)]):  # innermost cut first
        gathered = comm.all_gather_objects(tuple(shape), launch)
        expected = [tuple(shape)] * len(gathered)
        if isinstance(placement, Shard):
            dim = placement.dim
            shape[dim] = sum(each[dim] for each in gathered)
            chunk = -(-shape[dim] // len(gathered))  # as DTensor cuts
            cuts = [max(0, min(chunk, shape[dim] - chunk * rank)) for rank in range(len(gathered))]
            expected = [(*shape[:dim], cut, *shape[dim + 1 :]) for cut in cuts]
        if gathered != expected:
            raise AnnotationError(
                f"parameter '{managed.fqn}' was declared to be a part with placements"
                f" {tuple(placements)}, and its ranks have parts of the shapes {gathered}, which"
                " torch.chunk does not give. Let every rank have as many rows, and the last ones"
                " the rest"
            )
    return torch.Size(shape)


@checked
def declare_part(
    parameter: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]
) -> nn.Parameter:
    """Declare that a plain parameter is this rank's part of a whole, as in a Megatron-like model.

    `fully_shard` over other dimensions of the same mesh then shards each rank's part. Modules
    compute with plain tensors as before. At rest, the parameter is a `DTensor` with the shape of
    the whole. State dicts, `torch.distributed.checkpoint`, `full_state_dict`, `export` and
    `clip_grad_norm_` need nothing more. If a gradient must be summed over `mesh`, the model does
    this.

    Args:
        parameter: a plain `nn.Parameter` of this rank. Declare it before `fully_shard`. (torch's
            types call the parameters of its own layers `Tensor`.)
        mesh: the ranks that have the parts, such as `mesh["tp"]`.
        placements: one per dimension of `mesh`. `Shard(dim)` stands for a part, as `torch.chunk`
            makes it. `Replicate()` stands for a parameter that is the same on all ranks of the
            dimension.

    Returns:
        `parameter`.

    Raises:
        AnnotationError: `parameter` is not a plain parameter, the mesh does not contain this rank,
            or the placements do not fit.

    Example:
        >>> column = nn.Parameter(torch.empty(4 // tp.size(), 2))
        >>> declare_part(column, tp, [Shard(0)])
    """
    if type(parameter) is not nn.Parameter:
        raise AnnotationError(
            "declare_part: parameter must be a plain nn.Parameter, got"
            f" {with_article(type(parameter).__name__)}"
        )
    dims = [each.dim for each in placements if isinstance(each, Shard)]
    if (
        mesh.get_coordinate() is None
        or len(placements) != mesh.ndim
        or any(type(each) not in (Shard, Replicate) for each in placements)
        or any(not -parameter.ndim <= dim < parameter.ndim for dim in dims)
    ):
        raise AnnotationError(
            f"declare_part: placements {tuple(placements)} do not fit a parameter of shape"
            f" {tuple(parameter.shape)} over {describe_mesh(mesh)}. Pass Shard(dim) or Replicate()"
            " for each dimension of a mesh that holds this rank"
        )
    where = tuple(
        Shard(each.dim % parameter.ndim) if isinstance(each, Shard) else each for each in placements
    )
    setattr(parameter, PART, (mesh, where))
    return parameter
