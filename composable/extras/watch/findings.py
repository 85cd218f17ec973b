"""What `watch` finds: the first value that is not finite on this rank, and the text of a finding.

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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from composable.errors import few
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


# --- what is said --------------------------------------------------------------------------------

HINT: Final = "hint"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that `watch` found. All ranks have the same.

    Attributes:
        kind: "not finite", "ranks differ" or "not reproduced"; of hints, "hint".
        step: the step in which it was found, counted from 0.
        ranks: where, by their numbers among all ranks; the first one is `rank`.
        unit: the unit that it is about.
        phase: "parameter", "input", "output" or "gradient"; for ranks that differ, what does.
        tensor: which one, such as `output 0`, or the FQN of a parameter below the unit.
        what: what was seen there, in a few words.
        lines: more for the reader: a name and a text each.
        call: which call of the unit in the step it is in; -1 if that is the last one, or not known.
    """

    kind: str
    step: int
    ranks: tuple[int, ...]
    unit: str
    phase: str
    tensor: str
    what: str
    lines: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    call: int = field(default=-1, compare=False)

    @property
    def rank(self) -> int:
        """The first rank on which it was found."""
        return self.ranks[0]

    @property
    def place(self) -> tuple[str, ...]:
        """By which two findings are distinguished: a place is reported once."""
        return self.kind, self.unit, self.phase, self.tensor

    def __str__(self) -> str:
        """One block of text."""
        where = ", ".join(map(str, self.ranks))
        rows = [("unit", self.unit), ("phase", self.phase), ("tensor", self.tensor), *self.lines]
        title = f"watch: step {self.step}, rank {where}: {self.what}"
        return "\n".join([title, *(f"  {name:<10}{text}" for name, text in rows if text)])


def hint(step: int, ranks: Sequence[int], what: str, *, unit: str = "", phase: str = "") -> Finding:
    """Something to know, and no error."""
    return Finding(HINT, step, tuple(ranks), unit, phase, "", what)


def overflow(step: int) -> Finding:
    """Infinities that a loss scaler has made."""
    what = (
        "gradients have infinities, as is expected of a loss scaler, which skips the step."
        " The next ones are counted (`overflows`)"
    )
    return hint(step, [0], what, phase=GRADIENT)


_MADE: Final = {
    PARAMETER: "the last step of the optimizer, a load, or a write",
    INPUT: "the code of unit '{maker}' before it calls unit '{unit}'",
    OUTPUT: "the forward of unit '{maker}'",
    GRADIENT: "the backward of unit '{maker}'",
}


def not_finite(step: int, said: Sequence[tuple[int, First | None]]) -> Finding:
    """Put what each rank has seen first into words; the earliest decides."""
    seen = sorted(
        ((rank, each) for rank, each in said if each is not None),
        key=lambda pair: (pair[1].seen.clock, pair[1].seen.order, pair[0]),
    )
    first = seen[0][1]
    where = first.seen
    # what other ranks saw there later may have come by a reduction
    ranks = [
        rank
        for rank, each in seen
        if (each.seen.place, each.seen.clock) == (where.place, where.clock)
    ]
    others = [
        f"rank {rank} ({each.seen.unit}, {each.seen.tensor})"
        for rank, each in seen
        if rank not in ranks
    ]
    made = _MADE[where.phase].format(maker=where.maker, unit=where.unit)
    tensor = where.tensor
    if where.maker != where.unit:
        tensor = f"{tensor} of unit '{where.unit}'"
    elif where.phase == INPUT:
        made = "the batch: it was there before the model was called"
    elif where.phase == GRADIENT and tensor.startswith(f"gradient of {OUTPUT}"):
        made = "the loss, or what is between it and the model"
    kind = str(where.dtype).removeprefix("torch.")
    return Finding(
        "not finite", step, tuple(ranks), where.maker, where.phase, tensor,
        f"{first.what} in the {where.phase}s",
        (
            ("is", f"{kind} {tuple(where.shape)}"),
            ("made by", made),
            ("also", few(others)),
        ),
        first.call,
    )  # fmt: skip


def not_reproduced(step: int, unit: str, wrong: Mapping[int, str]) -> Finding:
    """What each rank has seen differ, by rank."""
    return Finding(
        "not reproduced", step, tuple(wrong), unit, "again", next(iter(wrong.values())),
        "an operator that ran again computed other bits",
        (("seen", "at once, on the same tensors: the later runs agree, the first one differs"),),
    )  # fmt: skip
