"""Once per root forward: find what users did to parameters, modules and hooks since the last one; adopt it or refuse it by name.

Nearly always nothing happened. So what the units left is compared in a few calls that run in C, and only a difference is looked
into unit by unit.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composable.contract.hooks import hooks_attached
from composable.contract.traversal import get_all_sharded_states, get_replicated_states, names_below
from composable.engine.param import ManagedParam, Place, describe_mesh, label_of, set_label, trainability, unit_of
from composable.errors import (
    AnnotationError,
    ForeignParameterError,
    HooksRemovedError,
    MeshError,
    PhaseError,
    few,
    still_on_meta,
)
from composable.memory.torch_private import active_ddp, as_tensors, innermost, local_of, outside_transforms

if TYPE_CHECKING:
    from composable.engine.root import Root
    from composable.engine.unit import Unit


logger = logging.getLogger("composable")
_dtype_of: Final = attrgetter("dtype")


class Preparation:
    """The check of one root."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._watched: list[Any] | None = None  # what was found when everything was in order
        self._looked_around = False
        self._owners: dict[int, tuple[Unit, ManagedParam]] = {}  # by the id of a form
        self._strangers: list[nn.Parameter] = []  # frozen, and managed by no unit: refused once they train

    def prepare(self) -> None:
        """Raise for what cannot be computed with; rebuild the groups of units whose parameters changed."""
        root = self._root
        ddp = active_ddp()
        if ddp is not None and _averages(ddp, root.units):
            raise AnnotationError(
                f"unit '{root.name}' is called inside DistributedDataParallel, which would average gradients once more. Leave DDP "
                "out: replicate and fully_shard average gradients themselves"
            )
        if self._watched is not None and self._unchanged():
            return
        self._watched = None
        self._look_for_newcomers()
        for unit in root.units:
            self._look_into(unit)
        self._note()

    def _note(self) -> None:
        """Flat lists, which are compared in C."""
        units = self._root.units
        params = [param for unit in units for param in unit.params if param.registered is not None]
        tables = [(table, name, param.at_rest) for param in params for table, name in param.tables]
        tables += [(p.module._parameters, p.name, param.at_rest) for param in params for p in param.by_setattr]
        self._tables = [table for table, _, _ in tables]
        self._names = [name for _, name, _ in tables]
        self._registered = [parameter for _, _, parameter in tables]
        self._at_rest = [param.at_rest for param in params]
        self._locals = [local_of(p) if isinstance(p, DTensor) else p for p in self._at_rest]
        self._sharded = [p for p in self._at_rest if isinstance(p, DTensor)]
        self._shards = [local_of(p) for p in self._sharded]
        self._own = [param.own for param in params if param.own is not None]
        self._dtyped = [*self._own, *(param.compute for param in params if param.compute is not param.own)]
        around = dict.fromkeys(each for unit in units for each in (unit, *unit.within))
        self._modules = list(dict.fromkeys(module for unit in around for module in unit.modules))
        self._watched = self._look()

    def _look(self) -> list[Any]:
        with as_tensors():
            trains = list(map(trainability, (*self._at_rest, *self._strangers)))
        # A shard's memory is the engine's; that of users' own parameters may be exchanged (`param.data = ...`).
        return [
            trains,
            list(map(Tensor.numel, self._locals)),
            list(map(Tensor.data_ptr, self._own)),
            list(map(_dtype_of, self._dtyped)),
        ]

    def _unchanged(self) -> bool:
        return (
            all(map(is_, map(dict.get, self._tables, self._names), self._registered))
            and all(map(is_, map(local_of, self._sharded), self._shards))
            and self._look() == self._watched
            and all(map(hooks_attached, self._modules))
        )

    @outside_transforms
    def _look_into(self, unit: Unit) -> None:
        for each in (unit, *unit.within):  # without its hooks, an annotation around a unit would not be noticed at all
            _refuse_cleared_hooks(each)
        _refuse_left_alone(unit)
        _refuse_optimizers_of_torch(unit)
        if _is_functional_call(unit):
            return
        _refuse_cast_in_forward(unit)
        if _adopt(unit, self._owners):
            if self._root.iteration is None:
                unit.reshard()
            unit.build()
            if self._root.buckets is not None:
                self._root.renew_buckets()
        for group in unit.groups:
            if group.device.type == "meta" and group.params:
                raise PhaseError(still_on_meta(group.params[0].fqn, unit.name))
        unit.follow()
        if self._root.buckets is not None:
            self._root.buckets.follow()

    def _look_for_newcomers(self) -> None:
        """Refuse trainable parameters below a unit that no unit manages, and ties that came after the annotation."""
        root = self._root
        self._owners = {
            id(form): (unit, param)
            for unit in root.units
            for param in unit.params
            for form in (param.at_rest, param.own, param.compute)
            if form is not None
        }
        self._strangers = []
        known = {(id(place.module), place.name) for unit in root.units for param in unit.params for place in param.info.places}
        known |= {(id(place.module), place.name) for unit in root.units for place in unit.spec.left_alone}
        alone = all(unit.mesh_info.all.size == 1 for unit in root.units)
        for unit in root.units:
            found = []
            for module in unit.modules:
                for prefix, below in module.named_modules():
                    for name, parameter in below._parameters.items():
                        if parameter is None or (id(below), name) in known:
                            continue
                        fqn = f"{prefix}.{name}" if prefix else name
                        if id(parameter) in self._owners:
                            owner, param = self._owners[id(parameter)]
                            _refuse_late_tie(f"'{fqn}' below unit '{unit.name}'", owner, param)
                            param.set_info(replace(param.info, places=(*param.info.places, Place(below, name))))
                        elif unit_of(parameter) is not None:
                            continue  # of a unit elsewhere, which reduces its gradient
                        elif parameter.requires_grad:
                            found.append(f"'{fqn}'")
                        else:
                            self._strangers.append(parameter)
            if found and not alone:
                verb = unit.spec.verb
                raise AnnotationError(
                    f"unit '{unit.name}' ({verb}): no unit manages {few(found)}, added below it, or left by remove(), after the "
                    "annotation: every rank would train its own. To have all parameters managed, call "
                    f"remove(module, {verb}) and annotate again; to train them as they are, name them in ignored_params then"
                )


