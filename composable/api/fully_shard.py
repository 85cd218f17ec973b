"""The verb `fully_shard`: validate, plan, attach. Moves no bytes itself and keeps no state of its own."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Final

from torch import nn

from composable.api.all_or_none import all_or_none, failures_told
from composable.api.devices import move_buffers
from composable.api.meshes import Mesh, Spread, device_of, meeting_place, mesh_info_of, refuse_unordered, spread_over
from composable.api.mp_policy import (
    MixedPrecision,
    buffer_holders,
    exact_modules,
    ids_of_exact,
    inherited_inside,
    is_exact,
    precision_policy,
    refuse_unknown_buffers,
)
from composable.api.offload_policy import Offload, note_no_effect, offload_policies, offload_policy_of
from composable.api.placements import Placement, Placements, placements_of
from composable.api.selection import check_keywords, ids_of_ignored, parameters_by_unit
from composable.api.sync_module_states import refuse_unknown_mode, synchronise
from composable.api.taken import refuse_taken, tell_of_gradients
from composable.api.ties import tied_to_replicated
from composable.config import (
    AfterForward,
    CPUOffloadPolicy,
    GradReduce,
    MixedPrecisionPolicy,
    after_forward,
    divisor_of,
    grad_reduce_in_words,
)
from composable.device.parameter_swap import ParamInfo, Place
from composable.errors import AnnotationError, unit_name
from composable.model.contract import contract, on_undo, require_callable
from composable.model.hooks import attach, detach
from composable.model.transaction import Transaction, running
from composable.model.traversal import (
    SHARD,
    ManagedParameter,
    get_replicated_states,
    get_states,
    names_below,
    registered_parameters,
    walk,
)
from composable.policies import PolicyLike, select_modules
from composable.policies.base import kind_of
from composable.runtime.handle import UnitSpec
from composable.runtime.inner_units import units_inside
from composable.runtime.launch_order import launch_together
from composable.runtime.membership import places_of_replicas
from composable.runtime.mesh_info import MeshInfo
from composable.runtime.model_parts import note_parts
from composable.runtime.sharded_unit import ShardedUnit
from composable.runtime.shown_parameters import rest_as_dtensors
from composable.runtime.wrappers import refuse_wrapped, refuse_wrapping

_EQUIVALENTS: Final = {
    "auto_wrap_policy": "policy=",
    "sharding_strategy": "write reshard_after_forward=True for FULL_SHARD, False for SHARD_GRAD_OP, or call replicate()",
    "use_orig_params": "parameters always keep their identity and names; leave it out",
    "device_mesh": "mesh=",
    "dp_mesh_dims": "pass the slice of its data-parallel dimensions, mesh=mesh[...]",
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

_FOR_UNITS: Final = ("mesh", "reshard_after_forward", "mp_policy", "offload_policy", "shard_placement_fn", "grad_reduce")


@contract(
    state_cls=ShardedUnit,
    clashes={"replicate": "a module can be sharded or replicated, not both. Call remove(module, replicate) first"},
    equivalents=_EQUIVALENTS,
)
def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: Mesh = None,
    policy: PolicyLike | None = None,
    reshard_after_forward: bool | int | None = None,
    mp_policy: MixedPrecision = None,
    offload_policy: Offload = None,
    shard_placement_fn: Placement | None = None,
    grad_reduce: GradReduce = "mean",
    ignored_params: Iterable[Any] = (),
    sync_module_states: str = "check",
) -> Any:
    """Shard the parameters, gradients and optimizer state of `module` over the ranks of a mesh, in place.

    Every rank keeps 1/n of each parameter, as a `DTensor` under its old name. Around the module's forward, and
    again around its backward, the parameters are gathered; in backward the gradients are averaged and scattered. The next
    module's parameters are gathered while this one computes. Annotate inner modules first, or name them in `policy`: each
    is gathered and freed on its own, so that only two of them are whole at any time.

    All ranks of the mesh call this together, with the same module.

    Args:
        module: a module, or a list of modules that form one unit.
        mesh: a `DeviceMesh`, a `ProcessGroup`, or None for all ranks. One process without a process group is fine. A mesh of
            two dimensions shards over one and replicates over the other (hybrid sharding). Names that contain "replicate" and
            "shard" tell which is which; without names the first one is replicated over.
        policy: which submodules become units of their own; see `composable.policies`. What is left over belongs to `module`.
        reshard_after_forward: None frees the parameters after forward and gathers them again in backward, except those that
            backward needs first: of the unit that ran last, and of the units around it. True frees them all (ZeRO-3); False
            keeps them until backward is done (ZeRO-2); a number keeps a shard over that many neighbouring ranks.
        mp_policy: a `MixedPrecisionPolicy`, composable's or torch's, or a dtype or its name ("bf16") to compute in. Parameters,
            gradients, optimizer state and what is saved keep the dtype that the parameters have.
        offload_policy: a `CPUOffloadPolicy`, composable's or torch's: shards, their gradients and the optimizer's state rest in
            the host's memory. Nothing changes on a mesh of CPUs, which is said once.
        shard_placement_fn: `fn(parameter) -> Shard | None`: shard another dimension than 0.
        grad_reduce: what becomes of the sum of gradients over all ranks of the mesh: "mean" divides it by their number, "sum"
            leaves it, a positive number divides it by that number.
        ignored_params: parameters, or modules, FQNs and globs that stand for theirs, to leave alone.
        sync_module_states: "check" compares names, shapes, dtypes and values across ranks and names the first difference;
            "broadcast" copies rank 0's values; "off" trusts the caller.

    Returns:
        What it was given.

    Raises:
        AnnotationError: the module is annotated already, inside an annotated one, replicated, or has no forward; a keyword
            is unknown; ignored_params matches nothing; a parameter would belong to two units.
        MeshError: the mesh has more than two dimensions, or two that do not say what they are for; it lists
            ranks in another order than process groups do, or does not hold this rank.
        RanksDisagreeError: the ranks do not hold the same module.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        >>> fully_shard(model, policy={nn.Linear}) is model
        True

    After Zhao et al., "PyTorch FSDP" (VLDB 2023), and Rajbhandari et al., "ZeRO" (SC 2020).
    """
    modules = module if isinstance(module, list) else [module]
    assigned = _assigned.get()
    if assigned is not None and assigned.module is modules[0] and assigned.within in running():
        after = _after_forward(reshard_after_forward)
        spread, precision = _spread_over(modules[0], mesh), precision_policy("fully_shard", mp_policy)
        mesh_info = mesh_info_of(spread, device_of(modules[0]), after)
        divisor, mine = divisor_of("fully_shard", grad_reduce), offload_policy_of("fully_shard", offload_policy)
        top = assigned.top
        _attach_unit(modules, assigned.parameters, assigned.placements, mesh_info, after, precision, divisor, top, mine)
        return module
    spread = _spread_over(modules[0], mesh)
    communicator = meeting_place("fully_shard", spread, device_of(modules[0]))
    common: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": reshard_after_forward, "mp_policy": mp_policy}
    common |= {"shard_placement_fn": shard_placement_fn, "grad_reduce": grad_reduce, "offload_policy": offload_policy}
    with failures_told("fully_shard", communicator):
        refuse_unknown_mode(sync_module_states)
        after, precision = _after_forward(reshard_after_forward), precision_policy("fully_shard", mp_policy)
        _refuse_misplaced(modules)
        tied = tied_to_replicated(modules, None if spread is None else spread.mesh)
        left_out = ids_of_ignored(modules, ignored_params) | {id(managed.parameter): None for _, managed in tied}
        picked = _picked(modules, policy)
        shares = parameters_by_unit(modules, list(picked), left_out)
        refuse_wrapped(modules, "fully_shard", everything := list(chain(*shares)))
        refuse_taken("fully_shard", modules, everything)
        inherited = inherited_inside(modules, list(picked), precision)
        options = [common, *({**common, "mp_policy": inherited[unit], **overrides} for unit, overrides in picked.items())]
        for unit, share, own in zip([modules, *([child] for child in picked)], shares, options, strict=True):
            _refuse_unfit_precision(modules, unit, share, precision_policy("fully_shard", own["mp_policy"]))
        # Asked from the innermost unit outwards, as units are made, and once: the function is the user's.
        placements = [
            placements_of(share, o["shard_placement_fn"]) for share, o in zip(shares[::-1], options[::-1], strict=True)
        ]
        placements.reverse()
        each_unit = zip([modules[0], *picked], options, placements, strict=True)
        treatment = [text for unit, o, placed in each_unit for text in _treatment(modules[0], unit, o, placed)]
        offload = offload_policies("fully_shard", options, None if spread is not None else device_of(modules[0]))
    synchronise("fully_shard", everything, communicator, sync_module_states, treatment)
    tell_of_gradients([] if spread is None else everything)
    mesh_info = mesh_info_of(spread, device_of(modules[0]), after)
    with all_or_none("fully_shard", communicator, *mesh_info.communicators[1:]):
        innermost_first = list(zip(picked, shares[1:], placements[1:], options[1:], strict=True))[::-1]
        for child, share, placed, own in innermost_first:
            token = _assigned.set(_Assignment(child, share, placed, running()[-1], modules))
            try:
                fully_shard(child, **own)
            finally:
                _assigned.reset(token)
        divisor = divisor_of("fully_shard", grad_reduce)
        _attach_unit(modules, shares[0], placements[0], mesh_info, after, precision, divisor, modules, offload[0])
        for each in (modules, *([child] for child in picked)):
            _leave_alone(each, left_out)
        _name_units(modules)
        replicated = [state for each in modules for state in get_replicated_states(each)]
        ties = [(shown, Place(place.module, place.name), place.fqn) for shown, managed in tied for place in managed.places]
        rest_as_dtensors([unit.shown for unit in replicated], mesh_info.mesh, ties)
        launch_together([unit.averaging for unit in replicated])
        note_parts(modules, mesh_info)
    note_no_effect("fully_shard", offload, mesh_info)
    return module


@dataclass(frozen=True, slots=True)
class _Assignment:
    """What a call with a policy has decided for one of the units that it annotates."""

    module: nn.Module
    parameters: Sequence[ManagedParameter]
    placements: Placements
    within: Transaction  # an interrupt may leave this behind
    top: Sequence[nn.Module]  # that the call annotates


# A context variable, so that verbs running in other threads do not see each other.
_assigned: ContextVar[_Assignment | None] = ContextVar("what_a_policy_decided", default=None)


def _treatment(module: nn.Module, unit: nn.Module, options: Mapping[str, Any], placements: Placements) -> list[str]:
    """For each parameter of a unit, what the arguments come to, in words that are the same on ranks that agree."""
    after, mesh = (options[name] for name in ("reshard_after_forward", "mesh"))
    _after_forward(after)
    name = unit_name(names_below(module).get(id(unit), ""))
    precision = str(precision_policy("fully_shard", options["mp_policy"]))
    over = "" if mesh is None else _in_words(_spread_over(unit, mesh))
    cast = f", {precision}" if precision else ""
    reduced = grad_reduce_in_words(divisor_of("fully_shard", options["grad_reduce"]))
    cast += "" if reduced == "mean" else f", grad_reduce {reduced}"
    cast += "" if offload_policy_of("fully_shard", options["offload_policy"]) is None else ", offloaded"
    return [f"unit '{name}', reshard_after_forward={after}{over}, dimension {dim}{cast}" for dim in placements]


def _after_forward(value: object) -> AfterForward:
    if not isinstance(value, int | None):
        raise AnnotationError(f"reshard_after_forward must be None, True, False or a number of ranks, got {kind_of(value)}")
    return after_forward(value)


def _spread_over(module: nn.Module, mesh: Mesh) -> Spread | None:
    spread = spread_over("fully_shard", mesh, device_of(module), hybrid=True)
    if spread is not None:
        refuse_unordered("fully_shard", spread)
    return spread


def _refuse_unfit_precision(
    top: Sequence[nn.Module], modules: Sequence[nn.Module], share: Sequence[ManagedParameter], precision: MixedPrecisionPolicy
) -> None:
    refuse_unknown_buffers("fully_shard", top, precision)
    below = ids_of_exact(modules, precision)
    for managed in share:
        is_exact(managed, below, "fully_shard")


def _in_words(spread: Spread | None) -> str:
    if spread is None:
        return ""
    if spread.replicate is None:
        return f", over ranks {spread.mesh.mesh.tolist()}"
    return f", over the replicas {spread.mesh.mesh.movedim(spread.shard, -1).tolist()}"


def _picked(modules: Sequence[nn.Module], policy: PolicyLike | None) -> dict[nn.Module, dict[str, Any]]:
    """The submodules that become units, in order, with their overrides."""
    if policy is None:
        return {}
    if len(modules) > 1:
        raise AnnotationError("fully_shard: a policy picks units below one module; it cannot be given with a list")
    picked = select_modules(policy, modules[0])
    check_keywords("fully_shard", picked, _FOR_UNITS)
    chosen = {}
    skipped = [m for _, m in walk(modules[0], stop=("replicate", SHARD))]
    for module, overrides in picked.items():
        if module is modules[0] or not any(module is known for known in skipped) or is_read_by_parent(module):
            continue
        require_callable(module)
        chosen[module] = overrides
    return chosen


def is_read_by_parent(module: nn.Module) -> bool:
    """Whether a module's parameters are read by its parent, which never calls it: `nn.MultiheadAttention.out_proj`."""
    return isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)


