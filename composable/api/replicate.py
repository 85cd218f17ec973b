"""The verb `replicate`: validate, plan, attach. Moves no bytes itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Final

from torch import nn

from composable.api.all_or_none import all_or_none, failures_told
from composable.api.devices import buffers_of, refuse_elsewhere
from composable.api.meshes import Mesh, communication_device, device_of, meeting_place, spread_over
from composable.api.mp_policy import (
    MixedPrecision,
    buffer_holders,
    exact_modules,
    ids_of_exact,
    inherited_inside,
    is_exact,
    precision_of_replicas,
    refuse_unknown_buffers,
)
from composable.api.selection import check_keywords, ids_of_ignored, parameters_by_unit
from composable.api.sync_module_states import refuse_unknown_mode, synchronise
from composable.api.taken import refuse_other_mesh, refuse_taken
from composable.config import GradReduce, MixedPrecisionPolicy, divisor_of, grad_reduce_in_words
from composable.device.cast_parameters import CastHolder, can_be_cast
from composable.device.collectives import LocalCommunicator, backwards_of, communicator_of
from composable.device.parameter_swap import Place
from composable.errors import AnnotationError
from composable.model.contract import contract, on_undo, require_callable
from composable.model.hooks import attach, detach
from composable.model.transaction import running
from composable.model.traversal import (
    REPLICATE,
    SHARD,
    ManagedParameter,
    get_all_sharded_states,
    get_replicated_states,
    walk,
)
from composable.policies import PolicyLike, select_modules
from composable.runtime.cast_unit import CastUnit
from composable.runtime.launch_order import launch_together
from composable.runtime.mesh_info import MeshInfo
from composable.runtime.model_parts import note_parts
from composable.runtime.replicated_unit import ReplicatedUnit
from composable.runtime.shards_inside import ShardsInside
from composable.runtime.shown_parameters import rest_as_dtensors
from composable.runtime.sparse import is_sparse_lookup
from composable.runtime.wrappers import refuse_wrapped, refuse_wrapping

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
    "offload_policy": "replicated parameters stay on their device; leave it out, or shard with fully_shard(offload_policy=)",
}


@contract(
    state_cls=ReplicatedUnit,
    clashes={"fully_shard": "a module can be sharded or replicated, not both. Call remove(module, fully_shard) first"},
    equivalents=_EQUIVALENTS,
)
def replicate(
    module: nn.Module | list[nn.Module],
    *,
    mesh: Mesh = None,
    policy: PolicyLike | None = None,
    bucket_cap_mb: float = 25.0,
    mp_policy: MixedPrecision = None,
    grad_reduce: GradReduce = "mean",
    ignored_params: Iterable[Any] = (),
    sync_module_states: str = "broadcast",
    broadcast_buffers: bool = True,
) -> Any:
    """Keep a copy of `module` on every rank and average the gradients while backward runs, in place.

    Parameters stay plain tensors, unless an annotation on this module or above covers sharded modules, too: then they rest as
    DTensors, so that one optimizer can hold all. Modules below that `fully_shard` annotated are left alone. Parameters that
    some or all ranks do not use need no flag: one that nobody used keeps `grad=None`.

    Args:
        module: a module, or a list of modules that form one unit.
        mesh: a 1-D `DeviceMesh`, a `ProcessGroup`, or None for all ranks. One process without a process group is fine.
        policy: which submodules get buckets of their own; what is left over belongs to `module`.
        bucket_cap_mb: MiB of small gradients that travel together; those of 1 MiB (accelerators: 25 MiB) and more travel alone.
        mp_policy: a `MixedPrecisionPolicy`, composable's or torch's, or a dtype or its name ("bf16") to compute in. Parameters,
            gradients, optimizer state and what is saved keep the dtype that the parameters have.
        grad_reduce: what becomes of the sum of gradients over all ranks of the mesh: "mean" divides it by their number, "sum"
            leaves it, a positive number divides it by that number.
        ignored_params: parameters, or modules, FQNs and globs that stand for theirs, to leave alone.
        sync_module_states: "broadcast" copies rank 0's parameters, "check" compares them, "off" trusts the caller.
        broadcast_buffers: buffers follow rank 0 before every forward of the outermost annotated module; False leaves them to
            each rank, and a policy may say so for some modules.

    Returns:
        What it was given.

    Raises:
        AnnotationError: the module is annotated already, sharded, or has no forward; a keyword is unknown.
        MeshError: the mesh has several dimensions or does not hold this rank.
        RanksDisagreeError: the ranks do not hold the same module.

    Example:
        >>> model = nn.Linear(4, 4)
        >>> replicate(model) is model
        True

    After Li et al., "PyTorch Distributed" (VLDB 2020).
    """
    modules = module if isinstance(module, list) else [module]
    device = device_of(modules[0])
    spread = spread_over("replicate", mesh, device)
    communicator = meeting_place("replicate", spread, device)
    with failures_told("replicate", communicator):
        refuse_unknown_mode(sync_module_states)
        if type(broadcast_buffers) is not bool:
            raise AnnotationError(f"broadcast_buffers must be True or False, got {broadcast_buffers!r}")
        if type(bucket_cap_mb) not in (int, float) or bucket_cap_mb <= 0:
            raise AnnotationError(f"bucket_cap_mb must be a positive number of MiB, got {bucket_cap_mb!r}")
        divisor, precision = divisor_of("replicate", grad_reduce), precision_of_replicas(mp_policy)
        for each in modules:
            require_callable(each)
        overridden = _picked(modules, policy)
        inherited = inherited_inside(modules, list(overridden), precision)
        picked = {
            child: ({"ignored_params": _ignored_inside(child, ignored_params), "mp_policy": inherited[child]}, own)
            for child, own in overridden.items()
        }
    common: dict[str, Any] = {"mesh": mesh, "bucket_cap_mb": bucket_cap_mb, "grad_reduce": grad_reduce}
    common |= {"sync_module_states": sync_module_states, "broadcast_buffers": broadcast_buffers}
    for child, (ignores, overrides) in picked.items():
        replicate(child, **{**common, **ignores, **overrides})
    with failures_told("replicate", communicator):
        resolved = None if spread is None else spread.mesh
        ignored = ids_of_ignored(modules, ignored_params)
        (parameters,) = parameters_by_unit(modules, [], ignored)
        refuse_wrapped(modules, "replicate", parameters)
        refuse_taken("replicate", modules, parameters)
        refuse_other_mesh(parameters, resolved)
        buffers = buffers_of(modules) if broadcast_buffers else []
        kept = ids_of_exact(modules, precision)
        keeps = [keep for managed in parameters for keep in [is_exact(managed, kept, "replicate")] * len(managed.places)]
        casts = _casts(modules, parameters, keeps, precision)
        if resolved is not None:
            refuse_elsewhere("replicate", parameters, buffers_of(modules), communication_device(resolved, device))
    treatment = f"bucket_cap_mb={bucket_cap_mb}, {len(buffers)} buffers that follow rank 0"
    treatment += f", {precision}" if str(precision) else ""
    treatment += "" if divisor is None else f", grad_reduce {grad_reduce_in_words(divisor)}"
    synchronise("replicate", parameters, communicator, sync_module_states, [treatment] * len(parameters))
    mesh_info = MeshInfo.over_one_dimension(None, LocalCommunicator())
    if spread is not None:
        # Apart: buckets of several annotations may become ready in different orders on different ranks.
        at = communication_device(spread.mesh, device)
        over = partial(MeshInfo.over_one_dimension, spread.mesh, device=at)
        mesh_info = _shared_ground(modules, over(communicator)) or over(communicator_of(spread.group, at, dedicated=True))
        backwards = backwards_of(spread.group)  # of which a rank may have run one more, in a model that failed
        label = "exchange of how many backwards there were"
        backwards.catch_up(communicator.min_max([backwards.next_number], label=label)[1][0] - 1)
        mesh_info.all.tags.count_by(backwards)
    places = [place for _, place, _ in buffers]
    with all_or_none("replicate", communicator):
        exact = exact_modules(modules, precision)
        cap_bytes = max(1, int(bucket_cap_mb * (1 << 20)))
        _attach(modules, parameters, places, mesh_info, cap_bytes, divisor, casts, exact, keeps)
        launch_together([unit.averaging for unit in (_unit_of(modules), *_inside(modules))])
        note_parts(modules, mesh_info)
    return module


def _unit_of(modules: Sequence[nn.Module]) -> ReplicatedUnit:
    unit = replicate.state(modules[0])
    assert unit is not None
    return unit


def _shared_ground(modules: Sequence[nn.Module], here: MeshInfo) -> MeshInfo | None:
    """That of a unit at the same place which is about to launch in one order with this one, where sums are told by order.

    Such are units below `modules`, and those that the same policy has picked before.
    """
    states = _inside(modules)
    for transaction in running():
        if transaction.name == REPLICATE:
            states += [record.state for _, record in transaction.nested]
    grounds = [state.averaging.mesh_info for state in states if state.averaging.mesh_info is not None]
    return next(
        (mesh_info for mesh_info in grounds if mesh_info.all.capabilities.ordered and mesh_info.place == here.place),
        None,
    )


def _picked(modules: Sequence[nn.Module], policy: PolicyLike | None) -> dict[nn.Module, dict[str, Any]]:
    """The submodules that get buckets of their own, innermost first, with their overrides."""
    if policy is None:
        return {}
    if len(modules) > 1:
        raise AnnotationError("replicate: a policy picks units below one module; it cannot be given with a list")
    picked = select_modules(policy, modules[0])
    check_keywords("replicate", picked, ("mesh", "bucket_cap_mb", "mp_policy", "broadcast_buffers", "grad_reduce"))
    reachable = [m for _, m in walk(modules[0], stop=(SHARD, REPLICATE))]
    chosen = [(m, o) for m, o in picked.items() if m is not modules[0] and any(m is other for other in reachable)]
    return dict(reversed(chosen))


def _inside(modules: Sequence[nn.Module]) -> list[ReplicatedUnit]:
    """Replicated units below `modules`, outer ones first; not theirs, while they are being annotated."""
    return [state for each in modules for state in get_replicated_states(each)]


def _ignored_inside(module: nn.Module, ignored: Iterable[Any]) -> list[Any]:
    """The ignored parameters that are below `module`, as parameters."""
    items = [ignored] if isinstance(ignored, (str, nn.Module, nn.Parameter)) else list(ignored)
    ids = [id(p) for item in items for p in (item.parameters() if isinstance(item, nn.Module) else [item])]
    return [p for p in module.parameters() if id(p) in ids]


def _casts(
    modules: Sequence[nn.Module],
    parameters: Sequence[ManagedParameter],
    keeps: Sequence[bool],
    precision: MixedPrecisionPolicy,
) -> CastUnit | None:
    """What a unit's modules see in place of its parameters and buffers; None where they see these."""
    if precision == MixedPrecisionPolicy():
        return None
    refuse_unknown_buffers("replicate", modules, precision)
    cast: dict[int, tuple[nn.Module, list[str]]] = {}
    places = [place for managed in parameters for place in managed.places]
    for place, keep in zip(places, keeps, strict=True):
        if not keep:
            cast.setdefault(id(place.module), (place.module, []))[1].append(place.name)
    for module, names in cast.values():
        if not can_be_cast(module):
            raise AnnotationError(
                f"replicate: parameter '{names[0]}' of a {type(module).__name__} cannot be cast: it is not registered as "
                "torch.nn.Module does it; parameters of TorchScript modules are not. Leave mp_policy out for it"
            )
    holders = [CastHolder(module, frozenset(names), is_sparse_lookup(module)) for module, names in cast.values()]
    return CastUnit(precision, holders, buffer_holders(modules, precision, modules))


