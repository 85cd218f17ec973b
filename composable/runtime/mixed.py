"""A replicated unit's parameters where others are sharded: DTensors at rest, plain tensors for modules; knows no root.

Note [Next to shards]
torch's own functions over all parameters of a model (`clip_grad_norm_`, `foreach` optimizers, gradient scalers) take DTensors
or plain tensors, but no mix. So as soon as one annotation covers both replicated and sharded modules, what is replicated rests
as DTensors, too, with a `Replicate()` placement on the mesh of the shards, over the memory of the plain parameters. Modules go
on computing with the plain ones, autograd accumulates there, and buckets average there. What arrives is moved to the DTensor
at the end: outside of a backward a plain parameter has no gradient, so there is nothing that `zero_grad` could miss.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from composable.compilation import untraced
from composable.device.parameter_swap import Place
from composable.device.private import in_backward
from composable.model.hooks import Guard, GuardRow, after_call
from composable.model.interrupts import calls_of
from composable.runtime.loading import StateDictHook
from composable.runtime.paired_places import PairedPlaces
from composable.runtime.readers import Readers


class MixedParameters:
    """What a replicated unit registers, and when.

    Args:
        places: the places of its parameters.
        names: FQNs, for messages.
        mesh: of the shards.
        called: the unit's own modules; whatever else holds parameters of it may be called by itself.
        unit: its name.

    Attributes:
        paired: where it does.
    """

    def __init__(
        self, places: Sequence[Place], names: Sequence[str], mesh: DeviceMesh, called: Sequence[nn.Module], unit: str
    ) -> None:
        self.paired = PairedPlaces(places, names, mesh, unit)
        self._shown: dict[object, None] = {}  # for whom: calls and backwards
        self._loading: list[RemovableHandle] = []
        self._guards: list[Guard] = []
        self._watch({id(place.module): place.module for place in places}, called)
        self.paired.build()

    def _watch(self, holders: Mapping[int, nn.Module], called: Sequence[nn.Module] = ()) -> None:
        """Be told when one of `holders`, by their ids, is called by itself, or loaded, or saved."""
        hook = StateDictHook(self.paired)
        self._loading += [module.register_load_state_dict_pre_hook(hook) for module in holders.values()]
        self._loading += [module.register_state_dict_pre_hook(self._before_state_dict) for module in holders.values()]
        mine = [id(module) for module in called]
        self._guards += [Guard(module, self._called_alone) for key, module in holders.items() if key not in mine]
        self._row = GuardRow(self._guards)

    def tie(self, places: Sequence[Place], names: Sequence[str]) -> None:
        """Other places of the parameters, in modules of sharded units; see Note [Tied to what is sharded]."""
        known = [id(place.module) for place in self.paired.each]
        self._watch({id(place.module): place.module for place in places if id(place.module) not in known})
        self.paired.tie(places, names)

    def use_plain(self, reader: object) -> None:
        """Modules compute with plain tensors for as long as there is a `reader`. Done twice is done once."""
        alone = not self._shown
        if not in_backward():
            self.paired.prepare(at_rest=alone)
        elif alone:
            for pair in self.paired.pairs:
                pair.tell_of_writes()
        self._shown[reader] = None  # first: whoever hides for it finds what has been shown
        if alone:
            self._row.step_aside()
            self.paired.swap.use_unsharded()

    def use_resting(self, reader: object) -> None:
        """Modules hold DTensors again when this was the last reader."""
        self._shown.pop(reader, None)
        if not self._shown:
            self.paired.swap.use_sharded()
            self._row.stand()

    @untraced
    def _before_state_dict(self, *_: Any) -> None:
        for reader in list(self._shown):
            if isinstance(reader, Readers):
                reader.recover()

    def drop_calls(self) -> None:
        """Calls of modules by themselves have ended without a word."""
        for reader in [each for each in self._shown if isinstance(each, _CalledAlone) and not calls_of(each.module)]:
            self.use_resting(reader)

    def _called_alone(self, module: nn.Module) -> None:
        """A module inside the unit is called while no call, or backward, of an annotated module around it is under way."""
        call = _CalledAlone(module)
        self.use_plain(call)
        after_call(module, partial(self.use_resting, call))

    def leave(self) -> None:
        """Register the plain parameters for good."""
        for guard in self._guards:
            guard.remove()
        for hook in self._loading:
            hook.remove()
        self.paired.leave()

    def __deepcopy__(self, memo: dict[int, Any]) -> MixedParameters:
        paired = copy.deepcopy(self.paired, memo)
        if id(self) in memo:  # copying them copies modules, and those lead here
            twin: MixedParameters = memo[id(self)]
            return twin
        twin = memo[id(self)] = MixedParameters.__new__(MixedParameters)
        twin.paired, twin._shown = paired, {}
        twin._loading = []  # the copies of hooks are on the copies of modules
        twin._guards, twin._row = copy.deepcopy((self._guards, self._row), memo)
        return twin


class _CalledAlone:
    """A call of a module inside a unit, by nobody who is annotated."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
