"""Once per root forward: find what users did to parameters, modules and hooks since the last one;
adopt it or refuse it by name. `broadcast_buffers` gives replicated units one rank's buffers.

Nearly always nothing happened, so everything is compared in a few calls that run in C; only a
difference is looked into.

| since the last forward | what happens |
|---|---|
| parameters were replaced, moved or cast | their unit is built anew around them (`_adopt`) |
| parameters were frozen or unfrozen | compute parameters follow (`Unit.follow`) |
| one parameter was registered in several units | one of these units gets it (`follow_ties`) |
| a place outside of a unit was tied to a parameter that is gathered or cast | refused |
| trainable parameters were added below a unit | refused: every rank would train its own |
| a forward has cast what was gathered | refused, and gathered anew |
| forward hooks were cleared | refused |
| DDP came around, or an optimizer of torch's that steps in backward | refused |
| a process group was made, and the annotation knows none | refused |
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter, call, is_, is_not
from traceback import walk_stack
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composable.comm.backends import is_distributed
from composable.comm.base import Comm
from composable.comm.launch import Launch
from composable.contract.hooks import hooks_attached
from composable.contract.tree import Place, registered_parameters
from composable.engine.params.param import ManagedParam, label_of, set_label, trainability
from composable.engine.step.unit import Unit, unit_of, units_below
from composable.errors import (
    AnnotationError,
    ForeignParameterError,
    HooksRemovedError,
    MeshError,
    PhaseError,
    few,
    still_on_meta,
)
from composable.tensors import describe_mesh
from composable.torch_private import active_ddp, as_tensors, innermost, local_of, outside_transforms

if TYPE_CHECKING:
    from composable.engine.step.root import Root

logger = logging.getLogger("composable")
_BROADCAST: Final = Launch("broadcast of buffers")
_is_alive: Final = partial(is_not, None)
_WARNED: Final[WeakSet[nn.Module]] = WeakSet()  # models that `_warn_of_unmanaged_around` has named
Holder = tuple[Unit, ManagedParam]
# what was found, and how to look again: a function in C, and lists of its arguments
_Row = tuple[Any, ...]


class Preparation:
    """The check of one root."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._looked_around = False
        # what was found when everything was in order: objects that are to be the same, and values
        self._watched: tuple[Sequence[_Row], Sequence[_Row]] | None = None
        self._modules: list[Any] = []  # whose hooks are looked at; weakly
        # which at-rest parameters train, as units know it: one of the rows with values
        self._freezing = _as_now(trainability, [])

    def run(self) -> None:
        """Raise for what cannot be computed with; rebuild the groups of units whose parameters
        changed.

        1. What the rows of the last time do not show is looked at: DDP, and in the first forward
           with gradients the parameters around.
        2. If these rows are as they were, nothing else is looked into.
        3. Ties that came later are followed, and parameters that no unit manages refused.
        4. Each unit is looked into.
        5. New rows are written down, if all of it was seen.
        """
        root = self._root
        ddp = active_ddp()
        if ddp is not None and _averages(ddp, root.units):
            raise AnnotationError(
                f"unit '{root.name}' is called inside DistributedDataParallel, which would average"
                " gradients once more. Leave DDP out: replicate and fully_shard average gradients"
                " themselves"
            )
        if torch.is_grad_enabled():
            # in the first forward that may be trained on; DDP averages what is around
            if not self._looked_around and ddp is None and not _is_alone(root):
                _warn_of_unmanaged_around(root)
            self._looked_around = True
        if self._watched is not None and self._unchanged(*self._watched):
            return
        self._watched = None
        for unit in root.units:  # to offload one makes its roots anew, which have watched nothing
            unit.refuse_offloaded("forward")
        # `summon_full_params` shows other tensors, in which ties are no news
        if not root.in_step and not any(unit.shown_by for unit in root.units):
            follow_ties(root.units, _left_alone(root.units))
        below = dict.fromkeys((*root.units, *units_below(root.modules)))
        owners = _owners(below)
        unmanaged = _look_for_unmanaged(root, below, owners)
        # without its hooks, an annotation around a unit would not be noticed at all
        around = dict.fromkeys(
            each for unit in root.units for each in (unit, *unit.relations.units_around())
        )
        for unit in around:
            _refuse_cleared_hooks(unit)
        seen = [_look_into(unit, root, owners) for unit in root.units]
        if all(seen):
            self._note(around, unmanaged)
        else:
            at_rest = [param.at_rest for unit in root.units for param in unit.params]
            self._freezing = _as_now(trainability, at_rest)

    def _note(self, around: Iterable[Unit], unmanaged: list[nn.Parameter]) -> None:
        """All is in order: write down rows of what was found, which `_unchanged` looks for again,
        each by its function.
        """
        params = [param for unit in self._root.units for param in unit.params]
        places = [place for param in params for place in param.info.places]
        tables = [place.module._parameters for place in places]
        names = [place.name for place in places]
        at_rest = [param.at_rest for param in params]
        sharded = [parameter for parameter in at_rest if isinstance(parameter, DTensor)]
        shards = list(map(local_of, sharded))
        own = [param.own for param in params if param.own is not None]
        dtyped = [*own, *(param.compute for param in params if param.compute is not param.own)]
        with as_tensors():
            # at rest, also if `torch.func.functional_call` has put tensors of its own there
            resting = [param.at_rest for param in params for _ in param.info.places]
            same = [(resting, dict.get, tables, names), _as_now(local_of, sharded)]
            self._freezing = _as_now(trainability, at_rest)
            equal = [
                self._freezing,
                _as_now(trainability, unmanaged),
                # A shard's memory is the engine's; that of users' own parameters may be exchanged
                # (`param.data = ...`).
                _as_now(Tensor.numel, shards),
                _as_now(Tensor.data_ptr, own),
                _as_now(attrgetter("dtype"), dtyped),
                _as_now(attrgetter("grad_dtype"), at_rest),
            ]
        self._watched = same, equal
        # weak: what is around the root's units may be dropped before them
        self._modules = [ref(module) for unit in around for module in unit.modules]

    def _unchanged(self, same: Sequence[_Row], equal: Sequence[_Row]) -> bool:
        with as_tensors():
            for before, *row in same:
                if not all(map(is_, before, map(*row))):
                    return False
            for before, *row in equal:
                if list(map(*row)) != before:
                    return False
        return all(map(hooks_attached, filter(_is_alive, map(call, self._modules))))

    def follow_freezing(self) -> None:
        """A backward begins: what `requires_grad` says now decides which parameters get gradients,
        as in torch.

        Adapters are switched off and on again between a forward and its backward, for a reference.
        """
        before, look, at_rest = self._freezing
        with as_tensors():
            trained = list(map(look, at_rest))
        if trained != before:
            before[:] = trained
            for unit in self._root.units:
                unit.follow()