def _refuse_misplaced(modules: Sequence[nn.Module]) -> None:
    for module in modules:
        require_callable(module)
        if is_read_by_parent(module):
            raise AnnotationError(
                "fully_shard: 'out_proj' is read by its parent (MultiheadAttention) without being called, so nothing would "
                "gather its parameters; annotate the MultiheadAttention instead"
            )


def _attach_unit(
    modules: Sequence[nn.Module],
    parameters: Sequence[ManagedParameter],
    placements: Placements,
    mesh_info: MeshInfo,
    after: AfterForward,
    precision: MixedPrecisionPolicy,
    divisor: float | None,
    top: Sequence[nn.Module],
    offload: CPUOffloadPolicy | None,
) -> None:
    """Shard `parameters` and hook `modules` as one unit. Everything that the user got wrong has been refused before."""
    unit = fully_shard.state(modules[0])
    assert unit is not None
    below = ids_of_exact(modules, precision)
    spec = UnitSpec(
        params=tuple(
            _info(each, dim, exact=is_exact(each, below, "fully_shard"))
            for each, dim in zip(parameters, placements, strict=True)
        ),
        mesh_info=mesh_info,
        after_forward=after,
        mp_policy=precision,
        holders=buffer_holders(modules, precision, top),
        exact=tuple(exact_modules(modules, precision)),
        divisor=divisor,
        offload=offload,
    )
    on_undo(unit.restore)
    unit.initialize(modules, spec)
    if mesh_info.mesh is not None:
        move_buffers(modules, mesh_info.device)
    for module in modules:
        on_undo(partial(detach, module, SHARD))
        attach(module, SHARD, unit.bracket)
    for undo in refuse_wrapping(modules, "fully_shard", [place for info in spec.params for place in info.places]):
        on_undo(undo)


