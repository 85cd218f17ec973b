"""Whether a backward reduces a unit's gradients or accumulates them: the scopes of `no_sync`."""

from __future__ import annotations

import enum


class SyncMode(enum.Enum):
    """What happens to a unit's gradients when backward leaves it."""

    REDUCE = "they are reduced, with all that was accumulated"
    HOLD = "they are accumulated on their rank (no_sync)"
    HOLD_SHARDS = (
        "they are reduced over the shard dimension and accumulated (no_sync(level='replicate'))"
    )


class Accumulation:
    """The scopes of `no_sync` that a unit is in; the innermost decides.

    Attributes:
        now: what a backward that runs now does.
    """

    __slots__ = ("_scopes", "now")

    def __init__(self) -> None:
        self.now = SyncMode.REDUCE
        self._scopes: dict[object, SyncMode] = {}

    def open_scope(self, scope: object, mode: SyncMode) -> None:
        self._scopes[scope] = self.now = mode

    def close_scope(self, scope: object) -> None:
        self._scopes.pop(scope, None)
        self.now = next(reversed(self._scopes.values()), SyncMode.REDUCE)