def _refuse_late_tie(where: str, unit: Unit, param: ManagedParam) -> None:
    if param.compute is param.at_rest:
        return  # modules compute with what is registered, and its gradient is reduced wherever it is used
    raise ForeignParameterError(
        f"{where} was tied to parameter '{param.fqn}' of unit '{unit.name}' after the annotation, and would not be gathered or "
        "cast with it. Call remove() with the module and its verb, tie the parameters, and annotate again"
    )


def _warn_of_unmanaged_around(root: Root) -> None:
    """In the first forward that trains: trainable parameters of the model around the root which no annotation reaches.

    The model is not known to its blocks; it is the outermost module whose forward is on the stack.
    """
    if all(unit.mesh_info.all.size == 1 for unit in root.units):
        return
    frame, around = sys._getframe(1), root.module  # not this one: it would hold itself, and the model, until it is collected
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, nn.Module) and frame.f_code.co_name in ("_call_impl", "forward"):
            around = found
        frame = frame.f_back  # type: ignore[assignment]
    if around is root.module:  # type: ignore[unreachable]
        return
    alone: dict[tuple[int, str], None] = {}
    for state in (*get_all_sharded_states(around), *get_replicated_states(around)):
        alone.update({(id(place.module), place.name): None for place in state.spec.left_alone})
    inside = {id(below) for below in root.module.modules()}
    names = [
        f"{prefix}.{name}" if prefix else name
        for prefix, below in around.named_modules()
        for name, parameter in below._parameters.items()
        if parameter is not None
        and parameter.requires_grad
        and label_of(parameter) is None
        and not isinstance(parameter, DTensor)
        and (id(below), name) not in alone
        and id(below) not in inside
    ]
    if names:
        verb = root.units[0].spec.verb
        logger.warning(
            "%s: %s of %s trains, and no annotation reaches it: every rank trains its own. Annotate the model around the "
            "annotated modules as well, %s(model), or freeze it",
            verb, few([f"'{name}'" for name in names]), type(around).__name__, verb,
        )  # fmt: skip


