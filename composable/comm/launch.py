"""What a collective is launched for: its kind, the object that sends it, and its name."""

from __future__ import annotations

from enum import Enum
from typing import Any, Final
from weakref import ref


class LaunchKind(Enum):
    """The purposes of launches. Observers act on them, see `Launch.sender` for the objects."""

    EXCHANGE = "values that ranks exchange or compare, or of which they make sums"
    GATHER = "the shards of a param group"
    REDUCE = "the gradients of a bucket"
    REDUCE_OVER_REPLICAS = "their sums over the shard dimension"
    GATHER_SPARSE = "the sparse gradient of a parameter"
    COMPARE_LAUNCHES = "in debug mode, what the ranks have launched"
    COMPARE_FORWARDS = "in debug mode, how many forwards ran"
    COMPARE_BACKWARDS = "how many backwards were accumulated"


class Launch:
    """What a collective is launched for. It is the same object at every launch where the object
    that sends it is, and two of them are equal only if they are one.

    Args:
        text: the name of the collective in errors, traces and the ledger, e.g. "all-gather of unit
            'layers.3'". Two launches may have the same.
        sender: the `ParamGroup` of a `GATHER`, the `ReducePlan` of both `REDUCE`s, the
            `ManagedParam` of a `GATHER_SPARSE`; None for others.
        unit: the name of the unit that it belongs to, if there is one.
    """

    __slots__ = ("_sender", "kind", "text", "unit")

    def __init__(
        self,
        text: str,
        kind: LaunchKind = LaunchKind.EXCHANGE,
        sender: object = None,
        unit: str = "",
    ) -> None:
        self.text: Final = text
        self.kind: Final = kind
        self.unit: Final = unit
        # weak: works and records of launches keep no model alive
        self._sender = None if sender is None else ref(sender)

    @property
    def sender(self) -> Any:
        """The object that sends it; None if there is none, or it is gone."""
        return None if self._sender is None else self._sender()

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Launch({self.text!r}, {self.kind})"


COMPARISON_OF_FORWARDS: Final = Launch("comparison of forwards", LaunchKind.COMPARE_FORWARDS)
COMPARISON_OF_LAUNCHES: Final = Launch("comparison of launches", LaunchKind.COMPARE_LAUNCHES)
