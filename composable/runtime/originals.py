"""The parameters from before a unit was sharded, and how whole ones come back in their places; knows no phase."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from composable.device.parameter_swap import ShardedParam
from composable.runtime.handle import Handle


class Originals:
    """Does not keep them: somebody else may still hold some.

    Of a copy of a module there are none, since the copy was never whole.

    Attributes:
        exact_values, whole_gradients: what ranks have gathered to remove the unit, beside what modules compute with.
    """

    __slots__ = ("_references", "_registered", "exact_values", "whole_gradients")

    def __init__(self, parameters: Sequence[nn.Parameter] = ()) -> None:
        self._references = [weakref.ref(parameter) for parameter in parameters]
        self._registered = False  # whole parameters are registered again
        self.exact_values: Sequence[Tensor | None] = ()
        self.whole_gradients: Sequence[Tensor | None] = ()

    def alive(self) -> list[nn.Parameter | None]:
        """None in place of those that nobody holds any more."""
        return [reference() for reference in self._references]

    def named(self, params: Sequence[ShardedParam]) -> Iterator[tuple[str, nn.Parameter]]:
        """Those that somebody still holds, by the FQNs of `params`, which they became."""
        for param, original in zip(params, self.alive(), strict=False):
            if original is not None:
                yield param.info.fqn, original

    def come_back(self, handle: Handle) -> None:
        """Register whole plain parameters, which are here unsharded: the originals where they still exist, new ones elsewhere.
        What an interrupt ends is done again."""
        parameters = handle.parameters
        if parameters.groups:
            if not self._registered:
                parameters.leave(self.alive(), self.exact_values, self.whole_gradients)
                self._registered = True
            handle.reshard()
            parameters.drop()
        handle.gradients.adopt(())
