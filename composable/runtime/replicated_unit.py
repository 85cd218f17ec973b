"""What `replicate` leaves in the registry: a unit, its reducer, and the bracket around its module's forward."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from composable.compilation import untraced
from composable.device.collectives import Communicator, LocalCommunicator, Steps
from composable.device.parameter_swap import Owner
from composable.device.private import in_backward, innermost
from composable.errors import PhaseError, first_line, still_on_meta, unit_name
from composable.model.hooks import before_gradient
from composable.model.interrupts import calls_of
from composable.model.naming import known_fqn
from composable.model.values import map_tensors, tensors_in, with_a_node
from composable.runtime.accumulation import refuse_removal
from composable.runtime.buffer_broadcast import share_buffers
from composable.runtime.launch_order import LaunchOrder
from composable.runtime.membership import Newcomers
from composable.runtime.mesh_info import MeshInfo
from composable.runtime.mixed import MixedParameters, serves
from composable.runtime.ownership import enroll, next_number, owned_elsewhere, strike_off, tell_the_next
from composable.runtime.readers import Readers
from composable.runtime.reducer import Reducer
from composable.runtime.resting_form import RestingGradients, at_rest, fits
from composable.runtime.rounds import Forward, Forwards
from composable.runtime.sparse import is_sparse_lookup, only_looked_up
from composable.runtime.step import refuse_gradients_left
from composable.runtime.unaveraged import refuse_unaveraged
from composable.runtime.wrappers import refuse_inside

# What a copy has, too.
_NAMED: Final = ("modules", "fqn", "names", "_owners", "_lookups", "buffers", "mesh_info", "_cap_bytes", "order", "place")
_HELD: Final = ("name", "_mixed", "_reasons", "_readers", "_inside", "_opens", "_forwards")


class ReplicatedUnit:
    """A replicated module. It is the state and the bracket in one object.

    Gradients are averaged from the annotation on, whether the module is called or not: the annotation, or copying it, puts
    hooks on the parameters. A call notices what has become of the parameters since, and shares the buffers.
    """

    def __init__(self) -> None:
        self.modules: tuple[nn.Module, ...] = ()
        self.fqn, self.name = "", unit_name("")
        self.names: tuple[str, ...] = ()
        self.mesh_info: MeshInfo | None = None
        self.number = next_number()
        self.held: frozenset[int] = frozenset()
        self._owners: tuple[Owner, ...] = ()  # every place of every parameter: what is tied now need not stay so
        self._lookups: tuple[bool, ...] = ()  # for each place, whether its module reads it by sparse lookups
        self._places: list[tuple[dict[str, nn.Parameter | None], str]] | None = None  # of the owners; asked at every forward
        self.buffers: tuple[Owner, ...] = ()
        self._cap_bytes = 0
        self._reducer: Reducer | None = None
        self.order, self.place = LaunchOrder(LocalCommunicator()), 0
        self._on_meta = False  # whether parameters had no values when the reducer was made
        self._depth = 0
        self._called = False  # since the last call of what is around it has begun
        self._newcomers: Newcomers | None = None  # of a copy, from its first call on
        self._mixed: MixedParameters | None = None
        self._reasons: dict[object, None] = {}  # annotations around or on this module that cover shards, too
        self._readers = Readers((self,), self.settle)
        self._doubtful = False  # plain parameters were shown while users could act
        self._around: dict[object, None] = {}  # calls and backwards of annotated modules, this one too, that may read
        self._trains = False  # whether a backward is to follow the last forward, which nothing annotated was around
        self._inside: tuple[ReplicatedUnit, ...] = ()
        self._opens = False  # whether this unit's forwards open the steps of its messages
        self._forwards = [Forwards()]  # this unit's own, and those of the replicated unit around it

    def initialize(
        self,
        modules: Sequence[nn.Module],
        owners: Sequence[Owner],
        names: Sequence[str],
        buffers: Sequence[Owner],
        mesh_info: MeshInfo,
        cap_bytes: int,
    ) -> None:
        self.modules = tuple(modules)
        self._owners = tuple(owners)
        self._lookups = tuple(is_sparse_lookup(owner.module) for owner in owners)
        self.names = tuple(names)
        self.buffers = tuple(buffers)
        self.mesh_info, self.order = mesh_info, LaunchOrder(mesh_info.all)
        self._cap_bytes = cap_bytes
        self._newcomers = Newcomers(modules)
        enroll(self)
        self._renew(self._registered)

    @property
    def communicator(self) -> Communicator:
        assert self.mesh_info is not None, "the unit is used before replicate has finished"
        return self.mesh_info.all

    @property
    def _registered(self) -> list[nn.Parameter]:
        """The parameters that the modules compute with, as they hold them now, tied ones as often as they are registered."""
        if self._mixed is not None:
            return self._mixed.places.plain
        if self._places is None:
            self._places = [(owner.module._parameters, owner.name) for owner in self._owners]
        held = [registry.get(name) for registry, name in self._places]
        return [parameter for parameter in held if parameter is not None]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that this unit averages the gradients of, as users see them between steps."""
        reducer = self.reducer
        return [self._at_rest(parameter) for i, parameter in enumerate(reducer.parameters) if i not in reducer.elsewhere]

    def _at_rest(self, parameter: nn.Parameter) -> nn.Parameter:
        return parameter if self._mixed is None else at_rest(parameter)

    @property
    def reducer(self) -> Reducer:
        registered = self._registered
        if self._reducer is None or not self._reducer.fits(registered):
            return self._renew(registered)
        return self._reducer

    def _renew(self, registered: Sequence[nn.Parameter]) -> Reducer:
        """Make the reducer for the parameters that are there now."""
        last = self._reducer
        if last is not None:
            self.order.abort()
            last.detach()
        before, self.held = self.held, frozenset(map(id, registered))
        self._on_meta = self.communicator.size > 1 and any(parameter.is_meta for parameter in registered)
        reducer = self._reducer = Reducer(
            registered,
            self.names,
            self.communicator,
            self.order,
            self.place,
            cap_bytes=self._cap_bytes,
            unit=self.name,
            turn=self.number,
            elsewhere=owned_elsewhere(self, registered),
            sparse=only_looked_up(registered, self._lookups),
            forms=RestingGradients() if self._mixed is not None else None,
            forwards=self._forwards,
            last=last,
        )
        self.order.put(self.place, reducer)
        tell_the_next(self, before ^ self.held)
        return reducer

    def _refuse_newcomers(self) -> None:
        if self.communicator.size > 1:
            self._newcomers = self._newcomers or Newcomers(self.modules)
            self._newcomers.refuse(self.held, self.name)

    def _refuse_meta(self) -> None:
        late = next((parameter for parameter in self._registered if parameter.is_meta), None)
        if late is not None:
            raise PhaseError(still_on_meta(self.name_of(late), self.name))
        self._on_meta = False

    def name_of(self, parameter: nn.Parameter) -> str:
        """The FQN, below the unit, of a parameter that it holds."""
        return next((name for held, name in zip(self._registered, self.names, strict=False) if held is parameter), "")

    def follow(self) -> None:
        """Another unit has come to hold, or holds no longer, parameters that this one holds, too."""
        reducer = self._reducer
        if reducer is not None and reducer.elsewhere != owned_elsewhere(self, reducer.parameters):
            self._renew(self._registered)

    def check_step(self, optimizer: Optimizer) -> None:
        """Raise when gradients that `optimizer` is about to use were not averaged; see Note [Before an optimizer steps]."""
        if self._reducer is not None and self.communicator.size > 1:
            named = list(zip(self._registered, self.names, strict=False))
            refuse_unaveraged(optimizer, self.name, self._reducer, named, self.order.in_backward, self._at_rest)

    # --- next to shards ---------------------------------------------------------------------------------------------

    def contains(self, inside: Sequence[ReplicatedUnit]) -> None:
        """Replicated units below this one: who is in a forward of this module may read their parameters, too."""
        self._inside = tuple(inside)
        self._readers = Readers((self, *inside), self.settle)
        for unit in inside:
            unit._forwards[1:] = self._forwards[:1]

    def launch_in(self, order: LaunchOrder, place: int, mesh_info: MeshInfo | None) -> None:
        if self._reducer is None:
            return
        self.order.abort()
        self.order.take_out(self.place)
        self.order, self.place, self.mesh_info = order, place, mesh_info
        self.rename(known_fqn(self.modules[0]) or self.fqn)
        self._renew(self._registered)

    def can_rest(self, parameter: nn.Parameter, mesh: DeviceMesh) -> bool:
        """Whether `parameter`, which modules of this unit compute with, can have a second form on `mesh`."""
        if self.mesh_info is None or not serves(mesh, self.mesh_info.mesh) or not fits(parameter, mesh):
            return False
        held = zip(self._registered, self._lookups, strict=False)
        return not any(lookup for other, lookup in held if other is parameter)

    def rest_on(self, mesh: DeviceMesh, tied: Sequence[tuple[Owner, str]], reason: object) -> None:
        """Let the parameters rest as DTensors on `mesh`, the shards' own; see Note [Next to shards]."""
        if self._mixed is None and (self.mesh_info is None or not serves(mesh, self.mesh_info.mesh)):
            return
        self._reasons[reason] = None
        if self._mixed is None:
            self.rename(known_fqn(self.modules[0]) or self.fqn)
            self._mixed = MixedParameters(self._owners, self.names, mesh, self.modules, self.name)
            self._renew(self._registered)
        if tied:
            owners, names = zip(*tied, strict=True)
            self._mixed.tie(owners, names)

    def rest_plain(self, reason: object) -> None:
        """One reason less to rest as DTensors."""
        if reason in self._reasons:
            if len(self._reasons) == 1:
                self._leave_mixed()
                self._renew(self._registered)
            self._reasons.pop(reason)

    def _leave_mixed(self) -> None:
        mixed, self._mixed = self._mixed, None
        if mixed is not None:
            mixed.leave()

    def show(self, reader: object) -> bool:
        if self._doubtful and not in_backward():
            self._doubtful = False
            held = zip(self.names, map(self._at_rest, self._registered), strict=False)
            refuse_gradients_left(self.name, held, partial(self.communicator.leave, self.communicator.sums))
        alone, self._around[reader] = not self._around, None
        if self._mixed is not None:
            self._mixed.show(reader)
            if not in_backward():
                _ = self.reducer  # of the parameters that are there now
        return alone

    def hide(self, reader: object) -> None:
        self._around.pop(reader, None)
        if not self._around and not in_backward():
            if not self._called:  # whoever called it has noticed what became of the parameters, and launches other buckets
                self.order.abort()
                self.reducer.prepare()
            self._called = False
        if self._mixed is not None:
            self._mixed.hide(reader)

    # --- backward ---------------------------------------------------------------------------------------------------

    def drop_held(self) -> None:
        self.reducer.forget()

    def open_backward(self) -> None:
        if self._reducer is not None:
            self.order.open()

    def _enter_backward(self, forward: Forward | None, *_: Any) -> None:
        """Backward is about to go through an output; with it the units inside take part, whether or not it comes to them."""
        try:
            self.open_backward()
            if forward is not None:
                forward.passed()
            self._readers.enter_backward()
        except BaseException:
            if self._reducer is not None:
                self.order.lose_backward()
            raise

    def count_by(self, steps: Steps, *, opened_here: bool = False) -> None:
        """Messages of this unit and of those inside belong to `steps`, in which all ranks run the forwards together.

        Args:
            opened_here: this unit's forwards open them.
        """
        self._opens = opened_here
        for unit in (self, *self._inside):
            unit.communicator.count_by(steps)

    def _lose_forward(self) -> None:
        """A forward raised. If a backward was to follow, this rank gives the step up, and meets the others in the next one."""
        if self._depth or not self._trains:
            return
        self._trains, sums = False, self.communicator.sums
        if sums.steps.by_backward:
            sums.steps.open()
        elif not self._opens:
            return
        error = sys.exception()
        why = f"raised {type(error).__name__}: {first_line(error)}" if isinstance(error, Exception) else "was interrupted"
        self.communicator.leave(sums, f"unit '{self.name}' {why}")
        for unit in (self, *self._inside):
            unit.drop_held()

    # --- the bracket ------------------------------------------------------------------------------------------------

    outermost = True

    @untraced
    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self._depth += 1
        if self._depth == 1:
            recomputed = in_backward()
            self._trains = not self._around and not recomputed and torch.is_grad_enabled() and self.communicator.size > 1
            found = self._readers.enter_call()
            if not recomputed:
                reducer, self._called = self.reducer, True
                self._refuse_newcomers()
                if self._on_meta:
                    self._refuse_meta()
                refuse_inside(module, "replicate", self.name, reducer.parameters)
                self.order.abort()  # if the backward before this forward raised
                reducer.prepare()
                if self._opens:
                    steps = self.communicator.sums.steps
                    steps.open()
                    steps.look_ahead([self.communicator])
                share_buffers(found)
        return args, kwargs

    def leave(self, module: nn.Module, output: Any) -> Any:
        self._end_call()
        if torch.is_grad_enabled() and self._reducer is not None and (self.communicator.size > 1 or self._mixed is not None):
            if not any(tensor.grad_fn is not None for tensor in tensors_in(output)):
                output = map_tensors(output, with_a_node)  # the caller's own input: what waits at a leaf is called only once
            # The graphs of torch.func's transforms lead to no parameter of ours; what they wrap may.
            watched = [tensor for tensor in map(innermost, tensors_in(output)) if tensor.requires_grad]
            alone = watched and module.training and not self._around and not in_backward()
            forward = self._forwards[0].begin(self.communicator.sums.steps.number) if alone else None
            enter_backward = partial(self._enter_backward, forward)
            for tensor in watched:
                before_gradient(tensor, enter_backward)
        return output

    def on_error(self, module: nn.Module) -> None:
        self._end_call()
        self._lose_forward()

    @untraced
    def on_interrupt(self) -> None:
        self._readers.forget_calls()
        if self.communicator.size > 1:
            self.communicator.sums.steps.behind = True
        self._lose_forward()

    @untraced
    def forget_calls(self) -> None:
        self._depth = 0
        if self._mixed is not None:
            self._doubtful = self._doubtful or not self._mixed.places.swap.intact()
            self._mixed.forget_calls()
        self._readers.leave_call()

    def settle(self) -> None:
        """Show what should be seen, if an interrupt has ended what was under way."""
        if self._depth and not any(calls_of(module) for module in self.modules):
            self._readers.forget_calls()

    def _end_call(self) -> None:
        if self._depth == 1:
            self._readers.leave_call()
        self._depth -= 1  # last: after an interrupt it is done again

    def rename(self, fqn: str) -> None:
        self.fqn, self.name = fqn, unit_name(fqn)

    @staticmethod
    def around_removal(units: Sequence[ReplicatedUnit], undo: Callable[[], object]) -> None:
        refuse_removal("replicate", [(unit.name, unit.reducer.local.accumulation) for unit in units])
        undo()

    def restore(self) -> None:
        """Undo: the parameters stay as they are, or are plain again, and nothing is reduced any more."""
        self._leave_mixed()
        if self._reducer is not None:
            self._reducer.detach()
            self._reducer = None
        self.order.take_out(self.place)
        strike_off(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplicatedUnit:
        twin = ReplicatedUnit()
        memo[id(self)] = twin
        for name in (*_NAMED, *_HELD):
            setattr(twin, name, copy.deepcopy(getattr(self, name), memo))
        twin.number = self.number
        enroll(twin)
        # The copied modules are not whole yet, but their parameters can be copied already.
        twin._renew(copy.deepcopy(self._registered, memo) if twin._mixed is None else twin._mixed.places.plain)
        return twin
