"""Some parameters whose gradients travel together, in one backward: which are there, and what is in flight; knows no others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from composable.device.buckets import GradientBucket
from composable.device.collectives import Arrival

IDLE, AWAITED, ARRIVED, SENT = range(4)  # what a gradient may be; idle: no backward is under way


class Bucket:
    """Some parameters whose gradients travel together, and how far they are in this backward."""

    __slots__ = ("arrival", "awaited", "gradients", "label", "members", "states")

    def __init__(self, members: Sequence[int], gradients: GradientBucket, label: str) -> None:
        self.members = tuple(members)
        self.gradients = gradients
        self.label = label
        self.states = bytearray(len(members))  # stays one object: hooks hold it
        self.awaited = len(members)  # gradients still to come in this backward
        self.arrival: Arrival | None = None

    def enter(self, state: int) -> None:
        """All gradients are in `state` now."""
        self.states[:] = bytes([state]) * len(self.states)

    @property
    def missing(self) -> list[int]:
        """Slots without a gradient in this backward, so far."""
        return [slot for slot, state in enumerate(self.states) if state == AWAITED] if self.awaited else []

    def hook(self, slot: int, when_complete: Callable[[], None], otherwise: Callable[[int], None]) -> Callable[[Tensor], None]:
        """What autograd calls when the gradient in `slot` is there: once per parameter and backward, so it is short."""
        states = self.states

        def arrived(_: Tensor) -> None:
            if states[slot] != AWAITED:
                otherwise(slot)
            if states[slot] == AWAITED:
                states[slot] = ARRIVED
                self.awaited -= 1
                if not self.awaited:
                    when_complete()

        return arrived

    def reset(self) -> None:
        self.enter(IDLE)
        self.awaited = len(self.members)
        self.arrival = None
        self.gradients.drop()

    def finish(self) -> None:
        arrival, self.arrival = self.arrival, None
        if arrival is not None:
            arrival.wait()
            self.gradients.finish()
