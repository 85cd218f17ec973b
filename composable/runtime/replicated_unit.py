"""What `replicate` leaves in the registry: a unit, and the bracket around its module's forward. Knows no gradient."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from composable.compilation import untraced
from composable.device.parameter_swap import Place
from composable.device.private import in_backward, innermost
from composable.model.hooks import before_gradient
from composable.model.interrupts import calls_of
from composable.model.values import map_tensors, tensors_in, with_a_node
from composable.runtime.accumulation import refuse_removal
from composable.runtime.averaging import Averaging, refuse_left_alone
from composable.runtime.buffer_broadcast import share_buffers
from composable.runtime.cast_unit import CastUnit, use_casts
from composable.runtime.dtype_notes import note_of_dtypes
from composable.runtime.exact_modules import ExactModule
from composable.runtime.forward_steps import ForwardSteps
from composable.runtime.mesh_info import MeshInfo
from composable.runtime.model_averagers import take_replicated_parameters
from composable.runtime.readers import Readers
from composable.runtime.replicated_parameters import ReplicatedParameters
from composable.runtime.rounds import Forward
from composable.runtime.shown_parameters import ShownParameters
from composable.runtime.torchs_clipping import look_after_torchs_clipping
from composable.runtime.torchs_scaler import look_after_torchs_scaler
from composable.runtime.wrappers import refuse_inside

_COPIED: Final = ("buffers", "parameters", "averaging", "shown", "forward_steps", "_readers")


class ReplicatedUnit:
    """A replicated module. It is the state and the bracket in one object.

    Gradients are averaged from the annotation on, whether the module is called or not: the annotation, or copying it, puts
    hooks on the parameters. A call notices what has become of the parameters since, and shares the buffers.
    """

    def __init__(self) -> None:
        self.buffers: tuple[Place, ...] = ()
        self.parameters = ReplicatedParameters()
        self.averaging = Averaging(self.parameters)
        self.shown = ShownParameters(self.averaging)
        self.forward_steps = ForwardSteps(self.averaging)
        self._readers = Readers((self,), self.recover)
        self._depth = 0
        self.exact: list[ExactModule] = []

    def initialize(
        self,
        modules: Sequence[nn.Module],
        places: Sequence[Place],
        names: Sequence[str],
        buffers: Sequence[Place],
        mesh_info: MeshInfo,
        cap_bytes: int,
        divisor: float | None = None,
        casts: CastUnit | None = None,
        exact: Sequence[nn.Module] = (),
        keeps: Sequence[bool] = (),
    ) -> None:
        """Average the gradients of what is registered at `places`.

        Args:
            casts: what modules see in its place; None where nothing is cast.
            exact: modules that keep their dtype there.
            keeps: for each place, whether it does.
        """
        self.buffers = tuple(buffers)
        self.shown.casts = self.averaging.casts = casts
        self.exact = [ExactModule(module, self, "shown.casts.precision") for module in exact]
        self.parameters.initialize(modules, places, names, keeps)
        self.averaging.initialize(mesh_info, cap_bytes, divisor)
        take_replicated_parameters()
        look_after_torchs_clipping()
        look_after_torchs_scaler()

    def contain(self, inside: Sequence[ReplicatedUnit]) -> None:
        """Replicated units below this one: who is in a forward of this module may read their parameters, too."""
        self.forward_steps.contain([unit.averaging for unit in inside])
        self._readers = Readers((self, *inside), self.recover)

    # --- the bracket ------------------------------------------------------------------------------------------------

    outermost = True

    @untraced
    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self._depth += 1
        if self._depth == 1:
            averaging, steps = self.averaging, self.forward_steps
            recomputed = in_backward()
            steps.trains = (
                not self.shown.around and not recomputed and torch.is_grad_enabled() and averaging.communicator.size > 1
            )
            found = self._readers.enter_call()
            if not recomputed:
                reducer, self.shown.called = averaging.reducer, True
                refuse_left_alone(averaging)
                averaging.refuse_unfit()
                refuse_inside(module, "replicate", averaging.name, reducer.parameters.everyone)
                averaging.order.abort()  # if the backward before this forward raised
                reducer.prepare()
                if steps.opened_here:
                    steps.open()
                share_buffers(found)
                use_casts(found, trains=module.training)
        casts = self.shown.casts
        return (args, kwargs) if casts is None or casts.edges is None else casts.edges.inputs(args, kwargs)

    def leave(self, module: nn.Module, output: Any) -> Any:
        casts = self.shown.casts
        if casts is not None:
            output = output if casts.edges is None else casts.edges.output(output)
            try:
                casts.refuse_written(self.averaging.name)
            except BaseException:
                self._end_call()
                raise
        self._end_call()
        averaging = self.averaging
        if (
            torch.is_grad_enabled()
            and averaging.current is not None
            and (averaging.communicator.size > 1 or self.parameters.pairs is not None or casts is not None)
        ):
            if not any(tensor.grad_fn is not None for tensor in tensors_in(output)):
                output = map_tensors(output, with_a_node)  # the caller's own input: what waits at a leaf is called only once
            # The graphs of torch.func's transforms lead to no parameter of ours; what they wrap may.
            watched = [tensor for tensor in map(innermost, tensors_in(output)) if tensor.requires_grad]
            alone = watched and module.training and not self.shown.around and not in_backward()
            forward = self.forward_steps.count() if alone else None
            enter_backward = partial(self._enter_backward, forward)
            for tensor in watched:
                before_gradient(tensor, enter_backward)
        return output

    def on_error(self, module: nn.Module) -> None:
        casts = self.shown.casts
        if casts is not None:
            note_of_dtypes(sys.exception(), module, casts.precision.in_force.param_dtype, self.averaging.name)
        self._end_call()
        if not self._depth:
            self.forward_steps.lose()

    @untraced
    def on_interrupt(self) -> None:
        self._readers.drop_calls()
        communicator = self.averaging.communicator
        if communicator.size > 1:
            communicator.sums.steps.behind = True
        if not self._depth:
            self.forward_steps.lose()

    def _end_call(self) -> None:
        if self._depth == 1:
            self._readers.leave_call()
        self._depth -= 1  # last: after an interrupt it is done again

    @untraced
    def drop_calls(self) -> None:
        """An interrupt ended the calls of its modules."""
        self._depth = 0
        self.shown.drop_calls()
        self._readers.leave_call()

    def recover(self) -> None:
        """Show what should be seen, if an interrupt has ended what was under way."""
        if self._depth and not any(calls_of(module) for module in self.parameters.modules):
            self._readers.drop_calls()

    def _enter_backward(self, forward: Forward | None, *_: Any) -> None:
        """Backward is about to go through an output; with it the units inside take part, whether or not it comes to them."""
        try:
            self.averaging.open_backward()
            if forward is not None:
                forward.passed()
            self._readers.enter_backward()
        except BaseException:
            if self.averaging.current is not None:
                self.averaging.order.lose_backward()
            raise

    # --- ends -------------------------------------------------------------------------------------------------------

    @staticmethod
    def around_removal(units: Sequence[ReplicatedUnit], undo: Callable[[], object]) -> None:
        held = [(unit.averaging.name, unit.averaging.reducer.local.accumulation) for unit in units]
        refuse_removal("replicate", held)
        undo()

    def restore(self) -> None:
        """Undo: the parameters stay as they are, or are plain again, and nothing is reduced any more."""
        self.shown.leave()
        for each in self.exact:
            each.remove()
        self.averaging.leave()
        self.buffers = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplicatedUnit:
        twin = memo[id(self)] = ReplicatedUnit()
        for name in _COPIED:
            setattr(twin, name, copy.deepcopy(getattr(self, name), memo))
        return twin
