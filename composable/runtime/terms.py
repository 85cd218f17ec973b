"""What the gradients of one group are multiplied by before they are summed; knows neither phases nor who weighs them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from composable.device.flat_parameters import FlatParameters
from composable.device.term_factors import Factor


class Terms:
    """The gradients that backwards bring to one `FlatParameters`, as they go into sums; see Note [Terms].

    Args:
        ranks: that the gradients are summed over.
        divisor: what sums are divided by; None for the number of ranks, which makes them means.

    Attributes:
        factor: of gradients that are reduced at once, in place of `divisor`: they become means then.
        divisor: what sums of gradients that nothing is multiplied by are divided by; None makes them means.
    """

    __slots__ = ("_asked", "_factor_of_held", "_flat", "_own", "divisor", "factor")

    def __init__(self, flat: FlatParameters, ranks: int, divisor: float | None) -> None:
        self._flat = flat
        self._own = None if divisor is None or divisor == ranks else Factor(ranks / divisor)
        self.divisor = self._asked = divisor if ranks > 1 else None  # one rank alone sums nothing
        self.weigh(None)

    def weigh(self, factor: Factor | None) -> None:
        """From here on the mean of what arrives, times each rank's `factor`, is wanted; None: what was wanted at first."""
        self._factor_of_held = self._own if factor is None else factor
        self.factor: Factor | None = factor
        if factor is None and self.divisor is None:
            self.factor = self._own

    def become(self, *, means: bool) -> None:
        """Whether what is summed becomes a mean by whoever sums it, so that terms are multiplied for anything else."""
        self.divisor = None if means else self._asked

    def arrived(self, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """To be reduced at once."""
        return gradients if self.factor is None else self.factor.times(gradients, self._flat.reduce_dtype)

    def held(self, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """In the dtype that users see, in which gradients of several backwards are added up."""
        flat = self._flat
        if self._factor_of_held is not None:
            return self._factor_of_held.times(gradients, flat.gradient_dtype)
        if flat.gradient_dtype == flat.compute_dtype:
            return gradients
        return [None if gradient is None else gradient.to(flat.gradient_dtype) for gradient in gradients]
