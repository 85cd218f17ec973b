"""`replicate` alone: gradients are reduced in buckets while backward runs, as DDP does.

Buckets are launched strictly in one order, and all of them in every backward: a rank without a gradient sends zeros. The order is
the reverse of the parameters' in the first backward, which launches them all at its end; from then on it is the order in which
rank 0's gradients were ready, which is broadcast once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch

from composable.engine.accumulation import SyncMode
from composable.engine.comm_hooks import attach_hooks
from composable.engine.grad_bucket import BucketState, GradBucket
from composable.engine.layout import Slot
from composable.engine.param import DeferredHooks, ManagedParam
from composable.engine.param_group import ParamGroup
from composable.engine.sparse import only_looked_up
from composable.errors import PhaseError
from composable.memory.torch_private import hooks_after_accumulation

if TYPE_CHECKING:
    from composable.engine.root import Root
    from composable.engine.unit import Unit

FIRST_BYTES: Final = 1 << 20  # of the first bucket: a small one is launched early


class _Pending:
    """A bucket, and which of its gradients this backward has not brought yet."""

    __slots__ = ("bucket", "launched", "missing", "unit")

    def __init__(self, unit: Unit, bucket: GradBucket) -> None:
        self.unit = unit
        self.bucket = bucket
        self.missing: dict[ManagedParam, None] = {}
        self.launched = False

    def open(self) -> None:
        self.missing = dict.fromkeys(p for p, t in zip(self.bucket.params, self.bucket.trainable, strict=True) if t)
        self.launched = False


class Buckets:
    """The buckets of the replicated units of one root.

    Attributes:
        is_open: a backward is under way.
    """

    def __init__(self, root: Root, units: Sequence[Unit]) -> None:
        self._root = root
        self._units = list(units)
        self.is_open = self._by_arrival = False
        self._next = 0  # in `_buckets`
        self._ready: list[ManagedParam] | None = []  # in the order of arrival, until the order is agreed
        self._members: dict[ManagedParam, tuple[Unit, ParamGroup, Slot]] = {
            param: (unit, group, slot)
            for unit in units
            for group in unit.groups
            for param, slot in zip(group.params, group.slots, strict=True)
            if not only_looked_up(param.info)
        }
        self._fill([param for unit in reversed(units) for param in reversed(unit.params) if param in self._members])

    def _fill(self, order: Sequence[ManagedParam]) -> None:
        """Fill buckets with parameters in `order`; those of one unit, precision and device share some."""
        open_buckets: dict[ParamGroup, list[ManagedParam]] = {}
        sizes: dict[ParamGroup, int] = {}
        filled: list[tuple[ParamGroup, list[ManagedParam]]] = []
        for param in order:
            unit, group, _ = self._members[param]
            members = open_buckets.setdefault(group, [])
            members.append(param)
            sizes[group] = sizes.get(group, 0) + param.at_rest.numel() * group.precision.reduce.itemsize
            cap = unit.spec.bucket_bytes if filled else min(FIRST_BYTES, unit.spec.bucket_bytes)
            if sizes[group] >= cap:
                filled.append((group, open_buckets.pop(group)))
                sizes[group] = 0
        filled += list(open_buckets.items())
        self._buckets: list[_Pending] = []
        self._bucket_of: dict[ManagedParam, _Pending] = {}
        for group, members in filled:
            unit = self._members[members[0]][0]
            slots = [(param, self._members[param][2]) for param in members]
            bucket = GradBucket(slots, group.precision, group.device, unit.mesh_info, factor=unit.grad_factor)
            bucket.label = f"gradient all-reduce of unit '{unit.name}' ('{members[0].fqn}' to '{members[-1].fqn}')"
            pending = _Pending(unit, bucket)
            self._buckets.append(pending)
            self._bucket_of.update(dict.fromkeys(members, pending))
        self.attach_hooks()

    def attach_hooks(self) -> None:
        """Buckets, or communication hooks of units, were changed."""
        for unit in self._units:
            attach_hooks(unit, [each.bucket for each in self._buckets if each.unit is unit])

    def follow(self) -> None:
        """Parameters were frozen or unfrozen."""
        for each in self._buckets:
            each.bucket.follow()

    def open(self, *, alone: bool) -> None:
        """A backward begins; every bucket takes part in it, whichever gradient came first.

        Args:
            alone: no other root launches collectives in this backward, so buckets are launched as gradients arrive. Otherwise
                the order among roots would depend on which gradients arrive, and all are launched at the end.
        """
        if not self.is_open:
            self.is_open, self._next, self._by_arrival = True, 0, alone
            for each in self._buckets:
                each.bucket.follow()
                each.bucket.open()
                each.open()

    def arrived(self, param: ManagedParam) -> None:
        """Autograd has accumulated a gradient of `param`."""
        each = self._bucket_of.get(param)
        if each is None:
            return  # sparse gradients are summed at the end of backward
        if each.launched:
            raise PhaseError(
                f"parameter '{param.fqn}' of unit '{each.unit.name}' got a second gradient in one backward, after the first was "
                "sent (reentrant checkpointing of modules that share it does this). Use checkpoint(module) of this library, or "
                "use_reentrant=False"
            )
        if each.missing.pop(param, param) is None and self._ready is not None:
            self._ready.append(param)
        iteration = self._root.iteration
        while self._by_arrival and self._next < len(self._buckets) and not self._buckets[self._next].missing:
            if self._next == len(self._buckets) - 1 and iteration is not None and iteration.forwards_left:
                return  # the last bucket carries whether forwards were left out, which is not known yet
            self._launch_next()

    def _launch_next(self) -> None:
        each = self._buckets[self._next]
        self._next += 1
        each.launched = True
        iteration = self._root.iteration
        if iteration is not None and iteration.builds_graph:
            return
        absent = [i for i, param in enumerate(each.bucket.params) if param in each.missing] if each.missing else []
        if each.unit.accumulation.now is not SyncMode.REDUCE:
            each.bucket.hold(absent)
            return
        if each is self._buckets[-1] and iteration is not None:
            each.bucket.forwards = (iteration.forwards, int(iteration.forwards_left > 0))
        each.bucket.reduce(absent)
        # Optimizers in backward free gradients as they step: land the bucket before this one now, and not only at the end.
        for before in self._buckets[max(0, self._next - 2) : self._next - 1]:
            if before.bucket.state is not BucketState.EMPTY and _has_hooks(before.bucket):
                before.bucket.land()

    def launch_rest(self) -> None:
        """Backward is at its end: what has not come does not come."""
        if not self.is_open:
            return
        while self._next < len(self._buckets):
            self._launch_next()

    def land(self) -> None:
        """Wait for all buckets, in their order."""
        if not self.is_open:
            return
        for each in self._buckets:
            each.bucket.land()
            each.bucket.decide()
        self.is_open = False
        # On ranks without any gradient, too: the order is broadcast.
        if self._ready is not None and self._members and all(unit.accumulation.now is SyncMode.REDUCE for unit in self._units):
            self._agree_on_order()

    def _agree_on_order(self) -> None:
        """Rank 0's order of arrival, once. Parameters that it has not seen come last."""
        ready, self._ready = self._ready, None
        assert ready is not None
        known = list(self._members)
        numbers = {param: index for index, param in enumerate(known)}
        comm = self._units[0].mesh_info.all
        seen = dict.fromkeys([*(numbers[param] for param in ready), *range(len(known))])
        message = torch.tensor(list(seen), dtype=torch.int64, device=comm.device)
        comm.broadcast([message], "broadcast of the order of buckets")
        self._fill([known[number] for number in message.tolist()])

    def reduce_held(self) -> None:
        """Reduce what was accumulated, outside of backward."""
        held = [each for each in self._buckets if each.bucket.held]
        for each in held:
            each.bucket.open()
            each.bucket.reduce(range(len(each.bucket.params)))  # no more than what is accumulated
        for each in held:
            each.bucket.land()
            each.bucket.decide()

    @property
    def held(self) -> int:
        """The most backwards that a bucket accumulated."""
        return max((each.bucket.held for each in self._buckets), default=0)

    def drop(self) -> None:
        """The step is lost: forget local gradients that were not reduced."""
        for each in self._buckets:
            if self.is_open and not each.launched and each.bucket.in_place:
                each.bucket.held = 1  # autograd may have left local gradients there
            each.bucket.drop()
        self.is_open = False


def _has_hooks(bucket: GradBucket) -> bool:
    for parameter in bucket.at_rest:
        hooks = hooks_after_accumulation(parameter)
        if hooks and (not isinstance(hooks, DeferredHooks) or hooks.of_users):
            return True
    return False
