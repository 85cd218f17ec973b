"""The first value that is not finite, on this rank.

A check computes the lowest and the highest value of a tensor on the device, in one pass; both are
NaN if one value is. The host reads the results of all checks at the end of a step, in the order of
the program, so no check waits for the device.

The place where a value is first seen tells which code made it:

| seen first in                  | made by                                                     |
|--------------------------------|-------------------------------------------------------------|
| a parameter at rest            | the last step of the optimizer, or a write                  |
| an input of a unit             | code of the unit around it, or, of the outermost, the batch |
| an output of a unit            | its forward: its inputs and those of units inside are sound |
| the gradient of an output      | backward of the unit around it, or, of the outermost, the   |
|                                | loss                                                        |
| the gradient of an input, or   | backward of the unit                                        |
| of a parameter before it is    |                                                             |
| reduced                        |                                                             |

An infinity below zero in an input, an output or a frozen parameter is usual in masks and in
logarithms of zero. It is reported only if a NaN or an infinity above zero follows from it, and if
it was not there in an earlier step without such a result.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from composable.torch_private import is_transformed, local_tensor, waited_for

PARAMETER: Final = "parameter"
INPUT: Final = "input"
OUTPUT: Final = "output"
GRADIENT: Final = "gradient"
# Checks whose results wait on the device, at most: programs may run forwards without steps.
_WAITING: Final = 4096


class Seen(NamedTuple):
    """Where a check looked.

    Attributes:
        clock: how many units were entered and left in this step before it.
        order: among checks of one tensor, which code made its gradient: the innermost unit that
            read it comes first, and of those that made it the outermost.
        unit: in which it was seen; `maker` is that whose code made it.
        usual: what requires no gradient may be a mask: an infinity below zero means nothing in an
            input, and little in a parameter.
        forward: the number of the forward; inputs and outputs count if its backward came, and
            always if it is None. Pipelines run some on memory that was never written to.
    """

    clock: int
    order: tuple[int, int]
    phase: str
    unit: str
    maker: str
    tensor: str
    dtype: torch.dtype
    shape: torch.Size
    usual: bool = False
    forward: int | None = None

    @property
    def place(self) -> tuple[str, ...]:
        """By which values that are seen in several steps are known to be the same."""
        return self.phase, self.unit, self.maker, self.tensor


class First(NamedTuple):
    """A value that is not finite.

    Attributes:
        sure: it is not usual there.
        call: which call of the unit whose code made it, see `Finding`.
    """

    seen: Seen
    what: str
    sure: bool
    call: int = -1


@dataclass
class Checks:
    """The checks of one step.

    Attributes:
        on_stream: to read a value is to wait for the device.
        clock: see `Seen`.
    """

    on_stream: bool
    clock: int = 0
    _waiting: list[tuple[Seen, Tensor, Tensor]] = field(default_factory=list)
    _found: list[First] = field(default_factory=list)
    _came: set[int | None] = field(default_factory=set)  # forwards whose backward came
    _usual: set[tuple[str, ...]] = field(default_factory=set)

    def advance(self) -> None:
        """A unit is entered, or left: what is seen from now on comes later."""
        self.clock += 1

    def pre_backward(self, forward: int | None) -> None:
        """Backward has come to a unit that was called in this forward."""
        self.clock += 1
        self._came.add(forward)

    def look_together(
        self,
        whole: Sequence[Tensor],
        tensors: Iterable[tuple[str, Tensor]],
        phase: str,
        unit: str,
        order: tuple[int, int] = (0, 0),
    ) -> None:
        """Look at the memory that tensors share, if there is any, and then at each.

        If it is finite, so are the tensors. Where the host would wait for it, only at each.
        """
        if self.on_stream or not whole or not all(map(is_finite, whole)):
            self.look(tensors, phase, unit, unit, order)

    @torch.no_grad()
    def look(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        phase: str,
        unit: str,
        maker: str,
        order: tuple[int, int] = (0, 0),
        *,
        forward: int | None = None,
    ) -> None:
        """Look at tensors, each with its name."""
        if is_transformed():
            return  # torch.func's wrappers must not outlive the function
        for name, tensor in tensors:
            values = numbers_of(tensor)
            if values is None:
                continue
            try:
                low, high = torch.aminmax(values)
            except (NotImplementedError, RuntimeError):
                continue  # a dtype or a subclass without an order
            seen = Seen(
                self.clock, order, phase, unit, maker, name, tensor.dtype, tensor.shape,
                phase in (INPUT, PARAMETER) and not tensor.requires_grad, forward,
            )  # fmt: skip
            self._waiting.append((seen, low, high))
        if len(self._waiting) > _WAITING:
            self.read()

    def read(self) -> None:
        """Read what waits on the device."""
        waiting, self._waiting = self._waiting, []
        for (seen, _, _), (low, high) in zip(waiting, _on_host(waiting), strict=True):
            if not (math.isfinite(low) and math.isfinite(high)):
                nan = math.isnan(low)
                strict = seen.phase == GRADIENT or (seen.phase == PARAMETER and not seen.usual)
                sure = nan or high == math.inf or strict
                if (sure or seen.phase != INPUT or not seen.usual) and len(self._found) < _WAITING:
                    self._found.append(First(seen, "a NaN" if nan else "an infinity", sure))

    def end(self, *, scaled: bool) -> tuple[First | None, bool]:
        """The first finding of the step, which ends, and whether there was one in gradients.

        Args:
            scaled: infinities in gradients are expected, and no finding.
        """
        self.read()
        came = self._came | {None}
        found = [
            each for each in self._found if each.seen.phase == GRADIENT or each.seen.forward in came
        ]
        found.sort(key=lambda each: (each.seen.clock, each.seen.order))
        in_gradients = [each for each in found if each.seen.phase == GRADIENT]
        if scaled:
            found = [each for each in found if each not in in_gradients]
        first = next((each for each in found if each.sure), None)
        if first is None:
            self._usual.update(each.seen.place for each in found)
        else:
            first = next(e for e in found if e.sure or e.seen.place not in self._usual)
        self.drop()
        return first, bool(in_gradients)

    def drop(self) -> None:
        """Forget what this step has seen."""
        self._waiting, self._found, self._came, self.clock = [], [], set(), 0


def numbers_of(tensor: Tensor) -> Tensor | None:
    """The values of `tensor` on this rank, as real numbers; None if there are none to look at."""
    values: Any = waited_for(local_tensor(tensor))
    if values.layout is torch.sparse_coo:
        values = values._values()
    is_plain = values.layout is torch.strided and not is_traceable_wrapper_subclass(values)
    if not is_plain or not values.numel() or values.is_meta:
        return None
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    return values.detach() if values.is_floating_point() else None


def range_of(tensor: Tensor) -> tuple[float, float]:
    """The lowest and the highest value, both NaN if one is; zeros if there are none to look at."""
    values = numbers_of(tensor)
    if values is None:
        return 0.0, 0.0
    low, high = torch.aminmax(values)
    return low.item(), high.item()


def is_finite(tensor: Tensor) -> bool:
    """Whether all values are."""
    return all(map(math.isfinite, range_of(tensor)))


def _on_host(waiting: list[tuple[Seen, Tensor, Tensor]]) -> Iterable[tuple[float, float]]:
    """The lowest and highest values, from each device and dtype in one copy."""
    alike: dict[tuple[Any, Any], list[int]] = {}
    for index, (_, low, _) in enumerate(waiting):
        alike.setdefault((low.device, low.dtype), []).append(index)
    values: list[tuple[float, float]] = [(0.0, 0.0)] * len(waiting)
    for indices in alike.values():
        both = torch.stack([each for index in indices for each in waiting[index][1:]])
        for index, pair in zip(indices, both.view(-1, 2).tolist(), strict=True):
            values[index] = pair
    return values
