"""A replicated unit's parameters where others are sharded: DTensors at rest, plain tensors for modules; knows no root.

Note [Next to shards]
torch's own functions over all parameters of a model (`clip_grad_norm_`, `foreach` optimizers, gradient scalers) take DTensors
or plain tensors, but no mix. So as soon as one annotation covers both replicated and sharded modules, what is replicated rests
as DTensors, too, with a `Replicate()` placement on the mesh of the shards, over the memory of the plain parameters. Modules go
on computing with the plain ones, autograd accumulates there, and buckets average there. What arrives is moved to the DTensor
at the end: outside of a backward a plain parameter has no gradient, so there is nothing that `zero_grad` could miss.

Note [Tied to what is sharded]
A head may be tied to an embedding that is replicated. Its weight is no shard's, then: the embedding's unit registers both forms
there, too. What is registered at one of the places later goes to all of them, as it does for parameters that are sharded.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.hooks import RemovableHandle

from composable.compilation import untraced
from composable.device.parameter_swap import Owner, ParameterSlots, ParameterSwap, describe_mesh, make_replicated
from composable.device.private import agree_on_infinities, in_backward, local_of
from composable.errors import ForeignParameterError
from composable.model.hooks import Guard, GuardRow, after_call
from composable.model.interrupts import calls_of
from composable.model.transaction import on_undo
from composable.runtime.loading import StateDictHook
from composable.runtime.optimizers import Form, forget, note
from composable.runtime.readers import Readers, Unit
from composable.runtime.resting_form import Pair, fits, pair_of, plain_over
from composable.runtime.sparse import is_sparse_lookup


class MixedParameters:
    """What a replicated unit registers, and when.

    Args:
        owners: the places of its parameters.
        names: FQNs, for messages.
        mesh: of the shards.
        called: the unit's own modules; whatever else holds parameters of it may be called by itself.
        unit: its name.
    """

    def __init__(
        self, owners: Sequence[Owner], names: Sequence[str], mesh: DeviceMesh, called: Sequence[nn.Module], unit: str
    ) -> None:
        self._mesh = mesh
        self._unit = unit
        self._own = len(owners)  # the places behind them are of other units
        self._tied_to: tuple[int, ...] = ()  # for each of those, the index of the unit's own place
        self._owners: tuple[Owner, ...] = ()
        self._names: tuple[str, ...] = ()
        self._found: tuple[Pair | None, ...] = ()
        self._shown: dict[object, None] = {}  # for whom: calls and backwards
        self._loading: list[RemovableHandle] = []
        self._guards: list[Guard] = []
        self._add(owners, names, called)
        self._build()

    def _add(self, owners: Sequence[Owner], names: Sequence[str], called: Sequence[nn.Module] = ()) -> None:
        known = [id(owner.module) for owner in self._owners]
        holders = {id(owner.module): owner.module for owner in owners if id(owner.module) not in known}
        hook = StateDictHook(self)
        self._loading += [module.register_load_state_dict_pre_hook(hook) for module in holders.values()]
        self._loading += [module.register_state_dict_pre_hook(self._before_state_dict) for module in holders.values()]
        mine = [id(module) for module in called]
        self._guards += [Guard(module, self._called_alone) for key, module in holders.items() if key not in mine]
        self._owners += tuple(owners)
        self._names += tuple(names)
        self._found += (None,) * len(owners)

    def tie(self, owners: Sequence[Owner], names: Sequence[str]) -> None:
        """Other places of the parameters, in modules of sharded units; see Note [Tied to what is sharded]."""
        pairs = [None if owner.registered is None else pair_of(owner.registered) for owner in owners]
        self._add(owners, names)
        self._tied_to += tuple(self._found.index(pair) for pair in pairs)
        self._build()

    # --- forms ------------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        """Register DTensors in all places, made or found."""
        self._built = True
        before = self._found
        self._keep_ties()
        # Sparse gradients are for an optimizer that takes nothing else.
        dense = {id(owner.registered): None for owner in self._owners if not is_sparse_lookup(owner.module)}
        self._found = tuple(
            self._pair_at(owner, name, last) if id(owner.registered) in dense else None
            for owner, name, last in zip(self._owners, self._names, before, strict=True)
        )
        owners: dict[int, list[Owner]] = {}
        for owner, pair in zip(self._owners, self._found, strict=True):
            owners.setdefault(id(pair), []).append(owner)
        self._pairs = tuple({id(pair): pair for pair in self._found if pair is not None}.values())
        self._slots = []
        for pair in self._pairs:
            slot = ParameterSlots(owners[id(pair)], pair.resting)
            slot.unsharded = pair.plain
            slot.replace(pair.resting)
            self._slots.append(slot)
        for name, pair, last in zip(self._names, self._found, before, strict=True):
            if last is not None and last is not pair:
                note(last.resting, Form.REPLACED, self._unit, name)
        for name, pair in zip(self._names, self._found, strict=True):
            if pair is not None:
                note(pair.plain, Form.COMPUTING, self._unit, name)
                note(pair.resting, Form.REPLICATED, self._unit, name)
        self._swap = ParameterSwap(self._slots)
        self._row = GuardRow(self._guards)
        self._at_rest = self._registered()
        held = zip(self._found, self._at_rest, strict=True)
        self._computing = [parameter if pair is None else pair.plain for pair, parameter in held]

    def _keep_ties(self) -> None:
        """What came to one of several tied places comes to all of them."""
        tied: dict[int, list[Owner]] = {}
        for index, own in enumerate(self._tied_to, self._own):
            tied.setdefault(own, [self._owners[own]]).append(self._owners[index])
        newcomers = []
        for own, places in tied.items():
            last = self._found[own]
            held = {id(owner.registered): owner.registered for owner in places if owner.registered is not None}
            new = [parameter for parameter in held.values() if last is None or not last.has(parameter)]
            if len(new) > 1:
                raise ForeignParameterError(
                    f"parameter '{self._names[own]}' of unit '{self._unit}' is tied: it has {len(places)} places, and "
                    "different parameters were registered at them. Register one parameter at all of them; to untie them, call "
                    "remove() on the annotated modules first"
                )
            newcomers += [(ParameterSlots(places, parameter), parameter) for parameter in new]
        for slot, parameter in newcomers:
            slot.replace(parameter)

    def _registered(self) -> list[nn.Parameter | None]:
        return [owner.registered for owner in self._owners]

    def _pair_at(self, owner: Owner, name: str, last: Pair | None) -> Pair | None:
        """The pair of what is registered there, where `last` was; None for what has no second form."""
        registered = owner.registered
        if registered is None:
            return None
        found = pair_of(registered)
        if isinstance(registered, DTensor) and (found is None or last not in (None, found)):
            self._refuse_spread_otherwise(registered, name)
        if found is not None:
            return found
        if isinstance(registered, DTensor):
            return Pair(plain_over(registered), registered)
        return Pair(registered, make_replicated(registered, self._mesh)) if fits(registered, self._mesh) else None

    def _refuse_spread_otherwise(self, newcomer: DTensor, name: str) -> None:
        if newcomer.device_mesh != self._mesh or not all(placement.is_replicate() for placement in newcomer.placements):
            raise ForeignParameterError(
                f"parameter '{name}' of unit '{self._unit}' was replaced by a DTensor that is spread otherwise: "
                f"{newcomer.placements} over {describe_mesh(newcomer.device_mesh)}, where the unit has "
                f"{(Replicate(),) * self._mesh.ndim} over {describe_mesh(self._mesh)}. Register its full_tensor() as a "
                "parameter, or load it with load_state_dict(), which spreads it anew"
            )

    @property
    def slots(self) -> Sequence[ParameterSlots]:
        """Those of the parameters that have two forms."""
        if not self._built:
            self._build()
        return self._slots

    @property
    def home(self) -> torch.device:
        """Where the parameters are, or are to be."""
        places = [pair.plain.device for pair in self._pairs if not pair.plain.is_meta]
        return places[0] if places else torch.device(self._mesh.device_type)

    @property
    def plain(self) -> list[nn.Parameter]:
        """What modules compute with, in the order of the unit's own places."""
        return [parameter for parameter in self._computing[: self._own] if parameter is not None]

    def resting(self, parameter: nn.Parameter) -> nn.Parameter:
        """What users see of a parameter that modules compute with."""
        found = pair_of(parameter)
        return parameter if found is None else found.resting

    # --- what modules see -------------------------------------------------------------------------------------------

    def show(self, reader: object) -> None:
        """Modules compute with plain tensors for as long as there is a `reader`. Done twice is done once."""
        if not in_backward():
            self._prepare()
        elif not self._shown:
            for pair in self._pairs:
                pair.tell_of_writes()
        alone = not self._shown
        self._shown[reader] = None  # first: whoever hides for it finds what has been shown
        if alone:
            self._row.step_aside()
            self._swap.show()

    def hide(self, reader: object) -> None:
        """Modules hold DTensors again when this was the last reader."""
        self._shown.pop(reader, None)
        if not self._shown:
            self._swap.hide()
            self._row.stand()

    def intact(self) -> bool:
        """Whether every module holds what it holds at rest."""
        return self._swap.intact()

    @untraced
    def _before_state_dict(self, *_: Any) -> None:
        for reader in list(self._shown):
            if isinstance(reader, Readers):
                reader.settle()

    def forget_calls(self) -> None:
        """Calls of modules by themselves have ended without a word."""
        for reader in [each for each in self._shown if isinstance(each, _CalledAlone) and not calls_of(each.module)]:
            self.hide(reader)

    def _prepare(self) -> None:
        """Notice what users did to the parameters."""
        if not self._shown:
            if not self._built or not all(map(is_, self._registered(), self._at_rest)):
                self._build()
            for pair in self._pairs:
                pair.follow()
            if any(slot.unsharded is not pair.plain for slot, pair in zip(self._slots, self._pairs, strict=True)):
                self._build()
        for pair in self._pairs:
            if pair.plain.grad is not None:
                pair.plain.grad = None  # a backward that raised left it behind

    def _called_alone(self, module: nn.Module) -> None:
        """A module inside the unit is called while no call, or backward, of an annotated module around it is under way."""
        call = _CalledAlone(module)
        self.show(call)
        after_call(module, partial(self.hide, call))

    # --- gradients --------------------------------------------------------------------------------------------------

    def deliver(self, parameters: Iterable[nn.Parameter], *, held: bool) -> None:
        for parameter in parameters:
            pair = pair_of(parameter)
            if pair is not None:
                pair.show_held() if held else pair.deliver()

    def take_up(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            pair = pair_of(parameter)
            if pair is not None:
                pair.take_up_held()

    # --- leaving ----------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Register the plain parameters for good."""
        for guard in self._guards:
            guard.remove()
        for hook in self._loading:
            hook.remove()
        for name, pair in zip(self._names, self._found, strict=True):
            if pair is not None:
                forget(pair.plain)
                note(pair.resting, Form.REMOVED, self._unit, name)
        for pair, slot in zip(self._pairs, self._slots, strict=True):
            pair.follow()
            slot.replace(pair.plain)
            gradient = pair.resting.grad
            pair.resting.grad = None
            if isinstance(gradient, DTensor):
                pair.plain.grad = local_of(gradient)
        self._pairs = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> MixedParameters:
        twin = MixedParameters.__new__(MixedParameters)
        memo[id(self)] = twin
        # First, since copying modules leads to whoever asks for them: the modules are not whole then, but parameters are.
        twin._found, twin._at_rest = copy.deepcopy((self._found, self._at_rest), memo)
        held = zip(twin._found, twin._at_rest, strict=True)
        twin._computing = [parameter if pair is None else pair.plain for pair, parameter in held]
        twin._mesh, twin._unit, twin._names, twin._shown = self._mesh, self._unit, self._names, {}
        twin._own, twin._tied_to = self._own, self._tied_to
        twin._loading = []  # the copies of hooks are on the copies of modules
        twin._owners, twin._guards = copy.deepcopy((self._owners, self._guards), memo)
        twin._pairs = ()
        twin._built = False
        return twin


class _CalledAlone:
    """A call of a module inside a unit, by nobody who is annotated."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module


def rest_as_dtensors(units: Sequence[Unit], mesh: DeviceMesh | None, ties: Sequence[tuple[Unit, Owner, str]] = ()) -> None:
    """What is replicated stands next to shards on `mesh` from here on, until the verb that runs is taken back.

    See Note [Next to shards].

    Args:
        ties: places of sharded units that hold a parameter of one of `units`, and their names.
    """
    if mesh is None:
        return
    reason = object()
    for unit in units:
        on_undo(partial(unit.rest_plain, reason))
        unit.rest_on(mesh, [(owner, name) for other, owner, name in ties if other is unit], reason)


def serves(mesh: DeviceMesh, replicas: DeviceMesh | None) -> bool:
    """Whether what is the same on all ranks of `replicas` can rest on `mesh`."""
    if replicas is None or not agree_on_infinities():
        return False
    ranks = replicas.mesh.flatten().tolist()
    return all(rank in ranks for rank in mesh.mesh.flatten().tolist())
