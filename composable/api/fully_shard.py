"""The verb `fully_shard`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Final

from torch import nn

from composable.api.arguments import (
    MixedPrecision,
    Offload,
    Placement,
    buffers_of,
    check_reshard_after_forward,
    offload_policy_of,
    shard_dim_of,
    warn_if_offload_has_no_effect,
)
from composable.api.checks import warn_of_gradients
from composable.api.mesh import Mesh, Spread, comm_of_all, device_of, refuse_uneven, refuse_unordered, spread_over
from composable.api.selection import is_read_by_parent
from composable.api.sync_module_states import failures_told, refuse_unknown_mode, synchronise
from composable.api.units import UnitPlan, attach_all, attach_unit, plan_for, select, unit_spread
from composable.config import GradReduce, divisor_of, grad_reduce_in_words
from composable.contract.contract import contract
from composable.contract.naming import modules_of
from composable.contract.traversal import SHARD, names_below
from composable.engine.unit import Unit
from composable.errors import AnnotationError, UnknownArgumentError, unit_name
from composable.policies import PolicyLike

_MESH_SLICE: Final = "pass the slice of its data-parallel dimensions, mesh=mesh[...]"

_EQUIVALENTS: Final = {
    "auto_wrap_policy": "policy=",
    "sharding_strategy": "write reshard_after_forward=True for FULL_SHARD, False for SHARD_GRAD_OP, or call replicate()",
    "use_orig_params": "parameters always keep their identity and names; leave it out",
    "device_mesh": "mesh=",
    "process_group": "mesh=",
    "ignored_modules": "ignored_params=",
    "ignored_states": "ignored_params=",
    "device_id": "the mesh says which device; leave it out",
    "limit_all_gathers": "gathers are always limited; leave it out",
    "forward_prefetch": "the recorded order is always prefetched; leave it out",
    "backward_prefetch": "the recorded order is always prefetched; leave it out",
    "param_init_fn": "initialise the module before annotating it; initialisers draw numbers shard by shard afterwards",
    "sync_module_state": "sync_module_states=",
    "find_unused_parameters": "unused parameters need no flag; leave it out",
    "static_graph": "nothing depends on it; leave it out",
    "bucket_cap_mb": "gradients are reduced unit by unit; leave it out",
    "broadcast_buffers": "buffers belong to each rank; leave it out",
    "mixed_precision": "mp_policy=",
    "cpu_offload": "offload_policy=CPUOffloadPolicy()",
}

_OVERRIDABLE: Final = ("mesh", "reshard_after_forward", "mp_policy", "offload_policy", "shard_placement_fn", "grad_reduce")


@contract(
    state_cls=Unit,
    clashes={"replicate": "a module can be sharded or replicated, not both. Call remove(module, replicate) first"},
    equivalents=_EQUIVALENTS,
)
def fully_shard(
    module: nn.Module | Sequence[nn.Module],
    *,
    mesh: Mesh = None,
    policy: PolicyLike | None = None,
    reshard_after_forward: bool | int | None = None,
    mp_policy: MixedPrecision = None,
    offload_policy: Offload = None,
    shard_placement_fn: Placement | None = None,
    grad_reduce: GradReduce = "mean",
    ignored_params: Iterable[Any] | None = (),
    sync_module_states: str = "check",
    dp_mesh_dims: None = None,
) -> Any:
    """Shard the parameters, gradients and optimizer state of `module` over the ranks of a mesh, in place.

    Every rank keeps 1/n of each parameter, as a `DTensor` under its old name. Before the module's forward, and again before its
    backward, the parameters are all-gathered; in backward the gradients are reduce-scattered. The next module's parameters are
    gathered while this one computes. Annotate inner modules first, or name them in `policy`: each is unsharded and resharded on
    its own, so that only two of them are unsharded at any time.

    All ranks of the mesh call this together, with the same module.

    Args:
        module: a module, or a list of modules that form one unit.
        mesh: a `DeviceMesh`, a `ProcessGroup`, or None for all ranks. One process without a process group is fine. A mesh of
            two dimensions shards over one and replicates over the other (hybrid sharding). Names that contain "replicate" and
            "shard" tell which is which; without names the first one is replicated over. A pair of process groups
            (shard, replicate) means the same: of the ranks that this rank shards with, and of those that hold the same shards.
        policy: which submodules become units of their own; see `composable.policies`. Other parameters belong to `module`.
        reshard_after_forward: None reshards after forward and gathers again in backward, except for the units that backward
            needs first: the one that ran last, and the root. True reshards all of them (ZeRO-3); False keeps parameters
            unsharded until backward is done (ZeRO-2); a number reshards to shards over that many neighbouring ranks.
        mp_policy: a `MixedPrecisionPolicy`, composable's or torch's, or a dtype or its name ("bf16") to compute in. Parameters,
            gradients, optimizer state and what is saved keep the dtype that the parameters have.
        offload_policy: a `CPUOffloadPolicy`, composable's or torch's: shards, their gradients and the optimizer's state rest in
            the host's memory. It has no effect on a mesh of CPUs, which is logged.
        shard_placement_fn: `fn(parameter) -> Shard | None`: shard another dimension than 0.
        grad_reduce: what becomes of the sum of gradients over all ranks of the mesh: "mean" divides it by their number, "sum"
            leaves it, a positive number divides it by that number.
        ignored_params: parameters, or modules, FQNs and globs that stand for theirs, to leave alone.
        sync_module_states: "check" compares names, shapes, dtypes and values of parameters and buffers across ranks and names
            the first difference; "broadcast" copies rank 0's values, also to ranks that built the module on the meta device;
            "off" compares no values.
        dp_mesh_dims: None, for scripts that pass it to torch's `fully_shard`. A slice of a mesh says the same.

    Returns:
        `module`.

    Raises:
        AnnotationError: the module is annotated already, inside an annotated one, replicated, or has no forward; a keyword
            is unknown; ignored_params matches nothing; a parameter would belong to two units.
        MeshError: the mesh has more than two dimensions, or two that do not say what they are for; it lists
            ranks in another order than process groups do, or does not hold this rank.
        RanksDisagreeError: the ranks do not hold the same module, or another rank refused its arguments.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        >>> fully_shard(model, policy={nn.Linear}) is model
        True

    After Zhao et al., "PyTorch FSDP" (VLDB 2023), and Rajbhandari et al., "ZeRO" (SC 2020).
    """
    modules = modules_of("fully_shard", module)
    plan = plan_for(modules[0])
    if plan is not None:
        attach_unit(fully_shard.state(modules[0]), plan)
        return module
    if dp_mesh_dims is not None:
        raise UnknownArgumentError(f"fully_shard() has no argument 'dp_mesh_dims'; {_MESH_SLICE}")
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": reshard_after_forward, "mp_policy": mp_policy}
    options |= {"offload_policy": offload_policy, "shard_placement_fn": shard_placement_fn, "grad_reduce": grad_reduce}
    spread = _spread_over(modules, mesh)
    comm = comm_of_all("fully_shard", spread, device_of(modules))
    with failures_told("fully_shard", comm):
        refuse_unknown_mode(sync_module_states)
        for each in modules:
            _refuse_read_by_parent(each)
        selected = select("fully_shard", modules, policy, ignored_params, mp_policy, spread, options, overridable=_OVERRIDABLE)
        # From the innermost unit outwards, as units are made: shard_placement_fn is the user's, and asked once per parameter.
        plans = [
            _plan(modules, spread, index, selected.options[index], selected) for index in reversed(range(len(selected.units)))
        ]
        plans.reverse()
        buffers = buffers_of(modules)
        names = names_below(modules[0])
        treatment = [text for each in plans for text in _treatment(each, unit_name(names.get(id(each.modules[0]), "")))]
    made = synchronise("fully_shard", comm, sync_module_states, selected.parameters, buffers, treatment)
    plans = [each.with_parameters(made) for each in plans]
    if spread is not None:
        warn_of_gradients(selected.parameters)
    attach_all(fully_shard, plans, selected.tied)
    warn_if_offload_has_no_effect("fully_shard", [each.offload for each in plans], comm.device)
    return module


def _spread_over(modules: Sequence[nn.Module], mesh: Mesh, device_type: str | None = None) -> Spread | None:
    spread = spread_over("fully_shard", mesh, modules, hybrid=True, device_type=device_type)
    if spread is not None:
        refuse_unordered("fully_shard", spread)
    return spread


def _refuse_read_by_parent(module: nn.Module) -> None:
    if is_read_by_parent(module):
        raise AnnotationError(
            "fully_shard: 'out_proj' is read by its parent (MultiheadAttention) without being called, so nothing would "
            "gather its parameters; annotate the MultiheadAttention instead"
        )


def _plan(top: Sequence[nn.Module], spread: Spread | None, index: int, options: dict[str, Any], selected: Any) -> UnitPlan:
    """The plan of one of the units, after the checks of its arguments."""
    unit, share = selected.units[index], selected.shares[index]
    after, choose = options["reshard_after_forward"], options["shard_placement_fn"]
    check_reshard_after_forward(after)
    own = unit_spread("fully_shard", spread, options["mesh"], selected.options[0]["mesh"], partial(_spread_over, unit))
    refuse_uneven(own, after)
    device = device_of(unit)
    return UnitPlan(
        verb=SHARD,
        modules=unit,
        options=options,
        parameters=tuple(share),
        precision=selected.precisions[index],
        spread=own,
        device=device,
        top=tuple(top),
        divisor=divisor_of("fully_shard", options["grad_reduce"]),
        shard_dims=tuple(shard_dim_of(managed, choose) for managed in share),
        reshard_after_forward=after,
        offload=offload_policy_of("fully_shard", options["offload_policy"], device if own is None else None),
        ignored=selected.ignored_in(unit),
    )


def _treatment(plan: UnitPlan, name: str) -> list[str]:
    """For each parameter of a unit, what the arguments come to, in words that are equal on ranks that agree."""
    over = "" if plan.options["mesh"] is None or plan.spread is None else plan.spread.in_words()
    rest = f", {plan.precision}" if str(plan.precision) else ""
    rest += "" if plan.divisor is None else f", grad_reduce {grad_reduce_in_words(plan.divisor)}"
    rest += "" if plan.offload is None else ", offloaded"
    after = plan.reshard_after_forward
    return [f"unit '{name}', reshard_after_forward={after}{over}, dimension {dim}{rest}" for dim in plan.shard_dims]
