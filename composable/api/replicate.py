"""The verb `replicate`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Final

from torch import nn
from torch.distributed import fsdp

from composable.api.arguments import MixedPrecision, buffers_of, refuse_elsewhere
from composable.api.mesh import Mesh, Spread, comm_of_all, communication_device, device_of, spread_over
from composable.api.selection import enclosing_units
from composable.api.sync_module_states import failures_told, refuse_unknown_mode, synchronise
from composable.api.units import Selected, UnitPlan, attach_all, attach_unit, plan_for, select, unit_spread
from composable.config import GradReduce, divisor_of, grad_reduce_in_words
from composable.contract.contract import contract
from composable.contract.naming import modules_of
from composable.contract.traversal import REPLICATE
from composable.engine.param import Place
from composable.engine.unit import Unit
from composable.errors import AnnotationError, UnknownArgumentError
from composable.policies import PolicyLike

_OFFLOAD: Final = "replicated parameters stay on their device; leave it out, or shard with fully_shard(offload_policy=)"

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
    "gradient_as_bucket_view": "gradients always are views of buckets; leave it out",
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

_OVERRIDABLE: Final = ("mesh", "bucket_cap_mb", "mp_policy", "broadcast_buffers", "grad_reduce")


@contract(
    state_cls=Unit,
    clashes={"fully_shard": "a module can be sharded or replicated, not both. Call remove(module, fully_shard) first"},
    equivalents=_EQUIVALENTS,
)
def replicate(
    module: nn.Module | Sequence[nn.Module],
    *,
    mesh: Mesh = None,
    policy: PolicyLike | None = None,
    bucket_cap_mb: float = 25.0,
    mp_policy: MixedPrecision = None,
    grad_reduce: GradReduce = "mean",
    ignored_params: Iterable[Any] | None = (),
    sync_module_states: str = "broadcast",
    broadcast_buffers: bool = True,
    offload_policy: fsdp.OffloadPolicy | None = None,
    dp_mesh_dims: None = None,
) -> Any:
    """Keep a copy of `module` on every rank and average the gradients during backward, in place.

    Parameters stay plain tensors, unless an annotation on this module or above covers sharded modules, too: then they rest as
    DTensors, so that one optimizer can hold all. Modules below that `fully_shard` annotated are left alone. Parameters that
    some or all ranks do not use need no flag: one that no rank used keeps `grad=None`.

    Args:
        module: a module, or a list of modules that form one unit.
        mesh: a 1-D `DeviceMesh`, a `ProcessGroup`, or None for all ranks. One process without a process group is fine.
        policy: which submodules get buckets of their own; other parameters belong to `module`.
        bucket_cap_mb: MiB of small gradients that travel together; those of 1 MiB (accelerators: 25 MiB) and more travel alone.
        mp_policy: a `MixedPrecisionPolicy`, composable's or torch's, or a dtype or its name ("bf16") to compute in. Parameters,
            gradients, optimizer state and what is saved keep the dtype that the parameters have.
        grad_reduce: what becomes of the sum of gradients over all ranks of the mesh: "mean" divides it by their number, "sum"
            leaves it, a positive number divides it by that number.
        ignored_params: parameters, or modules, FQNs and globs that stand for theirs, to leave alone.
        sync_module_states: "broadcast" copies rank 0's parameters and buffers, also to ranks that built the module on the meta
            device; "check" compares them; "off" compares no values.
        broadcast_buffers: buffers follow rank 0 before every training forward of the root; False leaves them to each rank, and
            a policy may say so for some modules.
        offload_policy: None, or torch's `OffloadPolicy()`, which offloads nothing.
        dp_mesh_dims: None, for scripts that pass it to torch's `replicate`.

    Returns:
        `module`.

    Raises:
        AnnotationError: the module is annotated already, sharded, or has no forward; a keyword is unknown.
        MeshError: the mesh has several dimensions or does not hold this rank.
        RanksDisagreeError: the ranks do not hold the same module, or another rank refused its arguments.

    Example:
        >>> model = nn.Linear(4, 4)
        >>> replicate(model) is model
        True

    After Li et al., "PyTorch Distributed" (VLDB 2020).
    """
    modules = modules_of("replicate", module)
    plan = plan_for(modules[0])
    if plan is not None:
        attach_unit(replicate.state(modules[0]), plan)
        return module
    if offload_policy is not None and type(offload_policy) is not fsdp.OffloadPolicy:
        raise UnknownArgumentError(f"replicate() has no argument 'offload_policy'; {_OFFLOAD}")
    if dp_mesh_dims is not None:
        raise UnknownArgumentError("replicate() has no argument 'dp_mesh_dims'; pass a mesh of one dimension, mesh=mesh[...]")
    options: dict[str, Any] = {"mesh": mesh, "bucket_cap_mb": bucket_cap_mb, "mp_policy": mp_policy}
    options |= {"grad_reduce": grad_reduce, "broadcast_buffers": broadcast_buffers}
    spread = spread_over("replicate", mesh, modules)
    comm = comm_of_all("replicate", spread, device_of(modules))
    with failures_told("replicate", comm):
        refuse_unknown_mode(sync_module_states)
        _check(options)
        selected = select("replicate", modules, policy, ignored_params, mp_policy, spread, options, overridable=_OVERRIDABLE)
        plans = _plans(modules, spread, selected)
        buffers = buffers_of(modules)
        treatment = [_treatment(each) for each in plans for _ in each.parameters]
    made = synchronise("replicate", comm, sync_module_states, selected.parameters, buffers, treatment)
    attach_all(replicate, [each.with_parameters(made) for each in plans], selected.tied)
    return module


def _check(options: dict[str, Any]) -> None:
    follow, cap = options["broadcast_buffers"], options["bucket_cap_mb"]
    if type(follow) is not bool:
        raise AnnotationError(f"broadcast_buffers must be True or False, got {follow!r}")
    if type(cap) not in (int, float) or cap <= 0:
        raise AnnotationError(f"bucket_cap_mb must be a positive number of MiB, got {cap!r}")


def _spread_over(modules: Sequence[nn.Module], mesh: Mesh, device_type: str | None) -> Spread | None:
    return spread_over("replicate", mesh, modules, device_type=device_type)


def _plans(modules: Sequence[nn.Module], spread: Spread | None, selected: Selected) -> list[UnitPlan]:
    """The plans of all units, after the checks of their arguments."""
    buffers, chains = buffers_of(modules), {}
    if len(selected.units) > 1:
        chains = enclosing_units(modules[0], [unit for (unit,) in selected.units[1:]])
    plans = []
    for index, (unit, share, options) in enumerate(zip(selected.units, selected.shares, selected.options, strict=True)):
        _check(options)
        own = unit_spread("replicate", spread, options["mesh"], selected.options[0]["mesh"], partial(_spread_over, unit))
        device = device_of(unit)
        if own is not None:
            refuse_elsewhere("replicate", share, [] if index else buffers, communication_device(own.mesh, device))
        places = [place for each in buffers for place in each.places if (chains.get(id(place.module)) or (0,))[-1] == index]
        plan = UnitPlan(
            verb=REPLICATE,
            modules=unit,
            options=options,
            parameters=tuple(share),
            precision=selected.precisions[index],
            spread=own,
            device=device,
            top=tuple(modules),
            divisor=divisor_of("replicate", options["grad_reduce"]),
            bucket_bytes=max(1, int(options["bucket_cap_mb"] * (1 << 20))),
            broadcast_buffers=tuple(Place(each.module, each.name) for each in places if options["broadcast_buffers"]),
            ignored=selected.ignored_in(unit),
        )
        plans.append(plan)
    return plans


def _treatment(plan: UnitPlan) -> str:
    """What the arguments come to for the parameters of a unit, in words that are equal on ranks that agree."""
    text = f"bucket_cap_mb={plan.options['bucket_cap_mb']}, {len(plan.broadcast_buffers)} buffers that follow rank 0"
    text += f", {plan.precision}" if str(plan.precision) else ""
    return text + ("" if plan.divisor is None else f", grad_reduce {grad_reduce_in_words(plan.divisor)}")
