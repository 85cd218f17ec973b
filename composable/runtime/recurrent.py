"""RNNs keep their weights where the unit put them; knows neither units nor meshes.

cuDNN likes an RNN's weights next to each other in an order of its own, and torch's RNNs move them there: in `forward`, when
they hold other parameters than before, and whenever `flatten_parameters()` is called, as many models do in their own forward.
What is gathered would never reach weights that were moved. Unmoved ones are copied together by cuDNN in each call.
"""

from __future__ import annotations

import contextlib

from torch import nn


class WeightsInPlace:
    """`flatten_parameters()` of one RNN does nothing, until `remove` is called."""

    __slots__ = ("_module",)

    def __init__(self, module: nn.RNNBase) -> None:
        self._module = module
        module.flatten_parameters = _leave_in_place  # type: ignore[method-assign]

    def remove(self) -> None:
        """Let the module flatten its weights again. May be called twice."""
        with contextlib.suppress(AttributeError):
            del self._module.flatten_parameters


def _leave_in_place() -> None:
    return None