def _as_now(look: Callable[..., Any], *arguments: list[Any]) -> _Row:
    return list(map(look, *arguments)), look, *arguments


def _owners(units: Iterable[Unit]) -> dict[int, Holder]:
    """Which parameter of which unit a tensor is, by its id. `model.to()` exchanges the attributes
    of DTensors, and with them their labels.
    """
    return {
        id(form): (unit, param)
        for unit in units
        for param in unit.params
        for form in (param.at_rest, param.own, param.compute)
        if form is not None
    }


def _look_for_unmanaged(
    root: Root, below: Iterable[Unit], owners: Mapping[int, Holder]
) -> list[nn.Parameter]:
    """Refuse trainable parameters below a unit that no unit manages, and ties that came after the
    annotation.

    Args:
        below: units of the root, and those below that are prepared by another one.

    Returns:
        Frozen parameters that no unit manages: refused once they train.
    """
    known = holders_of(below).keys() | _left_alone(below)
    unmanaged = []
    for unit in root.units:
        found = []
        for place, parameter in (
            each for module in unit.modules for each in registered_parameters(module, stop=())
        ):
            if place in known:
                continue
            known.add(place)
            if id(parameter) in owners:
                owner, param = owners[id(parameter)]
                _refuse_late_tie(f"'{place.fqn}' below unit '{unit.name}'", owner, param)
                param.set_info(replace(param.info, places=(*param.info.places, place)))
            elif _is_managed(parameter):
                continue  # of a unit elsewhere, which reduces its gradient
            elif parameter.requires_grad:
                found.append(f"'{place.fqn}'")
            else:
                unmanaged.append(parameter)
        if found and not _is_alone(root):
            verb = unit.spec.verb
            raise AnnotationError(
                f"unit '{unit.name}' ({verb}): no unit manages {few(found)}, added below it, or"
                " left by remove(), after the annotation: every rank would train its own. Call"
                f" remove(module, {verb}) and annotate again, with ignored_params= for those"
                " that are to be trained as they are"
            )
    return unmanaged


