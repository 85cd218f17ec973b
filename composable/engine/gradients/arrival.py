"""`replicate` alone: gradients are reduced in buckets while backward runs, as DDP does.

Buckets are launched strictly in one order, and all of them in every backward: a rank without a
gradient sends zeros. The first backward launches all buckets at its end, in the reverse order of
the parameters. Then the ranks agree once on the order in which rank 0's gradients were ready, and
use it in all later backwards. A backward in which other roots may take part also launches all
buckets at its end.

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

from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress, repeat
from operator import is_, itemgetter, ne, or_
from typing import Final, NoReturn

from typing_extensions import override

from composable.comm.launch import Launch
from composable.engine.gradients.agreed import Agreed
from composable.engine.gradients.grad_bucket import GradBucket, SyncMode
from composable.engine.gradients.sparse import only_looked_up
from composable.engine.gradients.unit_gradients import UnitGradients
from composable.engine.params.layout import Slot
from composable.engine.params.param import ManagedParam, gradient_of
from composable.engine.params.param_group import ParamGroup
from composable.engine.params.param_hooks import Arrival, ignore_arrivals, listen_to_arrivals
from composable.errors import PhaseError

FIRST_BYTES: Final = 1 << 20  # of the first bucket: a small one is launched early


class ArrivalBucket(GradBucket):
    """A bucket that knows which of its gradients this backward has not brought yet.

    Once the order is agreed, and if no gradient is there when backward begins, only the last
    parameter of a bucket has a hook; `.grad` of the others is looked at when it is called. A call
    for each gradient would take the host longer than the bucket itself.

    Attributes:
        missing: whose hooks autograd has not called; None where only the last one has a hook.
        silent: by what it would tell of the others.
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
        super().__init__(
            group, members, mesh_info,
            unit_name=unit.name,
            factor=unit.factor_of(mesh_info), keeps=unit.spec.keeps_buckets,
        )  # fmt: skip
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
        # in the order of arrival, until the order is agreed
        self._ready: list[ManagedParam] | None = [] if agreed.buckets is None else None
        self._again: set[ManagedParam] = set()  # of these, that arrived again in one backward
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
            self._by_arrival = by_arrival and self._ready is None
            for bucket in self.buckets:
                bucket.open(agreed=self._ready is None)

    def arrived(self, param: ManagedParam, *, builds_graph: bool) -> None:
        """Autograd has accumulated a gradient of `param`, in a backward that may build a graph."""
        bucket = self._bucket_of.get(param)
        if bucket is None:
            return  # sparse gradients are summed at the end of backward
        if bucket in self.buckets[: self._launched]:
            _refuse_second_gradient(bucket.unit, param)
        if bucket.missing is not None and param in bucket.missing:
            del bucket.missing[param]
            if self._ready is not None:
                self._ready.append(param)
        elif self._ready is not None:
            self._again.add(param)
        while (
            self._by_arrival
            and self._launched < len(self.buckets)
            and self.buckets[self._launched].is_complete
        ):
            self._launch_next(builds_graph=builds_graph)

    def _launch_next(self, *, builds_graph: bool) -> None:
        bucket = self.buckets[self._launched]
        unit, absent = bucket.unit, bucket.absent()
        if builds_graph and len(absent) < bucket.trainable.count(True):
            unit.refuse_graph()
        if builds_graph:
            self._launched += 1
            return
        bucket.reduce(unit.accumulation.now, absent)
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
            self._ready is not None
            and self._members
            and all(unit.accumulation.now is SyncMode.REDUCE for unit in self._units)
        ):
            self._agree_on_order()

    def _agree_on_order(self) -> None:
        """Rank 0's order of arrival, once, and what is launched at the end. Parameters that rank 0
        has not seen come last.
        """
        ready, self._ready = self._ready, None
        assert ready is not None
        known = list(self._members)
        comm = self._units[0].mesh_info.all
        seen = {param: place for place, param in enumerate(dict.fromkeys([*ready, *known]))}
        absent = {param for bucket in self.buckets for param in bucket.missing or ()}
        lowest, highest = comm.min_max(
            [
                *(seen[param] if comm.rank == 0 else -1 for param in known),
                *(param in self._again for param in known),
                *(param in absent for param in known),
            ],
            Launch("exchange of the order of buckets"),
        )
        count = len(known)
        places, again = highest[:count], highest[count : 2 * count]
        on_some = map(ne, lowest[2 * count :], highest[2 * count :])
        order = [param for _, param in sorted(zip(places, known, strict=True), key=itemgetter(0))]
        self._agreed.agree_on_buckets(order, compress(known, map(or_, again, on_some)))
        self._fill(order)

    @property
    def backwards(self) -> int:
        """The most backwards that one of them has accumulated."""
        return max((each.accumulated.backwards for each in self.buckets), default=0)

    def drops(self) -> list[Callable[[], None]]:
        """The step is lost; returns what forgets local gradients that were not reduced."""
        is_open, self.is_open = self.is_open, False
        for bucket in self.buckets:
            bucket.close()
        return [
            partial(bucket.drop, begun=is_open and index >= self._launched)
            for index, bucket in enumerate(self.buckets)
        ]


def _refuse_second_gradient(unit: UnitGradients, param: ManagedParam) -> NoReturn:
    raise PhaseError(
        f"parameter '{param.fqn}' of unit '{unit.name}' got a second gradient in one backward,"
        " after the first was sent (reentrant checkpointing of modules that share it does this, if"
        " no rank did so in the first backward). Use checkpoint(module) of this library, or"
        " use_reentrant=False"
    )
