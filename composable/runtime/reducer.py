"""Buckets of gradients that are all-reduced as they fill: what `replicate` runs on. Knows parameters and a
communicator, not modules.

Note [The same collectives on every rank]
Buckets are launched strictly in their order, and all of them in every backward: a rank that has no gradient for a parameter
contributes zeros. When a backward begins, and what follows its end, is for `composable.runtime.launch_order` to say. The last
message carries a flag per parameter, so that everybody learns which ones were used somewhere; the gradient of one that nobody
used stays as it was. No search through the graph, no flag for the user to set.

Note [The order of buckets]
The first backward runs with the parameters in reverse. At its end (to be exact: at the end of the first one in which some
rank had a gradient for every parameter) the ranks tell each other in which order gradients became ready, and all fill their
buckets anew by the same one. That happens once: what is agreed outlives the reducer, and graphs that change do not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from operator import is_
from typing import Final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from composable.device.collectives import Communicator, TagSequence
from composable.device.gradient_buckets import GradientBucket, gradient_strides
from composable.device.use_flags import UseFlags
from composable.errors import PhaseError
from composable.plan.scaling import scaling_of
from composable.runtime.accumulation import Accumulation
from composable.runtime.bucket import ARRIVED, AWAITED, IDLE, SENT, Bucket, grouped_in_order
from composable.runtime.bucket_order import BucketOrder, agree_on_bucket_order, known_to_others
from composable.runtime.gradient_hooks import call_when_accumulated, weakly
from composable.runtime.kinds import Kinds
from composable.runtime.launch_order import LaunchOrder
from composable.runtime.local_gradients import Forms, LocalGradients
from composable.runtime.rounds import NUMBERS, Forwards, Round
from composable.runtime.sparse import SparseGradients

_EVERYTHING: Final = -1  # as a parameter of which a rank has a gradient if it has one for every parameter

HOST_IN_FLIGHT: Final = 4  # buckets; each has a message in memory that ranks of one host share


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
        last: the reducer before this one.
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
        last: Reducer | None = None,
    ) -> None:
        self.parameters = tuple(parameters)
        self.names = tuple(names)
        self.unit = unit
        self.turn = turn
        # Ranks replace parameters one by one, but what they have agreed on stands until they agree again.
        same = last is not None and len(last.parameters) == len(self.parameters)
        self.bucket_order: BucketOrder = last.bucket_order if last is not None and same else BucketOrder()
        before = last.local if last is not None else None
        self.local: LocalGradients = LocalGradients(self.parameters, self.names, unit, communicator, forms, before)
        self._together = together
        self._place = place
        self._round = Round(forwards, communicator, unit, self.local.accumulation)
        self._forms = forms
        self._keeps = False  # in this backward: gradients stay on their rank
        self._reduces = True
        self._communicator = communicator
        self._cap_bytes = cap_bytes
        self.elsewhere = elsewhere
        mine = [i for i, p in enumerate(parameters) if (p.requires_grad or i in self.local.frozen) and i not in elsewhere]
        self._trainable = [i for i in mine if i not in sparse]
        self._sparse = [i for i in mine if i in sparse]
        self._rows = SparseGradients(
            [parameters[i] for i in self._sparse], [names[i] for i in self._sparse], communicator, unit
        )
        self._buckets: list[Bucket] = []
        self._launched = 0
        self._in_flight: list[Bucket] = []
        self._on_host = communicator.size > 1 and all(p.device.type == "cpu" for p in parameters)
        # Where order alone tells collectives apart, what is launched must not depend on what has arrived.
        self._few_in_flight = self._on_host and not communicator.capabilities.ordered
        self._arrivals: list[int] = []
        self._hooks: list[RemovableHandle] = []
        self._adopting: BucketOrder | None = None  # is being put into effect
        self._sure = False  # that all ranks know of the same agreement
        self._missed: int | None = None  # the step in which the others may have agreed without this rank
        self.kinds: Kinds = Kinds(self.parameters, self.names, last.kinds if last is not None else None)
        self._recording = not all(i in self.bucket_order.order for i in self._trainable)
        self._flags: UseFlags  # of the last bucket
        if communicator.size > 1:
            self._buckets = self._make_buckets()
            self._attach()
        elif forms is not None:
            alone = weakly(self._deliver_one)
            trainable = [parameters[i] for i in self._trainable if i not in self.local.frozen]
            self._hooks = [call_when_accumulated(parameter, alone) for parameter in trainable]

    # --- buckets ----------------------------------------------------------------------------------------------------

    def _order(self) -> list[int]:
        trainable = dict.fromkeys(self._trainable)
        known = dict.fromkeys(i for i in self.bucket_order.order if i in trainable)
        return [*known, *(i for i in reversed(self._trainable) if i not in known)]

    def _make_buckets(self) -> list[Bucket]:
        grouped = grouped_in_order(self._order(), self.parameters, self._cap_bytes)
        buckets = []
        for number, members in enumerate(grouped, start=1):
            gradients = GradientBucket(
                [self.parameters[i] for i in members],
                [self.bucket_order.strides.get(i) for i in members],
                scaling=scaling_of(
                    str(self.parameters[members[0]].dtype).removeprefix("torch."),
                    self._communicator.size,
                    on_the_way_in=True,
                    reads_inputs=self._communicator.capabilities.reads_scaled_inputs,
                ),
                # One flag per parameter, one that says that this rank had a gradient for all of them, and which backward it is.
                flags=len(self._trainable) + 1 + NUMBERS if number == len(grouped) else 0,
            )
            names = self.names[members[0]], self.names[members[-1]]
            label = f"gradient all-reduce of unit '{self.unit}' ('{names[0]}' to '{names[1]}')"
            buckets.append(Bucket(members, gradients, label))
        if grouped:
            last = self.parameters[grouped[-1][0]]
            self._flags = UseFlags((*self._trainable, _EVERYTHING), last.dtype, last.device)
        return buckets

    def _attach(self) -> None:
        complete, unexpected, record = weakly(self._together.launch_complete), weakly(self._unexpected), weakly(self._record)
        failed = weakly(self._together.note_interrupt)
        for number, bucket in enumerate(self._buckets):
            for slot, i in enumerate(bucket.members):
                hook = bucket.tally.hook(slot, complete, partial(unexpected, number), failed)
                if self._recording:
                    hook = partial(record, i, hook)
                if i not in self.local.frozen:
                    self._hooks.append(call_when_accumulated(self.parameters[i], hook))
        for slot, i in enumerate(self._sparse):
            hook = self._rows.hook(slot, weakly(self._together.open))
            if i not in self.local.frozen:
                self._hooks.append(call_when_accumulated(self.parameters[i], hook))

    def _deliver_one(self, parameter: nn.Parameter) -> None:
        """On one rank, what has arrived is complete."""
        if self._forms is not None:
            self._forms.deliver((parameter,), held=False)

    def detach(self) -> None:
        """Leave the parameters alone from here on."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def trainable(self) -> list[tuple[nn.Parameter, str]]:
        """Its parameters that get gradients, and their names."""
        return [
            (parameter, name) for parameter, name in zip(self.parameters, self.names, strict=True) if parameter.requires_grad
        ]

    def missed(self, named: Iterable[tuple[nn.Parameter, str]]) -> list[tuple[nn.Parameter, str]]:
        """Those of `named` that have a gradient for which no hook has waited."""
        known = {id(self.parameters[i]): None for i in (*self._trainable, *self._sparse)}
        return [(p, name) for p, name in named if p.requires_grad and p.grad is not None and id(p) not in known]

    def fits(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether these are still the parameters, of the same kinds, and as trainable as they were."""
        return (
            len(parameters) == len(self.parameters)
            and all(map(is_, parameters, self.parameters))
            and self.kinds.hold_for(parameters)
            and not self.local.outdated
        )

    # --- backward ---------------------------------------------------------------------------------------------------

    @property
    def waits(self) -> bool:
        return bool(self._hooks)

    @property
    def buckets(self) -> Sequence[Bucket]:
        return self._buckets

    @property
    def has_launched(self) -> bool:
        return self._launched == len(self._buckets)

    def begin(self, only: Container[Accumulation] | None = None) -> None:
        accumulation = self.local.accumulation
        self._keeps = only is None and accumulation.keeps
        self._reduces = not self._keeps and (only is None or accumulation in only)
        self.local.take_up()
        self._communicator.sums.agreed = self._round.agreed = (
            self.bucket_order.digest + self.kinds.digest
        ) % TagSequence.DIGESTS
        self.kinds.tell(self._communicator, self._place)
        for bucket in self._buckets:
            bucket.tally.enter(AWAITED)
            bucket.gradients.open()

    def _record(self, i: int, hook: Callable[[Tensor], None], parameter: Tensor) -> None:
        self._arrivals.append(i)
        hook(parameter)

    def _unexpected(self, number: int, slot: int) -> None:
        """The first gradient of a backward that came through no output, or one that came twice."""
        self._together.open()
        bucket = self._buckets[number]
        if bucket.tally.states[slot] == SENT:
            raise PhaseError(
                f"replicate(unit '{self.unit}'): parameter '{self.names[bucket.members[slot]]}' got a second gradient in one "
                "backward, after its first had been sent. Reentrant checkpointing of a shared parameter does this; use "
                "checkpoint(module)."
            )

    def launch_complete(self) -> None:
        if self._on_host:
            # A host's communicators do part of the work when asked to, better while backward runs than after it. Nobody is
            # waited for: another rank may launch its bucket at the end of its backward only, see Note [Launch points].
            self._in_flight = [bucket for bucket in self._in_flight if not bucket.progress()]
        while self._next is not None and not self._next.awaited:
            if self._next is self._buckets[-1] and self._round.incomplete:
                return  # backward may come to those forwards yet, or end without
            self._launch(self._next)

    @property
    def _next(self) -> Bucket | None:
        """The bucket to launch next, unless those in flight take memory enough."""
        if self.has_launched or (self._few_in_flight and len(self._in_flight) >= HOST_IN_FLIGHT):
            return None
        return self._buckets[self._launched]

    def _launch(self, bucket: Bucket) -> None:
        if not self._reduces:
            self._launched += 1
            if self._keeps:
                bucket.gradients.hold()
            return
        message = bucket.gradients.collect(self._missing(bucket))
        if bucket is self._buckets[-1]:
            self._write_flags(bucket.gradients.flags)
        if not bucket.awaited:  # otherwise backward is at its end, and what was awaited was missing
            bucket.tally.enter(SENT)
        bucket.work = self._communicator.all_reduce(message, label=bucket.label, scaled_input=bucket.gradients.scaled_input)
        self._in_flight.append(bucket)
        self._launched += 1

    def _missing(self, bucket: Bucket) -> list[int]:
        """Slots without a gradient: neither this backward nor an earlier one under `no_sync` brought one that is there."""
        return [slot for slot in bucket.missing if not self.local.has(bucket.members[slot])]

    def launch_again(self) -> None:
        if not self._reduces:
            return
        for bucket in self._buckets[: self._launched]:
            bucket.abort()
            if bucket is self._buckets[-1]:
                self._round.write(bucket.gradients.flags[-NUMBERS:])
            bucket.work = self._communicator.all_reduce(
                bucket.gradients.message, label=bucket.label, scaled_input=bucket.gradients.scaled_input
            )

    def _write_flags(self, flags: Tensor) -> None:
        self._round.write(flags[-NUMBERS:])
        missing = []
        if any(bucket.awaited for bucket in self._buckets):  # the last launch: no gradient comes after it
            missing = [bucket.members[slot] for bucket in self._buckets for slot in self._missing(bucket)] + [_EVERYTHING]
        flags[:-NUMBERS].copy_(self._flags.without(missing))

    def launch_rest(self) -> None:
        while self._next is not None:
            self._launch(self._next)

    def landed(self, bucket: Bucket) -> None:
        self._in_flight = [other for other in self._in_flight if other is not bucket]

    def conclude(self) -> None:
        if self._keeps:
            self.local.hold(self._arrived(), (*self._trainable, *self._sparse))
        if not self._reduces:
            return
        try:
            self._conclude_sums()
        finally:
            self.local.end_window()

    def _arrived(self) -> list[int]:
        slots = [(i, state) for bucket in self._buckets for i, state in zip(bucket.members, bucket.tally.states, strict=True)]
        return [*(i for i, state in slots if state in (ARRIVED, SENT)), *(self._sparse[slot] for slot in self._rows.arrived)]

    def _conclude_sums(self) -> None:
        if self._buckets:
            self._check_round()
        if self._buckets and (self._recording or any(bucket.awaited for bucket in self._buckets)):
            unused = self._flags.unused(self._flags.parameters, self._buckets[-1].gradients.flags[:-NUMBERS])
            absent = dict.fromkeys(unused)
            for bucket in self._buckets:
                bucket.gradients.settle([i not in absent for i in bucket.members])
            if self._recording and _EVERYTHING not in absent:
                self._agree()
        if self._sparse:
            self._rows.average([self.local.has(i) for i in self._sparse])

    def refuse_others(self) -> None:
        self.kinds.refuse_others(self._communicator, self._place, self.unit)

    def _check_round(self) -> None:
        numbers = self._buckets[-1].gradients.flags[-NUMBERS:]
        if numbers.device.type == "cpu" or not self._sure:  # elsewhere reading them would hold up the host in every step
            self._round.check(numbers.tolist(), self.refuse_others)
            self._sure = not self._recording

    def deliver(self) -> None:
        if self._forms is not None:
            self._forms.deliver([self.parameters[i] for i in self._trainable], held=not self._reduces)

    def forget(self) -> None:
        if self._keeps or self.local.accumulation.passes:
            self._keeps = False
            self.local.forget(self._arrived())

    def stop(self) -> None:
        if self._recording and self._missed is None:
            self._missed = self._communicator.sums.steps.number
        for bucket in self._buckets:
            bucket.tally.enter(IDLE)

    def reset(self) -> None:
        for bucket in self._buckets:
            bucket.reset()
        self._rows.reset()
        self._launched = 0
        self._in_flight = []
        self._arrivals = []

    # --- agreement --------------------------------------------------------------------------------------------------

    def _agree(self) -> None:
        """Find out in which order gradients become ready, and fill the buckets in that order from now on."""
        strides = {i: gradient_strides(self.parameters[i]) for i in self._trainable}
        count = len(self.parameters)
        self._adopt(
            agree_on_bucket_order(
                self.bucket_order, self._arrivals, self._order(), strides, self._communicator, self.unit, count, self._place
            )
        )

    @torch.no_grad()
    def _adopt(self, bucket_order: BucketOrder) -> None:
        self._adopting = bucket_order  # before anything changes: after an interrupt it is done again
        self.bucket_order = bucket_order
        self._sure = False
        self._recording = False
        self.detach()
        self._refill()
        self._attach()
        self._adopting = self._missed = None

    def prepare(self) -> None:
        """Before a backward is opened. See Note [An agreement that not all ranks know of]."""
        if self._missed is not None and self._adopting is None:
            count = len(self.parameters)
            self._adopting = known_to_others(self.bucket_order, self._communicator, self._missed, count, self._place)
        if self._adopting is not None:
            self._adopt(self._adopting)

    def _refill(self) -> None:
        views = {p: v for b in self._buckets for p, v in zip(b.gradients.parameters, b.gradients.views, strict=True)}
        self._buckets = self._make_buckets()  # memory of the old ones goes as the last view of each moves
        for bucket in self._buckets:
            bucket.gradients.adopt_from(views)
