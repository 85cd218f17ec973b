"""The verbs `fully_shard` and `replicate`: their arguments. `annotate.py` does the work."""

from __future__ import annotations

from typing import Any, Final

from torch.distributed import fsdp

from composable.api.annotate import annotate
from composable.api.arguments import Ignored, MixedPrecision, Offload, Placement
from composable.api.mesh import Mesh, MeshDims, mesh_plan_of_dims
from composable.checked import NonNegativeInt, PositiveFloat
from composable.config import GradReduce, StateSync
from composable.contract.contract import Target, contract
from composable.engine.edits.annotations import before_removal
from composable.engine.step.unit import Unit
from composable.errors import UnknownArgumentError
from composable.policies import PolicyLike

_CLASH: Final = "a module can be sharded or replicated, not both. Call remove(module, {}) first"
_FOR_BOTH: Final = {
    "process_group": "mesh=",
    "device_mesh": "mesh=",
    "ignored_modules": "ignored_params=",
    "mixed_precision": "mp_policy=",
    "find_unused_parameters": "unused parameters need no flag; leave it out",
    "static_graph": "nothing depends on it; leave it out",
}
_PREFETCHED: Final = "the recorded order is always prefetched; prefetch= says how many units ahead"
_FOR_FULLY_SHARD: Final = {
    **_FOR_BOTH,
    "auto_wrap_policy": "policy=",
    "sharding_strategy": (
        "write reshard_after_forward=True for FULL_SHARD, False for SHARD_GRAD_OP, or call"
        " replicate()"
    ),
    "use_orig_params": "parameters always keep their identity and names; leave it out",
    "ignored_states": "ignored_params=",
    "device_id": "the mesh says which device; leave it out",
    "limit_all_gathers": "gathers are always limited; leave it out",
    "forward_prefetch": _PREFETCHED,
    "backward_prefetch": _PREFETCHED,
    "param_init_fn": (
        "initialise the module before annotating it; initialisers draw numbers shard by shard"
        " afterwards"
    ),
    "sync_module_state": "sync_module_states=",
    "bucket_cap_mb": "gradients are reduced unit by unit; leave it out",
    "broadcast_buffers": "buffers belong to each rank; leave it out",
    "cpu_offload": "offload_policy=CPUOffloadPolicy()",
}
_FOR_REPLICATE: Final = {
    **_FOR_BOTH,
    "device_ids": "the module's own device is used; leave it out",
    "output_device": "the module's own device is used; leave it out",
    "dim": "every rank has its own batch; leave it out",
    "skip_all_reduce_unused_params": "what no rank used keeps grad=None; leave it out",
    "check_reduction": "the end of every backward is checked; leave it out",
    "bucket_cap_mb_list": "bucket_cap_mb=, which a policy may set for some modules",
    "batched_grad_copy": "small gradients are copied together where that pays; leave it out",
    "lazy_bucket_allocation": "buckets are what gradients live in, and last; leave it out",
    "delay_all_reduce_named_params": "ignored_params=, and reduce theirs as you like",
    "param_to_hook_all_reduce": "ignored_params=, and reduce theirs as you like",
    "forward_sync_buffers": "broadcast_buffers=",
    "init_sync": "sync_module_states=",
}


