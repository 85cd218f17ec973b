"""Where a replicated unit registers parameters that rest as DTensors, and the pair of forms at each place; knows no reader.

Note [Tied to what is sharded]
A head may be tied to an embedding that is replicated. Its weight is no shard's, then: the embedding's unit registers both forms
there, too. What is registered at one of the places later goes to all of them, as it does for parameters that are sharded.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from composable.device.parameter_forms import describe_mesh, make_replicated
from composable.device.parameter_swap import ParameterSwap, ParamInfo, Place, ShardedParam
from composable.device.private import local_of
from composable.errors import ForeignParameterError
from composable.runtime.optimizer_hooks import Form, drop_note, note
from composable.runtime.resting_form import Pair, fits, pair_of, plain_over
from composable.runtime.sparse import is_sparse_lookup


class PairedPlaces:
    """The places of parameters that have two forms, or could: which pair is at each, and what is registered there at rest.

    Args:
        places: the unit's own places.
        names: FQNs, for messages.
        mesh: of the shards.
        unit: its name.

    Attributes:
        each: the unit's own places, and behind them those of other units.
        pairs: of all of them, each once.
        swap: exchanges the forms.
    """

    def __init__(self, places: Sequence[Place], names: Sequence[str], mesh: DeviceMesh, unit: str) -> None:
        self._mesh = mesh
        self._unit = unit
        self._own = len(places)
        self._tied_to: tuple[int, ...] = ()  # for each place of another unit, the index of the unit's own
        self.each = tuple(places)
        self._names = tuple(names)
        self._found: tuple[Pair | None, ...] = (None,) * len(places)
        self._drop()

    def _drop(self) -> None:
        """Nothing is known of what is registered: `build` is to be done, or done again."""
        self.pairs: tuple[Pair, ...] = ()
        self._params: list[ShardedParam] = []
        self.swap = ParameterSwap(())
        self._built = False

    def tie(self, places: Sequence[Place], names: Sequence[str]) -> None:
        """Other places of the parameters, in modules of sharded units; see Note [Tied to what is sharded]."""
        pairs = [None if place.registered is None else pair_of(place.registered) for place in places]
        self.each += tuple(places)
        self._names += tuple(names)
        self._found += (None,) * len(places)
        self._tied_to += tuple(self._found.index(pair) for pair in pairs)
        self.build()

    def build(self) -> None:
        """Register DTensors in all places, made or found."""
        self._built = False
        before = self._found
        self._keep_ties()
        # Sparse gradients are for an optimizer that takes nothing else.
        dense = {id(place.registered): None for place in self.each if not is_sparse_lookup(place.module)}
        self._found = tuple(
            self._pair_at(place, name, last) if id(place.registered) in dense else None
            for place, name, last in zip(self.each, self._names, before, strict=True)
        )
        places: dict[int, list[Place]] = {}
        names: dict[int, str] = {}
        for place, name, pair in zip(self.each, self._names, self._found, strict=True):
            places.setdefault(id(pair), []).append(place)
            names.setdefault(id(pair), name)
        self.pairs = tuple({id(pair): pair for pair in self._found if pair is not None}.values())
        self._params = []
        for pair in self.pairs:
            param = ShardedParam(ParamInfo(names[id(pair)], tuple(places[id(pair)])), pair.resting)
            param.unsharded = pair.plain
            param.replace(pair.resting)
            self._params.append(param)
        for name, pair, last in zip(self._names, self._found, before, strict=True):
            if last is not None and last is not pair:
                note(last.resting, Form.REPLACED, self._unit, name)
        for name, pair in zip(self._names, self._found, strict=True):
            if pair is not None:
                note(pair.plain, Form.COMPUTING, self._unit, name)
                note(pair.resting, Form.REPLICATED, self._unit, name)
        self.swap = ParameterSwap(self._params)
        self._at_rest = self._registered()
        held = zip(self._found, self._at_rest, strict=True)
        self._computing = [parameter if pair is None else pair.plain for pair, parameter in held]
        self._built = True  # last: after an interrupt it is done again

    def _keep_ties(self) -> None:
        """What came to one of several tied places comes to all of them."""
        tied: dict[int, list[Place]] = {}
        for index, own in enumerate(self._tied_to, self._own):
            tied.setdefault(own, [self.each[own]]).append(self.each[index])
        newcomers = []
        for own, places in tied.items():
            last = self._found[own]
            held = {id(place.registered): place.registered for place in places if place.registered is not None}
            new = [parameter for parameter in held.values() if last is None or not last.has(parameter)]
            if len(new) > 1:
                raise ForeignParameterError(
                    f"parameter '{self._names[own]}' of unit '{self._unit}' is tied: it has {len(places)} places, and "
                    "different parameters were registered at them. Register one parameter at all of them; to untie them, call "
                    "remove() on the annotated modules first"
                )
            newcomers += [(ShardedParam(ParamInfo(self._names[own], tuple(places)), parameter), parameter) for parameter in new]
        for param, parameter in newcomers:
            param.replace(parameter)

    def _registered(self) -> list[nn.Parameter | None]:
        return [place.registered for place in self.each]

    def _pair_at(self, place: Place, name: str, last: Pair | None) -> Pair | None:
        """The pair of what is registered there, where `last` was; None for what has no second form."""
        registered = place.registered
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

    def prepare(self, *, at_rest: bool) -> None:
        """Notice what users did to the parameters.

        Args:
            at_rest: modules hold the resting forms.
        """
        if at_rest:
            if not self._built or not all(map(is_, self._registered(), self._at_rest)):
                self.build()
            for pair in self.pairs:
                pair.follow()
            if any(param.unsharded is not pair.plain for param, pair in zip(self._params, self.pairs, strict=True)):
                self.build()
        for pair in self.pairs:
            if pair.plain.grad is not None:
                pair.plain.grad = None  # a backward that raised left it behind

    @property
    def params(self) -> Sequence[ShardedParam]:
        """Those of the parameters that have two forms."""
        if not self._built:
            self.build()
        return self._params

    @property
    def home(self) -> torch.device:
        """Where the parameters are, or are to be."""
        devices = [pair.plain.device for pair in self.pairs if not pair.plain.is_meta]
        return devices[0] if devices else torch.device(self._mesh.device_type)

    @property
    def plain(self) -> list[nn.Parameter]:
        """What modules compute with, in the order of the unit's own places."""
        return [parameter for parameter in self._computing[: self._own] if parameter is not None]

    @property
    def present(self) -> list[int]:
        """Numbers of the unit's own places that hold a parameter."""
        return [number for number, parameter in enumerate(self._computing[: self._own]) if parameter is not None]

    def leave(self) -> None:
        """Register the plain parameters for good."""
        if not self._built:
            self.build()  # which an interrupt has left half done
        for name, pair in zip(self._names, self._found, strict=True):
            if pair is not None:
                drop_note(pair.plain)
                note(pair.resting, Form.REMOVED, self._unit, name)
        for pair, param in zip(self.pairs, self._params, strict=True):
            pair.follow()
            param.replace(pair.plain)
            gradient = pair.resting.grad
            pair.resting.grad = None
            if isinstance(gradient, DTensor):
                pair.plain.grad = local_of(gradient)
        self.pairs = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> PairedPlaces:
        twin = memo[id(self)] = PairedPlaces.__new__(PairedPlaces)
        # First, since copying modules leads to whoever asks for them: the modules are not whole then, but parameters are.
        twin._found, twin._at_rest = copy.deepcopy((self._found, self._at_rest), memo)
        held = zip(twin._found, twin._at_rest, strict=True)
        twin._computing = [parameter if pair is None else pair.plain for pair, parameter in held]
        twin._mesh, twin._unit, twin._names = self._mesh, self._unit, self._names
        twin._own, twin._tied_to = self._own, self._tied_to
        twin.each = copy.deepcopy(self.each, memo)
        twin._drop()
        return twin