def _averages(ddp: Any, units: Sequence[Unit]) -> bool:
    """Whether DDP was not told to ignore all parameters of these units."""
    managed = {id(param.at_rest) for unit in units for param in unit.params}
    ignored = getattr(ddp, "parameters_to_ignore", ())
    return any(id(p) in managed and name not in ignored for name, p in ddp.module.named_parameters())


def _refuse_cast_in_forward(unit: Unit) -> None:
    """A forward that casts its module, as routers of some mixtures of experts do, takes what is gathered out of its memory."""
    for group in unit.groups:
        for param in group.params:
            dtype, expected = param.compute.dtype, group.precision.compute
            if param.compute is not param.own and dtype != expected:
                unit.reshard()
                unit.build()
                raise ForeignParameterError(
                    f"a forward gave parameter '{param.fqn}' of unit '{unit.name}' the dtype {dtype}, by `.to()` or `.data = ...`, "
                    f"where the unit computes in {expected}; what is gathered would not reach it. The parameter is as before. Cast "
                    "the module before annotating it, let the unit cast it (mp_policy=), or cast a copy in forward"
                )


def _refuse_cleared_hooks(unit: Unit) -> None:
    for module in unit.modules:
        if not hooks_attached(module):
            raise HooksRemovedError(
                f"unit '{unit.name}': the forward hooks that the annotation needs were removed from its "
                f"{type(module).__name__}. Remove hooks by their own handles; to take the annotation back, call remove()"
            )


def _refuse_left_alone(unit: Unit) -> None:
    if unit.mesh_info.mesh is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        verb = unit.spec.verb
        raise MeshError(
            f"unit '{unit.name}' was annotated before there was a process group: each of the {dist.get_world_size()} ranks would "
            f"train it by itself. Call remove(module, {verb}) and annotate again, now that init_process_group has run; to train on "
            f"this rank alone, pass mesh=DeviceMesh(device, [{dist.get_rank()}])"
        )


def _refuse_optimizers_of_torch(unit: Unit) -> None:
    """torch's optimizers in backward hang on nodes of autograd's, which compute parameters of shards do not share."""
    for param in unit.params:
        if hasattr(param.at_rest, "_in_backward_optimizers") or hasattr(param.compute, "_in_backward_optimizers"):
            raise PhaseError(
                f"parameter '{param.fqn}' of unit '{unit.name}' has an optimizer of torch's _apply_optimizer_in_backward, which "
                "would step before its gradient is reduced, or never. Use composable.apply_optimizer_in_backward, or "
                "register_post_accumulate_grad_hook on the parameter"
            )


def _is_functional_call(unit: Unit) -> bool:
    """`torch.func.functional_call` registers tensors of its own for one call; a unit that only replicates computes with them."""
    if unit.is_sharded:
        return False
    held = [param.registered for param in unit.params]
    return any(tensor is not None and not isinstance(tensor, nn.Parameter) for tensor in held)