@contract(
    state_cls=Unit,
    before_removal=before_removal,
    clashes={"replicate": _CLASH.format("replicate")},
    equivalents=_FOR_FULLY_SHARD,
)
def fully_shard(
    module: Target,
    *,
    mesh: Mesh = None,
    policy: PolicyLike | None = None,
    reshard_after_forward: bool | int | None = None,
    prefetch: NonNegativeInt = 1,
    mp_policy: MixedPrecision = None,
    offload_policy: Offload = None,
    shard_placement_fn: Placement | None = None,
    grad_reduce: GradReduce = "mean",
    ignored_params: Ignored = (),
    sync_module_states: StateSync = "check",
    dp_mesh_dims: MeshDims | None = None,
) -> Target:
    """Shard the parameters, gradients and optimizer state of `module` over a mesh, in place.

    Each of the n ranks of the mesh keeps 1/n of each parameter, as a `DTensor` under its old name.
    The library all-gathers the parameters before the module's forward, and again before its
    backward. It reduce-scatters the gradients in backward. While one module computes, the library
    gathers the parameters of the next.

    Annotate inner modules first, or name them in `policy`. Each is unsharded and resharded on its
    own. At most two of them (`prefetch` + 1) are unsharded at a time, besides the parameters of the
    outer module itself.

    All ranks of the mesh call this together, with the same module.

    Args:
        module: a module, or a list of modules that form one unit.
        mesh: a `DeviceMesh`, a `ProcessGroup`, or None for all ranks. One process without a process
            group is fine. With a mesh of two dimensions, parameters are sharded over one and
            replicated over the other (hybrid sharding). Dimension names that contain "replicate"
            and "shard" decide which is which. Without names, the first dimension replicates. A pair
            of process groups (shard, replicate) means the same: the first has the ranks that this
            rank shards with, the second the ranks that hold the same shards. "hybrid" shards over
            the ranks of a host, as torchrun reports them, and replicates over hosts.
        policy: which submodules become their own units; see `composable.policies`. For a model of
            transformers, `policy=model` uses the modules that the model names. All other parameters
            belong to the unit of `module`.
        reshard_after_forward: True reshards all units after forward, and gathers them again in
            backward (ZeRO-3). None does the same, except for the units that backward needs first:
            the unit that ran last, and the root. False keeps parameters unsharded until backward
            ends (ZeRO-2). A number reshards to shards over that many neighbouring ranks.
        prefetch: how many units are gathered ahead, in forward and in backward, in the order of the
            last forward. A larger number hides slow gathers of small units. 0 takes the least
            memory.
        mp_policy: a `MixedPrecisionPolicy`, composable's or torch's, or a dtype or its name
            ("bf16") to compute in. Parameters, gradients, optimizer state and checkpoints keep the
            dtype that the parameters have.
        offload_policy: a `CPUOffloadPolicy`, composable's or torch's, keeps shards, their gradients
            and the optimizer's state in the host's memory. On a mesh of CPUs it has no effect, and
            a log message says so.
        shard_placement_fn: `fn(parameter) -> Shard | None` returns the dimension to shard. None
            stands for dimension 0. The function may also return a pair, (`Shard` or None,
            `DeviceMesh`), or torch's `ShardPlacementResult`. Then the parameter is sharded over
            that mesh, and the rest of the unit over `mesh`. Without a function, dimension 0 is
            sharded. This may leave ranks empty, for example if experts are stacked in one parameter
            and there are fewer experts than ranks. If the padding then takes a mebibyte or more,
            the parameter is sharded along the first dimension that needs the least padding.
        grad_reduce: how to scale the sum of gradients over all ranks of the mesh. "mean" divides it
            by the number of ranks, "sum" keeps it, and a positive number divides it by that number.
        ignored_params: parameters to leave alone. Modules, FQNs and globs stand for their
            parameters. Parameters outside of `module` are allowed, so you can pass one set to every
            call.
        sync_module_states: "check" compares names, shapes, dtypes and values of parameters and
            buffers across ranks, and raises an error that names the first difference. "broadcast"
            copies rank 0's values, also to ranks that built the module on the meta device. "off"
            compares no values.
        dp_mesh_dims: the names of the data-parallel dimensions of `mesh`, as torch's
            `DataParallelMeshDims(shard=..., replicate=...)` or any object with these attributes. A
            tuple of names is flattened to one dimension. The other dimensions are left alone. Over
            them, a parameter is a `DTensor`, or a plain tensor of which each group of ranks trains
            its own copy.

    Returns:
        `module`.

    Raises:
        AnnotationError: the module is already annotated or replicated, is inside an annotated
            module, or has no forward; a keyword is unknown; a name in ignored_params matches
            nothing; a parameter would belong to two units.
        MeshError: the mesh has more than two dimensions, or two whose names do not say which one
            shards; the mesh lists ranks in another order than process groups do, or does not
            contain this rank; `shard_placement_fn` returns a mesh of other ranks; `dp_mesh_dims`
            names no dimension of the mesh; hosts have different numbers of ranks.
        RanksDisagreeError: the ranks do not hold the same module, or another rank raised an error
            for its arguments.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        >>> fully_shard(model, policy={nn.Linear}) is model
        True

    After Zhao et al., "PyTorch FSDP" (VLDB 2023), and Rajbhandari et al., "ZeRO" (SC 2020).
    """
    options: dict[str, Any] = {
        "mesh": mesh_plan_of_dims("fully_shard", mesh, dp_mesh_dims),
        "reshard_after_forward": reshard_after_forward,
        "mp_policy": mp_policy,
        "prefetch": prefetch,
        "offload_policy": offload_policy,
        "shard_placement_fn": shard_placement_fn,
        "grad_reduce": grad_reduce,
    }
    annotate(fully_shard, module, policy, ignored_params, sync_module_states, options)
    return module


@contract(
    state_cls=Unit,
    before_removal=before_removal,
    clashes={"fully_shard": _CLASH.format("fully_shard")},
    equivalents=_FOR_REPLICATE,
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
        bucket_cap_mb: a bucket is reduced once its gradients have this many MiB. The first one has
            1 MiB or one gradient, so that a message is sent early.
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
    options: dict[str, Any] = {
        "mesh": mesh_plan_of_dims("replicate", mesh, dp_mesh_dims),
        "bucket_cap_mb": bucket_cap_mb,
        "gradient_as_bucket_view": gradient_as_bucket_view,
        "mp_policy": mp_policy,
        "grad_reduce": grad_reduce,
        "broadcast_buffers": broadcast_buffers,
    }
    annotate(replicate, module, policy, ignored_params, sync_module_states, options)
    return module