@outside_transforms
def _look_into(unit: Unit, root: Root, owners: Mapping[int, Holder]) -> bool:
    """Returns whether all of it was seen."""
    if unit.shown_by:
        raise PhaseError(
            f"a forward of unit '{unit.name}' was called inside of {unit.shown_by}, where its"
            " modules hold whole parameters to look at and to edit. Call it outside of the"
            " scope; to keep parameters unsharded for forwards, use keep_unsharded(model)"
        )
    _refuse_without_group(unit)
    _refuse_optimizers_of_torch(unit)
    if not unit.is_sharded and any(
        not isinstance(p.registered, nn.Parameter | None) for p in unit.params
    ):
        # `torch.func.functional_call` registers tensors of its own for one call, and they are
        # computed with
        unit.follow()
        return False
    unit.take_back()
    _refuse_cast_in_forward(unit)
    if _adopt(unit, owners):
        if not root.in_step:  # what an open forward has saved stays
            unit.reshard()
        unit.build()
    for group in unit.groups:
        if group.device.type == "meta":
            raise PhaseError(still_on_meta(group.params[0].fqn, unit.name))
    unit.follow()
    return True


def _is_alone(root: Root) -> bool:
    return all(unit.mesh_info.all.size == 1 for unit in root.units)


def _is_managed(parameter: nn.Parameter) -> bool:
    """Whether any unit manages `parameter`; one whose forward is under way, or which is kept
    unsharded, shows its compute form.
    """
    label = label_of(parameter)
    return label is not None and (label.form == "compute" or unit_of(parameter) is not None)


def _left_alone(units: Iterable[Unit]) -> set[Place]:
    """Where ignored parameters are registered."""
    return {place for unit in units for place in unit.spec.left_alone}


def _refuse_late_tie(where: str, unit: Unit, param: ManagedParam) -> None:
    if param.compute is param.at_rest:
        # modules compute with what is registered, and its gradient is reduced wherever it is used
        return
    raise ForeignParameterError(
        f"{where} was tied to parameter '{param.fqn}' of unit '{unit.name}' after the annotation,"
        " and would not be gathered or cast with it. Call remove() with the module and its verb,"
        " tie the parameters, and annotate again"
    )


def _warn_of_unmanaged_around(root: Root) -> None:
    """Once per model: tell which of its parameters train and are reached by no annotation, such as
    those around annotated blocks.

    Blocks do not know the model; it is the outermost module whose forward is on the stack.
    """
    model = [root.modules[0], *modules_inside("_call_impl", "forward")][-1]
    if model in root.modules or model in _WARNED:
        return
    _WARNED.add(model)
    ignored = _left_alone(units_below([model]))
    names = [
        f"'{place.fqn}'"
        for place, parameter in registered_parameters(model, stop=())
        if parameter.requires_grad
        and not _is_managed(parameter)
        and not isinstance(parameter, DTensor)  # which somebody else distributes, and reduces
        and place not in ignored
    ]
    if names:
        verb = root.units[0].spec.verb
        logger.warning(
            "%s: %s of %s trains, and no annotation reaches it: every rank trains its own."
            " Annotate the model around the annotated modules as well, %s(model), or freeze it",
            verb, few(names), type(model).__name__, verb,
        )  # fmt: skip


# names of the functions that call a forward, and of what torch.compile makes of one
_is_a_call: Final = re.compile(
    "_call_impl|_call_as_forward|forward|torch_dynamo_resume_in.*"
).fullmatch


