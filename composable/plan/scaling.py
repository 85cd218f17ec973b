"""By how much gradients are divided, and when; knows dtypes by name only."""

from __future__ import annotations


def division_factors(dtype: str, ranks: int) -> tuple[float, float]:
    """Factors to divide gradients by before and after their sum, whose product is `ranks`.

    A dtype that can overflow is divided by about the square root of the number of ranks before the sum and by the rest after
    it, so that neither the sum overflows nor the terms underflow. The others are divided once, after the sum.

    Example:
        >>> division_factors("float16", 8), division_factors("float32", 8)
        ((4.0, 2.0), (1.0, 8.0))
    """
    if dtype != "float16":
        return 1.0, float(ranks)
    before = 1.0
    while ranks % before == 0 and ranks / before > before:
        before *= 2
    if ranks % before or before * before > 2 * ranks:
        before /= 2
    return before, ranks / before
