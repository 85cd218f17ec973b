"""The verb `replicate`."""

from __future__ import annotations

from typing import Any, Final

from torch.distributed import fsdp

from composable.api.arguments import MixedPrecision
from composable.api.mesh import Mesh, MeshDims, mesh_plan_of_dims
from composable.api.selection import Ignored
from composable.api.units import annotate
from composable.checked import PositiveFloat
from composable.config import GradReduce, StateSync
from composable.contract.contract import Target, contract
from composable.engine.edits.tree import before_removal
from composable.engine.step.unit import Unit
from composable.errors import UnknownArgumentError
from composable.policies import PolicyLike

_EQUIVALENTS: Final = {
    "device_ids": "the module's own device is used; leave it out",
    "output_device": "the module's own device is used; leave it out",
    "dim": "every rank has its own batch; leave it out",
    "process_group": "mesh=",
    "device_mesh": "mesh=",
    "find_unused_parameters": "unused parameters need no flag; leave it out",
    "skip_all_reduce_unused_params": "what no rank used keeps grad=None; leave it out",
    "static_graph": "nothing depends on it; leave it out",
    "check_reduction": "the end of every backward is checked; leave it out",
    "bucket_cap_mb_list": "bucket_cap_mb=, which a policy may set for some modules",
    "batched_grad_copy": "small gradients are copied together where that pays; leave it out",
    "lazy_bucket_allocation": "buckets are what gradients live in, and last; leave it out",
    "delay_all_reduce_named_params": "ignored_params=, and reduce theirs as you like",
    "param_to_hook_all_reduce": "ignored_params=, and reduce theirs as you like",
    "forward_sync_buffers": "broadcast_buffers=",
    "ignored_modules": "ignored_params=",
    "init_sync": "sync_module_states=",
    "mixed_precision": "mp_policy=",
}


@contract(
    state_cls=Unit,
    before_removal=before_removal,
    clashes={
        "fully_shard": (
            "a module can be sharded or replicated, not both. Call remove(module, fully_shard)"
            " first"
        )
    },
    equivalents=_EQUIVALENTS,
)
def replicate(
    module: Target,
    *,
    mesh: Mesh = None,
    policy: PolicyLike | None = None,
    bucket_cap_mb: PositiveFloat = 25.0,
    gradient_as_bucket_view: bool = False,
    mp_policy: MixedPrecision = None,
    grad_reduce: GradReduce = "mean",
    ignored_params: Ignored = (),
    sync_module_states: StateSync = "broadcast",
    broadcast_buffers: bool = True,
    offload_policy: fsdp.OffloadPolicy | None = None,
    dp_mesh_dims: MeshDims | None = None,
) -> Target:
    """Keep a copy of `module` on every rank and average the gradients during backward, in place.

    Parameters stay plain tensors, with one exception. If an annotation on this module or on a
    module around it also covers sharded modules, parameters are DTensors at rest, so that one
    optimizer can hold all parameters. `replicate` leaves modules alone that `fully_shard` has
    annotated. Parameters that some or all ranks do not use need no flag. A parameter that no rank
    used keeps `grad=None`.

    Args:
        module: a module, or a list of modules that form one unit.
        mesh: a 1-D `DeviceMesh`, a `ProcessGroup`, or None for all ranks. One process without a
            process group is fine.
        policy: which submodules get their own buckets. All other parameters belong to `module`.
        bucket_cap_mb: MiB of small gradients that are reduced together. Gradients of 1 MiB
            (accelerators: 25 MiB) and more are reduced alone.
        gradient_as_bucket_view: keep gradients in their buckets from step to step, at the same
            addresses. This is faster, but holds the memory of the gradients between steps. If you
            keep a gradient beyond a step, the next step overwrites it. It has no effect with mixed
            precision, next to shards, and for one rank.
        mp_policy: a `MixedPrecisionPolicy`, composable's or torch's, or a dtype or its name
            ("bf16") to compute in. Parameters, gradients, optimizer state and checkpoints keep the
            dtype that the parameters have.
        grad_reduce: how to scale the sum of gradients over all ranks of the mesh. "mean" divides it
            by the number of ranks, "sum" keeps it, and a positive number divides it by that number.
        ignored_params: parameters to leave alone. Modules, FQNs and globs stand for their
            parameters. Parameters outside of `module` are allowed, so you can pass one set to every
            call. Names of buffers are allowed, too: each rank keeps its own values of these.
        sync_module_states: "broadcast" copies rank 0's parameters and buffers, also to ranks that
            built the module on the meta device. "check" compares them. "off" compares no values.
        broadcast_buffers: copy rank 0's buffers before every training forward of the root. With
            False, each rank keeps its own. A policy may set this for some modules.
        offload_policy: None, or torch's `OffloadPolicy()`, which offloads nothing.
        dp_mesh_dims: the name of the dimension of `mesh` to replicate over, as torch's
            `DataParallelMeshDims(replicate=...)` or any object with these attributes. A tuple of
            names is flattened to one dimension.

    Returns:
        `module`.

    Raises:
        AnnotationError: the module is already annotated or sharded, or has no forward; a keyword is
            unknown.
        MeshError: the mesh has several dimensions or does not contain this rank; `dp_mesh_dims`
            names no dimension of the mesh.
        RanksDisagreeError: the ranks do not hold the same module, or another rank raised an error
            for its arguments.

    Example:
        >>> model = nn.Linear(4, 4)
        >>> replicate(model) is model
        True

    After Li et al., "PyTorch Distributed" (VLDB 2020).
    """
    if offload_policy is not None and type(offload_policy) is not fsdp.OffloadPolicy:
        raise UnknownArgumentError(
            "replicate() has no argument 'offload_policy'; replicated parameters stay on their"
            " device; leave it out, or shard with fully_shard(offload_policy=)"
        )
    if dp_mesh_dims is not None:
        mesh = mesh_plan_of_dims("replicate", mesh, dp_mesh_dims)
    options: dict[str, Any] = {"mesh": mesh, "bucket_cap_mb": bucket_cap_mb, "mp_policy": mp_policy}
    options |= {"gradient_as_bucket_view": gradient_as_bucket_view}
    options |= {"broadcast_buffers": broadcast_buffers, "grad_reduce": grad_reduce}
    annotate(replicate, module, policy, ignored_params, sync_module_states, options)
    return module
