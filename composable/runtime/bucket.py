"""Some parameters whose gradients travel together, in one backward: which are there, and what is in flight; knows no others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from composable.compilation import untraced
from composable.device.collectives import PollableWork
from composable.device.gradient_buckets import GradientBucket
from composable.plan.bucketing import buckets_in_order

IDLE, AWAITED, ARRIVED, SENT = range(4)  # what a gradient may be; idle: no backward is under way


def grouped_in_order(order: Sequence[int], parameters: Sequence[nn.Parameter], cap_bytes: int) -> list[list[int]]:
    """Which of `parameters`, by number, share a bucket; `order` is that in which gradients become ready."""
    ordered = [parameters[i] for i in order]
    sizes = [parameter.numel() * parameter.element_size() for parameter in ordered]
    kinds = [(parameter.dtype, parameter.device) for parameter in ordered]
    return [[order[position] for position in positions] for positions in buckets_in_order(sizes, kinds, cap=cap_bytes)]


class Tally:
    """Which gradients of a bucket have arrived in this backward. It is all that hooks hold, for the reason that
    Note [Hooks on parameters hold nothing] gives."""

    __slots__ = ("awaited", "states")

    def __init__(self, count: int) -> None:
        self.states = bytearray(count)
        self.awaited = count  # gradients still to come in this backward

    def enter(self, state: int) -> None:
        """All gradients are in `state` now."""
        self.states[:] = bytes([state]) * len(self.states)

    def hook(
        self,
        slot: int,
        when_complete: Callable[[], None],
        otherwise: Callable[[int], None],
        when_failed: Callable[[], None],
    ) -> Callable[[Tensor], None]:
        """What autograd calls when the gradient in `slot` is there: once per parameter and backward, so it is short."""
        states = self.states

        @untraced
        def arrived(_: Tensor) -> None:
            try:
                if states[slot] != AWAITED:
                    otherwise(slot)
                if states[slot] == AWAITED:
                    states[slot] = ARRIVED
                    self.awaited -= 1
                    if not self.awaited:
                        when_complete()
            except BaseException:
                when_failed()
                raise

        return arrived


class Bucket:
    """Some parameters whose gradients travel together, and how far they are in this backward."""

    __slots__ = ("gradients", "label", "members", "tally", "work")

    def __init__(self, members: Sequence[int], gradients: GradientBucket, label: str) -> None:
        self.members = tuple(members)
        self.gradients = gradients
        self.label = label
        self.tally = Tally(len(members))
        self.work: PollableWork | None = None

    @property
    def awaited(self) -> int:
        """How many gradients are still to come in this backward."""
        return self.tally.awaited

    @property
    def missing(self) -> list[int]:
        """Slots without a gradient in this backward, so far."""
        states = self.tally.states
        return [slot for slot, state in enumerate(states) if state == AWAITED] if self.tally.awaited else []

    def reset(self) -> None:
        self.tally.enter(IDLE)
        self.tally.awaited = len(self.members)
        self.work = None
        self.gradients.drop()

    def progress(self) -> bool:
        """Do what can be done without waiting for another rank; whether the bucket is finished."""
        if self.work is not None and self.work.progress():
            self.finish()
        return self.work is None

    def abort(self) -> None:
        """What is in flight is not wanted."""
        work, self.work = self.work, None
        if work is not None:
            work.abort()

    def finish(self) -> None:
        """Wait for the sum; nothing happens if that has been done, or nothing was launched."""
        work, self.work = self.work, None
        if work is not None:
            work.wait()
            self.gradients.finish()
