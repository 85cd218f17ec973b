"""A unit's parameters from its first look at them to its last: what holds them, and what modules see; knows no phase."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from composable.config import CPUOffloadPolicy
from composable.device.buffer_swap import swap_of
from composable.device.collectives import TagSequence
from composable.device.memory import MemoryPool
from composable.device.parameter_forms import keep_gradients_in, trainability
from composable.device.parameter_swap import ShardedParam
from composable.device.term_factors import Factor
from composable.plan.precision import Precision
from composable.runtime.dtype_group import DtypeGroup, version_of
from composable.runtime.gradient_group import GradientGroup
from composable.runtime.group_builder import GroupBuilder
from composable.runtime.mesh_info import MeshInfo
from composable.runtime.optimizer_hooks import Form, note
from composable.runtime.registered import Registered, RegisteredOwn, RegisteredShards
from composable.runtime.term_hooks import TermHooks
from composable.runtime.unit_precision import UnitPrecision
from composable.runtime.whole_parameters import restore

Versions = list[int]  # of all groups' shards


class UnitParameters:
    """A unit's parameters: where they are registered, the groups that hold them, what modules see of them.

    A group holds those of one precision on one device. Without a mesh parameters stay what they are, and only those that are
    cast have a group.

    Attributes:
        precision: in which dtypes they are computed with.
        registered: the parameters as they were left with the modules, to be compared with what these hold later.
        trainable: whether any of them is.
        counted: whose version counters change whenever somebody writes to a shard; see Note [Stale parameters].
        takes_all_ranks: whether to unshard them takes all ranks that have parts of them.
        on_meta: names of those that have no values yet.
        term_hooks: on those that have no group.
        unit: its name, for messages.
    """

    __slots__ = (
        "_builder", "_divisor", "_in_place", "_mesh_info", "_places", "counted",
        "gradient_groups", "groups", "on_meta", "params", "precision",
        "registered", "swap", "takes_all_ranks", "term_hooks", "trainable", "unit"
    )  # fmt: skip

    registered: Registered

    def __init__(
        self,
        params: Sequence[ShardedParam],
        mesh_info: MeshInfo,
        precision: UnitPrecision,
        pool: MemoryPool,
        on_gradient: Callable[[Tensor], None],
        divisor: float | None = None,
        offload: CPUOffloadPolicy | None = None,
    ) -> None:
        self.params = tuple(params)
        self._mesh_info = mesh_info
        self._in_place = mesh_info.mesh is None
        self._divisor = divisor
        # Without a mesh autograd adds up what is not cast.
        own = Factor(1.0 / divisor) if self._in_place and divisor not in (None, 1.0) else None
        self.term_hooks = TermHooks(self._added_by_autograd, own)
        self.precision = precision
        self._builder = GroupBuilder(self.params, mesh_info, precision, pool, on_gradient, offload)
        self.unit = ""
        self.rebuild()

    def rebuild(self) -> None:
        """(Re)build the groups around the parameters as they are now: plain tensors, or DTensors of our placement."""
        self.precision.follow_mode()
        groups = self._builder.build()
        self._adopt(groups)
        alone = self._mesh_info.all.size == 1
        self.takes_all_ranks = any(alone or group.flat.layout.gathered for group in groups)
        self.gradient_groups = tuple(
            GradientGroup(group.flat, group.sharded, group.unsharded, self._mesh_info, self._divisor) for group in groups
        )
        self.on_meta = tuple(s.name for group in groups if group.flat.device.type == "meta" for s in group.flat.layout.slots)
        self.rename(self.unit)
        self.trainable = False
        two_forms = [param for param in self.params if param.unsharded is not param.sharded]
        self.swap = swap_of(two_forms, self.precision.holders)
        self._note_registered()
        self.follow()

    def _adopt(self, groups: tuple[DtypeGroup, ...]) -> None:
        ends = list(accumulate([len(group.counted) for group in groups], initial=0))
        counted = tuple([each for group in groups for each in group.counted])
        self.groups, self._places, self.counted = groups, list(map(slice, ends, ends[1:])), counted

    def _note_registered(self) -> None:
        if self._in_place:
            self.registered = RegisteredOwn(self.params, self.groups, self._builder)
        else:
            self.registered = RegisteredShards(self.params, self.groups, self.swap)

    @property
    def device(self) -> torch.device:
        """Where modules compute with them, or would."""
        return self.groups[0].flat.device if self.groups else self._mesh_info.device

    @property
    def precisions(self) -> list[Precision]:
        """Of each parameter."""
        return [self._builder.precision_of(param, param.sharded.dtype) for param in self.params]

    def rename(self, unit: str) -> None:
        """Take the unit's name for messages."""
        self.unit = unit
        for param in self.params:
            fqn = param.info.fqn
            if param.unsharded is not param.sharded:
                note(param.unsharded, Form.UNSHARDED, unit, fqn)
            note(param.sharded, Form.SHARDED if self._mesh_info.mesh is not None else Form.WHOLE, unit, fqn)

    def follow(self) -> None:
        """Unsharded parameters follow what users freeze and unfreeze on the sharded ones."""
        for group in self.gradient_groups:
            trainable = tuple(map(trainability, group.sharded))
            if trainable != group.trainable:
                group.follow(trainable)
                self.trainable = any(other.trains for other in self.gradient_groups)
        if self._in_place:
            self.trainable = any(param.sharded.requires_grad for param in self.params)
            self.term_hooks.follow()

    def _added_by_autograd(self) -> list[nn.Parameter]:
        """The parameters whose gradients no group takes."""
        return [param.sharded for param in self.params if self._in_place and param.unsharded is param.sharded]

    def outdate(self, before: Versions, now: Versions) -> None:
        """Unsharded parameters count as written to where the sharded ones were."""
        if len(before) != len(self.counted):  # the unit was built anew
            return
        if len(self.groups) == 1:
            self.groups[0].outdate(before, now)
            return
        for group, place in zip(self.groups, self._places, strict=True):
            if before[place] != now[place]:
                group.outdate(before[place], now[place])

    def written_since(self, before: Versions) -> list[str]:
        """Names of the parameters that were written to."""
        if len(before) != len(self.counted):
            return []
        now = list(map(version_of, self.counted))
        places = zip(self.groups, self._places, strict=True)
        return [name for group, place in places for name in group.written_since(before[place], now[place])]

    def aliased_by(self, tensor: Tensor) -> bool:
        """Whether `tensor` is, or views, an unsharded parameter."""
        # What is computed is neither; asked first, since the second question takes Python.
        if not tensor._is_view() and (type(tensor) is Tensor or not isinstance(tensor, nn.Parameter)):
            return False
        return any(group.holds(tensor) for group in self.groups)

    def gather_exact(self, tags: TagSequence, label: str) -> list[Tensor | None]:
        """All of every parameter that modules compute with in another dtype than it rests in, in the latter; for the others
        None."""
        exact: dict[int, Tensor] = {}
        for group in () if self._in_place else self.groups:
            if group.flat.compute_dtype != group.flat.dtype:
                exact.update(zip(map(id, group.sharded), group.gather_exact(tags, label), strict=True))
        return [exact.get(id(param.sharded)) for param in self.params]

    def leave(
        self,
        originals: Sequence[nn.Parameter | None],
        exact: Sequence[Tensor | None],
        gradients: Sequence[Tensor | None],
    ) -> None:
        """Register whole plain parameters: `originals` where they still exist, new ones elsewhere. All must be unsharded.

        Args:
            exact: what `gather_exact` returned.
        """
        self.swap.use_sharded()
        if self._in_place:
            for param in self.params:
                keep_gradients_in(param.sharded.dtype, param.sharded)
            return
        for param, original, value, gradient in zip(self.params, originals, exact, gradients, strict=True):
            restore(param, param.unsharded.data if value is None else value, original, gradient)

    def drop(self) -> None:
        """The parameters are somebody else's."""
        self.term_hooks.remove()
        self._adopt(())
        self.gradient_groups = ()
        self._note_registered()
