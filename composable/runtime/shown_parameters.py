"""For whom the modules of a replicated unit show what they compute with, and as what its parameters rest otherwise.

It knows neither forwards nor backwards, only who reads.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composable.device.infinities import agree_on_infinities
from composable.device.parameter_swap import Place
from composable.device.private import in_backward
from composable.model.transaction import on_undo
from composable.runtime.averaging import Averaging
from composable.runtime.cast_unit import CastUnit
from composable.runtime.mixed import MixedParameters
from composable.runtime.resting_form import fits
from composable.runtime.step import refuse_gradients_left


class ShownParameters:
    """What users and modules see of the parameters of one replicated unit.

    Attributes:
        around: calls and backwards of annotated modules, the unit's own too, that may read the parameters now.
        called: whether the unit was called since the first of them began.
        casts: what modules see in place of parameters and buffers; None where nothing is cast.
    """

    def __init__(self, averaging: Averaging) -> None:
        self._averaging = averaging
        self._mixed: MixedParameters | None = None
        self._reasons: dict[object, None] = {}  # annotations around or on the module that cover shards, too
        self._doubtful = False  # plain parameters were shown while users could act
        self.around: dict[object, None] = {}
        self.called = False
        self.casts: CastUnit | None = None

    def can_rest(self, parameter: nn.Parameter, mesh: DeviceMesh) -> bool:
        """Whether `parameter`, which modules of the unit compute with, can have a second form on `mesh`."""
        if not self._is_whole_on(mesh) or not fits(parameter, mesh):
            return False
        parameters = self._averaging.parameters
        return not any(lookup for other, lookup in parameters.with_lookups() if other is parameter)

    def _is_whole_on(self, mesh: DeviceMesh) -> bool:
        """Whether what is the same on all ranks of the unit can rest on `mesh`."""
        replicas = None if self._averaging.mesh_info is None else self._averaging.mesh_info.mesh
        if replicas is None or not agree_on_infinities():
            return False
        ranks = replicas.mesh.flatten().tolist()
        return all(rank in ranks for rank in mesh.mesh.flatten().tolist())

    def rest_on(self, mesh: DeviceMesh, tied: Sequence[tuple[Place, str]], reason: object) -> None:
        """Let the parameters rest as DTensors on `mesh`, the shards' own; see Note [Next to shards].

        Nothing if they cannot.

        Args:
            tied: places in sharded units that hold some of them, and names.
        """
        averaging, parameters = self._averaging, self._averaging.parameters
        if self._mixed is None and not self._is_whole_on(mesh):
            return
        self._reasons[reason] = None
        if self._mixed is None:
            averaging.look_up_name()
            self._mixed = MixedParameters(parameters.places, parameters.names, mesh, parameters.modules, averaging.name)
            parameters.pairs = self._mixed.paired
            averaging.renew(parameters.registered)
        if tied:
            places, names = zip(*tied, strict=True)
            self._mixed.tie(places, names)

    def rest_plain(self, reason: object) -> None:
        """One reason less to rest as DTensors; nothing if it was none."""
        if reason in self._reasons:
            if len(self._reasons) == 1:
                self.leave()
                self._averaging.renew(self._averaging.parameters.registered)
            self._reasons.pop(reason)

    def leave(self) -> None:
        """Register plain parameters for good."""
        if self.casts is not None:
            self.casts.use_originals()
        self._averaging.parameters.pairs = None
        mixed, self._mixed = self._mixed, None
        if mixed is not None:
            mixed.leave()

    def use_plain(self, reader: object) -> bool:
        """Modules compute with plain parameters from here on, for `reader`. Done twice is done once.

        Returns:
            Whether nobody was around the unit before.
        """
        if self._doubtful and not in_backward():
            self._doubtful = False
            parameters, communicator = self._averaging.parameters, self._averaging.communicator
            held = ((name, parameters.at_rest(parameter)) for parameter, name in parameters.named)
            refuse_gradients_left(self._averaging.name, held, partial(communicator.presence.leave, communicator.sums))
        alone, self.around[reader] = not self.around, None
        if self.casts is not None and in_backward():
            self.casts.use_casts()  # what is recomputed is cast again; before a forward, buffers are shared first
        if self._mixed is not None:
            self._mixed.use_plain(reader)
            if not in_backward():
                _ = self._averaging.reducer  # of the parameters that are there now
        return alone

    def use_resting(self, reader: object) -> None:
        """Modules hold what they hold at rest again, if they show nothing for anybody else."""
        self.around.pop(reader, None)
        if self.casts is not None and not self.around:
            self.casts.use_originals()
        if not self.around and not in_backward():
            if not self.called:  # whoever called it has noticed what became of the parameters, and launches other buckets
                self._averaging.order.abort()
                self._averaging.reducer.prepare()
            self.called = False
        if self._mixed is not None:
            self._mixed.use_resting(reader)

    def drop_calls(self) -> None:
        """An interrupt ended the calls of the unit's modules."""
        if self._mixed is not None:
            self._doubtful = self._doubtful or not self._mixed.paired.swap.intact()
            self._mixed.drop_calls()

    def __deepcopy__(self, memo: dict[int, Any]) -> ShownParameters:
        twin = memo[id(self)] = ShownParameters(self._averaging)
        for name in ("_averaging", "_mixed", "_reasons", "casts"):
            setattr(twin, name, copy.deepcopy(getattr(self, name), memo))
        return twin


def rest_as_dtensors(
    units: Sequence[ShownParameters],
    mesh: DeviceMesh | None,
    ties: Sequence[tuple[ShownParameters, Place, str]] = (),
) -> None:
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
        unit.rest_on(mesh, [(place, name) for other, place, name in ties if other is unit], reason)
