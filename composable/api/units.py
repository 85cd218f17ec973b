"""What `fully_shard` and `replicate` have in common: a plan for every unit of a call, and how a planned unit is attached.

A verb validates everything and plans all units of its call, agrees with the other ranks, and only then changes the modules.
A unit that a policy picks is annotated by a call of the verb, so that it has a record of its own; its plan is passed along.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from composable.api.arguments import (
    MixedPrecision,
    buffer_holders,
    exact_modules,
    ids_of_exact,
    inherited_policies,
    is_exact,
    move_buffers,
    precision_policy,
    refuse_unknown_buffers,
)
from composable.api.checks import Tied, note_originals, refuse_ddp_around, refuse_unfit, refuse_wrapped, tied_to_replicated
from composable.api.mesh import Mesh, Spread, communication_device
from composable.api.selection import by_unit, ids_of_ignored, managed_by, picked_units
from composable.comm import MeshInfo, mesh_info_of_replicas, mesh_info_of_shards
from composable.config import CPUOffloadPolicy, MixedPrecisionPolicy
from composable.contract.contract import on_undo
from composable.contract.hooks import attach, detach
from composable.contract.naming import require_callable
from composable.contract.traversal import SHARD, ManagedParameter, registered_parameters
from composable.engine.param import ParamInfo, Place
from composable.engine.unit import Unit, UnitSpec, settle
from composable.errors import AnnotationError
from composable.policies import PolicyLike


@dataclass(frozen=True, slots=True)
class UnitPlan:
    """One unit of a call, before it is attached.

    Attributes:
        options: the keyword arguments of its own call of the verb.
        parameters: with FQNs relative to the unit.
        device: of the parameters now, or once they leave the meta device.
        divisor: of the sum of gradients; None for the number of ranks.
        shard_dims: the dimension that each parameter is sharded along; None for one that is not.
        top: the modules that the user annotated.
    """

    verb: str
    modules: tuple[nn.Module, ...]
    options: Mapping[str, Any]
    parameters: tuple[ManagedParameter, ...]
    precision: MixedPrecisionPolicy
    spread: Spread | None
    device: torch.device
    top: tuple[nn.Module, ...]
    divisor: float | None = None
    shard_dims: tuple[int | None, ...] = ()
    reshard_after_forward: bool | int | None = None
    offload: CPUOffloadPolicy | None = None
    bucket_bytes: int = 0
    broadcast_buffers: tuple[Place, ...] = ()
    ignored: tuple[Place, ...] = ()

    def with_parameters(self, made: Mapping[int, nn.Parameter]) -> UnitPlan:
        """The same unit after parameters were materialised, given by the ids of those on the meta device."""
        if not made:
            return self
        renewed = [ManagedParameter(made.get(id(each.parameter), each.parameter), each.places) for each in self.parameters]
        return replace(self, parameters=tuple(renewed))

    def mesh_info(self) -> MeshInfo:
        """The communicators of the unit. May create process groups: all ranks of the mesh call it together."""
        if self.spread is None:
            return (mesh_info_of_shards if self.verb == SHARD else mesh_info_of_replicas)(None, self.device)
        mesh, device = self.spread.mesh, communication_device(self.spread.mesh, self.device)
        if self.verb != SHARD:
            return mesh_info_of_replicas(mesh, device)
        after = self.reshard_after_forward
        ranks = None if after is None or isinstance(after, bool) else after
        return mesh_info_of_shards(mesh, device, shard_dim=self.spread.shard_dim, post_forward_ranks=ranks)


@dataclass(frozen=True, slots=True)
class Selected:
    """What a call of a verb is about.

    Attributes:
        units: the annotated modules, then each module that a policy picked, in order.
        options: of each unit, the keyword arguments of its own call.
        shares: of each unit, its parameters.
        tied: parameters that stay with a replicated unit.
        ignored: the ids of parameters that the user leaves out.
    """

    units: list[tuple[nn.Module, ...]]
    options: list[dict[str, Any]]
    shares: list[list[ManagedParameter]]
    precisions: list[MixedPrecisionPolicy]
    tied: list[tuple[Unit, ManagedParameter]]
    ignored: dict[int, None] = field(default_factory=dict)

    @property
    def parameters(self) -> list[ManagedParameter]:
        return [managed for share in self.shares for managed in share]

    def ignored_in(self, modules: Sequence[nn.Module]) -> tuple[Place, ...]:
        found = [place for each in modules for place, p in registered_parameters(each) if id(p) in self.ignored]
        return tuple(Place(place.module, place.name) for place in found)


def select(
    verb: str,
    modules: Sequence[nn.Module],
    policy: PolicyLike | None,
    ignored_params: Iterable[Any] | None,
    mp_policy: MixedPrecision,
    spread: Spread | None,
    options: Mapping[str, Any],
    overridable: Sequence[str],
) -> Selected:
    """Which units and parameters a call is about, after all checks that both verbs make. Changes nothing.

    Args:
        options: the keyword arguments of the call that units inherit.
        overridable: the keywords that a policy may override.
    """
    for module in modules:
        require_callable(module)
    picked = picked_units(verb, modules, policy, overridable)
    ignored = ids_of_ignored(modules, ignored_params)
    everything = managed_by(modules, ignored)
    tied = tied_to_replicated(verb, modules, everything, None if spread is None else spread.mesh)
    left_out = ignored | {id(managed.parameter): None for _, managed in tied}
    shares = by_unit(modules, list(picked), [each for each in everything if id(each.parameter) not in left_out])
    parameters = [managed for share in shares for managed in share]
    refuse_wrapped(verb, modules, parameters)
    refuse_unfit(verb, parameters)
    precision = precision_policy(verb, mp_policy)
    inherited = inherited_policies(modules, picked, precision)
    units = [tuple(modules), *((unit,) for unit in picked)]
    each_options = [dict(options), *({**options, "mp_policy": inherited[unit], **own} for unit, own in picked.items())]
    precisions = [precision_policy(verb, each["mp_policy"]) for each in each_options]
    for unit, share, each in zip(units, shares, precisions, strict=True):
        refuse_unknown_buffers(verb, modules, each)
        exact = ids_of_exact(unit, each)
        for managed in share:
            is_exact(verb, managed, exact)
    return Selected(units, each_options, shares, precisions, tied, ignored)


def unit_spread(verb: str, top: Spread | None, mesh: Mesh, common: Mesh, make: Callable[..., Spread | None]) -> Spread | None:
    """The mesh of a unit, which a policy may have overridden.

    Args:
        top: of the annotated module, for `common`.
        make: called for another mesh, with the type of device that the ranks agreed on.
    """
    if mesh is common:
        return top
    if isinstance(mesh, tuple):
        raise AnnotationError(
            f"{verb}: a policy may override mesh with a DeviceMesh or a ProcessGroup, not with a pair of groups"
        )
    return make(mesh, device_type=None if top is None else top.mesh.device_type)


# --- attaching --------------------------------------------------------------------------------------------------------

# The plan for the call of a verb that is about to begin. A context variable: verbs may run in other threads.
_planned: Final[ContextVar[UnitPlan | None]] = ContextVar("composable_planned_unit", default=None)


def plan_for(module: nn.Module) -> UnitPlan | None:
    """The plan with which an outer call of the verb annotates `module`; None in a call of the user's."""
    plan = _planned.get()
    return plan if plan is not None and plan.modules[0] is module else None


