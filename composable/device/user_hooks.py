"""Hooks of users on parameters, called where autograd does not come; knows no buffer and no unit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from composable.device.private import gradient_hooks, hooks_after_accumulation


def hooked(parameter: nn.Parameter, gradient: Tensor) -> Tensor:
    """What a parameter's gradient hooks make of its gradient, as autograd would ask them."""
    with torch.no_grad():
        for hook in list((gradient_hooks(parameter) or {}).values()):
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
    return gradient


def with_hooks(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Those that have hooks which wait for their gradient to be accumulated; almost always none."""
    if not any(map(hooks_after_accumulation, parameters)):
        return []
    return [parameter for parameter in parameters if hooks_after_accumulation(parameter)]


def call_hooks_after_accumulation(parameter: nn.Parameter) -> None:
    """As autograd would."""
    with torch.no_grad():
        for hook in list((hooks_after_accumulation(parameter) or {}).values()):
            hook(parameter)


class WaitingHooks:
    """Parameters with hooks that are called when a backward has ended, each once.

    Attributes:
        waiting: these, by their `id`.
    """

    __slots__ = ("waiting",)

    def __init__(self) -> None:
        self.waiting: dict[int, nn.Parameter] = {}

    def add(self, parameters: Sequence[nn.Parameter]) -> None:
        self.waiting.update({id(parameter): parameter for parameter in parameters})

    def call(self) -> None:
        """Nobody waits afterwards, also if a hook raises."""
        waiting, self.waiting = self.waiting, {}
        for parameter in waiting.values():
            call_hooks_after_accumulation(parameter)
