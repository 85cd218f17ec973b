"""What the user asks for, as frozen values; knows neither tensors nor process groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Free:
    """Free the unsharded parameters after forward and gather them again in backward."""


@dataclass(frozen=True, slots=True)
class Keep:
    """Keep the unsharded parameters until backward is done: more memory, one gather fewer."""


@dataclass(frozen=True, slots=True)
class ReshardTo:
    """Keep a shard over `ranks` neighbours after forward, so that backward gathers nearby."""

    ranks: int


AfterForward = Free | Keep | ReshardTo

SYNC_MODES: Final = ("check", "broadcast", "off")


def after_forward(value: bool | int) -> AfterForward:
    """The value of `reshard_after_forward`, by name. Whether the number fits the mesh is for the caller to say."""
    if value is True:
        return Free()
    if value is False:
        return Keep()
    return ReshardTo(int(value))
