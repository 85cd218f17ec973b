"""Some parameters whose gradients travel together, in one backward: which are there, and what is in flight; knows no others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from composable.compilation import untraced
from composable.device.collectives import Communicator
from composable.device.gradient_buckets import GradientBucket
from composable.device.labels import labelled, profiled
from composable.plan.bucketing import buckets_in_order
from composable.plan.phases import GradEvent, GradPhase, advance_gradients
from composable.runtime.hooked_hop import HookedHop
from composable.runtime.hop import Hop

IDLE, AWAITED, ARRIVED, SENT = range(4)  # what a gradient may be; idle: no backward is under way


def grouped_in_order(
    order: Sequence[int],
    parameters: Sequence[nn.Parameter],
    dtypes: Sequence[torch.dtype],
    cap_bytes: int,
    alone_bytes: int,
) -> list[list[int]]:
    """Which of `parameters`, by number, share a bucket.

    Args:
        order: that in which gradients become ready.
        dtypes: in which they are summed.
    """
    sizes = [parameters[i].numel() * dtypes[i].itemsize for i in order]
    kinds = [(dtypes[i], parameters[i].device) for i in order]
    buckets = buckets_in_order(sizes, kinds, cap=cap_bytes, alone_bytes=alone_bytes)
    return [[order[position] for position in positions] for positions in buckets]


class PendingGradients:
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
    """Some parameters whose gradients travel together, and how far they are.

    EMPTY -> REDUCING -> EMPTY, or by HELD, see `composable.plan.phases`; which of its gradients have arrived is for `tally` to
    say.

    Attributes:
        members: the parameters, by number.
        label: of its messages.

    Args:
        hop: in place of the communicator's sum.
    """

    __slots__ = ("_hop", "gradients", "label", "members", "pending_gradients", "phase")

    def __init__(
        self,
        members: Sequence[int],
        gradients: GradientBucket,
        communicator: Communicator,
        label: str,
        phase: GradPhase = GradPhase.EMPTY,
        hop: HookedHop | None = None,
    ) -> None:
        self.members = tuple(members)
        self.gradients = gradients
        self.label = label
        self.phase = phase
        self.pending_gradients = PendingGradients(len(members))
        self._hop = hop or Hop(communicator)

    def _advance(self, event: GradEvent) -> None:
        self.phase = advance_gradients(self.phase, event, unit=self.label)

    @property
    def missing(self) -> list[int]:
        """Slots without a gradient in this backward, so far."""
        states = self.pending_gradients.states
        return [slot for slot, state in enumerate(states) if state == AWAITED] if self.pending_gradients.awaited else []

    @property
    def arrived(self) -> list[int]:
        """The parameters that this backward has brought gradients to, so far."""
        return [i for i, state in zip(self.members, self.pending_gradients.states, strict=True) if state in (ARRIVED, SENT)]

    def open(self) -> None:
        """A backward begins."""
        self.pending_gradients.enter(AWAITED)
        self.gradients.open()

    def hold(self) -> None:
        """Leave what is there for a later backward."""
        self._advance(GradEvent.HOLD)
        self.gradients.hold()

    def launch(self) -> None:
        """The message is complete: sum it."""
        self._advance(GradEvent.REDUCE)
        if not self.pending_gradients.awaited:  # otherwise backward is at its end, and what was awaited was missing
            self.pending_gradients.enter(SENT)
        message = (self.gradients.message, self.label, self.gradients.scaled_input)
        try:
            if profiled():
                labelled(self.label, self._hop.all_reduce, *message)
            else:
                self._hop.all_reduce(*message)
        except BaseException:
            self._advance(GradEvent.DROP)  # or it would be finished without having been summed
            raise

    def progress(self) -> bool:
        """Do what can be done without waiting for another rank; whether the bucket is finished."""
        if self.phase is GradPhase.REDUCING and self._hop.progress():
            self.finish()
        return self.phase is not GradPhase.REDUCING

    def finish(self) -> None:
        """Wait for the sum; nothing happens if that has been done, or nothing was launched."""
        if self.phase is not GradPhase.REDUCING:
            return
        try:
            if profiled():
                labelled(f"wait for the {self.label}", self._hop.wait)
            else:
                self._hop.wait()
        except BaseException:
            self._advance(GradEvent.DROP)
            raise
        self.gradients.finish()
        self._advance(GradEvent.FINISH)

    def close(self) -> None:
        """The backward has ended, well or not: the next gradient belongs to another one."""
        self.pending_gradients.enter(IDLE)
        self.pending_gradients.awaited = len(self.members)
        self.gradients.drop()

    def drop(self) -> None:
        """Nothing is in flight, and nothing is held."""
        try:
            self._hop.abort()
        finally:
            self._advance(GradEvent.DROP)
