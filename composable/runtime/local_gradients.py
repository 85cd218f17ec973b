"""Which parameters of a replicated unit have gradients of this rank alone; knows neither buckets nor communicators."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import nn

from composable.device.collectives import Communicator
from composable.runtime.accumulation import Accumulation, log_dropped


class Forms(Protocol):
    """Where users see other tensors in place of the parameters that autograd accumulates to."""

    def deliver(self, parameters: Iterable[nn.Parameter], *, held: bool) -> None:
        """Show the gradients of some parameters: they are complete, or `held` until later backwards add to them."""

    def take_up(self, parameters: Iterable[nn.Parameter]) -> None:
        """Give back what is held of some parameters: more is about to be added to it, or it is about to be averaged."""


class LocalGradients:
    """What backwards under `no_sync` have left in `grad` of some parameters, until one sums it over the ranks.

    Args:
        forms: of the parameters, where users see others than autograd.
        last: of the parameters that these ones stand in place of: some may be the same.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        names: Sequence[str],
        unit: str,
        communicator: Communicator,
        forms: Forms | None = None,
        last: LocalGradients | None = None,
    ) -> None:
        self._members = parameters
        self._names = names
        self._unit = unit
        self._communicator = communicator
        self._forms = forms
        self._trained: dict[int, None] = {}  # ids of those that backwards since may have brought gradients to, on any rank
        self._held: dict[int, None] = {}  # ids of those that they have brought some to
        self.accumulation = Accumulation()
        if last is not None:
            self.accumulation = last.accumulation
            present = {id(parameter): None for parameter in parameters}
            self._trained = {key: None for key in last._trained if key in present}
            self._held = {key: None for key in last._held if key in present}
        # Numbers of those that nothing is expected of any more, but whose gradients are reduced with the others.
        self.frozen = {i: None for i, p in enumerate(parameters) if id(p) in self._trained and not p.requires_grad}

    @property
    def outdated(self) -> bool:
        """Whether those have been reduced."""
        return bool(self.frozen) and not self.accumulation.passes

    def take_up(self) -> None:
        """A backward begins."""
        if self.accumulation.passes and self._forms is not None:
            self._forms.take_up(self._members)

    def hold(self, arrived: Iterable[int], trained: Iterable[int]) -> None:
        """A backward has left gradients of the parameters with the numbers `arrived`, and may have of all in `trained`."""
        self._trained.update({id(self._members[i]): None for i in trained})
        self._held.update({id(self._members[i]): None for i in arrived})
        self.accumulation.end_pass()

    def has(self, number: int) -> bool:
        """Whether that parameter has a gradient from an earlier backward."""
        parameter = self._members[number]
        return id(parameter) in self._held and parameter.grad is not None

    def named(self) -> list[tuple[nn.Parameter, str]]:
        """All that have one, and their names."""
        return [(p, name) for i, (p, name) in enumerate(zip(self._members, self._names, strict=True)) if self.has(i)]

    def end_window(self) -> None:
        """They have been summed over the ranks."""
        self.accumulation.end_window(self._communicator.sums.steps)
        self._trained, self._held = {}, {}

    def drop(self, arrived: Iterable[int]) -> None:
        """A step was lost: what it added to may be there by halves. Done twice is done once."""
        log_dropped(self.accumulation.passes, unit=f"replicate(unit '{self._unit}'): ")
        self.accumulation.lose(self._communicator.sums.steps)
        self.take_up()
        for i in arrived:
            self._members[i].grad = None
        for parameter in self._members:
            if id(parameter) in self._held:
                parameter.grad = None
        self._trained, self._held = {}, {}
        self.accumulation.drop()  # last: after an interrupt it is done again
