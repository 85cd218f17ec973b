"""Before a forward of a root: has anybody moved, replaced, frozen or resized parameters? Asked of all units at once; no order.

Note [One question for all units]
Nearly always nobody has. So what the units left is compared in one go, mostly in C, and only a difference is looked into unit
by unit. What is compared with is what the units themselves noted; it is forgotten before any of them changes its notes.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

from torch import Tensor, nn

from composable.device.parameter_forms import trainability
from composable.device.private import as_tensors, local_of, outside_transforms
from composable.errors import PhaseError, still_on_meta
from composable.runtime.handle import Handle
from composable.runtime.membership import Membership
from composable.runtime.registered import RegisteredShards


class _ParameterWatch:
    """Tells quickly whether sharded parameters are registered where they were, hold what they held, and train as they did."""

    def __init__(self, units: Sequence[RegisteredShards]) -> None:
        at_rest = [place for unit in units for place in unit.swap.at_rest]
        self._registries = [registry for registry, _, _ in at_rest]
        self._names = [name for _, name, _ in at_rest]
        self._registered = [sharded for _, _, sharded in at_rest]
        self._sharded = [sharded for unit in units for sharded in unit.sharded]
        self._locals = [local for unit in units for local in unit.locals]
        self._numels = [numel for unit in units for numel in unit.numels]
        self._trainable = self._trains()

    def unchanged(self) -> bool:
        return (
            all(map(is_, map(dict.get, self._registries, self._names), self._registered))
            and all(map(is_, map(local_of, self._sharded), self._locals))
            and list(map(Tensor.numel, self._locals)) == self._numels
            and self._trains() == self._trainable
        )

    def _trains(self) -> list[bool]:
        with as_tensors():
            return list(map(trainability, self._sharded))


class Preparation:
    """Lets the units of one root notice what happened to their parameters and gradients since its last forward."""

    def __init__(self, module: nn.Module, handles: Sequence[Handle], membership: Membership) -> None:
        self._module = module
        self._handles = tuple(handles)
        self._membership = membership
        # Without a mesh, parameters are the user's own: what they are is looked up each time.
        self._can_watch = all(handle.mesh_info.mesh is not None for handle in handles)
        self._watch: _ParameterWatch | None = None
        precisions = [handle.parameters.precision for handle in handles]
        self._with_modes = tuple(precision for precision in precisions if precision.has_modes)

    def prepare(self) -> None:
        """May raise: what nobody can compute with is refused."""
        if (self._with_modes and self._changed_mode()) or self._watch is None or not self._watch.unchanged():
            self._watch = None
            for handle in self._handles:
                self._look_into(handle)
            if self._can_watch:
                registered = [handle.parameters.registered for handle in self._handles]
                self._watch = _ParameterWatch([each for each in registered if isinstance(each, RegisteredShards)])
        for handle in self._handles:
            handle.refresh()

    @property
    def trains(self) -> bool:
        """The mode of the root's module."""
        return self._module.training

    def _changed_mode(self) -> bool:
        """Whether dtypes have changed with the mode of the root's module."""
        trains = self.trains
        for precision in self._with_modes:
            precision.trains = trains
        return any(precision.outdated for precision in self._with_modes)

    @outside_transforms
    def _look_into(self, handle: Handle) -> None:
        parameters = handle.parameters
        if parameters.precision.outdated or not parameters.registered.intact():
            self._membership.check_ties()
            handle.adopt_replaced()
        if parameters.on_meta:
            raise PhaseError(still_on_meta(parameters.on_meta[0], handle.name))
        parameters.follow()
