"""Tensor-parallel parameters: what users call before an annotation, and their forms in one.

`apply_tp_plan` applies the plan of a transformers model. transformers itself applies plans in
`from_pretrained(distributed_config=...)`, which uses all ranks. The parts that are used here are in
`transformers.distributed`, which its guides mention. One private method turns a plan into one for
the layers of a model. Checked on transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any, Final, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from composable.api.agreement import failures_shared, synchronise
from composable.api.mesh import MeshPlan, comms_along, device_of, joint_mesh, part_of
from composable.checked import ELSEWHERE, checked
from composable.comm.backends import comm_of
from composable.comm.launch import Launch
from composable.comm.mesh_info import communication_device
from composable.config import StateSync
from composable.contract.contract import registry
from composable.contract.tree import REPLICATE, SHARD, Managed, managed_buffers, managed_parameters
from composable.engine.params.param import ParamForm
from composable.errors import AnnotationError, RanksDisagreeError, with_article
from composable.features.param_forms import (
    PART,
    DTensorForm,
    PartForm,
    form_of,
    mesh_and_placements,
    meta_like,
)
from composable.tensors import describe_mesh, is_packed

_NAME: Final = "apply_tp_plan"

M = TypeVar("M", bound=nn.Module)


@checked
def apply_tp_plan(
    module: M,
    mesh: DeviceMesh,
    *,
    experts: bool = False,
    sync_module_states: Annotated[StateSync, ELSEWHERE] = "check",  # refused on all ranks
) -> M:
    """Make a model of transformers tensor parallel, in place, by the plan of its configuration.

    Then call `fully_shard` or `replicate` over the other dimensions of the same mesh. Pass the same
    rows of the batch to all ranks of `mesh`. These ranks call this together, before they annotate.

    Args:
        module: a model of transformers 5. It is the same on all ranks of `mesh`, and each rank
            keeps its part; or it is on the meta device.
        mesh: a mesh of one dimension, such as `mesh["tp"]`.
        experts: give each rank whole experts (`ep_plan`) in place of a part of every expert.
            Outputs are then summed over all ranks.
        sync_module_states: as for `fully_shard`, over the ranks of `mesh`. "check" compares values,
            "broadcast" copies those of the first rank, "off" compares none.

    Returns:
        `module`.

    Raises:
        AnnotationError: the model has no such plan, or is already annotated; the mesh has several
            dimensions.
        RanksDisagreeError: the ranks do not hold the same model, or another rank failed.

    Example:
        >>> mesh = init_device_mesh("cuda", (4, 8), mesh_dim_names=("dp", "tp"))
        >>> apply_tp_plan(model, mesh["tp"])
        >>> fully_shard(model, mesh=mesh["dp"], policy=model)

    After `transformers.distributed`.
    """
    if mesh.ndim != 1:
        raise AnnotationError(
            f"apply_tp_plan: mesh must have one dimension, and {mesh!r} has {mesh.ndim}. Pass a"
            " slice, mesh['tp']"
        )
    comm = comm_of(mesh.get_group(), communication_device(mesh, device_of((module,))))
    with failures_shared(_NAME, comm, sync_module_states):
        tp_plan, ep_plan = _plans_for(module, experts=experts)
    parameters, buffers = managed_parameters((module,), ignored={}), managed_buffers((module,))
    treatment = [f"experts={experts}"] * len(parameters)
    synchronise(_NAME, comm, sync_module_states, parameters, buffers, treatment)
    # the other names of tied weights are none of a parameter
    there = {name for name, _ in (*module.named_parameters(), *module.named_modules())}
    whole: Any = module
    tp_plan, ep_plan = (
        {name: how for name, how in whole._expand_parallel_plan(plan).items() if name in there}
        for plan in (tp_plan, ep_plan)
    )
    if not tp_plan and not ep_plan:
        raise AnnotationError(
            f"apply_tp_plan: no module of the plan is in this {type(module).__name__}. Pass the"
            " model of transformers itself, before others are put around it"
        )
    distributed = "transformers.distributed"
    import_module(f"{distributed}.tensor_parallel").apply_tensor_parallelism(module, mesh, tp_plan)
    if experts:
        import_module(f"{distributed}.expert_parallel").apply_expert_parallelism(
            module, mesh, mesh, ep_plan, ep_implementation="all_reduce"
        )
    whole.tie_weights()
    return module


def _plans_for(model: nn.Module, *, experts: bool) -> tuple[dict[str, str], dict[str, str]]:
    """Check the model, and return the rules of its two plans that apply."""
    # what transformers says of it: how it is made tensor parallel, and its experts
    plans = (getattr(model, name, None) for name in ("tp_plan", "ep_plan"))
    tp_plan, ep_plan = (dict(plan or {}) for plan in plans)
    if not tp_plan or (experts and not ep_plan):
        raise AnnotationError(
            f"apply_tp_plan: the {type(model).__name__} has no {'ep' if tp_plan else 'tp'}_plan, as"
            " many models of transformers have. Call torch's parallelize_module with a plan of"
            " your own"
        )
    for name, module in model.named_modules():
        if not registry(module).keys().isdisjoint((SHARD, REPLICATE)):
            raise AnnotationError(
                f"apply_tp_plan: '{name or '(root)'}' is annotated already. Make the model tensor"
                " parallel before"
            )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) or is_packed(parameter):
            what = "a DTensor already" if isinstance(parameter, DTensor) else "packed in 4 bits"
            raise AnnotationError(
                f"apply_tp_plan: parameter '{name}' is {what}, and cannot be cut by the plan"
            )
    of_experts = ep_plan if experts else {}
    return {
        name: how
        for name, how in tp_plan.items()
        if not any(f"{name}.".startswith(f"{left}.") for left in of_experts)
    }, of_experts


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


# --- in an annotation ----------------------------------------------------------------------------


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
