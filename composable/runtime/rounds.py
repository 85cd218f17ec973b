"""Whether ranks average gradients of the same backward: what a rank says of it, and what is read; moves nothing.

Note [Skipped backwards]
A rank that leaves a backward out brings to its next one what the others bring to another: the mean would be one of different
steps, and nobody would know. Two things tell. Backwards with replicated units are counted, and so are forwards that raised,
since no backward follows them (docs/decisions/0019-rounds.md). And a rank that ran a forward and no backward through it has run
one forward more. Ranks may run different numbers of forwards, and one may call a module without need of it; so only both
together count: some rank leaves a forward out of its backward, and the ranks ran different numbers of them. Forwards that
nobody trains on are not counted (in evaluation mode, without gradients, in a recomputation): one rank may evaluate alone.

Backwards under `no_sync` add up gradients on their rank (`composable.runtime.accumulation`). They open a step as others do, and
how many there were since the last sum is compared: a rank that lost some to an error would bring less than the others.

What the ranks have agreed on about the order of gradients is compared, too, see Note [An agreement that not all ranks know of].
And a rank says whether it keeps others that launch over the same communicator, see Note [Who else trains].

All of that travels at the end of a unit's last bucket, in numbers that are zero or one on each rank: a sum of such tells in any
dtype which of them were one somewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from torch import Tensor

from composable.device.collectives import Communicator, TagSequence
from composable.device.host_numbers import numbers_for
from composable.errors import RanksDisagreeError
from composable.runtime.accumulation import Accumulation

_MODULUS: Final = 5  # of backwards, of forwards, and of those under no_sync, of which there are often two, four or eight
_FIRST: Final = 3 * _MODULUS + 1  # number of the digest's: for each bit one if it is set, and one if it is not
_BITS: Final = range(TagSequence.DIGESTS.bit_length())
_OTHERS: Final = _FIRST + 2 * len(_BITS)  # number of that which says whether a rank keeps others, see Note [Who else trains]
NUMBERS: Final = _OTHERS + 1


class Forwards:
    """Forwards of one replicated module, called by nothing that is annotated, since the last backward or lost forward."""

    __slots__ = ("_left", "_step", "count")

    def __init__(self) -> None:
        self.count = 0
        self._left = [0]
        self._step = -1

    def begin(self, step: int) -> Forward:
        """One more, after the step with the number `step`."""
        if step != self._step:
            self._step = step
            self.count = 0
            self._left = [0]
        self.count += 1
        self._left[0] += 1
        return Forward(self._left)

    @property
    def left(self) -> bool:
        """Whether backward has yet to go through one, or leaves it out."""
        return self._left[0] > 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Forwards:
        twin = memo[id(self)] = Forwards()
        return twin


class Forward:
    """One of them.

    Args:
        left: how many backward has yet to go through, of those that were together with this one.
    """

    __slots__ = ("_left",)

    def __init__(self, left: list[int]) -> None:
        self._left: list[int] | None = left

    def passed(self) -> None:
        """A backward is about to go through it."""
        if self._left is not None:
            self._left[0] -= 1
            self._left = None


class Round:
    """One unit's backwards, and the forwards that went before each.

    Attributes:
        agreed: digest of what this rank knows to be agreed on.
        others: whether it keeps others that launch over the same communicator.
    """

    def __init__(self, forwards: Sequence[Forwards], communicator: Communicator, unit: str, accumulation: Accumulation) -> None:
        self._forwards = forwards
        self._accumulation = accumulation
        self._communicator = communicator
        self._unit = unit
        self._rows: dict[tuple[int, ...], Tensor] = {}
        self.agreed = 0
        self.others = False

    @property
    def incomplete(self) -> bool:
        """Whether this backward has yet to go through a forward, or leaves it out."""
        return any(each.left for each in self._forwards)

    def _state(self) -> tuple[int, int, int, int]:
        forwards = sum(each.count for each in self._forwards)
        return self._communicator.sums.steps.number, forwards, int(self.incomplete), self._accumulation.passes

    def write(self, numbers: Tensor) -> None:
        """Say which backward this is."""
        backward, forwards, incomplete, held = self._state()
        key = backward % _MODULUS, forwards % _MODULUS, held % _MODULUS, incomplete, self.agreed, self.others
        if key not in self._rows:
            row = [float(number == k) for number in key[:3] for k in range(_MODULUS)]
            digest = [float(self.agreed >> bit & 1 == value) for bit in _BITS for value in (1, 0)]
            row += [float(incomplete), *digest, float(self.others)]
            self._rows[key] = numbers_for(row, numbers.device, numbers.dtype)
        numbers.copy_(self._rows[key])

    def check(self, numbers: Sequence[Any], refuse_others: Callable[[], None]) -> None:
        """Raise, on every rank, if the ranks are in different backwards, or fill buckets differently.

        Args:
            numbers: what all wrote, summed; the same on every rank.
            refuse_others: raises if the ranks hold parameters of different kinds.
        """
        backwards, forwards, held = (numbers[k * _MODULUS : (k + 1) * _MODULUS] for k in range(3))
        several = _MODULUS - forwards.count(0) > 1 and numbers[_FIRST - 1] != 0
        if several or _MODULUS - backwards.count(0) > 1 or _MODULUS - held.count(0) > 1:
            self._refuse()
        if numbers[_FIRST:_OTHERS].count(0) != len(_BITS):
            refuse_others()
            raise RanksDisagreeError(
                f"replicate(unit '{self._unit}'): an interrupt reached some ranks while all agreed on the order in which "
                "gradients are sent, and this backward mixed up those of different parameters. Clear them and go on: the order "
                "is looked up where the others left it. If this comes again, call remove(module, replicate) and annotate again"
            )

    def read_others(self, numbers: Tensor) -> bool:
        """Whether some rank wrote that it keeps others. Reads memory."""
        return bool(numbers[_OTHERS].item())

    def _refuse(self) -> None:
        label = f"exchange of what the ranks did before a backward of unit '{self._unit}'"
        rows = self._communicator.all_gather_ints(self._state(), label=label)
        seen = "; ".join(f"rank {rank} {_told(*row)}" for rank, row in enumerate(rows))
        raise RanksDisagreeError(
            f"replicate(unit '{self._unit}'): this backward averaged gradients of different steps: {seen}. Every rank must run "
            "the same backwards: leave a step out on all ranks, or on none. Forwards that are not trained on belong under "
            "torch.no_grad(), or in evaluation mode. Clear the gradients before going on."
        )


def _told(backward: int, forwards: int, incomplete: int, held: int) -> str:
    ran = f"ran {forwards} {'forward' if forwards == 1 else 'forwards'} before its backward number {backward}"
    ran = f"{ran}, which leaves some of them out" if incomplete else ran
    return f"{ran}, and holds gradients of {held} under no_sync" if held else ran