def modules_inside(*functions: str) -> list[nn.Module]:
    """The modules whose functions of these names are on the stack, the innermost first."""
    found = [each.f_locals for each, _ in walk_stack(None) if each.f_code.co_name in functions]
    owners = [names.get("self", names.get("module")) for names in found]
    return [owner for owner in owners if isinstance(owner, nn.Module)]


def is_called(modules: Iterable[nn.Module], thread: int | None = None) -> bool:
    """Whether a forward of one of these is on the stack of a thread; None: of any. A
    KeyboardInterrupt and a SystemExit end forwards, of which torch does not tell their hooks.
    """
    stacks = [stack for each, stack in sys._current_frames().items() if thread in (None, each)]
    frames = [frame for stack in stacks for frame, _ in walk_stack(stack)]
    found = [frame.f_locals for frame in frames if _is_a_call(frame.f_code.co_name)]
    called = [names.get("self", names.get("module")) for names in found]
    return any(module is each for module in modules for each in called)


def _averages(ddp: Any, units: Sequence[Unit]) -> bool:
    """Whether DDP was not asked to ignore all parameters of these units."""
    managed = {id(param.at_rest) for unit in units for param in unit.params}
    ignored = getattr(ddp, "parameters_to_ignore", ())
    return any(
        id(p) in managed and name not in ignored for name, p in ddp.module.named_parameters()
    )


def _refuse_cast_in_forward(unit: Unit) -> None:
    """A forward that casts its module, as routers of some mixtures of experts do, takes what is
    gathered out of its memory.
    """
    for group in unit.groups:
        for param in group.recast():
            dtype, expected = param.compute.dtype, group.precision.compute
            # not `model.half()` of what is computed with as it is: that is adopted
            if param.compute is not param.own and dtype != expected:
                unit.reshard()
                unit.build()
                raise ForeignParameterError(
                    f"a forward gave parameter '{param.fqn}' of unit '{unit.name}' the dtype"
                    f" {dtype}, where the unit computes in {expected}; what is gathered would not"
                    " reach it. The parameter is as before. Cast the module before annotating it,"
                    " pass mp_policy=, or cast a copy in forward"
                )


def _refuse_cleared_hooks(unit: Unit) -> None:
    for module in unit.modules:
        if not hooks_attached(module):
            raise HooksRemovedError(
                f"unit '{unit.name}': the forward hooks that the annotation needs were removed from"
                f" its {type(module).__name__}. Remove hooks by their own handles; to take the"
                " annotation back, call remove()"
            )


def _refuse_without_group(unit: Unit) -> None:
    if unit.mesh_info.mesh is None and is_distributed() and dist.get_world_size() > 1:
        verb = unit.spec.verb
        raise MeshError(
            f"unit '{unit.name}' was annotated before there was a process group: each of the"
            f" {dist.get_world_size()} ranks would train it by itself. Call remove(module, {verb})"
            " and annotate again; to train on this rank alone, pass mesh=DeviceMesh(device,"
            f" [{dist.get_rank()}])"
        )


def _refuse_optimizers_of_torch(unit: Unit) -> None:
    """They hang on nodes of autograd's: those of parameters at rest never run, and those of
    replicas step before gradients are reduced.
    """
    for param in unit.params:
        if any(hasattr(each, "_in_backward_optimizers") for each in (param.at_rest, param.compute)):
            raise PhaseError(
                f"parameter '{param.fqn}' of unit '{unit.name}' has an optimizer of torch's"
                " _apply_optimizer_in_backward, which would step before its gradient is reduced,"
                " or never. Use composable.apply_optimizer_in_backward, or"
                " register_post_accumulate_grad_hook on the parameter"
            )


