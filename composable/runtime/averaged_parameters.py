"""The parameters of a replicated unit, as its reducer found them; knows neither buckets nor hooks."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from operator import is_

from torch import nn

from composable.runtime.kinds import Kinds


class AveragedParameters:
    """Which parameters are averaged here, and how.

    Args:
        frozen: numbers of those that train no longer, but whose gradients of earlier backwards are averaged with the others.
        elsewhere: numbers of those whose gradients somebody else averages.
        sparse: numbers of those whose gradients are sparse.
        before: of what kinds the unit's parameters were.

    Attributes:
        everyone: all of them, in the order of their names.
        dense: numbers of those that have a place in a bucket.
        sparse: numbers of those whose rows are brought together.
        kinds: of all.
    """

    __slots__ = ("dense", "elsewhere", "everyone", "kinds", "names", "sparse")

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        names: Sequence[str],
        *,
        frozen: Container[int],
        elsewhere: frozenset[int],
        sparse: frozenset[int],
        before: Kinds | None,
    ) -> None:
        self.everyone = tuple(parameters)
        self.names = tuple(names)
        self.elsewhere = elsewhere
        mine = [i for i, p in enumerate(parameters) if (p.requires_grad or i in frozen) and i not in elsewhere]
        self.dense = [i for i in mine if i not in sparse]
        self.sparse = [i for i in mine if i in sparse]
        self.kinds = Kinds(self.everyone, self.names, before)

    def are(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether these are still the parameters, of the same kinds, and as trainable as they were."""
        return (
            len(parameters) == len(self.everyone)
            and all(map(is_, parameters, self.everyone))
            and self.kinds.hold_for(parameters)
        )

    def trainable(self) -> list[tuple[nn.Parameter, str]]:
        """Those that get gradients, and their names."""
        return [(parameter, name) for parameter, name in zip(self.everyone, self.names, strict=True) if parameter.requires_grad]

    def missed(self, named: Iterable[tuple[nn.Parameter, str]]) -> list[tuple[nn.Parameter, str]]:
        """Those of `named` that have a gradient for which no hook has waited."""
        known = {id(self.everyone[i]): None for i in (*self.dense, *self.sparse)}
        return [(p, name) for p, name in named if p.requires_grad and p.grad is not None and id(p) not in known]
