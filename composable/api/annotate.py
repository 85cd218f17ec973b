"""What `fully_shard` and `replicate` have in common: a plan for every unit of a call, and how a
planned unit is attached.

A verb validates everything and plans all units of its call, agrees with the other ranks, and only
then changes the modules. A unit that a policy picks is annotated by a call of the verb, so that it
has a record of its own; that call finds its plan in `_planned`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from composable.api import agreement, arguments, checks
from composable.api.explicit_calls import no_sync
from composable.api.mesh import MeshPlan, device_of, mesh_plan_for, own_mesh_plan
from composable.api.tensor_parallel import forms_of
from composable.checked import check_arguments, is_bool
from composable.comm.backends import comm_of
from composable.comm.mesh_info import (
    MeshInfo,
    communication_device,
    mesh_info_of_replicas,
    mesh_info_of_shards,
)
from composable.compilation import is_traced
from composable.config import MixedPrecisionPolicy, divisor_of, grad_reduce_in_words
from composable.contract.contract import (
    Verb,
    add_attribute,
    bind_method,
    modules_of,
    on_undo,
    require_callable,
    unbind_method,
)
from composable.contract.hooks import attach, detach
from composable.contract.tree import (
    REPLICATE,
    SHARD,
    Managed,
    Place,
    T,
    managed_buffers,
    managed_parameters,
    names_below,
    registered_parameters,
)
from composable.engine.edits.annotations import restore, settle
from composable.engine.edits.copies import attach_copying, detach_copying
from composable.engine.edits.loading import StateDictHooks, keep_attributes
from composable.engine.gradients.unit_gradients import UnitKind
from composable.engine.params.param import ParamInfo
from composable.engine.params.precision import ExactModule
from composable.engine.step.unit import Unit, UnitSpec
from composable.engine.step.visit import GRADIENT_HOOKS, Visit
from composable.errors import unit_name
from composable.features.groups import GroupingByForm
from composable.features.param_forms import prepare_packed
from composable.policies import PolicyLike
from composable.tensors import is_packed


class ParamPlan(NamedTuple):
    """One parameter of a unit, before it is attached.

    Attributes:
        managed: with its FQN relative to the unit.
        own: its mesh, if it is not the unit's.
        info: without what depends on its mesh.
    """

    managed: Managed[nn.Parameter]
    own: MeshPlan | None
    info: ParamInfo


@dataclass(frozen=True, slots=True)
class UnitPlan:
    """One unit of a call, before it is attached.

    Attributes:
        top: the modules that the user annotated.
        options: the keyword arguments of its own call of the verb.
        mesh_plan: its mesh; None in a single process without a process group.
        device: of the parameters now, or once they leave the meta device.
        settings: the fields of its `UnitSpec` that do not depend on what is attached first.
    """

    modules: tuple[nn.Module, ...]
    top: tuple[nn.Module, ...]
    options: Mapping[str, Any]
    params: list[ParamPlan]
    precision: MixedPrecisionPolicy
    mesh_plan: MeshPlan | None
    device: torch.device
    settings: dict[str, Any]


# transformers reads this attribute, which FSDP2 sets: `generate` of all ranks then makes equally
# many tokens, and LayerDrop calls each layer on every rank.
_MANAGED: Final = "_is_fsdp_managed_module"

_OBSERVERS: Final[list[Callable[[str, Sequence[UnitPlan]], None]]] = []


def observe_annotations(notify: Callable[[str, Sequence[UnitPlan]], None]) -> Callable[[], None]:
    """Call this after each call of a verb, with its name and the plans of its units; returns what
    ends it.
    """
    _OBSERVERS.append(notify)
    return lambda: _OBSERVERS.remove(notify)


# The plan for the call of a verb that is about to begin. A context variable: verbs may run in other
# threads.
_planned: Final[ContextVar[UnitPlan | None]] = ContextVar("composable_planned_unit", default=None)


def annotate(
    verb: Verb[..., Unit],
    module: nn.Module | Sequence[nn.Module],
    policy: PolicyLike | None,
    ignored_params: arguments.Ignored,
    sync_module_states: str,
    options: dict[str, Any],
) -> None:
    """The body of both verbs.

    Args:
        options: the other arguments, which units inherit and a policy may override.
    """
    name = verb.__name__
    modules = modules_of(name, module)
    plan = _planned.get()
    # an outer call of the verb annotates what its policy picked
    if plan is not None and plan.modules[0] is modules[0]:
        _attach(verb, plan)
        return
    if isinstance(ignored_params, Iterator):  # it is read twice
        ignored_params = list(ignored_params)
    mesh_plan = mesh_plan_for(name, options["mesh"], modules)
    device = device_of(modules)
    comm = comm_of(None, device) if mesh_plan is None else mesh_plan.comm_of_all(device)
    across = agreement.comms_of_parameters(modules, ignored_params, comm.device)
    with agreement.failures_shared_with(name, across, "tensor-parallel rank"):
        with agreement.failures_shared(name, comm, sync_module_states):
            check_arguments(verb, {**options, "ignored_params": ignored_params})
            plans, tied, buffers = _planned_units(
                verb, modules, policy, ignored_params, mesh_plan, options
            )
            params = [each for plan in plans for each in plan.params]
            parameters = [each.managed for each in params]
            names = names_below(modules[0])
            treatment = [text for plan in plans for text in _treatment(name, plan, names)]
        # the meshes of parameters that have one of their own
        apart = dict.fromkeys(each.own for each in params if each.own is not None)
        left_out = {id(each.managed.tensor) for each in params if each.own is not None}
        agreement.synchronise(
            name, comm, sync_module_states, parameters, buffers, treatment, left_out
        )
        with agreement.failures_shared_with(name, [comm] if apart else [], "rank of the module"):
            for own in apart:
                members = [each.managed for each in params if each.own == own]
                over = own.comm_of_all(device)
                # ranks that agree on the arguments may be others
                agreement.synchronise(
                    name, over, sync_module_states, members, [], [""] * len(members)
                )
    for plan in plans:
        _note_meshes(name, plan)
    if mesh_plan is not None:
        checks.warn_of_one_rank(name, modules[0], mesh_plan.mesh, parameters)
        if name == SHARD:
            checks.warn_of_gradients(parameters)
    for plan in reversed(plans[1:]):  # the innermost first
        token = _planned.set(plan)
        try:
            verb(plan.modules[0], **plan.options)
        finally:
            _planned.reset(token)
    unit = _attach(verb, plans[0])
    settle(modules, unit, [(owner, managed.tensor, managed.places) for owner, managed in tied])
    checks.warn_of_padding(
        state for plan in plans if (state := verb.state(plan.modules[0])) is not None
    )
    if name == SHARD and any(plan.settings["grouping"].on_host for plan in plans):
        arguments.warn_of_no_offload(comm.device)
    for notify in _OBSERVERS:
        notify(name, plans)


def _planned_units(
    of: Verb[..., Unit],
    modules: tuple[nn.Module, ...],
    policy: PolicyLike | None,
    ignored_params: arguments.Ignored,
    mesh_plan: MeshPlan | None,
    options: dict[str, Any],
) -> tuple[list[UnitPlan], list[tuple[Unit, Managed[nn.Parameter]]], list[Managed[Tensor]]]:
    """The plans of the annotated modules and of each one that the policy picks, in order; what
    stays with another unit; and the buffers.

    Makes all checks, and changes nothing.
    """
    verb = of.__name__
    for module in modules:
        if verb == SHARD:
            arguments.refuse_read_by_parent(module)
        require_callable(module)
    picked = arguments.picked_units(verb, modules, policy, tuple(options))
    for overrides in picked.values():
        check_arguments(of, overrides)
    ignored = arguments.ids_of_ignored(modules, ignored_params)
    replicated = checks.replicated_by_torch(modules) if verb == SHARD else {}
    ignored |= {id(p): None for module in replicated for p in module.parameters(False)}
    picked = {module: own for module, own in picked.items() if module not in replicated}
    managed = managed_parameters(modules, ignored=ignored)
    mesh = None if mesh_plan is None else mesh_plan.mesh
    tied = checks.tied_to_replicated(verb, modules, managed, mesh)
    left_out = {id(each.tensor) for _, each in tied}
    managed = [each for each in managed if id(each.tensor) not in left_out]
    checks.refuse_wrapped(verb, modules, managed)
    held = managed_buffers(modules, ignored=ignored)
    checks.refuse_lazy([*managed, *held])
    checks.refuse_unfit(verb, managed)
    precision = arguments.precision_policy(verb, options["mp_policy"])
    inherited = arguments.inherited_policies(modules, picked, precision)
    units = [(modules, options)]
    units += [((u,), {**options, "mp_policy": inherited[u], **own}) for u, own in picked.items()]
    shares = _by_unit(modules, list(picked), managed)
    buffers = _by_unit(modules, list(picked), held)
    # From the innermost unit outwards, as units are made: shard_placement_fn is the user's, and
    # asked once per parameter.
    plans = []
    for (unit, own), share, followed in reversed([*zip(units, shares, buffers, strict=True)]):
        over = mesh_plan
        if own["mesh"] is not options["mesh"]:
            kind = None if mesh_plan is None else mesh_plan.mesh.device_type
            over = mesh_plan_for(verb, own["mesh"], unit, kind)
        plans.append(_plan(verb, modules, unit, own, over, share, followed, ignored))
    return plans[::-1], tied, held


def _plan(
    verb: str,
    top: tuple[nn.Module, ...],
    modules: tuple[nn.Module, ...],
    options: dict[str, Any],
    mesh_plan: MeshPlan | None,
    share: list[Managed[nn.Parameter]],
    buffers: list[Managed[Tensor]],
    ignored: Mapping[int, None],
) -> UnitPlan:
    precision, device = arguments.precision_policy(verb, options["mp_policy"]), device_of(modules)
    arguments.refuse_unknown_buffers(verb, top, precision)
    settings: dict[str, Any] = {"divisor": divisor_of(options["grad_reduce"])}
    if verb == SHARD:
        after = options["reshard_after_forward"]
        if after is not None:  # NumPy's types, too: it is asked by `is` whether it is True or False
            after = bool(after) if is_bool(after) else int(after)
        settings["reshard_after_forward"] = after
        arguments.check_reshard_after_forward(mesh_plan, after)
        settings["prefetch"] = int(options["prefetch"])
        offload = arguments.offload_policy_of(
            verb, options["offload_policy"], device if mesh_plan is None else None
        )
        # plain parameters that rest on the device: one `ShardedGroup`
        settings["grouping"] = GroupingByForm(precision, offload)
        if offload is not None and mesh_plan is not None:
            checks.refuse_dtensor_offload(share, communication_device(mesh_plan.mesh, device))
    else:
        mib = float(options["bucket_cap_mb"])  # small types of NumPy overflow
        settings["bucket_bytes"] = max(1, int(mib * (1 << 20)))
        settings["keeps_buckets"] = options["gradient_as_bucket_view"]
        if mesh_plan is not None:
            arguments.refuse_elsewhere(
                verb, [*share, *buffers], communication_device(mesh_plan.mesh, device)
            )
        followed = buffers if options["broadcast_buffers"] else []
        settings["broadcast_buffers"] = tuple(place for each in followed for place in each.places)
    exact, params = arguments.ids_of_exact(modules, precision), []
    ranks = 1 if mesh_plan is None else mesh_plan.num_shards
    for managed in share:
        dim = own = None
        if verb == SHARD:
            dim, given = arguments.placement_of(managed, options["shard_placement_fn"], ranks)
            if given is not None and mesh_plan is not None:
                own = own_mesh_plan(verb, managed.fqn, given, mesh_plan)
                arguments.check_reshard_after_forward(own, after)
            if (over := own or mesh_plan) is not None:
                checks.refuse_unfit_extension(managed, dim, over, settings, device)
        checks.refuse_dtensor(verb, managed, own or mesh_plan)
        is_exact = is_packed(managed.tensor) or all(
            id(place.module) in exact for place in managed.places
        )
        keeps = precision.keeps_dtype_of(managed.tensor, managed.fqn)
        info = ParamInfo(managed.fqn, managed.places, dim, is_exact, keeps)
        params.append(ParamPlan(managed, own, info))
    settings["left_alone"] = tuple(
        place for each in modules for place, p in registered_parameters(each) if id(p) in ignored
    )
    return UnitPlan(modules, top, options, params, precision, mesh_plan, device, settings)


def _by_unit(
    modules: Sequence[nn.Module], picked: Sequence[nn.Module], everything: Sequence[Managed[T]]
) -> list[list[Managed[T]]]:
    """The parameters, or buffers, of the unit `modules`, then those of each unit in `picked`, with
    FQNs relative to their unit.

    A parameter that is tied across units goes to the innermost unit that contains all its places:
    it is unsharded whenever one of them computes.
    """
    if not picked:
        return [list(everything)]
    chains = _enclosing_units(modules[0], picked)
    names = {id(m): name for name, m in modules[0].named_modules()}
    shares: list[list[Managed[T]]] = [[] for _ in range(len(picked) + 1)]
    for managed in everything:
        common = chains[id(managed.places[0].module)]
        for place in managed.places[1:]:
            common = tuple(unit for unit in common if unit in chains[id(place.module)])
        owner = common[-1] if common else 0
        prefix = names[id(picked[owner - 1])] + "." if owner else ""
        places = tuple(
            Place(place.module, place.name, place.fqn.removeprefix(prefix))
            for place in managed.places
        )
        shares[owner].append(Managed(managed.tensor, places))
    return shares


def _enclosing_units(root: nn.Module, picked: Sequence[nn.Module]) -> dict[int, tuple[int, ...]]:
    """For every module below `root`, by its id: the picked units around it, outermost first,
    counted from 1.
    """
    number = {id(module): index + 1 for index, module in enumerate(picked)}
    chains: dict[int, tuple[int, ...]] = {}

    def visit(module: nn.Module, chain: tuple[int, ...]) -> None:
        if id(module) in number:
            chain = (*chain, number[id(module)])
        # reached on another path: only units on all paths enclose it and what is below it
        if id(module) in chains:
            known = chains[id(module)]
            chain = tuple(unit for unit in known if unit in chain)
            if chain == known:
                return
        chains[id(module)] = chain
        for child in module.children():
            visit(child, chain)

    visit(root, ())
    return chains


_OF_BUCKETS: Final = ("bucket_cap_mb", "broadcast_buffers")


def _treatment(verb: str, plan: UnitPlan, names: Mapping[int, str]) -> list[str]:
    """For each parameter, what the arguments mean for it, as text; ranks compare these texts.

    Args:
        names: the FQNs of modules, by their ids.
    """
    settings, rest = plan.settings, [str(plan.precision)]
    if settings["divisor"] is not None:
        rest.append(f"grad_reduce {grad_reduce_in_words(settings['divisor'])}")
    if verb == REPLICATE:
        start = ", ".join(f"{key}={plan.options[key]}" for key in _OF_BUCKETS)
        if settings["keeps_buckets"]:
            rest.append("gradient_as_bucket_view=True")
    else:
        name = unit_name(names.get(id(plan.modules[0]), ""))
        start = f"unit '{name}', reshard_after_forward={settings['reshard_after_forward']}"
        if plan.options["mesh"] is not None and plan.mesh_plan is not None:
            start += f", over ranks {plan.mesh_plan.rows.tolist()}"
        if settings["grouping"].on_host:
            rest.append("offloaded")
        if settings["prefetch"] != 1:
            rest.append(f"prefetch={settings['prefetch']}")
    texts = []
    for _, own, info in plan.params:
        said = [start]
        if verb == SHARD:
            said.append(f"dimension {info.shard_dim}")
        if own is not None:
            said.append(f"over a mesh {own.mesh.mesh_dim_names or ''} {tuple(own.mesh.shape)}")
        if info.keeps:
            said.append("computes in its own dtype")
        texts.append(", ".join(filter(None, [*said, *rest])))
    return texts


def _note_meshes(verb: str, plan: UnitPlan) -> None:
    """Note the meshes of parameters that have one of their own, and of tensor-parallel ones.

    May create process groups: all ranks of these meshes call it together.
    """
    infos = {
        own: None if own is None else _mesh_info(verb, plan, own)
        for own in dict.fromkeys(each.own for each in plan.params)
    }
    mesh_plans = [each.own or plan.mesh_plan for each in plan.params]
    forms = forms_of(verb, [each.managed for each in plan.params], mesh_plans, plan.device)
    plan.settings["params"] = tuple(
        replace(each.info, form=form, mesh_info=infos[each.own])
        for each, form in zip(plan.params, forms, strict=True)
    )


def _attach(verb: Verb[..., Unit], plan: UnitPlan) -> Unit:
    """Hand the parameters to the engine, and let it run around the forwards of the modules.

    `contract` has made an empty `Unit`, the state of the verb; this fills it.
    """
    name, unit = verb.__name__, verb.state(plan.modules[0])
    assert unit is not None, "the verb is running"
    mesh_info = _mesh_info(name, plan, plan.mesh_plan)
    spec = UnitSpec(
        verb=name,
        modules=plan.modules,
        mesh_info=mesh_info,
        mp_policy=plan.precision,
        buffer_holders=arguments.buffer_holders(plan.modules, plan.precision, plan.top),
        **plan.settings,
    )
    on_undo(partial(restore, unit))
    low, hooks = spec.mp_policy.param_dtype, StateDictHooks(unit)
    unit.initialize(spec, GRADIENT_HOOKS, hooks.watch)
    for exact in arguments.exact_modules(plan.modules, plan.precision):  # none, if nothing is cast
        assert low is not None
        on_undo(ExactModule(exact, low).remove)
    holders = dict.fromkeys(place.module for param in spec.params for place in param.places)
    # State dicts have buffers of modules without parameters, too.
    with_buffers = dict.fromkeys(each.module for each in spec.buffer_holders)
    for undo in (step for each in holders for step in prepare_packed(each, mesh_info.device)):
        on_undo(undo)
    for undo in (*hooks.watch({**holders, **with_buffers}), *keep_attributes(holders)):
        on_undo(undo)
    for module in plan.modules:
        attach_copying(module)  # `copy.deepcopy` and pickle
        on_undo(partial(detach_copying, module))
    unit.build()
    if mesh_info.mesh is not None:
        for module in arguments.own_modules(plan.modules):
            add_attribute(module, _MANAGED, _GathersFlag(unit))
        if name == SHARD:
            arguments.move_buffers(plan.modules, mesh_info.device)
    visit = Visit(unit)
    for module in plan.modules:
        on_undo(partial(detach, module, name))
        attach(module, name, visit)
        if plan.modules is plan.top and "no_sync" not in vars(module):
            # where loops written for DDP, and trainers, look for it
            on_undo(partial(unbind_method, module, "no_sync"))
            bind_method(module, "no_sync", no_sync)
    checks.refuse_torch_around(name, plan.modules)
    return unit


class _GathersFlag:
    """True if all ranks must call a module equally often; see `_MANAGED`. Not inside of
    `keep_unsharded`: nothing is gathered.

    False in a pickled module, and to torch.compile, which leaves out guards of modules that FSDP
    manages.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit = ref(unit)

    def __bool__(self) -> bool:
        unit = self._unit()
        if unit is None or not unit.modules or unit.kept_by or is_traced():
            return False
        return unit.kind in (UnitKind.SHARDED, UnitKind.BESIDE)

    def __deepcopy__(self, memo: dict[int, Any]) -> _GathersFlag | bool:
        unit = self._unit()
        return False if unit is None else _GathersFlag(copy.deepcopy(unit, memo))

    def __reduce__(self) -> tuple[type[bool], tuple[()]]:
        return bool, ()


def _mesh_info(verb: str, plan: UnitPlan, mesh_plan: MeshPlan | None) -> MeshInfo:
    """The communicators of the unit, or of some of its parameters.

    May create process groups: all ranks of the mesh call it together.
    """
    if mesh_plan is None:
        return mesh_info_of_replicas(None, plan.device)
    mesh, device = mesh_plan.mesh, communication_device(mesh_plan.mesh, plan.device)
    if verb == REPLICATE:
        return mesh_info_of_replicas(mesh, device)
    ranks = arguments.ranks_after_forward(plan.settings["reshard_after_forward"])
    return mesh_info_of_shards(
        mesh, device, shard_dim=mesh_plan.shard_dim, post_forward_ranks=ranks
    )
