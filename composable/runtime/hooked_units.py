"""Which units a communication hook was registered for, and what its buckets are called; knows no gradient and no backward."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composable.device.collectives import Communicator, TagSequence
from composable.device.comm_hooks import CommHook, GradientBucketForHooks
from composable.device.gradient_buckets import GradientBucket
from composable.device.private import local_of
from composable.errors import AnnotationError
from composable.plan.scaling import share_of_mean
from composable.runtime.gradient_hooks import weakly
from composable.runtime.hooked_hop import HookedHop, Start
from composable.runtime.trailer import Trailer

REDUCE_SCATTER: Final = "reduce_scatter"
ALL_REDUCE: Final = "all_reduce"


class Trains(Protocol):
    """Some gradients of a sharded unit."""

    trains: bool
    trainable: tuple[bool, ...]
    sharded: Sequence[nn.Parameter]


class Shards(Protocol):
    """The gradients of a sharded unit."""

    @property
    def groups(self) -> Sequence[Trains]:
        """Those that are reduced together."""


class Replicas(Protocol):
    """A replicated unit."""

    @property
    def place_in_backward(self) -> tuple[int, int] | None:
        """Who has a higher one launches later; None for one that launches nothing."""


def digest_of(hooks: str) -> int:
    """A number for the names of a unit's hooks that is not zero. It is in the tags of the unit's gradients: ranks with other
    hooks exchange other messages, of which none must be taken for another."""
    return 1 + zlib.crc32(hooks.encode()) % (TagSequence.DIGESTS - 1)


class HookedUnits:
    """The units of one registration.

    Args:
        stage: where there are two, the one that the hook makes.

    Attributes:
        hook: of all of them.
        digest: a number for it that is not zero.
    """

    def __init__(self, hook: CommHook, stage: str = "") -> None:
        self.hook = hook
        self.stage = stage
        self.digest = digest_of(hook.name)
        self._shards: list[ref[Shards]] = []
        self._replicas: list[ref[Replicas]] = []
        self._called: dict[tuple[str, ...], None] = {}  # for which shards, in this backward
        self._indices: dict[tuple[str, ...], int] = {}

    def add_shards(self, unit: Shards, prefix: str) -> UnitHook:
        """One more, of sharded ones.

        Args:
            prefix: of the names of its parameters.
        """
        self._shards.append(ref(unit))
        return UnitHook(self, None, prefix)

    def add_replicas(self, unit: Replicas, prefix: str) -> UnitHook:
        """One more, of replicated ones."""
        self._replicas.append(ref(unit))
        return UnitHook(self, unit, prefix)

    def index_of(self, fqns: Sequence[str]) -> int:
        """A number for some parameters in one order, which stays theirs: hooks keep memory by it that lies as the bucket does,
        and buckets are filled anew. On all ranks they hold the same, and are asked for in the same order."""
        return self._indices.setdefault(tuple(fqns), len(self._indices))

    def is_last_reduction(self, fqns: Sequence[str]) -> bool:
        """Whether shards of all units have been reduced with those of these names. In which order that happens is not known
        beforehand, but alike on all ranks; a backward that leaves out a unit has no last one."""
        key = tuple(fqns)
        if key in self._called:
            self._called = {}
        self._called[key] = None
        groups = [group for each in self._shards if (found := each()) is not None for group in found.groups]
        expected = sum(group.trains and (self.stage != ALL_REDUCE or _trains_rows(group)) for group in groups)
        last = len(self._called) >= expected
        if last:
            self._called = {}
        return last

    def is_last(self, unit: Replicas) -> bool:
        """Whether no other one launches after it."""
        places = [found.place_in_backward for each in self._replicas if (found := each()) is not None]
        return unit.place_in_backward == max((place for place in places if place is not None), default=None)


def _trains_rows(group: Trains) -> bool:
    return any(wanted and has_rows(each) for each, wanted in zip(group.sharded, group.trainable, strict=True))


def has_rows(parameter: nn.Parameter) -> bool:
    """Whether this rank owns any of a sharded parameter."""
    assert isinstance(parameter, DTensor)
    return local_of(parameter).numel() > 0


class UnitHook:
    """A hook as one unit has it."""

    def __init__(self, units: HookedUnits, unit: Replicas | None, prefix: str) -> None:
        self.units = units
        self.prefix = prefix
        self._unit = None if unit is None else ref(unit)

    @property
    def name(self) -> str:
        return self.units.hook.name

    def summed_by(self, communicator: Communicator) -> HookedSums:
        """For the buckets of one reducer."""
        return HookedSums(self, communicator)

    def bucket_of_shards(
        self, parameters: Sequence[nn.Parameter], shapes: Sequence[torch.Size], fqns: Sequence[str], ranks: int, flat: Tensor
    ) -> GradientBucketForHooks:
        """What is handed over of sharded parameters, for the mean over `ranks` ranks; when it is launched, not before.

        Args:
            shapes: of their gradients in `flat`.
        """
        units = self.units
        return GradientBucketForHooks(
            flat,
            parameters,
            shapes,
            fqns,
            units.index_of(fqns),
            last=units.is_last_reduction(fqns),
            scale=share_of_mean(ranks),
            group=units.hook.group,
        )

    def is_last(self) -> bool:
        """Whether no other unit launches after this one."""
        unit = None if self._unit is None else self._unit()
        return unit is not None and self.units.is_last(unit)

    def leave(self) -> None:
        """This rank leaves a backward. Who waits for it in a hook is told."""
        self.units.hook.group.give_up(None)

    def refuse_copy(self, verb: str, unit: str) -> None:
        """Raise: what a hook remembers is of one model."""
        raise AnnotationError(
            f"{verb}(unit '{unit}'): its communication hook '{self.name}' cannot be copied with it, since what a hook "
            "remembers is of one model. Remove the hook by the handle that register_comm_hook returned, copy, and register "
            "hooks for both"
        )


class HookedSums:
    """The hops of one reducer's buckets."""

    def __init__(self, hook: UnitHook, communicator: Communicator) -> None:
        self._hook = hook
        self._scale = share_of_mean(communicator.size)
        self._at_launch = not communicator.capabilities.looked_after
        self._start = Start(communicator, hook.units.hook.group)

    def hop(
        self, gradients: GradientBucket, names: Sequence[str], trailer: Trailer | None, refuse_others: Callable[[], None]
    ) -> HookedHop:
        """Of one bucket; those of the unit are asked for in the order in which they are launched.

        Args:
            trailer: of the last one.
            refuse_others: called when ranks turn out to differ.
        """
        says = None
        if trailer is not None:
            says = partial(_flags_of, gradients)
            self._start.check = partial(_check, trailer, weakly(refuse_others))
        bucket_of = partial(self._bucket_of, gradients, [self._hook.prefix + name for name in names], trailer is not None)
        return HookedHop(self._hook.units.hook, self._start, says, bucket_of, at_launch=self._at_launch)

    def _bucket_of(
        self, gradients: GradientBucket, fqns: Sequence[str], last_of_unit: bool, flat: Tensor
    ) -> GradientBucketForHooks:
        units = self._hook.units
        return GradientBucketForHooks(
            flat,
            gradients.parameters,
            [parameter.shape for parameter in gradients.parameters],
            fqns,
            units.index_of(fqns),
            last=last_of_unit and self._hook.is_last(),
            scale=self._scale,
            group=units.hook.group,
        )


def _check(trailer: Trailer, refuse_others: Callable[[], None], numbers: Tensor) -> None:
    trailer.check(trailer.read(numbers), refuse_others)


def _flags_of(gradients: GradientBucket) -> Tensor:
    return gradients.flags


def refuse_sparse(unit: str, names: Sequence[str]) -> None:
    """Raise if a unit has sparse gradients, of the parameters with these names."""
    if names:
        raise AnnotationError(
            f"register_comm_hook: the gradient of parameter '{names[0]}' of unit '{unit}' is sparse, and hooks take dense "
            "ones. Make its embedding with sparse=False, or leave it to a unit without a hook"
        )