def _adopt(unit: Unit, owners: Mapping[int, tuple[Unit, ManagedParam]]) -> bool:
    """Whether the unit has to be built anew, since its parameters were replaced, moved or cast."""
    _refuse_resized(unit)
    changed = _untie(unit, owners)
    newcomers = [_newcomer(unit, param) for param in unit.params]  # whatever is refused is refused before anything changes
    for param, newcomer in zip(unit.params, newcomers, strict=True):
        if newcomer is not None and id(newcomer) in owners:
            _refuse_late_tie(f"parameter '{param.fqn}' of unit '{unit.name}'", *owners[id(newcomer)])
    for param, newcomer in [*zip(unit.params, newcomers, strict=True)]:
        if newcomer is not None:
            set_label(param.at_rest, unit.name, param.fqn, "replaced")
            param.register(newcomer)
            changed = True
            if id(newcomer) in owners:  # tied: managed where it was before
                unit.params.remove(param)
    for group in unit.groups:
        for param in group.params:
            at_rest = param.at_rest
            if param.own is not None:
                local = local_of(at_rest) if isinstance(at_rest, DTensor) else at_rest
                moved = local.data_ptr() != param.own.data_ptr() or local.device != group.device
                changed = changed or moved or at_rest.dtype != group.precision.original or _sources_moved(group)
            elif isinstance(at_rest, DTensor):
                local = local_of(at_rest)
                _refuse_moved_off_the_host(unit, param, local)
                changed = changed or (local._base is None and local.data_ptr() != group.address_of(param))
    return changed


def _untie(unit: Unit, owners: Mapping[int, tuple[Unit, ManagedParam]]) -> bool:
    """Parameters that are computed with as they are may be untied: those that were put at some of the places become the unit's."""
    untied = False
    for param in [*unit.params]:
        places = param.info.places
        if (
            param.compute is not param.at_rest
            or len(places) == 1
            or all(place.registered is not param.at_rest for place in places)
        ):
            continue
        others: dict[int, list[Place]] = {}
        for place in places:
            if place.registered is not None and place.registered is not param.at_rest:
                others.setdefault(id(place.registered), []).append(place)
        for key, there in others.items():
            registered = there[0].registered
            assert registered is not None
            if key not in owners and unit_of(registered) is None:
                names = names_below(unit.modules[0])
                fqn = f"{names.get(id(there[0].module), '')}.{there[0].name}".lstrip(".")
                unit.params.append(ManagedParam(replace(param.info, fqn=fqn, places=tuple(there))))
            untied = True
        if others:
            stayed = tuple(place for place in places if place.registered is param.at_rest or place.registered is None)
            param.set_info(replace(param.info, places=stayed))
    return untied


def _sources_moved(group: Any) -> bool:
    return bool(group.addresses != [param.own.data_ptr() for param in group.params])


def _refuse_resized(unit: Unit) -> None:
    """An operator with `out=` resizes a shard to the whole, and fails: whoever writes to it next would write behind its memory."""
    for group in unit.groups:
        if not group.has_shards:
            continue
        for param, slot in zip(group.params, group.slots, strict=True):
            at_rest = param.at_rest
            if param.registered is not at_rest or not isinstance(at_rest, DTensor):
                continue
            local, shape = local_of(at_rest), slot.local_shape(group.comm.rank)
            if local.data_ptr() == group.address_of(param) and local.numel() != torch.Size(shape).numel():
                right = group.local_of_slot(slot)
                local.as_strided_(right.shape, right.stride())
                raise ForeignParameterError(
                    f"parameter '{param.fqn}' of unit '{unit.name}': its shard was resized by an operator with out=, as "
                    "torch.nn.init.eye_ calls one, which cannot work on shards. The shard has its shape again, and the values "
                    "from before. Initialise the parameter before fully_shard, or load_state_dict() the whole tensor, which is sharded then"
                )


def _refuse_moved_off_the_host(unit: Unit, param: ManagedParam, local: Tensor) -> None:
    at_rest = param.at_rest
    assert isinstance(at_rest, DTensor)
    if at_rest.device_mesh.device_type == "cpu" and local.device.type not in ("cpu", "meta"):
        raise ForeignParameterError(
            f"parameter '{param.fqn}' of unit '{unit.name}' was moved to {local.device}, and the ranks of its mesh communicate "
            f"on cpu. Call module.to('{local.device.type}') before fully_shard, or pass it a mesh of {local.device.type}"
        )


