"""The driver of a rank that does not compute some units, but takes part in their collectives.

All ranks of a model launch the same collectives in the same order. Which ones a step launches is
decided where a forward or a backward enters or leaves a unit (`root.py`, `gather_order.py`,
`post_backward.py`). A rank that does not compute a unit makes the same visits: it gathers, reduces
and reshards.

* `Driver.visit` makes one visit. A rank that computes says which ones it makes, in the order of
  `StepEvent` (`join`): forward and backward are driven.
* `Driver.pass_through` makes the visits of one forward of a module, for its units in the order of
  `.modules()` (`skipped`). It puts nodes into the graph, through which backward makes its visits.

If a compiler reduces the gradients (`Root.eager_because` is empty), backward makes no visits, so a
driven rank could not take part. `pass_through` then raises an error, and while a `join` scope is
open, no compiler reduces.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from composable.contract.values import map_tensors
from composable.engine.gradients.agreed import InputGradMode
from composable.engine.gradients.grad_bucket import SyncMode
from composable.engine.params.param import hook_gradients
from composable.engine.step.prepare import broadcast_buffers
from composable.engine.step.root import land_held, launch_held, reset, root_of
from composable.engine.step.unit import Unit, UnitCall, unit_of
from composable.engine.step.visit import Visit, end_call, pre_backward
from composable.errors import PhaseError


class StepEvent(enum.IntEnum):
    """What one unit does; what its `detail`, a number, says."""

    # A forward of the module with this index, or its recomputation, begins.
    PRE_FORWARD = 0
    OUTPUT = 1  # that forward has outputs through which backward will come
    POST_FORWARD = 2  # it ends; 1: parameters must outlive it
    OPEN = 3  # a backward begins in the unit's root
    PRE_BACKWARD = 4  # it enters the unit; 1: by the first output of a forward
    GRADIENT = 5  # a parameter has a gradient, and its unit was not entered
    # It ends, as far as this root is concerned: it launches the rest; 1: a backward around it goes
    # on, of other roots.
    END = 6
    LANDED = 7  # behind that 1: the root waits for what it launched
    LOST = 8  # the step failed; nothing is driven


class Driver:
    """Takes part in steps of units that other ranks compute.

    Args:
        units: in the same order on all ranks.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = list(units)

    @property
    def modes(self) -> list[SyncMode]:
        """What backwards do with the gradients of each unit now: another rank does the same."""
        return [unit.gradients.accumulation.now for unit in self._units]

    def visit(self, index: int, event: StepEvent, detail: int) -> None:
        """Do with a unit what another rank says that it does, and compute nothing."""
        unit = self._units[index]
        root = root_of(unit)
        match event:
            case StepEvent.PRE_FORWARD:
                _enter(unit, unit.modules[detail])
            case StepEvent.OUTPUT:
                unit.count(1)
            case StepEvent.POST_FORWARD:
                end_call(unit.pop_call(), keep=bool(detail))
            case StepEvent.OPEN:
                root.open_backward()
            case StepEvent.PRE_BACKWARD:
                unit.count(-detail)
                pre_backward(UnitCall(unit, unit.step, unit.modules[0], 0, None))  # of no forward
            case StepEvent.GRADIENT:
                root.on_gradient(unit, unit.params[0])
            case StepEvent.END:
                root.launch_remaining()
            case StepEvent.LANDED:
                root.finish_backward()

    def backward(self, modes: Sequence[SyncMode], follow: Callable[[], None]) -> None:
        """Call `follow`, which makes the visits of a backward, in autograd's engine: it calls the
        end of backward.

        Args:
            modes: those of the rank that computes.
        """
        scope = object()
        for unit, mode in zip(self._units, modes, strict=True):
            unit.gradients.accumulation.open_scope(scope, mode)
        try:
            with torch.enable_grad():
                anchor = torch.zeros((), device=self._units[0].mesh_info.device, requires_grad=True)
                outcome = anchor.clone()
                outcome.register_hook(lambda _: follow())
                outcome.backward()
        finally:
            for unit in self._units:
                unit.gradients.accumulation.close_scope(scope)

    def reduce(self, parameters: Sequence[Tensor]) -> None:
        """Take part in `reduce_gradients` of the units of these parameters."""
        units = dict.fromkeys(unit for each in parameters if (unit := unit_of(each)) is not None)
        land_held(launch_held([*units]))

    def reset(self) -> None:
        """Give up the step, as the ranks that compute it do."""
        reset([module for unit in self._units for module in unit.modules])

    def scale_gradients(self, scaled: Callable[[Tensor], Tensor]) -> list[Callable[[], object]]:
        """Let autograd accumulate what `scaled` makes of gradients; returns what ends it."""
        compute = [[param.compute for param in unit.params] for unit in self._units]
        return [undo for params in compute for undo in hook_gradients(params, scaled)]

    def take_buffers(self, source: int) -> None:
        """Buffers of replicated units become those of a rank, as in forwards."""
        broadcast_buffers(self._units, source, saved=False)

    def pass_through(self, module: nn.Module, x: Any) -> Any:
        """Make the visits of a forward of `module`, in which each unit below runs once. Returns
        `x`, as other tensors of the graph where backward comes to units.

        Raises:
            PhaseError: a compiler reduces the gradients.
        """
        return _pass(module, x, [*self._units], {})


def _enter(unit: Unit, module: nn.Module) -> Visit:
    visit = Visit(unit)
    visit.pre_forward(module, (), {}, computes=False)
    return visit


def _pass(module: nn.Module, x: Any, units: list[Unit], seen: dict[nn.Module, None]) -> Any:
    """Visit the units of `module` and below that are still in `units`; take them out."""
    if module in seen:  # modules may refer to each other in a circle
        return x
    seen[module] = None
    unit = next((unit for unit in units if module in unit.modules), None)
    if unit is None:
        for child in module.children():
            x = _pass(child, x, units, seen)
        return x
    units.remove(unit)
    visit = _enter(unit, module)
    try:
        root = root_of(unit)
        if not root.eager_because:
            raise PhaseError(
                "skipped: compiled autograd is on, and each rank's graph reduces the gradients that"
                f" it has. This rank would have none for unit '{unit.name}', and the others would"
                " wait. Run backwards of models that skip units without compiled autograd"
            )
        for child in module.children():
            x = _pass(child, x, units, seen)
        anchor = torch.zeros((), device=unit.mesh_info.device, requires_grad=unit.trains)
        # If the parameters train, backward comes to this unit on ranks that compute it. If they are
        # frozen, it does where inputs require gradients: an image tower's do not, though what this
        # rank passes through may.
        mode = root.order.input_grad_mode(unit)
        enters = unit.trains or mode in (InputGradMode.UNKNOWN, InputGradMode.REQUIRED)
        y = map_tensors(x, lambda tensor: _with_a_node(anchor, tensor)) if enters else None
    except BaseException:
        visit.on_error(module)
        raise
    with torch.set_grad_enabled(
        torch.is_grad_enabled() and (unit.trains or mode is not InputGradMode.NO_GRAD)
    ):
        y = visit.post_forward(module, y)
    return y if enters else x


def _with_a_node(anchor: Tensor, tensor: Tensor) -> Tensor:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    outcome: Tensor = _Passed.apply(anchor, tensor)  # type: ignore[no-untyped-call]
    return outcome


class _Passed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(anchor)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        # Inside of a checkpointed part this starts the recomputation, as what a module saves does
        # on ranks that compute it.
        _ = ctx.saved_tensors
        return None, gradient