def _attach(
    modules: Sequence[nn.Module],
    parameters: Sequence[ManagedParameter],
    buffers: Sequence[Place],
    mesh_info: MeshInfo,
    cap_bytes: int,
    divisor: float | None,
    casts: CastUnit | None,
    exact: Sequence[nn.Module],
    keeps: Sequence[bool],
) -> None:
    unit = _unit_of(modules)
    named = [place for p in parameters for place in p.places]
    places = [Place(place.module, place.name) for place in named]
    on_undo(unit.restore)
    unit.initialize(
        modules,
        places,
        [place.fqn for place in named],
        buffers,
        mesh_info,
        cap_bytes,
        divisor,
        casts,
        exact,
        keeps,
    )
    for each in modules:
        on_undo(partial(detach, each, REPLICATE))
        attach(each, REPLICATE, unit)
    for undo in refuse_wrapping(modules, "replicate", places):
        on_undo(undo)
    inside = _inside(modules)
    unit.contain(inside)
    sharded = [state for each in modules for state in get_all_sharded_states(each)]
    if sharded:  # then all ranks run its forwards together
        unit.forward_steps.open_here(ShardsInside(sharded))
    mesh = next((state.handle.mesh_info.mesh for state in sharded), None)
    rest_as_dtensors([each.shown for each in (unit, *inside)], mesh)