def _info(managed: ManagedParameter, cut_dim: int | None, *, exact: bool) -> ParamInfo:
    places = tuple(Place(place.module, place.name) for place in managed.places)
    return ParamInfo(managed.fqn, places, cut_dim, managed.parameter.stride(), exact)


def _leave_alone(modules: Sequence[nn.Module], left_out: Collection[int]) -> None:
    """Note where parameters are that are not its own; others that no unit has are refused when they train."""
    unit = fully_shard.state(modules[0])
    assert unit is not None
    places = [place for module in modules for place, parameter in registered_parameters(module) if id(parameter) in left_out]
    unit.inner.left_alone += [Place(place.module, place.name) for place in places]
    unit.inside = [inner for inner in units_inside(modules) if inner is not unit.inner]
    unit.replicated_inside = places_of_replicas(modules)


def _name_units(modules: Sequence[nn.Module]) -> None:
    """Name the units below by their FQN for messages; the root of a forward names them again."""
    for module in modules:
        states = get_states(module)
        for name, below in walk(module, stop=("replicate",)):
            for state in states:
                if state.modules and state.modules[0] is below:
                    state.rename(name)
                    around = None if state.enclosing is None else state.enclosing()
                    if below is not module and (around is None or around.spec is None):
                        state.enclosed_by(fully_shard.state(module))
