"""When gradients are reduced, and in which order, below one root.

| gradients of | are launched |
|--------------|--------------|
| units with shards | where backward leaves the unit: `end_unit` |
| units with shards that had several forwards | when backward has left the last of these |
| replicated units next to shards | where backward leaves the next unit with shards, used or not |
| a unit with a gradient after it was left, or without being entered | at the end: `remaining` |
| a replicated unit with tied weights, or without a later sharded unit | at the end, used or not |
| units with accumulated gradients | at the end of the next reducing backward, or `launch_held` |
| replicated units below a root without shards | all in each backward, by arrival: `arrival.py` |

A sharded unit that no backward came to is not launched: backward must come to it on all ranks or
on none (docs/failures.md).

One reduction stays in flight while backward goes through the next unit. At the end all are launched
before any lands. `land` puts gradients on at-rest parameters, in the order of launches.

All ranks must launch in one order. The order never depends on which gradients arrived: a rank
without a gradient sends zeros. It depends on which units backward enters, and in which order. For
sharded units this is the same on all ranks, because all ranks gather them in forward, and their
outputs always have a node for backward (`outputs.py`). Replicated units may run on some ranks only,
or in another order on each rank. So the first backward compares the order in which the ranks left
the units. If all ranks had the same order, it decides from then on which replicated units are
reduced before which unit with shards, also on ranks that skip some of them. Otherwise all
replicated units are reduced at the end of each backward, in the order of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from composable.comm.launch import Launch, LaunchKind
from composable.comm.ledger import checksum, debug_enabled
from composable.engine.gradients.agreed import Agreed
from composable.engine.gradients.arrival import Buckets
from composable.engine.gradients.grad_bucket import GradBucket, SyncMode
from composable.engine.gradients.unit_gradients import UnitGradients, UnitKind
from composable.errors import ComposableError, RanksDisagreeError

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
        """Backward has come to the outputs of `unit`."""
        due.to_reduce.pop(unit, None)
        due.to_reduce[unit] = None
        if unit.spec.kind is not UnitKind.ARRIVAL:
            # It will be reduced, whichever gradients come: autograd need not tell of them.
            unit.ignore()

    def end_unit(self, unit: UnitGradients, due: Due) -> None:
        """Backward has left `unit`, and its parameters are resharded."""
        agreed, index = self._agreed, self._indices[unit]
        if agreed.in_one_order is None:
            due.left.append(index)
        if unit in self.beside:
            return  # some ranks may skip it
        for before in agreed.before.get(index, ()):
            each = self._units[before]
            due.reduced[each] = None
            self.reduce(each, due)
        due.reduced[unit] = None
        self.reduce(unit, due)
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
        """What is still to be reduced, in the order of launches: what backward has entered, the
        last one first; what it may have come to unseen; what only earlier backwards brought
        gradients to; and replicated units next to shards.
        """
        held = [
            unit
            for unit in self._units
            if unit.accumulation.now is SyncMode.REDUCE and (unit.hooks_due or unit.backwards)
        ]
        sent = [*due.in_flight, *due.over_replicas]
        units = [
            unit
            for unit in dict.fromkeys([*reversed(due.to_reduce), *unseen, *held])
            # what is in flight: only if backward has entered it again, or brought more gradients
            if unit in due.to_reduce or unit not in sent or unit.are_there
        ]
        beside = dict.fromkeys(unit for unit in self.beside if unit not in due.reduced)
        order: dict[UnitGradients, None] = {}
        for unit in units:
            if unit not in beside:  # backward leaves it now, and these before it
                for before in self._agreed.before.get(self._indices[unit], ()):
                    if self._units[before] in beside:
                        order[self._units[before]] = None
                order[unit] = None
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
        if self._agreed.in_one_order is None and all(reduces):
            self._compare_left(due)

    def _compare_left(self, due: Due) -> None:
        """Once: do all ranks leave units in one order? Some may run replicated modules that others
        do not, or in another order.
        """
        # The root is left last on all ranks: there is nothing to compare if it is the only one.
        beside = [] if self.beside == self._units[:1] else self.beside
        comms = [*dict.fromkeys(unit.mesh_info.all for unit in beside)]
        in_one_order = False
        if len(comms) == 1:
            lowest, highest = comms[0].min_max(
                [checksum(str(due.left))], Launch("comparison of the order of units in backward")
            )
            in_one_order = lowest == highest
        if not in_one_order:
            self._agreed.agree_on_leaving(in_one_order=False)
            return
        comm = comms[0]  # of all units beside shards
        left, waiting, before = due.left, list[int](), dict[int, tuple[int, ...]]()
        for number, index in enumerate(left, start=1):
            unit = self._units[index]
            if index in left[number:] or unit.spec.is_read_apart:
                continue  # left again; or tied: complete when all readers have been left
            if unit in beside:
                waiting.append(index)
            # backward left it once: behind it, what waits has come on all ranks
            elif left.count(index) == 1 and unit.mesh_info.all.size >= comm.size:  # on all ranks
                before[index], waiting = tuple(waiting), []
        self._agreed.agree_on_leaving(in_one_order=True, before=before)

    def drop(self, due: Due) -> list[ComposableError]:
        """The step is lost: wait for what is in flight, in the order of launches, and forget local
        gradients. Returns what failed in flight: a collective, or a hook in place of one.
        """
        drops: list[Callable[[], None]] = []
        for unit in dict.fromkeys([*due.over_replicas, *due.in_flight, *self._units]):
            begun = unit in due.to_reduce
            drops += [partial(bucket.drop, begun=begun) for bucket in unit.buckets]
            drops += [sparse.drop for sparse in unit.sparse]
        failed: list[ComposableError] = []
        for drop in [*drops, *self.buckets.drops()]:
            try:
                drop()
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
