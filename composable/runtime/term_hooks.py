"""Multiplies gradients as autograd brings them, where it adds them up by itself; knows neither units nor buckets."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import is_

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from composable.compilation import untraced
from composable.device.term_factors import Factor


class _Cell:
    """All that hooks hold, see Note [Hooks on parameters hold nothing]."""

    __slots__ = ("factor",)

    def __init__(self) -> None:
        self.factor: Factor | None = None

    @untraced
    def multiply(self, gradient: Tensor) -> Tensor | None:
        """What autograd calls before it adds a gradient to those of a parameter."""
        return None if self.factor is None else self.factor.times([gradient])[0]


class TermHooks:
    """Hooks on some parameters, which are there only while there is a factor; see Note [Terms].

    Args:
        parameters: gives those that are meant now; asked only while there is a factor.
        own: the factor, where nobody gives another one.
    """

    __slots__ = ("_cell", "_handles", "_hooked", "_meant", "_own")

    def __init__(self, parameters: Callable[[], Iterable[nn.Parameter]], own: Factor | None = None) -> None:
        self._meant = parameters
        self._own = own
        self._cell = _Cell()
        self._cell.factor = own
        self._hooked: tuple[nn.Parameter, ...] = ()
        self._handles: list[RemovableHandle] = []

    def follow(self) -> None:
        """Other parameters may be meant, or trainable, now."""
        if self._cell.factor is None:
            return
        trainable = tuple([parameter for parameter in self._meant() if parameter.requires_grad])
        if len(trainable) != len(self._hooked) or not all(map(is_, trainable, self._hooked)):
            self.remove()
            self._hooked = trainable
            self._handles = [parameter.register_hook(self._cell.multiply) for parameter in trainable]

    def weigh(self, factor: Factor | None) -> None:
        """From here on gradients are multiplied by `factor`; None: by what they were multiplied by before."""
        self._cell.factor = self._own if factor is None else factor
        if self._cell.factor is None:
            self.remove()
        else:
            self.follow()

    def remove(self) -> None:
        """Leave the parameters alone from here on."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._hooked = ()