def _adopt(unit: Unit, owners: Mapping[int, Holder]) -> bool:
    """Whether the unit has to be built anew, since its parameters were replaced, moved or cast."""
    # what is refused is refused before anything changes
    replacements = {
        param: replacement
        for param in unit.params
        if (replacement := _replacement(unit, param)) is not None
    }
    elsewhere = [other for replacement in replacements.values() if (other := unit_of(replacement))]
    owners = {**_owners(elsewhere), **owners}
    tied = [param for param, replacement in replacements.items() if id(replacement) in owners]
    for param in tied:  # managed where it was before
        where = f"parameter '{param.fqn}' of unit '{unit.name}'"
        _refuse_late_tie(where, *owners[id(replacements[param])])
    changed = [group for group in unit.groups if group.adopt_changes()]
    for param, replacement in replacements.items():
        set_label(param.at_rest, param, unit.name, "replaced")
        param.follow(replacement)
    unit.give(tied)
    return bool(replacements or changed)


def _replacement(unit: Unit, param: ManagedParam) -> nn.Parameter | None:
    """The parameter that a user registered in place of the at-rest one; None if there is none."""
    name, at_rest = param.fqn, param.at_rest
    held = [found for place in param.info.places if (found := place.registered) is not None]
    if any(
        not isinstance(found, nn.Parameter) and isinstance(innermost(found), DTensor)  # type: ignore[unreachable]
        for found in held
    ):
        raise ForeignParameterError(
            f"parameter '{name}' of unit '{unit.name}' was replaced by a DTensor that is no"
            " nn.Parameter, as torch.func.functional_call does inside torch.func.grad; nothing"
            " would gather it. Gradients of sharded parameters come by backward(); transforms over"
            " inputs, torch.func.grad(...)(x), work"
        )
    others = {
        id(found): found
        for found in held
        if isinstance(found, nn.Parameter)  # type: ignore[redundant-expr]
        and found is not at_rest
    }
    if not others:
        return None
    # What is computed with as it is stays as the user registered it; a gathered parameter is
    # registered at all places.
    untied = param.compute is at_rest and any(found is at_rest for found in held)
    if untied or len(others) > 1:
        raise ForeignParameterError(
            f"parameter '{name}' of unit '{unit.name}' is tied: it has {len(param.info.places)}"
            " places, and different parameters were registered at them. Register one parameter at"
            " all of them; to untie them, call remove() on the annotated modules first"
        )
    (other,) = others.values()
    form = param.info.form
    if unit.is_sharded and type(other) is not form.kind and not isinstance(other, DTensor):
        raise ForeignParameterError(
            f"parameter '{name}' of unit '{unit.name}' was replaced by a {type(other).__name__};"
            f" only a {form.kind.__name__} can be sharded there"
        )
    if refusal := form.refusal(f"'{name}' of unit '{unit.name}'", other):
        raise ForeignParameterError(refusal)
    if (
        isinstance(other, DTensor)
        and isinstance(at_rest, DTensor)
        and (other.device_mesh, other.placements) != (at_rest.device_mesh, at_rest.placements)
    ):
        raise ForeignParameterError(
            f"parameter '{name}' of unit '{unit.name}' was replaced by a DTensor that is"
            f" distributed otherwise: {other.placements} over {describe_mesh(other.device_mesh)},"
            f" where the unit has {at_rest.placements} over {describe_mesh(at_rest.device_mesh)}."
            " Register its full_tensor(), or load it with load_state_dict()"
        )
    return other


# --- ties that came after the annotation ---------------------------------------------------------


def holders_of(units: Iterable[Unit]) -> dict[Place, Holder]:
    """Which parameter of which unit has its place where."""
    return {
        place: (unit, param)
        for unit in units
        for param in unit.params
        for place in param.info.places
    }


def follow_ties(units: Sequence[Unit], left_alone: Collection[Place]) -> None:
    """Give each parameter that is registered in places of several units to one of them: libraries
    tie parameters as they load weights into a model which is sharded on the meta device.

    That is the innermost unit around all its places, as in an annotation of tied parameters: it is
    gathered whenever one of them computes. What cannot be moved is left as it is, for the next
    check to refuse. Between two steps.

    Args:
        units: of one root; the first has the outermost modules.
        left_alone: places of ignored parameters.
    """
    holders = holders_of(units)
    found: dict[int, list[Place]] = {}
    for module in units[0].modules:
        for place, parameter in registered_parameters(module, stop=()):
            if place not in left_alone:
                found.setdefault(id(parameter), []).append(place)
    for places in found.values():
        held = dict.fromkeys(holders.get(place) for place in places)
        holding = [holder for holder in held if holder is not None]
        if holding and len(held) > 1:
            _move(holding, places, units)


