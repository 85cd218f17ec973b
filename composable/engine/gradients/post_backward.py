"""The schedule of gradient reductions below one root (`PostBackward`), and the buckets of models
that are only replicated (`Buckets`).

| gradients of | are launched |
|--------------|--------------|
| units with shards | where backward leaves the unit: `end_unit` |
| units with shards that had several forwards | when backward has left the last of these |
| replicated units next to shards | where backward leaves the next unit with shards, used or not |
| a unit with a gradient after it was left, or without being entered | at the end: `remaining` |
| a replicated unit with tied weights, or without a later sharded unit | at the end, used or not |
| units with accumulated gradients | at the end of the next reducing backward, or `launch_held` |
| replicated units below a root without shards | all in each backward, by arrival: `Buckets` |

A sharded unit that no backward came to is not launched: backward must come to it on all ranks or
on none (docs/failures.md).

One reduction stays in flight while backward goes through the next unit. At the end all are launched
before any lands. `land` puts gradients on at-rest parameters, in the order of launches.

All ranks must launch in one order. The order never depends on which gradients arrived: a rank
without a gradient sends zeros. It depends on which units backward enters, and in which order. For
sharded units this is the same on all ranks, because all ranks gather them in forward, and their
outputs always have a node for backward (`visit.py`). Replicated units may run on some ranks only,
or in another order on each rank. So the first backward compares the order in which the ranks left
the units. If all ranks had the same order, it decides from then on which replicated units are
reduced before which unit with shards, also on ranks that skip some of them. Otherwise all
replicated units are reduced at the end of each backward, in the order of the model.

`Buckets` reduces the gradients of `replicate` alone while backward runs, as DDP does. They are
launched strictly in one order, and all of them in every backward: a rank without a gradient sends
zeros. The first backward launches all buckets at its end, in the reverse order of the parameters.
Then the ranks agree once on the order in which rank 0's gradients were ready, and use it in all
later backwards. A backward in which other roots may take part also launches all buckets at its end.

Two kinds of parameters get their own buckets, which are launched at the end of backward. A
parameter is of such a kind if any rank noticed it in the first backward:

* Parameters on which autograd accumulated several times. This happens if reentrant checkpointing
  runs several backwards inside of a backward, and modules in more than one of them use the
  parameter.
* Parameters that had a gradient on some ranks only. The other ranks can launch such a bucket only
  at the end. An optimizer in backward waits for buckets before the end. If the model's own backward
  has collectives (experts), this rank would wait for the bucket, while the other ranks wait for it
  in these collectives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress, repeat
from operator import attrgetter, is_, ne, or_
from typing import Final, NoReturn

from typing_extensions import override

from composable.comm.launch import Launch, LaunchKind
from composable.comm.ledger import checksum, debug_enabled
from composable.engine.gradients.agreed import Agreed
from composable.engine.gradients.grad_bucket import GradBucket, SyncMode
from composable.engine.gradients.sparse import only_looked_up
from composable.engine.gradients.unit_gradients import UnitGradients, UnitKind
from composable.engine.params.layout import Slot
from composable.engine.params.param import (
    Arrival,
    ManagedParam,
    gradient_of,
    ignore_arrivals,
    listen_to_arrivals,
)
from composable.engine.params.param_group import ParamGroup
from composable.errors import ComposableError, PhaseError, RanksDisagreeError

FIRST_BYTES: Final = 1 << 20  # of the first bucket: a small one is launched early


class ArrivalBucket(GradBucket):
    """A bucket that knows which of its gradients this backward has not brought yet.

    Once the order is agreed, and if no gradient is there when backward begins, only the last
    parameter of a bucket has a hook; `.grad` of the others is looked at when it is called. A call
    for each gradient would take the host longer than the bucket itself.

    Attributes:
        missing: whose hooks autograd has not called; None where only the last one has a hook.
        silent: the hooks of all but the last parameter, which autograd does not call until `close`.
        late: it is launched at the end of backward.
    """

    def __init__(
        self,
        unit: UnitGradients,
        group: ParamGroup,
        members: Sequence[tuple[ManagedParam, Slot]],
        *,
        late: bool,
    ) -> None:
        mesh_info = unit.mesh_info
        factor = unit.factor_of(mesh_info)
        super().__init__(group, members, mesh_info, factor=factor, keeps=unit.spec.keeps_buckets)
        self.unit = unit
        self.late = late
        self.missing: dict[ManagedParam, None] | None = {}
        self.silent: list[Arrival] = []

    @override
    def text_of(self, unit_name: str) -> str:
        first, last = self.params[0].fqn, self.params[-1].fqn
        return f"gradient all-reduce of unit '{unit_name}' ('{first}' to '{last}')"

    def open(self, *, agreed: bool) -> None:
        """A backward begins."""
        self.follow()
        there = self.look()
        # Hooks of users, optimizers in backward among them, put a reduced gradient there before
        # backward ends.
        hooked = self.has_post_accumulate_hooks
        if agreed and all(self.trainable) and not there and not hooked:
            self.missing = None
            self.silent = [self.unit.arrivals[param] for param in self.params[:-1]]
            ignore_arrivals(self.silent)
        else:
            self.missing = dict.fromkeys(compress(self.params, self.trainable))

    @property
    def is_complete(self) -> bool:
        """Whether this backward has brought all gradients, as far as that is known before its
        end.
        """
        if self.late:
            return False
        if self.missing is not None:
            return not self.missing
        return not any(map(is_, map(gradient_of, self.compute), repeat(None)))

    def absent(self) -> list[int]:
        """Indices of parameters that this backward has brought no gradient for."""
        if self.missing is None:
            return [index for index, each in enumerate(self.compute) if each.grad is None]
        return [index for index, param in enumerate(self.params) if param in self.missing]

    def close(self) -> None:
        """It has ended."""
        listen_to_arrivals(self.silent)
        self.silent = []


class Buckets:
    """The buckets of the replicated units of one root.

    Attributes:
        is_open: a backward is under way.
        buckets: in the order in which they are launched.
    """

    def __init__(self, units: Sequence[UnitGradients], agreed: Agreed) -> None:
        self._units = list(units)
        self._agreed = agreed
        self.is_open = self._by_arrival = False
        self._launched = 0  # of `buckets`, in this backward
        # until the order is agreed: parameters in the order of arrival, and which of them arrived
        # again in one backward
        self._ready: dict[ManagedParam, bool] = {}
        self._members: dict[ManagedParam, tuple[UnitGradients, ParamGroup, Slot]] = {
            param: (unit, group, slot)
            for unit in units
            for group in unit.groups
            for param, slot in group.members
            if not only_looked_up(param.info)
        }
        last_first = [param for unit in reversed(units) for param in reversed(unit.params)]
        self._fill(last_first)

    def _fill(self, rest: Sequence[ManagedParam]) -> None:
        """Fill buckets with parameters, in the agreed order, and in the order of `rest`.

        Those of one unit, precision and device share some.
        """
        Key = tuple[ParamGroup, bool]
        open_buckets: dict[Key, list[ManagedParam]] = {}
        sizes: dict[Key, int] = {}
        filled: list[tuple[Key, list[ManagedParam]]] = []
        late = {each() for each in self._agreed.late}
        order = dict.fromkeys([*(each() for each in self._agreed.buckets or ()), *rest])
        for param in (each for each in order if each in self._members):  # not those replaced since
            unit, group, _ = self._members[param]
            key = group, param in late
            members = open_buckets.setdefault(key, [])
            members.append(param)
            sizes[key] = sizes.get(key, 0) + param.at_rest.numel() * group.precision.reduce.itemsize
            cap = unit.spec.bucket_bytes if filled else min(FIRST_BYTES, unit.spec.bucket_bytes)
            if sizes[key] >= cap:
                filled.append((key, open_buckets.pop(key)))
                sizes[key] = 0
        filled += list(open_buckets.items())
        filled.sort(key=lambda each: each[0][1])  # the others do not wait for those
        self.buckets: list[ArrivalBucket] = []
        self._bucket_of: dict[ManagedParam, ArrivalBucket] = {}
        for (group, is_late), members in filled:
            unit = self._members[members[0]][0]
            slots = [(param, self._members[param][2]) for param in members]
            bucket = ArrivalBucket(unit, group, slots, late=is_late)
            self.buckets.append(bucket)
            self._bucket_of.update(dict.fromkeys(members, bucket))
        for unit in self._units:
            unit.arrive_in([each for each in self.buckets if each.unit is unit])

    def open(self, *, by_arrival: bool) -> None:
        """A backward begins; every bucket takes part in it, whichever gradient came first.

        Args:
            by_arrival: no other root launches collectives in this backward, so buckets are launched
                as gradients arrive. Otherwise the order among roots would depend on which gradients
                arrive, and all are launched at the end.
        """
        if not self.is_open:
            self.is_open, self._launched = True, 0
            agreed = self._agreed.buckets is not None
            self._by_arrival = by_arrival and agreed
            for bucket in self.buckets:
                bucket.open(agreed=agreed)

    def arrived(self, param: ManagedParam, *, builds_graph: bool) -> None:
        """Autograd has accumulated a gradient of `param`, in a backward that may build a graph."""
        bucket = self._bucket_of.get(param)
        if bucket is None:
            return  # sparse gradients are summed at the end of backward
        if bucket in self.buckets[: self._launched]:
            _refuse_second_gradient(bucket.unit, param)
        if bucket.missing is not None:
            again = param not in bucket.missing
            bucket.missing.pop(param, None)
            if self._agreed.buckets is None:
                self._ready[param] = again or self._ready.get(param, False)
        while (
            self._by_arrival
            and self._launched < len(self.buckets)
            and self.buckets[self._launched].is_complete
        ):
            self._launch_next(builds_graph=builds_graph)

    def _launch_next(self, *, builds_graph: bool) -> None:
        bucket = self.buckets[self._launched]
        unit, absent = bucket.unit, bucket.absent()
        if not builds_graph:
            bucket.reduce(unit.accumulation.now, absent)
        elif len(absent) < bucket.trainable.count(True):
            unit.refuse_graph()
        self._launched += 1
        # Optimizers in backward free gradients as they step: land the bucket before this one now,
        # and not only at the end.
        for before in self.buckets[max(0, self._launched - 2) : self._launched - 1]:
            if before.has_post_accumulate_hooks:
                before.land()

    def launch_remaining(self, *, builds_graph: bool) -> None:
        """Backward is at its end: what has not come does not come. Of a step that was given up in
        it nothing is open.
        """
        while self.is_open and self._launched < len(self.buckets):
            self._launch_next(builds_graph=builds_graph)

    def land(self) -> None:
        """Wait for all buckets, in their order."""
        if not self.is_open:
            return
        for bucket in self.buckets:
            if bucket.missing is None and bucket.reduction is not None:
                for param in bucket.params:  # what was there has been taken
                    if param.compute.grad is not None:
                        _refuse_second_gradient(bucket.unit, param)
            bucket.land()
            bucket.decide()
            bucket.close()
        self.is_open = False
        # On ranks without any gradient, too: the order is broadcast. Not under `no_sync`, where no
        # rank launches anything.
        if (
            self._agreed.buckets is None
            and self._members
            and all(unit.accumulation.now is SyncMode.REDUCE for unit in self._units)
        ):
            self._agree_on_order()

    def _agree_on_order(self) -> None:
        """Rank 0's order of arrival, once, and what is launched at the end. Parameters that rank 0
        has not seen come last.
        """
        ready, self._ready = self._ready, {}
        known = list(self._members)
        comm = max((unit.mesh_info.all for unit in self._units), key=attrgetter("size"))
        seen = {param: place for place, param in enumerate(dict.fromkeys([*ready, *known]))}
        absent = {param for bucket in self.buckets for param in bucket.missing or ()}
        lowest, highest = comm.min_max(
            [
                *(seen[param] if comm.rank == 0 else -1 for param in known),
                *(ready.get(param, False) for param in known),
                *(param in absent for param in known),
            ],
            Launch("exchange of the order of buckets"),
        )
        count = len(known)
        places = dict(zip(known, highest[:count], strict=True))
        order = sorted(known, key=places.__getitem__)
        on_some = map(ne, lowest[2 * count :], highest[2 * count :])
        late = compress(known, map(or_, highest[count : 2 * count], on_some))
        self._agreed.agree_on_buckets(order, late)
        self._fill(order)

    @property
    def backwards(self) -> int:
        """The most backwards that one of them has accumulated."""
        return max((each.accumulated.backwards for each in self.buckets), default=0)

    def close(self) -> dict[GradBucket, bool]:
        """The step is lost. Returns the buckets, and which of them a backward has come to and not
        launched.
        """
        is_open, self.is_open = self.is_open, False
        for bucket in self.buckets:
            bucket.close()
        return {
            bucket: is_open and index >= self._launched for index, bucket in enumerate(self.buckets)
        }


def _refuse_second_gradient(unit: UnitGradients, param: ManagedParam) -> NoReturn:
    raise PhaseError(
        f"parameter '{param.fqn}' of unit '{unit.name}' got a second gradient in one backward,"
        " after the first was sent (reentrant checkpointing of modules that share it does this, if"
        " no rank did so in the first backward). Use checkpoint(module) of this library, or"
        " use_reentrant=False"
    )


IN_FLIGHT: Final = 1  # reductions that stay in flight while backward goes through the next unit


@dataclass(slots=True)
class Due:
    """What one iteration has to reduce; dropped with it.

    Attributes:
        to_reduce: units that backward has entered, or brought a gradient to, since they were last
            reduced.
        reduced: units that were, where backward left them.
        in_flight, over_replicas: units whose reduction is in its first, or second, stage.
        left: until the ranks have compared it, indices of units in the order in which backward
            left them.
        builds_graph: the backward runs with `create_graph=True`.
    """

    to_reduce: dict[UnitGradients, None] = field(default_factory=dict)
    reduced: dict[UnitGradients, None] = field(default_factory=dict)
    in_flight: list[UnitGradients] = field(default_factory=list)
    over_replicas: list[UnitGradients] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    builds_graph: bool = False

    def come_again(self, unit: UnitGradients) -> None:
        """A gradient came to a unit that backward has not entered, or has left."""
        self.to_reduce[unit] = None

    def build_graph(self) -> None:
        """The backward makes nodes of its own."""
        self.builds_graph = True


class PostBackward:
    """See the top of this file.

    Args:
        agreed: what all ranks have alike about `units`.

    Attributes:
        beside: replicated units next to shards (`UnitKind.BESIDE`).
        buckets: of units that are reduced by arrival.
    """

    def __init__(self, units: Sequence[UnitGradients], agreed: Agreed) -> None:
        self._units = list(units)
        self._agreed = agreed
        self._indices = {unit: index for index, unit in enumerate(units)}
        self.beside = [unit for unit in units if unit.spec.kind is UnitKind.BESIDE]
        self.make_buckets()

    def make_buckets(self) -> None:
        """Anew when parameters of replicated units were replaced, or what reduces them."""
        replicated = [unit for unit in self._units if unit.spec.kind is UnitKind.ARRIVAL]
        self.buckets = Buckets(replicated, self._agreed)

    # --- in a backward ---------------------------------------------------------------------------

    def begin_unit(self, unit: UnitGradients, due: Due) -> None:
        """Backward has come to the outputs of `unit`: it is to be reduced."""
        due.to_reduce.pop(unit, None)
        due.to_reduce[unit] = None
        if unit.spec.kind is not UnitKind.ARRIVAL:
            # whichever gradients come: autograd calls none of its hooks until `reduce`
            unit.ignore()

    def end_unit(self, unit: UnitGradients, due: Due) -> None:
        """Backward has left `unit`, and its parameters are resharded."""
        if self._agreed.before is None:
            due.left.append(self._indices[unit])
        if unit in self.beside:
            return  # some ranks may skip it
        for each in (*self._reduced_before(unit), unit):
            due.reduced[each] = None
            self.reduce(each, due)
        # Land the oldest reductions, or launch their second stage, until `IN_FLIGHT` are left in
        # each stage.
        while len(due.in_flight) > IN_FLIGHT:
            oldest = due.in_flight.pop(0)
            if oldest.advance():
                due.over_replicas.append(oldest)
            else:
                oldest.land()
        while len(due.over_replicas) > IN_FLIGHT:
            due.over_replicas.pop(0).land()

    def _reduced_before(self, unit: UnitGradients) -> list[UnitGradients]:
        """Replicated units whose reduction precedes that of a unit with shards, see `Agreed`."""
        before = (self._agreed.before or {}).get(self._indices[unit], ())
        return [self._units[index] for index in before]

    def reduce(self, unit: UnitGradients, due: Due) -> None:
        """Launch the reduction of what is on this rank now; under `no_sync` leave it there."""
        due.to_reduce.pop(unit, None)
        mode = unit.accumulation.now
        unit.listen()
        if unit.hooks_due and mode is SyncMode.REDUCE:
            unit.run_hooks()
        if due.builds_graph:
            if unit.are_there:
                unit.refuse_graph()
            return
        for units in (due.in_flight, due.over_replicas):
            if unit in units:  # it was reduced in this backward already: its buckets must be free
                units.remove(unit)
                unit.land()
        for bucket in unit.buckets:
            bucket.reduce(mode)
        if unit.buckets:
            due.in_flight.append(unit)

    # --- at its end ------------------------------------------------------------------------------

    def remaining(self, due: Due, unseen: Iterable[UnitGradients]) -> list[UnitGradients]:
        """What is still to be reduced, in the order of launches.

        1. Units that backward has entered, the last one first; those that it may have come to
           unseen; those with gradients of earlier backwards. Replicated units that are reduced
           before one of them (`Agreed.before`) precede it.
        2. All other replicated units next to shards.
        """
        held = [
            unit
            for unit in self._units
            if unit.accumulation.now is SyncMode.REDUCE and (unit.hooks_due or unit.backwards)
        ]
        beside = dict.fromkeys(unit for unit in self.beside if unit not in due.reduced)
        order: dict[UnitGradients, None] = {}
        for unit in [*reversed(due.to_reduce), *unseen, *held]:
            is_sent = unit in due.in_flight or unit in due.over_replicas
            if is_sent and unit not in due.to_reduce and not unit.are_there:
                continue  # what is in flight is all that has come to it
            if unit not in beside:
                before = [each for each in self._reduced_before(unit) if each in beside]
                order.update(dict.fromkeys([*before, unit]))
        return [*(order | beside)]

    def launch_last(self, due: Due) -> None:
        """`remaining` was reduced: launch the buckets that did not fill, and all second stages."""
        self.buckets.launch_remaining(builds_graph=due.builds_graph)
        for unit in list(due.in_flight):
            if unit.advance():
                due.in_flight.remove(unit)
                due.over_replicas.append(unit)

    def land(self, due: Due) -> None:
        """All that takes part in this backward has been launched: wait for it."""
        for unit in [*due.over_replicas, *due.in_flight]:
            unit.land()
        self.buckets.land()
        reduces = [unit.accumulation.now is SyncMode.REDUCE for unit in self._units]
        for unit, now in zip(self._units, reduces, strict=True):
            for bucket in unit.buckets:
                bucket.decide()
                if now:
                    bucket.run_hooks()
            for sparse in unit.sparse:
                if not due.builds_graph:
                    sparse.end_backward(reduces=now)
                elif sparse.came:
                    unit.refuse_graph()
        # under `no_sync` ranks launch nothing, this included
        if self._agreed.before is None and all(reduces):
            self._compare_left(due)

    def _compare_left(self, due: Due) -> None:
        """Once: do all ranks leave units in one order? Some may run replicated modules that others
        do not, or in another order.
        """
        # The root is left last on all ranks: there is nothing to compare if it is the only one.
        beside = [] if self.beside == self._units[:1] else self.beside
        comms = [*dict.fromkeys(unit.mesh_info.all for unit in beside)]
        left, waiting, before = list[int](), list[int](), dict[int, tuple[int, ...]]()
        if len(comms) == 1:
            lowest, highest = comms[0].min_max(
                [checksum(str(due.left))], Launch("comparison of the order of units in backward")
            )
            left = due.left if lowest == highest else []
        for number, index in enumerate(left, start=1):
            unit = self._units[index]
            if index in left[number:] or unit.spec.is_read_apart:
                continue  # left again; or tied: complete when all readers have been left
            if unit in beside:
                waiting.append(index)
            # backward left it once, on all ranks: behind it, what waits has come on all of them
            elif left.count(index) == 1 and unit.mesh_info.all.size >= comms[0].size:
                before[index], waiting = tuple(waiting), []
        self._agreed.agree_on_leaving(before)

    def drop(self, due: Due) -> list[ComposableError]:
        """The step is lost: wait for what is in flight, in the order of launches, and forget local
        gradients. Returns what failed in flight: a collective, or a hook in place of one.
        """
        begun: dict[GradBucket, bool] = {}
        for unit in dict.fromkeys([*due.over_replicas, *due.in_flight, *self._units]):
            begun.update(dict.fromkeys(unit.buckets, unit in due.to_reduce))
            for sparse in unit.sparse:
                sparse.drop()
        failed: list[ComposableError] = []
        for bucket, is_begun in (begun | self.buckets.close()).items():
            try:
                bucket.drop(begun=is_begun)
            except ComposableError as error:
                failed.append(error)
        return failed

    # --- without a backward ----------------------------------------------------------------------

    def _all_buckets(self) -> list[GradBucket]:
        of_units = [bucket for unit in self._units for bucket in unit.buckets]
        return [*of_units, *self.buckets.buckets]

    def hold(self) -> None:
        """Split backwards have assigned gradients: they wait to be reduced."""
        for bucket in self._all_buckets():
            bucket.reduce(SyncMode.HOLD)
        for unit in self._units:
            for sparse in unit.sparse:
                sparse.hold_by_hand()

    def launch_held(self) -> None:
        """Launch the reduction of what was accumulated under `no_sync`."""
        for bucket in self._all_buckets():
            if bucket.accumulated.backwards:
                bucket.look()
                bucket.reduce()

    def land_held(self) -> None:
        """Wait for what `launch_held` launched."""
        buckets = self._all_buckets()
        for bucket in buckets:
            bucket.advance()
        for bucket in buckets:
            bucket.land()
            bucket.decide()
        for unit in self._units:
            for sparse in unit.sparse:
                if sparse.holds:
                    sparse.reduce()
            unit.run_hooks()
        for bucket in buckets:
            bucket.run_hooks()

    def compare_held(self, name: str) -> None:
        """On hosts, all ranks have accumulated equally often: a rank without gradients would launch
        nothing.

        Args:
            name: of the root.

        Raises:
            RanksDisagreeError: they have not.
        """
        for comm in dict.fromkeys(unit.mesh_info.all for unit in self._units):
            if comm.size == 1 or (comm.traits.on_stream and not debug_enabled()):
                continue
            held = [unit.backwards for unit in self._units if unit.mesh_info.all is comm]
            mine = max([0, *held, self.buckets.backwards])
            text = f"comparison of accumulated backwards of unit '{name}'"
            said = comm.all_gather_ints([mine], Launch(text, LaunchKind.COMPARE_BACKWARDS))
            if said != [said[0]] * len(said):
                raise RanksDisagreeError(
                    "reduce_gradients: the ranks accumulated gradients of different numbers of"
                    f" backwards below unit '{name}':"
                    f" {', '.join(f'rank {rank} {count}' for rank, (count,) in enumerate(said))}."
                    " Every rank must run the same backwards under no_sync. What was accumulated"
                    " is dropped on all ranks"
                )
