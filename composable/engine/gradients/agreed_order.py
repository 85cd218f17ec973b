"""The agreement of all ranks on the order in which gradients are reduced, below one root."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import ref


@dataclass(slots=True, eq=False)
class AgreedOrder:
    """A part of `Agreed`, which says when it changes and where it hangs. Units are indices there.

    Attributes:
        buckets: parameters in the order of buckets; None before the first backward that reduces.
        late: those whose buckets are launched at the end of backward.
        in_one_order: whether all ranks leave the units in one order in backward; None before the
            first backward that reduces. False also where nothing is replicated next to shards.
        before: of a unit with shards, the replicated ones that backward left before it, and after
            the unit with shards before that.
    """

    buckets: tuple[ref[Any], ...] | None = None
    late: tuple[ref[Any], ...] = ()
    in_one_order: bool | None = None
    before: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def agree_on_buckets(self, order: Iterable[Any], late: Iterable[Any]) -> None:
        """All ranks have exchanged in which order parameters were ready."""
        self.buckets, self.late = tuple(map(ref, order)), tuple(map(ref, late))

    def agree_on_leaving(
        self, in_one_order: bool, before: Mapping[int, tuple[int, ...]] = {}
    ) -> None:
        """All ranks have compared in which order they left the units."""
        self.in_one_order, self.before = in_one_order, dict(before)
