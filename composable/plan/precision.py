"""In which dtypes a parameter rests, computes, and has its gradient summed and kept; knows dtypes by name only."""

from __future__ import annotations

from dataclasses import dataclass

from composable.dtypes import REAL


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes of a parameter and of its gradient.

    Args:
        original: of the parameter at rest, of its optimizer state and of what is saved.
        compute: of the parameter that modules compute with, and of what is sent to make it.
        reduce: in which gradients are sent and summed.
        gradient: of the gradient that users and optimizers see.
    """

    original: str
    compute: str
    reduce: str
    gradient: str

    @property
    def changes(self) -> bool:
        """Whether anything is cast at all."""
        return any(other != self.original for other in (self.compute, self.reduce, self.gradient))


def resolve(original: str, param: str | None = None, reduce: str | None = None, *, keep_reduced: bool = False) -> Precision:
    """What a policy means for one parameter. Only real floating-point parameters are cast.

    Args:
        original: the parameter's dtype.
        param: the dtype to compute in; None keeps the parameter's.
        reduce: the dtype to sum gradients in; None: that in which is computed.
        keep_reduced: users see gradients in the latter, and not in the parameter's own.

    Example:
        >>> resolve("float32", "bfloat16")
        Precision(original='float32', compute='bfloat16', reduce='bfloat16', gradient='float32')
    """
    if original not in REAL:
        return Precision(original, original, original, original)
    compute = param or original
    summed = reduce or compute
    return Precision(original, compute, summed, summed if keep_reduced else original)