def attach_all(verb: Callable[..., Any], plans: Sequence[UnitPlan], tied: Sequence[tuple[Unit, ManagedParameter]]) -> None:
    """Annotate the units that a policy picked, innermost first, then those modules that the user annotates.

    Args:
        plans: of the latter, then of the former, in order.
    """
    for plan in reversed(plans[1:]):
        token = _planned.set(plan)
        try:
            verb(plan.modules[0], **plan.options)
        finally:
            _planned.reset(token)
    top = plans[0]
    unit: Unit = verb.state(top.modules[0])  # type: ignore[attr-defined]
    attach_unit(unit, top)
    ties: list[Tied] = [
        (owner, managed.parameter, tuple(Place(place.module, place.name) for place in managed.places))
        for owner, managed in tied
    ]
    settle(top.modules, unit, ties)


def attach_unit(unit: Unit | None, plan: UnitPlan) -> None:
    """Hand the parameters to the engine, and let it run around the forwards of the modules."""
    assert unit is not None, "the verb is running"
    exact = ids_of_exact(plan.modules, plan.precision)
    dims = plan.shard_dims or (None,) * len(plan.parameters)
    params = tuple(
        ParamInfo(
            managed.fqn,
            tuple(Place(place.module, place.name) for place in managed.places),
            dim,
            is_exact(plan.verb, managed, exact),
        )
        for managed, dim in zip(plan.parameters, dims, strict=True)
    )
    mesh_info = plan.mesh_info()
    on_undo(unit.restore)
    note_originals(unit, plan.parameters)
    unit.initialize(
        UnitSpec(
            verb=plan.verb,
            modules=plan.modules,
            params=params,
            mesh_info=mesh_info,
            reshard_after_forward=plan.reshard_after_forward,
            mp_policy=plan.precision,
            buffer_holders=buffer_holders(plan.modules, plan.precision, plan.top),
            exact=exact_modules(plan.modules, plan.precision),
            divisor=plan.divisor,
            offload=plan.offload,
            bucket_bytes=plan.bucket_bytes,
            broadcast_buffers=plan.broadcast_buffers,
            left_alone=plan.ignored,
        )
    )
    if plan.verb == SHARD and mesh_info.mesh is not None:
        move_buffers(plan.modules, mesh_info.device)
    for module in plan.modules:
        on_undo(partial(detach, module, plan.verb))
        attach(module, plan.verb, unit)
    refuse_ddp_around(plan.verb, plan.modules)