def _newcomer(unit: Unit, param: ManagedParam) -> nn.Parameter | None:
    """The parameter that a user registered in place of the at-rest one, at any of its places; None if there is none."""
    name, at_rest = param.fqn, param.at_rest
    held = [found for place in param.info.places if (found := place.registered) is not None and found is not at_rest]
    if any(not isinstance(other, nn.Parameter) and isinstance(innermost(other), DTensor) for other in held):  # type: ignore[unreachable]
        raise ForeignParameterError(
            f"parameter '{name}' of unit '{unit.name}' was replaced by a DTensor that is no nn.Parameter, as "
            "torch.func.functional_call does with what torch.func.grad and the like hand to it; nothing would gather it. "
            "Gradients of sharded parameters come by backward(); transforms over inputs, torch.func.grad(...)(x), work"
        )
    others = {id(other): other for other in held if isinstance(other, nn.Parameter)}  # type: ignore[redundant-expr]
    if not others:
        return None
    if len(others) > 1:
        raise ForeignParameterError(
            f"parameter '{name}' of unit '{unit.name}' is tied: it has {len(param.info.places)} places, and different parameters were registered at "
            "them. Register one parameter at all of them; to untie them, call remove() on the annotated modules first"
        )
    (other,) = others.values()
    if unit.is_sharded and type(other) is not nn.Parameter and not isinstance(other, DTensor):
        raise ForeignParameterError(
            f"parameter '{name}' of unit '{unit.name}' was replaced by a {type(other).__name__}; only an nn.Parameter can be sharded"
        )
    if isinstance(other, DTensor) and isinstance(at_rest, DTensor):
        spread = (other.device_mesh, other.placements)
        if spread != (at_rest.device_mesh, at_rest.placements):
            raise ForeignParameterError(
                f"parameter '{name}' of unit '{unit.name}' was replaced by a DTensor that is spread otherwise: {other.placements} over "
                f"{describe_mesh(other.device_mesh)}, where the unit has {at_rest.placements} over "
                f"{describe_mesh(at_rest.device_mesh)}. Register its full_tensor() as a parameter, or load it with "
                "load_state_dict(), which spreads it anew"
            )
    return other


@outside_transforms
def broadcast_buffers(units: list[Unit], *, saved: bool) -> None:
    """Buffers of replicated units follow rank 0, in training forwards only, as with DDP.

    The values are written into the tensors that users hold, on hosts only where they differ.

    Args:
        saved: an earlier forward waits for its backward, and may have saved the buffers. Then a buffer is replaced.
    """
    found: dict[Any, dict[int, tuple[Tensor, list[Place]]]] = {}  # a buffer that modules share stays one
    for unit in units:
        if unit.mesh_info.all.size == 1:
            continue
        for place in unit.spec.broadcast_buffers:
            buffer = place.module._buffers.get(place.name)
            if buffer is not None and buffer.numel():
                found.setdefault(unit.mesh_info.all, {}).setdefault(id(buffer), (buffer, []))[1].append(place)
    for comm, buffers in found.items():
        by_kind: dict[tuple[torch.dtype, torch.device], list[tuple[Tensor, list[Place]]]] = {}
        for buffer, places in buffers.values():
            by_kind.setdefault((buffer.dtype, buffer.device), []).append((buffer, places))
        for members in by_kind.values():
            with torch.no_grad(), torch.inference_mode(False):
                message = torch.cat([buffer.detach().reshape(-1) for buffer, _ in members])
                comm.broadcast([message], "broadcast of buffers")
            if comm.rank == 0:
                continue
            pieces = message.split([buffer.numel() for buffer, _ in members])
            for (buffer, places), piece in zip(members, pieces, strict=True):
                received = piece.view(buffer.shape)
                if not comm.traits.on_stream and torch.equal(buffer, received):
                    continue  # where a stream is, to compare would make the host wait
                if not saved:
                    with torch.no_grad(), torch.inference_mode(buffer.is_inference()):
                        buffer.copy_(received)
                    continue
                received = received.clone()  # no view of the message, which other buffers share
                for place in places:
                    place.module._buffers[place.name] = received
