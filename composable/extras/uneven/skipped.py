"""A unit that some ranks compute and others skip."""

from __future__ import annotations

from typing import NoReturn, TypeVar

from torch import nn

from composable.checked import checked
from composable.compilation import untraced, unwrapped
from composable.errors import PhaseError
from composable.seams import driver_of, units_in

T = TypeVar("T")


@untraced
@checked
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
    if not (units := units_in(module)):
        return x
    y: T = driver_of(units).pass_through(module, x, _refuse_traced)
    return y


def _refuse_traced(unit_name: str) -> NoReturn:
    raise PhaseError(
        "skipped: compiled autograd is on, and each rank's graph reduces the gradients that it has."
        f" This rank would have none for unit '{unit_name}', and the others would wait. Run"
        " backwards of models that skip units without compiled autograd"
    )