def _move(held: list[Holder], places: list[Place], units: Sequence[Unit]) -> None:
    """Let the innermost unit around the places manage what is registered there."""
    tensor, inside = places[0].registered, {unit: _places(unit) for unit in units}
    around = [unit for unit in units if inside[unit].keys() >= set(places)]
    if not around or not isinstance(tensor, nn.Parameter) or unit_of(tensor) not in (None, *units):
        return  # of one call of `torch.func.functional_call`; or of a unit elsewhere
    owner = min(reversed(around), key=lambda unit: len(inside[unit]))
    touched = dict.fromkeys([owner, *(unit for unit, _ in held)])
    if not all(_can_move(unit, owner) for unit in touched) or not all(
        param.info.form.is_whole and param.info.mesh_info is None for _, param in held
    ):
        return
    _, param = next((each for each in held if each[1].at_rest is tensor), held[0])
    for unit, other in held:
        unit.give([other])
        if other.at_rest is not tensor:
            set_label(other.at_rest, other, unit.name, "replaced")
    owner.take(param, tuple(inside[owner][place] for place in places))
    for unit in touched:
        unit.reshard()
        unit.build()


def _can_move(unit: Unit, owner: Unit) -> bool:
    """Whether parameters of `unit` may become those of `owner`."""
    return (
        unit.is_sharded
        and unit.mesh_info.mesh == owner.mesh_info.mesh
        and unit.spec.grouping == owner.spec.grouping
        and unit.spec.divisor == owner.spec.divisor
        and not unit.gradients.has_unreduced
        and not any(group.extended for group in unit.groups)
    )


def _places(unit: Unit) -> dict[Place, Place]:
    """All places of parameters in the unit's modules and below, with their names there."""
    found: dict[Place, Place] = {}
    for index, module in enumerate(unit.modules):
        prefix = "" if len(unit.modules) == 1 else str(index)
        for place, _ in registered_parameters(module, prefix, stop=()):
            found.setdefault(place, place)
    return found


# --- buffers of replicated units -----------------------------------------------------------------


@outside_transforms
def broadcast_buffers(units: Sequence[Unit], source: int = 0, *, saved: bool) -> None:
    """Buffers of replicated units follow one rank, in forwards with gradients only, as with DDP.

    The values are written into the tensors that users hold, on hosts only where they differ.

    Args:
        saved: an earlier forward waits for its backward, and may have saved the buffers. Then a
            buffer is replaced.
    """
    # One message per kind; a buffer that modules share stays one.
    messages: dict[
        tuple[Comm, torch.dtype, torch.device], dict[int, tuple[Tensor, list[Place]]]
    ] = {}
    for unit in units:
        comm = unit.mesh_info.all
        for place in unit.spec.broadcast_buffers if comm.size > 1 else ():
            buffer = place.module._buffers.get(place.name)
            if buffer is not None and buffer.numel():
                members = messages.setdefault((comm, buffer.dtype, buffer.device), {})
                members.setdefault(id(buffer), (buffer, []))[1].append(place)
    for (comm, _, _), members in messages.items():
        with torch.no_grad(), torch.inference_mode(False):
            message = torch.cat([buffer.detach().reshape(-1) for buffer, _ in members.values()])
            comm.broadcast([message], _BROADCAST, source)
        if comm.rank == source:
            continue
        pieces = message.split([buffer.numel() for buffer, _ in members.values()])
        for (buffer, places), piece in zip(members.values(), pieces, strict=True):
            received = piece.view(buffer.shape)
            if not comm.traits.on_stream and torch.equal(buffer, received):
                continue  # where a stream is, to compare would make the host wait
            if saved:
                received = received.clone()  # no view of the message, which other buffers share
                for place in places:
                    place.module._buffers[place.name] = received
            else:
                with torch.no_grad(), torch.inference_mode(buffer.is_inference()):
                    buffer.copy_(received)
