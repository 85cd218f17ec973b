"""The reducer that fits the parameters of a replicated unit: made anew when they change; knows no forward and no reader."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Final

from torch import nn
from torch.optim import Optimizer

from composable.device.collectives import Communicator, LocalCommunicator
from composable.errors import unit_name
from composable.model.naming import find_fqn, known_fqn
from composable.runtime.cast_unit import CastUnit
from composable.runtime.hooked_units import UnitHook, refuse_sparse
from composable.runtime.launch_order import LaunchOrder
from composable.runtime.membership import Newcomers
from composable.runtime.mesh_info import MeshInfo, is_left_alone, left_alone
from composable.runtime.model_parts import forget_parts
from composable.runtime.ownership import enroll, next_number, owned_elsewhere, strike_off, tell_the_next
from composable.runtime.reducer import Reducer
from composable.runtime.replicated_parameters import ReplicatedParameters
from composable.runtime.resting_form import RestingGradients
from composable.runtime.rounds import Forwards
from composable.runtime.sparse import only_looked_up
from composable.runtime.unaveraged import refuse_unaveraged

_COPIED: Final = (
    "parameters", "name", "_fqn", "mesh_info", "divisor", "_cap_bytes", "order", "place", "forwards", "_newcomers", "casts"
)  # fmt: skip


class Averaging:
    """Averages the gradients of `parameters`, from the annotation on, whether their modules are called or not.

    A `Holder` of `composable.runtime.ownership`, and a `Launcher` of `composable.runtime.launch_order`.

    Attributes:
        name: what the unit is called in messages.
        number: units are numbered in the order of annotation; a copy has the number of its original.
        held: ids of the parameters that the reducer was made for.
        order, place: where the reducer launches.
        forwards: the unit's own, and those of the replicated unit around it.
        divisor: what sums of gradients are divided by; None for the number of ranks.
        casts: says in which dtypes sums are made; None: in those of the parameters.
        current: the reducer that was made last; None before the first, and after the unit was removed.
        hook: of a user's, which makes the means; whoever puts it there renews the reducer.
    """

    def __init__(self, parameters: ReplicatedParameters) -> None:
        self.parameters = parameters
        self._fqn, self.name = "", unit_name("")
        self.number = next_number()
        self.held: frozenset[int] = frozenset()
        self.mesh_info: MeshInfo | None = None
        self.order, self.place = LaunchOrder(LocalCommunicator()), 0
        self.forwards = [Forwards()]
        self.current: Reducer | None = None
        self.divisor: float | None = None
        self.hook: UnitHook | None = None
        self.casts: CastUnit | None = None
        self._cap_bytes = 0
        self._on_meta = False  # whether parameters had no values when the reducer was made
        self._newcomers = Newcomers(())

    def initialize(self, mesh_info: MeshInfo, cap_bytes: int, divisor: float | None = None) -> None:
        self.look_up_name()
        self.divisor = divisor
        self.mesh_info, self.order = mesh_info, LaunchOrder(mesh_info.all)
        (self.place,) = self.order.company.reserve(1)
        self._cap_bytes = cap_bytes
        self._newcomers = Newcomers(self.parameters.modules)
        enroll(self)
        self.renew(self.parameters.registered)

    def look_up_name(self) -> None:
        """It follows what is known of the modules around the unit."""
        self._fqn = known_fqn(self.parameters.modules[0]) or self._fqn
        self.name = unit_name(self._fqn)

    @property
    def communicator(self) -> Communicator:
        assert self.mesh_info is not None, "the unit is used before replicate has finished"
        return self.mesh_info.all

    @property
    def reducer(self) -> Reducer:
        """For the parameters that are there now."""
        registered = self.parameters.registered
        if self.current is None or not self.current.fits(registered):
            return self.renew(registered)
        return self.current

    @property
    def owned_at_rest(self) -> list[nn.Parameter]:
        """The parameters that this unit averages the gradients of, as users see them between steps."""
        parameters = self.reducer.parameters
        mine = [parameter for i, parameter in enumerate(parameters.everyone) if i not in parameters.elsewhere]
        return list(map(self.parameters.at_rest, mine))

    def renew(self, registered: Sequence[nn.Parameter], numbers: Sequence[int] | None = None) -> Reducer:
        """Make the reducer for the parameters that are there now.

        Args:
            numbers: of their places; None where modules are whole, and can be asked.
        """
        all_of, at = self.parameters, self.parameters.present if numbers is None else numbers
        names = [all_of.names[number] for number in at]
        sparse = only_looked_up(registered, [all_of.lookups[number] for number in at])
        if self.hook is not None:
            refuse_sparse(self.name, [names[i] for i in sorted(sparse)])
        last = self.current
        if last is not None:
            self.order.abort()
            last.hooks.detach()
            last.term_hooks.remove()
        before, self.held = self.held, frozenset(map(id, registered))
        self._on_meta = self.communicator.size > 1 and any(parameter.is_meta for parameter in registered)
        reducer = self.current = Reducer(
            registered,
            names,
            self.communicator,
            self.order,
            self.place,
            cap_bytes=self._cap_bytes,
            unit=self.name,
            turn=self.number,
            elsewhere=owned_elsewhere(self, registered),
            sparse=sparse,
            forms=None if all_of.pairs is None else RestingGradients(),
            forwards=self.forwards,
            divisor=self.divisor,
            hook=self.hook,
            summed_in=None if self.casts is None else all_of.summed_in(self.casts, registered, at),
            last=last,
        )
        self.order.put(self.place, reducer)
        tell_the_next(self, before ^ self.held)
        return reducer

    def refuse_unfit(self) -> None:
        """Raise for parameters that came later and that nothing averages, or that have no values yet."""
        if self.communicator.size > 1:
            self._newcomers.refuse(self.held, self.name)
        if self._on_meta:
            self.parameters.refuse_meta(self.name)
            self._on_meta = False

    @property
    def place_in_backward(self) -> tuple[int, int] | None:
        """Who has a higher one launches later; None where there is nothing to launch."""
        if self.current is None or not self.current.buckets.each:
            return None
        return min(member.turn for member in self.order.members), self.place

    def follow(self) -> None:
        """Another unit has come to hold, or holds no longer, parameters that this one holds, too."""
        parameters = None if self.current is None else self.current.parameters
        if parameters is not None and parameters.elsewhere != owned_elsewhere(self, parameters.everyone):
            self.renew(self.parameters.registered)

    def check_step(self, optimizer: Optimizer) -> None:
        """Raise when gradients that `optimizer` is about to use were not averaged; see Note [Before an optimizer steps]."""
        if self.current is None:
            return
        if self.mesh_info is not None and is_left_alone(self.mesh_info.mesh):
            given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            if any(id(parameter) in self.held and parameter.grad is not None for parameter in given):
                refuse_left_alone(self)
        elif self.communicator.size > 1:
            parameters = self.parameters
            named = parameters.named
            has_backward = self.order.backward is not None
            refuse_unaveraged(optimizer, self.name, self.current, named, has_backward, parameters.at_rest)

    def launch_in(self, order: LaunchOrder, place: int, mesh_info: MeshInfo | None) -> None:
        """See `composable.runtime.launch_order`."""
        if self.current is None:
            return
        self.order.abort()
        self.order.take_out(self.place)
        self.order, self.place, self.mesh_info = order, place, mesh_info
        self.look_up_name()
        self.renew(self.parameters.registered)

    def open_backward(self) -> None:
        """Take part in the backward that runs, whichever gradients it brings."""
        if self.current is not None:
            self.order.open()

    def leave(self) -> None:
        """The unit is removed: it has no parameters from here on, and no ranks; who is around it may go on asking it."""
        if self.current is not None:
            self.current.hooks.detach()
            self.current.term_hooks.remove()
            self.current = None
        self.order.take_out(self.place)
        strike_off(self)
        self.held, self.hook = frozenset(), None
        if self.mesh_info is not None:
            forget_parts(self.mesh_info)
        self.mesh_info = MeshInfo.over_one_dimension(None, LocalCommunicator())
        self.order, self.place = LaunchOrder(self.mesh_info.all), 0
        self.parameters.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> Averaging:
        if self.hook is not None:
            self.hook.refuse_copy("replicate", self.name)
        twin = memo[id(self)] = Averaging(ReplicatedParameters())
        for name in _COPIED:
            setattr(twin, name, copy.deepcopy(getattr(self, name), memo))
        twin.number = self.number
        enroll(twin)
        # The copied modules are not whole yet, but their parameters can be copied already.
        source, pairs = self.parameters, twin.parameters.pairs
        if pairs is None:
            twin.renew(copy.deepcopy(source.registered, memo), source.present)
        else:
            twin.renew(pairs.plain, pairs.present)
        return twin


def refuse_left_alone(unit: Averaging) -> None:
    """Raise if `unit` was annotated before its process had a group.

    Raises:
        MeshError: each rank would train it by itself.
    """
    if unit.mesh_info is not None and is_left_alone(unit.mesh_info.mesh):
        raise left_alone("replicate", unit_name(find_fqn(unit.parameters.modules[0]) or unit._fqn))
