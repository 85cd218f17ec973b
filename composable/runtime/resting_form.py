"""The two forms of a replicated parameter that rests as a DTensor: one memory, one gradient; knows no module and no unit."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, Final
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from composable.device.held_gradients import held_part, refuse_hooks_again
from composable.device.parameter_forms import gradient_like, summand_like
from composable.device.private import gradient_hooks, hooks_after_accumulation, local_of
from composable.device.user_hooks import call_hooks_after_accumulation, hooked

_PAIRS: Final[WeakValueDictionary[int, Pair]] = WeakValueDictionary()  # by the id of either form


class Pair:
    """The two forms of one parameter, which share their memory. Tied ones are one pair, in however many units they are."""

    __slots__ = ("__weakref__", "local", "plain", "resting", "version")

    def __init__(self, plain: nn.Parameter, resting: nn.Parameter) -> None:
        self.plain = plain
        self.resting = resting
        self.local = _memory_of(resting)
        self.version = resting._version
        _PAIRS[id(plain)] = _PAIRS[id(resting)] = self  # it keeps both alive, so nothing else can have their ids

    def has(self, parameter: nn.Parameter) -> bool:
        """Whether `parameter` is one of the two forms."""
        return parameter is self.plain or parameter is self.resting

    def follow(self) -> None:
        """The plain form follows what users did to the other one: moved or cast it, wrote to it, froze it."""
        resting = self.resting
        if _memory_of(resting) is not self.local:
            self.local = _memory_of(resting)
            if self.plain.is_meta and not self.local.is_meta:
                del _PAIRS[id(self.plain)]  # torch gives no memory to what was made on the meta device
                self.plain = plain_over(resting)
                _PAIRS[id(self.plain)] = self
            else:
                self.plain.data = self.local
        self.tell_of_writes()
        if self.plain.requires_grad is not resting.requires_grad:
            self.plain.requires_grad_(resting.requires_grad)

    def tell_of_writes(self) -> None:
        """A write to a DTensor does not count as one to its memory: autograd hears of it here."""
        if self.resting._version != self.version:
            self.version = self.resting._version
            increment_version(self.plain)

    def deliver(self) -> None:
        """Move the gradient to the DTensor, which gets it, or gets it added to the one that it has."""
        gradient = self.plain.grad
        if gradient is None:
            return
        self.plain.grad = None
        gradient = gradient.detach() if gradient.requires_grad else gradient
        arrived = gradient_like(gradient, self.resting)
        if gradient_hooks(self.resting):
            arrived = hooked(self.resting, arrived)
        there = self.resting.grad
        if there is None:
            self.resting.grad = arrived
        elif isinstance(there, DTensor) and isinstance(arrived, DTensor):
            local_of(there).add_(local_of(arrived))
        else:
            there.add_(arrived)
        if hooks_after_accumulation(self.resting):
            call_hooks_after_accumulation(self.resting)

    def show_held(self) -> None:
        """Show what backwards have left on this rank; see Note [Held gradients are summands]."""
        gradient, resting = self.plain.grad, self.resting
        self.plain.grad = None
        there = resting.grad
        if isinstance(there, DTensor):
            refuse_hooks_again(resting)
            gradient = local_of(there) if gradient is None else gradient.add_(local_of(there))
        if gradient is not None:
            resting.grad = summand_like(gradient, resting)

    def take_up_held(self) -> None:
        """The plain form has what is held, and gets more, or the mean."""
        held = held_part(self.resting)
        if held is not None:
            self.resting.grad = None
            if self.plain.grad is not None:  # the first of a backward that came through no output
                held.add_(self.plain.grad)
            self.plain.grad = held

    def __deepcopy__(self, memo: dict[int, Any]) -> Pair:
        resting = copy.deepcopy(self.resting, memo)
        twin = Pair(plain_over(resting), resting)
        memo[id(self)] = twin
        return twin


def _memory_of(resting: nn.Parameter) -> Tensor:
    assert isinstance(resting, DTensor)
    return local_of(resting)


def plain_over(resting: nn.Parameter) -> nn.Parameter:
    with torch.inference_mode(False):
        return nn.Parameter(_memory_of(resting).detach(), requires_grad=resting.requires_grad)


def pair_of(parameter: nn.Parameter) -> Pair | None:
    """The pair that `parameter` is a form of."""
    return _PAIRS.get(id(parameter))


def at_rest(parameter: nn.Parameter) -> nn.Parameter:
    """What users see, between steps, of a parameter that modules compute with."""
    found = pair_of(parameter)
    return parameter if found is None else found.resting


def fits(plain: nn.Parameter, mesh: DeviceMesh) -> bool:
    """Whether a plain parameter can have a second form on `mesh`."""
    here = plain.device.type in ("meta", mesh.device_type) and plain.layout is torch.strided
    return here and type(plain) is nn.Parameter


class RestingGradients:
    """Gradients of parameters, where users see them: those of plain forms move to the resting ones."""

    def deliver(self, parameters: Iterable[nn.Parameter], *, held: bool) -> None:
        """See `composable.runtime.local_gradients`."""
        for parameter in parameters:
            pair = pair_of(parameter)
            if pair is not None:
                pair.show_held() if held else pair.deliver()

    def take_up(self, parameters: Iterable[nn.Parameter]) -> None:
        """See there."""
        for parameter in parameters:
            pair = pair_of(parameter)
            if pair is not None:
                pair.take_up_held()
