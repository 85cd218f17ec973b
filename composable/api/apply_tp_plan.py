"""Apply the tensor parallel plan of a transformers model.

transformers itself applies plans in `from_pretrained(distributed_config=...)`, which uses all
ranks. The parts that are used here are in `transformers.distributed`, which its guides mention. One
private method turns a plan into one for the layers of a model. Checked on transformers 5.23.
"""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any, Final, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from composable.api.mesh import device_of
from composable.api.sync_module_states import failures_shared, synchronise
from composable.checked import ELSEWHERE, checked
from composable.comm import comm_of
from composable.comm.mesh_info import communication_device
from composable.config import StateSync
from composable.contract.contract import registry
from composable.contract.tree import REPLICATE, SHARD, managed_buffers, managed_parameters
from composable.errors import AnnotationError
from composable.features.forms import is_packed

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
    if not experts:
        return tp_plan, {}
    return {
        name: how
        for name, how in tp_plan.items()
        if not any(f"{name}.".startswith(f"{left}.") for left in ep_plan)
    }, ep_plan
