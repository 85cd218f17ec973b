"""The buckets of one replicated unit, and how far they have been launched in a backward; knows neither hooks nor other units.

Note [The same collectives on every rank]
Buckets are launched strictly in their order, and all of them in every backward: a rank that has no gradient for a parameter
contributes zeros. When a backward begins, and what follows its end, is for `composable.runtime.launch_order` to say. The last
message says which parameters had a gradient, so that everybody learns which ones were used somewhere; the gradient of one that
nobody used stays as it was (Note [Unused parameters]). No search through the graph, no flag for the user to set.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from composable.device.collectives import Capabilities
from composable.errors import CommunicationError
from composable.runtime.accumulation import Pass
from composable.runtime.bucket import Bucket
from composable.runtime.local_gradients import LocalGradients
from composable.runtime.rounds import Round
from composable.runtime.trailer import Trailer

HOST_IN_FLIGHT: Final = 4  # buckets; each has a message in memory that ranks of one host share


class Buckets:
    """Those of one reducer, in the order in which they are launched.

    Args:
        local: gradients of earlier backwards, of this rank alone.
        round_: says whether backward has more to go through.
        trailer: of the last one; None where there are none.
        capabilities: of the communicator.
        hooked: hooks of users sum them.
    """

    __slots__ = ("_few_in_flight", "_in_flight", "_launched", "_local", "_looked_after", "_pass", "_round", "each", "trailer")

    def __init__(
        self,
        local: LocalGradients,
        round_: Round,
        each: Sequence[Bucket] = (),
        trailer: Trailer | None = None,
        capabilities: Capabilities = Capabilities(),  # noqa: B008 - frozen
        *,
        hooked: bool = False,
    ) -> None:
        self.each = tuple(each)
        self.trailer = trailer
        self._local = local
        self._round = round_
        self._looked_after = capabilities.looked_after
        # Where order alone tells collectives apart, what is launched must not depend on what has arrived.
        self._few_in_flight = self._looked_after and not capabilities.ordered and not hooked
        self._pass = Pass.SPARES
        self._launched = 0
        self._in_flight: list[Bucket] = []

    def open(self, pass_: Pass) -> None:
        """A backward begins."""
        self._pass = pass_
        for bucket in self.each:
            bucket.open()

    @property
    def awaited(self) -> bool:
        """Whether a gradient is still to come."""
        return any(bucket.pending_gradients.awaited for bucket in self.each)

    @property
    def arrived(self) -> list[int]:
        """The parameters that this backward has brought gradients to, so far."""
        return [i for bucket in self.each for i in bucket.arrived]

    @property
    def has_launched(self) -> bool:
        """Whether all have been launched in this backward."""
        return self._launched == len(self.each)

    def launch_complete(self) -> None:
        """Launch those that are complete, up to the first that is not, or until many are in flight."""
        if self._looked_after:
            # Part of the work is done when asked for, better while backward runs than after it. Nobody is waited for: another
            # rank may launch its bucket at the end of its backward only, see Note [Launch points].
            before, self._in_flight = self._in_flight, [bucket for bucket in self._in_flight if not bucket.progress()]
            if self._local.accumulation.early:
                for each in before:
                    if each not in self._in_flight:
                        _step(self, each)
        while (bucket := self._next) is not None and not bucket.pending_gradients.awaited:
            if bucket is self.each[-1] and self._round.incomplete:
                return  # backward may come to those forwards yet, or end without
            self._launch(bucket)

    def launch_rest(self) -> None:
        """Launch all of them, or until many are in flight."""
        while (bucket := self._next) is not None:
            self._launch(bucket)

    @property
    def _next(self) -> Bucket | None:
        """The bucket to launch next, unless those in flight take memory enough."""
        if self.has_launched or (self._few_in_flight and len(self._in_flight) >= HOST_IN_FLIGHT):
            return None
        return self.each[self._launched]

    def _launch(self, bucket: Bucket) -> None:
        if self._pass is Pass.REDUCES:
            bucket.gradients.collect(self._missing(bucket))
            if bucket is self.each[-1] and self.trailer is not None:  # no gradient comes after it
                complete = not self.awaited
                missing = () if complete else [b.members[slot] for b in self.each for slot in self._missing(b)]
                self.trailer.write(bucket.gradients.flags, missing, complete=complete)
            bucket.launch()
            self._in_flight.append(bucket)
        elif self._pass is Pass.HOLDS:
            bucket.hold()
        self._launched += 1

    def _missing(self, bucket: Bucket) -> list[int]:
        """Slots without a gradient: neither this backward nor an earlier one under `no_sync` brought one that is there."""
        return [slot for slot in bucket.missing if not self._local.has(bucket.members[slot])]

    def launch_again(self) -> None:
        """Launch what has been launched, in another step."""
        if self._pass is not Pass.REDUCES:
            return
        for bucket in self.each[: self._launched]:
            bucket.drop()
            if bucket is self.each[-1] and self.trailer is not None:
                self.trailer.write_round(bucket.gradients.flags)
            bucket.launch()

    def finish(self, bucket: Bucket) -> None:
        """Wait for one of them."""
        bucket.finish()
        self._in_flight = [other for other in self._in_flight if other is not bucket]
        if self._local.accumulation.early:
            _step(self, bucket)

    def resolve_unused(self, said: Sequence[float]) -> bool:
        """All sums are there: decide about gradients that were missing on this rank.

        Args:
            said: the trailer's numbers, read.

        Returns:
            Whether some rank had a gradient for every parameter.
        """
        assert self.trailer is not None
        unused, complete = self.trailer.unused(said)
        absent = dict.fromkeys(unused)
        for bucket in self.each:
            bucket.gradients.resolve_unused([i not in absent for i in bucket.members])
        return complete

    def close(self) -> None:
        """The backward has ended, well or not."""
        for bucket in self.each:
            bucket.close()
        self._launched = 0
        self._in_flight = []

    def drop(self) -> None:
        """After an error: nothing is in flight."""
        for bucket in self.each:
            with suppress(CommunicationError):  # the error that ended the backward has been reported already
                bucket.drop()


def _step(buckets: Buckets, bucket: Bucket) -> None:
    """Step what is stepped in backward, and give the bucket's memory back. See Note [Steps in backward]."""
    accumulation, gradients = buckets._local.accumulation, bucket.gradients
    if buckets._pass is not Pass.REDUCES or not accumulation.complete:
        return
    decided = [parameter for slot, parameter in enumerate(gradients.parameters) if slot not in gradients.undecided]
    for steps in accumulation.early:
        steps.step(accumulation, decided)
    if bucket is not buckets.each[-1]:  # the numbers behind its gradients are read when all sums are there
        gradients.release()


def keep_others(buckets: Buckets) -> bool | None:
    """All sums are there: whether some rank said that it keeps others, see Note [Who else trains]; None if nothing was summed.
    Reads memory."""
    if buckets._pass is not Pass.REDUCES or buckets.trailer is None:
        return None
    return buckets.trailer.others(buckets.each[-1].gradients.flags)
