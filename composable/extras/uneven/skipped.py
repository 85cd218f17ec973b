"""A unit that some ranks compute and others skip."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from composable.compilation import untraced, unwrapped
from composable.contract.values import map_tensors
from composable.engine.step.unit import UNKNOWN, Unit, units_below
from composable.engine.step.visit import Visit
from composable.errors import PhaseError

T = TypeVar("T")


@untraced
def skipped(module: nn.Module, x: T) -> T:
    """Return `x`, and take part in the collectives of `module` without computing it.

    A rank takes part in them because other ranks compute the module. Ranks may decide for
    themselves: `y = layer(x) if keep else skipped(layer, x)`, for stochastic depth, mixture of
    depths, or experts without tokens. The gradients of the module's parameters count as zero from a
    rank that skips it. Its parameters are gathered and its gradients are reduced all the same, so a
    rank that skips saves the computation, and no communication.

    Annotated modules below `module` are taken to run once each, in the order of `.modules()`.

    Args:
        module: an annotated module; of any other, nothing needs to be done.
        x: its input: a tensor, or a container of tensors. For a frozen module, where other ranks'
            inputs require no gradient, it should require none either. If it does, the library goes
            by the inputs in the first forward, and by those of this rank.

    Returns:
        `x`, as another tensor of the graph.

    Example:
        >>> def forward(self, x):
        ...     for layer in self.layers:
        ...         keep = not self.training or random.random() > 0.1  # on each rank
        ...         x = layer(x) if keep else skipped(layer, x)
        ...     return x
    """
    module = unwrapped(module)
    units = units_below([module])
    return _through(module, x, units, {}) if units else x


def _through(module: nn.Module, x: Any, units: list[Unit], seen: dict[nn.Module, None]) -> Any:
    """Enter and leave the units of `module` and below that are still in `units`; take them out."""
    if module in seen:
        return x
    seen[module] = None
    unit = next((unit for unit in units if module in unit.modules), None)
    if unit is None:
        for child in module.children():
            x = _through(child, x, units, seen)
        return x
    units.remove(unit)
    visit = Visit(unit)
    visit.enter(module, (), {}, computes=False)
    try:
        root = unit.root
        if root is not None and not root.eager_because:
            raise PhaseError(
                "skipped: compiled autograd is on, and each rank's graph reduces the gradients"
                f" that it has. This rank would have none for unit '{unit.name}', and the others"
                " would wait. Run backwards of models that skip units without compiled autograd"
            )
        for child in module.children():
            x = _through(child, x, units, seen)
        anchor = torch.zeros((), device=unit.mesh_info.device, requires_grad=unit.trains)
        # If the parameters train, backward comes to this unit on ranks that compute it. If they are
        # frozen, it does where inputs require gradients: an image tower's do not, though what this
        # rank passes through may.
        given = UNKNOWN if root is None else root.order.known_given(unit)
        enters = unit.trains or given in (UNKNOWN, 2)
        y = map_tensors(x, lambda tensor: _with_a_node(anchor, tensor)) if enters else None
    except BaseException:
        visit.on_error(module)
        raise
    with torch.set_grad_enabled(torch.is_grad_enabled() and (unit.trains or given != 0)):
        y = visit.leave(module, y)
    return y if enters else x


def _with_a_node(anchor: Tensor, tensor: Tensor) -> Tensor:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    outcome: Tensor = _Skipped.apply(anchor, tensor)  # type: ignore[no-untyped-call]
    return outcome


class _Skipped(torch.autograd.Function):
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
