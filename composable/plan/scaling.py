"""By how much gradients are divided, and when: decided here and nowhere else; knows dtypes by name only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

_WIDE: Final = ("float64", "float32", "bfloat16", "complex128", "complex64")  # in which nothing sensible under- or overflows


def division_factors(dtype: str, divisor: float) -> tuple[float, float]:
    """Factors to divide gradients by before and after their sum, whose product is `divisor`: the number of ranks for a mean.

    A dtype that can overflow is divided by about the square root of it before the sum and by the rest after it, so that neither
    the sum overflows nor the terms underflow. The others are divided once, after the sum.

    Example:
        >>> division_factors("float16", 8), division_factors("float32", 8), division_factors("float16", 2.5)
        ((4.0, 2.0), (1.0, 8.0), (1.0, 2.5))
    """
    if dtype != "float16" or divisor < 1.0:
        return 1.0, float(divisor)
    if divisor % 1.0:
        before = 2.0 ** math.floor(math.log2(divisor) / 2)
        return before, divisor / before
    before = 1.0
    while divisor % before == 0 and divisor / before > before:
        before *= 2
    if divisor % before or before * before > 2 * divisor:
        before /= 2
    return before, divisor / before


def may_scale_inputs(dtype: str, factor: float) -> bool:
    """Whether the terms of a sum may be multiplied by `factor` in place of the sum, or while they are added.

    That rounds alike for powers of two, but where a dtype ends: in float16 it would undo what `division_factors` is for.

    Example:
        >>> may_scale_inputs("float32", 0.25), may_scale_inputs("float32", 1 / 3), may_scale_inputs("float16", 0.25)
        (True, False, False)
    """
    return dtype in _WIDE and math.frexp(factor)[0] == 0.5


def share_of_mean(ranks: int) -> float:
    """What a sum over so many ranks is multiplied by to be their mean: said to hooks of users, who divide for themselves.

    Example:
        >>> share_of_mean(4)
        0.25
    """
    return 1.0 / ranks


@dataclass(frozen=True, slots=True)
class Scaling:
    """How a sum of gradients over all ranks becomes their mean, or what else was asked for.

    Attributes:
        before: what every term is divided by on its way into a message.
        after: what the sum is divided by.
        input_factor: what terms may be multiplied by as the last sum reads them, in place of both; None where that would round
            otherwise, or nobody reads them.
    """

    before: float = 1.0
    after: float = 1.0
    input_factor: float | None = None


def scaling_of(
    dtype: str, ranks: int, *, divisor: float | None = None, on_the_way_in: bool = False, reads_inputs: bool = True
) -> Scaling:
    """How gradients are divided, whatever way they go.

    Args:
        dtype: of the messages.
        ranks: over which they are summed, all hops together.
        divisor: what their sum is divided by; None for the number of ranks, which makes it a mean.
        on_the_way_in: a pass that copies them divides them at no price, so what cannot overflow is divided there, as DDP does.
        reads_inputs: whether the last sum can multiply what it reads.

    Example:
        >>> scaling_of("float32", 4), scaling_of("float32", 3, on_the_way_in=True)
        (Scaling(before=1.0, after=4.0, input_factor=0.25), Scaling(before=3.0, after=1.0, input_factor=None))
    """
    divisor = float(ranks if divisor is None else divisor)
    before, after = division_factors(dtype, divisor)
    if on_the_way_in and dtype != "float16":
        before, after = before * after, 1.0
    share = 1.0 / divisor
    return Scaling(before, after, share if reads_inputs and may_scale_inputs(dtype, share) else None)
