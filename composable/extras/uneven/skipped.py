"""A unit that some ranks compute and others skip."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from composable.checked import checked
from composable.compilation import untraced, unwrapped
from composable.seams import driver_of, units_in

T = TypeVar("T")


@untraced
@checked
def skipped(module: nn.Module, x: T) -> T:
    """Return `x`, and take part in the collectives of `module` without computing it.

    A rank takes part in the collectives because other ranks compute the module. Each rank may
    decide by itself: `y = layer(x) if keep else skipped(layer, x)`. Use this for stochastic depth,
    mixture of depths, or experts without tokens. A rank that skips the module contributes zeros to
    the gradients of its parameters. It still gathers the parameters and reduces the gradients, so
    it saves the computation, but no communication.

    The function assumes that each annotated module below `module` runs once, in the order of
    `.modules()`.

    Args:
        module: an annotated module. For any other module, the function only returns `x`.
        x: the module's input: a tensor, or a container of tensors. If the module is frozen and the
            inputs of other ranks require no gradient, `x` should require none either. If it does,
            the library goes by the inputs in the first forward, and by those of this rank.

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
    y: T = driver_of(units).pass_through(module, x)
    return y
