"""Gradients that are means already, and would lose bits in a message of another dtype; knows no bucket and no communicator.

A message of another dtype than the parameters rounds what goes into it. What an earlier backward left in `grad` is a mean, and
its bits are all that is left of it. So it is put aside while the new gradients are summed, and these are added to it. Whoever
has written to it since has made it something else, which is summed with the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final
from weakref import ref

from torch import Tensor, nn

Mean = tuple[ref[Tensor], int]  # a gradient, and its version
NO_MEANS: Final[Mapping[nn.Parameter, Mean]] = {}


class MeansApart:
    """Of some parameters, whose gradients are summed in another dtype than their own.

    Attributes:
        known: between backwards, the means that are there, by parameter.
        aside: in a backward, those that were put aside.
    """

    __slots__ = ("_of", "aside", "known")

    def __init__(self, parameters: Sequence[nn.Parameter], known: Mapping[nn.Parameter, Mean] = NO_MEANS) -> None:
        self._of = tuple(parameters)
        self.known = {parameter: mean for parameter, mean in known.items() if any(parameter is each for each in parameters)}
        self.aside: list[tuple[nn.Parameter, Tensor]] = []

    def put_aside(self) -> None:
        """A backward begins."""
        for parameter, (mean, version) in self.known.items():
            gradient = parameter.grad
            if gradient is not None and gradient is mean() and gradient._version == version:
                self.aside.append((parameter, gradient))
                parameter.grad = None
        self.known = {}

    def add_new(self) -> None:
        """All gradients of this backward are means."""
        if not self._of:
            return
        for parameter, mean in self.aside:
            new = parameter.grad
            if new is not None and (mean.requires_grad or new.requires_grad):
                mean = mean + new
            elif new is not None:
                mean.add_(new)
            parameter.grad = mean
        self.aside = []
        gradients = [(parameter, parameter.grad) for parameter in self._of]
        self.known = {p: (ref(gradient), gradient._version) for p, gradient in gradients if gradient is not None}

    def put_back(self) -> None:
        """The backward did not end."""
        for parameter, mean in self.aside:
            parameter.grad = mean
        self.aside = []
