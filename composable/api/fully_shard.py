"""The verb `fully_shard`."""

from __future__ import annotations

from typing import Any, Final

from composable.api.arguments import MixedPrecision, Offload, Placement
from composable.api.mesh import Mesh, MeshDims, mesh_plan_of_dims
from composable.api.selection import Ignored
from composable.api.units import annotate
from composable.checked import NonNegativeInt
from composable.config import GradReduce, StateSync
from composable.contract.contract import Target, contract
from composable.engine.edits.removal import before_removal
from composable.engine.step.unit import Unit
from composable.policies import PolicyLike

_PREFETCHED: Final = "the recorded order is always prefetched; prefetch= says how many units ahead"
_EQUIVALENTS: Final = {
    "auto_wrap_policy": "policy=",
    "sharding_strategy": (
        "write reshard_after_forward=True for FULL_SHARD, False for SHARD_GRAD_OP, or call"
        " replicate()"
    ),
    "use_orig_params": "parameters always keep their identity and names; leave it out",
    "device_mesh": "mesh=",
    "process_group": "mesh=",
    "ignored_modules": "ignored_params=",
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
    "find_unused_parameters": "unused parameters need no flag; leave it out",
    "static_graph": "nothing depends on it; leave it out",
    "bucket_cap_mb": "gradients are reduced unit by unit; leave it out",
    "broadcast_buffers": "buffers belong to each rank; leave it out",
    "mixed_precision": "mp_policy=",
    "cpu_offload": "offload_policy=CPUOffloadPolicy()",
}


@contract(
    state_cls=Unit,
    before_removal=before_removal,
    clashes={
        "replicate": (
            "a module can be sharded or replicated, not both. Call remove(module, replicate) first"
        )
    },
    equivalents=_EQUIVALENTS,
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

    Every rank of the mesh keeps 1/n of each parameter, as a `DTensor` under its old name. Before
    the module's forward, and again before its backward, the parameters are all-gathered; in
    backward the gradients are reduce-scattered. The next module's parameters are gathered while
    this one computes. Annotate inner modules first, or name them in `policy`: each is unsharded and
    resharded on its own, so that at most two of them (`prefetch` + 1) are unsharded at a time,
    besides the parameters of the outer module itself.

    All ranks of the mesh call this together, with the same module.

    Args:
        module: a module, or a list of modules that form one unit.
        mesh: a `DeviceMesh`, a `ProcessGroup`, or None for all ranks. One process without a process
            group is fine. A mesh of two dimensions shards over one and replicates over the other
            (hybrid sharding). Names that contain "replicate" and "shard" tell which is which;
            without names the first one is replicated over. A pair of process groups (shard,
            replicate) means the same: of the ranks that this rank shards with, and of those that
            hold the same shards. "hybrid" shards over the ranks of a host, as torchrun tells them,
            and replicates over hosts.
        policy: which submodules become units of their own; see `composable.policies`. A model of
            transformers names them itself: `policy=model`. Other parameters belong to `module`.
        reshard_after_forward: None reshards after forward and gathers again in backward, except for
            the units that backward needs first: the one that ran last, and the root. True reshards
            all of them (ZeRO-3); False keeps parameters unsharded until backward is done (ZeRO-2);
            a number reshards to shards over that many neighbouring ranks.
        prefetch: how many units are gathered ahead, in forward and in backward, by the order of the
            last forward. More hide slow gathers of small units, 0 takes the least memory.
        mp_policy: a `MixedPrecisionPolicy`, composable's or torch's, or a dtype or its name
            ("bf16") to compute in. Parameters, gradients, optimizer state and what is saved keep
            the dtype that the parameters have.
        offload_policy: a `CPUOffloadPolicy`, composable's or torch's: shards, their gradients and
            the optimizer's state rest in the host's memory. It has no effect on a mesh of CPUs,
            which is logged.
        shard_placement_fn: `fn(parameter) -> Shard | None`: which dimension is sharded; None stands
            for dimension 0. It may return a pair, (`Shard` or None, `DeviceMesh`), or torch's
            `ShardPlacementResult`: the parameter is on that mesh then, and the rest of the unit on
            `mesh`. Without such a function dimension 0 is sharded, except where that leaves ranks
            empty and costs a mebibyte or more, as of experts that are stacked in one parameter and
            are fewer than ranks: these are sharded along the first dimension that leaves least.
        grad_reduce: what becomes of the sum of gradients over all ranks of the mesh: "mean" divides
            it by their number, "sum" leaves it, a positive number divides it by that number.
        ignored_params: parameters, or modules, FQNs and globs that stand for theirs, to leave
            alone. Parameters that lie elsewhere may be among them: one set may go to every call.
        sync_module_states: "check" compares names, shapes, dtypes and values of parameters and
            buffers across ranks and names the first difference; "broadcast" copies rank 0's values,
            also to ranks that built the module on the meta device; "off" compares no values.
        dp_mesh_dims: torch's `DataParallelMeshDims(shard=..., replicate=...)`, or any object with
            these attributes: which dimensions of `mesh` are data parallel, by name. A tuple of
            names is flattened to one dimension. Other dimensions are left alone: parameters are
            `DTensor`s over them, or plain ones of which each part of the ranks trains a copy.

    Returns:
        `module`.

    Raises:
        AnnotationError: the module is annotated already, inside an annotated one, replicated, or
            has no forward; a keyword is unknown; a name in ignored_params matches nothing; a
            parameter would belong to two units.
        MeshError: the mesh has more than two dimensions, or two that do not say what they are for;
            it lists ranks in another order than process groups do, or does not hold this rank;
            `shard_placement_fn` returns a mesh of other ranks; `dp_mesh_dims` names no dimension of
            it; hosts have different numbers of ranks.
        RanksDisagreeError: the ranks do not hold the same module, or another rank refused its
            arguments.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        >>> fully_shard(model, policy={nn.Linear}) is model
        True

    After Zhao et al., "PyTorch FSDP" (VLDB 2023), and Rajbhandari et al., "ZeRO" (SC 2020).
    """
    if dp_mesh_dims is not None:
        mesh = mesh_plan_of_dims("fully_shard", mesh, dp_mesh_dims)
    options: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": reshard_after_forward,
        "mp_policy": mp_policy,
        "prefetch": prefetch,
        "offload_policy": offload_policy,
        "shard_placement_fn": shard_placement_fn,
        "grad_reduce": grad_reduce,
    }
    annotate(fully_shard, module, policy, ignored_params, sync_module_states, options)
    return module
