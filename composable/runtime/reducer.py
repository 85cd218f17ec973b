"""Averages the gradients of parameters while backward runs: what `replicate` runs on. Knows no modules.

What it consists of: the parameters, hooks on them, the buckets that they fill and the order of these that ranks
agree on, rows of sparse gradients, and what is held of earlier backwards.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch
from torch import nn

from composable.device.collectives import Communicator, TagSequence
from composable.device.gradient_buckets import GradientBucket, gradient_strides
from composable.device.term_factors import Factor
from composable.plan.phases import GradPhase
from composable.plan.scaling import Scaling, scaling_of
from composable.runtime.accumulation import Accumulation, Pass
from composable.runtime.averaged_parameters import AveragedParameters
from composable.runtime.bucket import IDLE, Bucket, grouped_in_order
from composable.runtime.bucket_hooks import BucketHooks
from composable.runtime.bucket_order import BucketOrder, OrderAgreement
from composable.runtime.buckets import Buckets
from composable.runtime.hooked_units import UnitHook
from composable.runtime.launch_order import LaunchOrder
from composable.runtime.local_gradients import Forms, LocalGradients
from composable.runtime.resting_form import at_rest
from composable.runtime.rounds import Forwards, Round
from composable.runtime.sparse import SparseGradients
from composable.runtime.term_hooks import TermHooks
from composable.runtime.trailer import Trailer


class Reducer:
    """Averages the gradients of `parameters` over a communicator while backward runs.

    Args:
        parameters: in the order of their FQNs; gradients are expected roughly in the reverse of it.
        together: who takes part in backwards together with this one; whoever makes it puts it there.
        place: there.
        cap_bytes: bytes a bucket may hold.
        turn: the unit's place among all, the same on every rank.
        elsewhere: indices of parameters whose gradients somebody else averages.
        sparse: indices of parameters whose gradients are sparse.
        forms: of the parameters, where users see others than autograd.
        forwards: of the unit and of those around it, that a backward should go through.
        divisor: what sums of gradients are divided by; None for the number of ranks, which makes them means.
        hook: of a user's, which makes means of gradients in place of the communicator.
        summed_in: for each parameter, in which dtype its gradients are summed; None: each in its own.
        last: the reducer before this one.

    Attributes:
        parameters: as they were found.
        local: what is held of earlier backwards.
        hooks: on the parameters.
        term_hooks: others, which multiply gradients as they come.
        buckets: what it launches in every backward.
        agreement: on their order.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        names: Sequence[str],
        communicator: Communicator,
        together: LaunchOrder,
        place: int,
        *,
        cap_bytes: int,
        unit: str,
        turn: int = 0,
        elsewhere: frozenset[int] = frozenset(),
        sparse: frozenset[int] = frozenset(),
        forms: Forms | None = None,
        forwards: Sequence[Forwards] = (),
        divisor: float | None = None,
        hook: UnitHook | None = None,
        summed_in: Sequence[torch.dtype] | None = None,
        last: Reducer | None = None,
    ) -> None:
        self.unit = unit
        self.turn = turn
        self._communicator = communicator
        self._place = place
        self._cap_bytes = cap_bytes
        self._forms = forms
        self._hook = hook
        self._dtypes = [parameter.dtype for parameter in parameters] if summed_in is None else summed_in
        self._pass = Pass.SPARES
        self.local: LocalGradients = LocalGradients(
            tuple(parameters), names, unit, communicator, forms, last.local if last is not None else None
        )
        frozen = self.local.frozen
        self.parameters: AveragedParameters = AveragedParameters(
            parameters,
            names,
            frozen=frozen,
            elsewhere=elsewhere,
            sparse=sparse,
            before=last.parameters.kinds if last is not None else None,
        )
        # Ranks replace parameters one by one, but what they have agreed on stands until they agree again.
        same = last is not None and len(last.parameters.everyone) == len(parameters)
        known = last.agreement.order if last is not None and same else BucketOrder()
        self.agreement: OrderAgreement = OrderAgreement(
            self.parameters.dense, known, communicator, unit, len(parameters), place
        )
        self._round = Round(forwards, communicator, unit, self.local.accumulation)
        slots = self.parameters.sparse
        self._rows = SparseGradients([parameters[i] for i in slots], [names[i] for i in slots], communicator, unit)
        self.hooks = BucketHooks(self.parameters, frozen, together, unit)
        share = 1.0 if divisor is None else communicator.size / divisor
        trainable = [parameters[i] for i in (*self.parameters.dense, *slots) if i not in frozen]
        self.term_hooks = TermHooks(lambda: trainable, None if share == 1.0 else Factor(share))
        self.term_hooks.weigh(self.local.accumulation.weight)
        self.buckets: Buckets = self._make_buckets() if communicator.size > 1 else Buckets(self.local, self._round)
        if communicator.size > 1:
            self.hooks.attach(self.buckets.each, self._rows, self.agreement)
        elif forms is not None:
            self.hooks.attach_alone(forms)

    # --- buckets ----------------------------------------------------------------------------------------------------

    def _make_buckets(self) -> Buckets:
        parameters, names, order = self.parameters.everyone, self.parameters.names, self.agreement
        capabilities = self._communicator.capabilities
        grouped = grouped_in_order(order.of_parameters(), parameters, self._dtypes, self._cap_bytes, capabilities.alone_bytes)
        holds = self.local.accumulation.passes and self._pass is not Pass.REDUCES
        held = GradPhase.HELD if holds else GradPhase.EMPTY
        buckets, trailer, hook = [], None, self._hook
        summed = None if hook is None else hook.summed_by(self._communicator)
        for number, members in enumerate(grouped, start=1):
            first, dtype = parameters[members[0]], self._dtypes[members[0]]
            if number == len(grouped):
                trailer = Trailer(self.parameters.dense, self._round, dtype, first.device)
            gradients = GradientBucket(
                [parameters[i] for i in members],
                [order.order.strides.get(i) for i in members],
                scaling=scaling_of(
                    str(dtype).removeprefix("torch."),
                    self._communicator.size,
                    on_the_way_in=True,
                    reads_inputs=capabilities.reads_scaled_inputs,
                )
                if summed is None
                else Scaling(),
                flags=trailer.numel if trailer is not None else 0,
                apart=summed is not None,
                dtype=dtype,
            )
            by = "" if hook is None else f" by {hook.name}"
            label = f"gradient all-reduce of unit '{self.unit}' ('{names[members[0]]}' to '{names[members[-1]]}'){by}"
            hop = None if summed is None else summed.hop(gradients, [names[i] for i in members], trailer, self.refuse_others)
            buckets.append(Bucket(members, gradients, self._communicator, label, held, hop))
        return Buckets(self.local, self._round, buckets, trailer, capabilities, hooked=hook is not None)

    def fits(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether these are still the parameters, of the same kinds, and as trainable as they were."""
        return self.parameters.are(parameters) and not self.local.outdated

    # --- backward ---------------------------------------------------------------------------------------------------

    def begin(self, others: bool, only: Container[Accumulation] | None = None) -> None:
        accumulation = self.local.accumulation
        self._pass = accumulation.now
        if only is not None:
            self._pass = Pass.REDUCES if accumulation in only else Pass.SPARES
        accumulation.holds = self._pass is Pass.HOLDS
        self.local.take_up()
        kinds = self.parameters.kinds
        digest = self.agreement.order.digest + kinds.digest + (0 if self._hook is None else self._hook.units.digest)
        self._communicator.sums.agreed = self._round.agreed = digest % TagSequence.DIGESTS
        self._round.others = others
        kinds.tell(self._communicator, self._place)
        self.buckets.open(self._pass)

    def conclude(self) -> None:
        if self._pass is Pass.HOLDS:
            self.local.hold(self._arrived(), (*self.parameters.dense, *self.parameters.sparse))
        if self._pass is not Pass.REDUCES:
            return
        try:
            self._conclude_sums()
        finally:
            self.local.end_window()

    def _arrived(self) -> list[int]:
        return [*self.buckets.arrived, *(self.parameters.sparse[slot] for slot in self._rows.arrived)]

    def _conclude_sums(self) -> None:
        agreement, buckets = self.agreement, self.buckets
        if buckets.trailer is not None:
            checks = self._communicator.capabilities.reads_freely or not agreement.sure
            resolves = agreement.recording or buckets.awaited
            said = buckets.trailer.read(buckets.each[-1].gradients.flags) if checks or resolves else []
            if checks:
                buckets.trailer.check(said, self.refuse_others)
                agreement.sure = not agreement.recording
            complete = buckets.resolve_unused(said) if resolves else False
            for bucket in buckets.each:
                bucket.gradients.means.add_new()
            if agreement.recording and complete:
                agreement.agree({i: gradient_strides(self.parameters.everyone[i]) for i in self.parameters.dense})
                self._adopt()
        if self.parameters.sparse:
            self._rows.average([self.local.has(i) for i in self.parameters.sparse])

    def refuse_others(self) -> None:
        self.parameters.kinds.refuse_others(self._communicator, self._place, self.unit)

    def deliver(self) -> None:
        if self._forms is not None:
            held = self._pass is not Pass.REDUCES
            self._forms.deliver([self.parameters.everyone[i] for i in self.parameters.dense], held=held)
        if self.local.accumulation.early and self._pass is Pass.REDUCES:
            _end_steps(self)

    # --- ends -------------------------------------------------------------------------------------------------------

    def drop(self) -> None:
        """After an error: nothing is in flight, and nothing is held. A backward that raised may have added to it by halves."""
        self.buckets.drop()
        if self.local.accumulation.in_window:
            self.local.drop(self._arrived())

    def lose(self) -> None:
        """The backward raised; the next one, or the next forward, drops what it left."""
        self.agreement.lose_backward()
        for steps in self.local.accumulation.early:
            steps.lose()
        for bucket in self.buckets.each:
            bucket.pending_gradients.enter(IDLE)
        in_flight = any(bucket.phase is GradPhase.REDUCING for bucket in self.buckets.each)
        if self._hook is not None and in_flight and self._communicator.capabilities.looked_after:
            self._hook.leave()  # others may call hooks that this rank does not come to

    def close(self) -> None:
        self.buckets.close()
        self._rows.clear()
        self.agreement.close()

    # --- agreement --------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Before a backward is opened. See Note [An agreement that not all ranks know of]."""
        self.agreement.look_up()
        if self.agreement.adopting is not None:
            self._adopt()

    @torch.no_grad()
    def _adopt(self) -> None:
        self.agreement.adopt()
        self.hooks.detach()
        self._refill()
        self.hooks.attach(self.buckets.each, self._rows, self.agreement)
        self.agreement.adopted()

    def _refill(self) -> None:
        buckets = self.buckets.each
        views = {p: v for b in buckets for p, v in zip(b.gradients.parameters, b.gradients.views, strict=True)}
        means = {p: mean for bucket in buckets for p, mean in bucket.gradients.means.known.items()}
        del buckets
        self.buckets = self._make_buckets()  # memory of the old ones goes as the last view of each moves
        for bucket in self.buckets.each:
            bucket.gradients.adopt_from(views, means)


def _end_steps(reducer: Reducer) -> None:
    """A backward is over: step what is stepped in it and was not yet. See Note [Steps in backward]."""
    accumulation, parameters = reducer.local.accumulation, [at_rest(parameter) for parameter in reducer.parameters.everyone]
    if not accumulation.complete:
        return
    for steps in accumulation.early:
        steps.step(accumulation, parameters)
        steps.end(accumulation, parameters)
    for bucket in reducer.buckets.each:
        bucket.gradients.release()
