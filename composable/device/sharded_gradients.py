"""Gradients on their way to the shards: the rows of a message, and the gradients that users see; knows no communicator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composable.device.elastic_buffer import ElasticBuffer
from composable.device.flat_parameters import FlatParameters, note_starts, shape_like_rows
from composable.device.held_gradients import refuse_hooks_again
from composable.device.host_home import LeavingSums
from composable.device.kept_gradients import GradientUsers
from composable.device.parameter_forms import like_parameter
from composable.device.private import as_tensors, chunk_cat, gradient_hooks, local_of
from composable.device.row_pairs import pair_rows
from composable.device.unused_parameters import UseFlags
from composable.device.user_hooks import hooked, with_hooks
from composable.plan.layout import ReduceLayout, Slot, without_frozen
from composable.plan.routes import Route

WORTH_RELEASING: Final = 64 << 10  # bytes below which giving memory back, and getting it again, costs more than it brings

_PADDING: Final = 64  # elements that at most lie between two parameters to start them where memory is aligned

gradient_of: Final = attrgetter("grad")


def missing_in(values: Sequence[object]) -> int:
    """How many are None. A plain loop is quicker than what C offers, and comparing would ask the tensors."""
    missing = 0
    for value in values:
        if value is None:
            missing += 1
    return missing


def take_gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
    """The parameters' gradients, which they have no longer."""
    gradients = list(map(gradient_of, parameters))
    for parameter in parameters:
        parameter.grad = None
    return gradients


def _picker(indices: Sequence[int]) -> Any:
    """A function, made in C, from a list to the tuple of its items at `indices`."""
    if len(indices) > 1:
        return itemgetter(*indices)
    return lambda items: tuple(items[index] for index in indices)


class GradientRows:
    """The message of one reduction: one row per rank with that rank's chunk of every column, then the flags.

    It does not hold the reduced row: that lands in the gradients' own buffer where the plan says so, see `GradientShards`.
    Gradients are cast as they are copied in, so that they are summed in the dtype of the message.

    Args:
        source: the dtype of the gradients.
    """

    __slots__ = (
        "_all_used", "_as_they_are", "_constants", "_cut_together", "_fillers", "_num_shards", "_pick_flagged", "_pick_row",
        "_rows", "_slots", "buffer", "flags", "plan"
    )  # fmt: skip

    def __init__(self, flat: FlatParameters, plan: ReduceLayout, num_shards: int, source: torch.dtype) -> None:
        self.plan = plan
        self._slots = flat.layout.slots
        self._num_shards = num_shards
        self.buffer = ElasticBuffer(num_shards * plan.row_numel, flat.reduce_dtype, flat.device, flat.pool)
        self._rows = self.buffer.tensor.view(num_shards, plan.row_numel)
        self.flags = UseFlags(plan.flagged, source, flat.device, num_shards)
        self._all_used = self.flags.without(())
        # One kernel cuts, pads and packs all tensors whose dimension 0 is cut.
        self._cut_together = all(self._slots[column.slot].dim == 0 for column in plan.columns)
        self._as_they_are = self._cut_together and all(self._slots[c.slot].route is not Route.WHOLE for c in plan.columns)
        # Zeros for the gaps of a row: where each starts, behind a column or behind the flags.
        ends = [*(column.start + column.numel for column in plan.columns), plan.flags_start + len(plan.flagged)]
        gaps = zip(ends, plan.gaps, strict=True)
        with torch.inference_mode(False):
            self._fillers = {end: self._all_used.new_zeros((num_shards, gap)) for end, gap in gaps if gap}
        self._constants = (self._all_used, *self._fillers.values())
        self._pick_row = _picker(self._places_in_row())
        self._pick_flagged = _picker(plan.flagged)

    def _places_in_row(self) -> list[int]:
        """What a row consists of, by its number among all gradients and `_constants`."""
        plan, first = self.plan, len(self._slots)
        fillers = {end: first + 1 + number for number, end in enumerate(self._fillers)}
        places = []
        for column in plan.columns:
            places += [column.slot, *([fillers[end]] if (end := column.start + column.numel) in fillers else ())]
        end = plan.flags_start + len(plan.flagged)
        return [*places, first, *([fillers[end]] if end in fillers else ())]

    def copy_in(self, gradients: Sequence[Tensor | None]) -> list[int]:
        """Fill the rows; a missing gradient counts as zeros with a zero flag. The buffer must be allocated.

        Args:
            gradients: one per slot; those of slots that are not in the plan are not looked at.

        Returns:
            The slots whose gradients are missing.
        """
        complete = not missing_in(self._pick_flagged(gradients))
        if complete and self._as_they_are:
            chunk_cat(self._pick_row((*gradients, *self._constants)), 0, self._num_shards, out=self._rows)
            return []
        missing = [] if complete else [slot for slot in self.plan.flagged if gradients[slot] is None]
        self._copy_in_carefully(gradients, missing)
        return missing

    def _copy_in_carefully(self, gradients: Sequence[Tensor | None], missing: Sequence[int]) -> None:
        wanted: list[Tensor | None] = list(gradients)
        for column in self.plan.columns:
            slot, gradient = self._slots[column.slot], gradients[column.slot]
            if gradient is None:
                gradient = self._all_used.new_zeros(slot.shape)
            whole = slot.route is Route.WHOLE
            wanted[column.slot] = gradient.expand(self._num_shards, *slot.shape) if whole else gradient
        flags = self.flags.without(missing)
        if self._cut_together:
            chunk_cat(self._pick_row((*wanted, flags, *self._fillers.values())), 0, self._num_shards, out=self._rows)
            return
        starts = [self.plan.flags_start, *self._fillers]
        sources = [flags, *self._fillers.values()]
        targets = [self._rows[:, start : start + source.shape[1]] for start, source in zip(starts, sources, strict=True)]
        for column in self.plan.columns:
            slot, tensor = self._slots[column.slot], wanted[column.slot]
            assert tensor is not None
            view = self._rows[:, column.start : column.start + column.numel]
            if slot.route is Route.WHOLE:
                targets.append(view)
                sources.append(tensor.reshape(self._num_shards, -1))
                continue
            for source, target in pair_rows(slot, tensor.reshape(-1), view):
                targets.append(target)
                sources.append(source)
        torch._foreach_copy_(targets, sources)


def _stretches(direct: Sequence[Slot], straight: int | None, numel: int) -> list[tuple[int, int]]:
    """Where in a gradient buffer of `numel` elements sums land: starts and ends; across padding, but not across parameters."""
    ends = sorted((slot.shard_start, slot.shard_start + slot.chunk_numel) for slot in direct)
    if straight is not None and straight < numel:
        ends.append((straight, numel))
    stretches: list[tuple[int, int]] = []
    for start, end in ends:
        if stretches and start - stretches[-1][1] < _PADDING:
            start, _ = stretches.pop()
        stretches.append((start, end))
    return stretches


def _own_stretches(slots: Sequence[Slot], rank: int) -> list[tuple[int, int]]:
    """Where a rank's own elements of `slots` are; across what lies between them, but not across what is other ranks' alone."""
    stretches: list[tuple[int, int]] = []
    full = False
    for slot in sorted(slots, key=lambda slot: slot.shard_start):
        start, end = slot.shard_start, slot.shard_start + slot.local_numel(rank)
        if full and start - stretches[-1][1] < _PADDING:
            start, _ = stretches.pop()
        stretches.append((start, end))
        full = slot.local_numel(rank) == slot.chunk_numel
    return [(start, end) for start, end in stretches if end > start]


def landed_in(shards: GradientShards, plan: ReduceLayout, flat: FlatParameters) -> dict[int, Tensor]:
    """For each parameter, by its number, the memory where this rank's part of the sum lands: 1-D, in the order in which its
    elements lie there."""
    landed = dict(zip(plan.direct, shards.direct, strict=True))
    for column in plan.columns:
        end = column.start + flat.layout.slots[column.slot].local_numel(flat.rank)
        landed[column.slot] = shards.row[column.start : end]
    return landed


class GradientShards:
    """The gradients of sharded parameters: DTensors over one flat buffer, made once and used again when nobody kept them.

    Where shards rest on the host the buffer is there, too, and what sums land in is one of the device that is laid out alike.

    Args:
        like: makes a DTensor of a shard, if gradients are not spread as their parameters are: they are held, and no hook is
            called for them.

    Attributes:
        in_place: whether sums land where gradients are, so that `take_from_row` and `close` have nothing to do.
        slots: where the gradients lie in their buffer, by the number of their parameter; none that are frozen.
    """

    __slots__ = (
        "_belongs", "_buffer", "_dtensors", "_flat", "_free_list", "_holds", "_landed", "_landing", "_leaving", "_like",
        "_numel", "_places", "_plan", "_released", "_sharded", "_straight", "_users", "direct", "in_place", "reduced", "row",
        "slots", "worth_releasing"
    )  # fmt: skip

    def __init__(
        self,
        flat: FlatParameters,
        parameters: Sequence[nn.Parameter],
        plan: ReduceLayout,
        like: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        self._flat = flat
        self._sharded = parameters
        self._like = like or like_parameter
        self._holds = like is not None
        self._plan = plan
        self._buffer: Tensor | None = None
        self._users: GradientUsers  # of the buffer
        self.direct: list[Tensor] = []  # where direct gradients belong, in the plan's order
        self.row = torch.empty(0)  # where the reduced row lands: in the buffer itself if it can
        self.reduced: list[Tensor] = []  # all of these, in as few stretches as they lie in
        self.in_place = False
        self._landed: list[Tensor] = []  # otherwise: where its columns are, ...
        self._belongs: list[Tensor] = []  # ... and where they belong
        self._landing: ElasticBuffer | None = None  # of these, if they are cast on the way; memory of a reduction only
        self._dtensors: list[Tensor] = []
        self._leaving: LeavingSums | None = None  # where shards rest on the host
        self._released = False
        # What is frozen has no gradient, and no room for one.
        self.slots, self._numel = without_frozen(flat.layout, plan.flagged)
        self._places = {index: place for place, index in enumerate(plan.flagged)}  # of their gradients, among all
        self._straight: int | None = None
        if plan.straight is not None:
            self._straight = self.slots[plan.columns[0].slot].shard_start if plan.columns else self._numel
            self._numel = self._straight + plan.row_numel
        if flat.gradient_dtype != flat.reduce_dtype:
            numel = plan.row_numel + sum(flat.layout.slots[index].local_numel(flat.rank) for index in plan.direct)
            self._landing = ElasticBuffer(numel, flat.reduce_dtype, flat.device, flat.pool)
        nbytes = self._numel * flat.gradient_dtype.itemsize
        self.worth_releasing = nbytes >= WORTH_RELEASING and flat.home is None
        self._free_list = flat.pool.free_list(nbytes, flat.device)

    def _make(self) -> None:
        flat = self._flat
        self._released = False
        self._buffer = None  # until everything is made: an interrupt may come in between
        with torch.inference_mode(False), torch.no_grad():
            slots, rank = self.slots, flat.rank
            if flat.home is None:
                buffer = landing = torch.empty(self._numel, dtype=flat.gradient_dtype, device=flat.device)
            else:
                summed = _own_stretches(list(slots.values()), rank)
                self._leaving = LeavingSums(self._numel, flat.gradient_dtype, flat.home, flat.pool, summed)
                buffer, landing = self._leaving.rests, self._leaving.buffer.tensor
            note_starts(buffer, [slot.shard_start for slot in slots.values() if slot.local_numel(rank)])
            self._dtensors = [
                self._like(shape_like_rows(buffer, slots[index], rank), self._sharded[index]) for index in self._places
            ]
            shards = {
                index: landing[slot.shard_start : slot.shard_start + slot.local_numel(rank)] for index, slot in slots.items()
            }
            self._plan_landing(landing, shards)
            del shards
        self._users = GradientUsers(buffer, self._dtensors)
        self._buffer = buffer

    def _plan_landing(self, buffer: Tensor, shards: Mapping[int, Tensor]) -> None:
        plan, landing = self._plan, self._landing
        self.direct = [shards[index] for index in plan.direct]
        stretches = _stretches([self.slots[index] for index in plan.direct], self._straight, self._numel)
        self.reduced = [buffer[start:end] for start, end in stretches]
        self.in_place = landing is None and self._straight is not None and self._leaving is None
        if landing is None and self._straight is not None:
            self.row = buffer[self._straight :]
            return
        self._belongs = [shards[column.slot] for column in plan.columns]
        if landing is None:
            self.row = buffer.new_empty(plan.row_numel)
            self.reduced.append(self.row)
        else:
            landing.allocate()  # views can only be made while the memory is there
            *direct, self.row = landing.tensor.split([*(shard.numel() for shard in self.direct), plan.row_numel])
            self._belongs += self.direct
            self.direct = direct
            self.reduced = [landing.tensor]
        starts = [column.start for column in plan.columns]
        self._landed = [self.row[start : start + shards[c.slot].numel()] for start, c in zip(starts, plan.columns, strict=True)]
        self._landed += self.direct if landing is not None else []

    def refresh(self) -> bool:
        """Make `buffer`, which is laid out like the shard buffer, ready for the next gradients; True if it is another one."""
        if self._landing is not None:
            self._landing.allocate()
        if self._released:
            self._free_list.allocate(self.buffer.untyped_storage())
            self._released = False
            return False
        if self._buffer is None or self._users.keep_any():
            self._make()
            return True
        if self._leaving is not None:
            self._leaving.refresh()
        return False

    def release(self) -> None:
        """Give the memory back if nobody holds a gradient in it: during forward, activations need it more."""
        if not self._released and self._buffer is not None and not self._users.keep_any():
            self._released = True  # first: after an interrupt there may be more memory, never less
            self._free_list.release(self.buffer.untyped_storage())

    @property
    def buffer(self) -> Tensor:
        assert self._buffer is not None
        return self._buffer

    def take_from_row(self) -> None:
        """Copy, and cast, what landed elsewhere to where it belongs, and let it leave for there."""
        if self._belongs:
            torch._foreach_copy_(self._belongs, self._landed)
        if self._leaving is not None:
            self._leaving.send()

    def close(self, *, lost: bool = False) -> None:
        """What landed has been taken; or it is `lost`."""
        if self._landing is not None:
            self._landing.free()
        if lost and self._leaving is not None:
            self._leaving.drop()

    def add_shards(self, shards: Sequence[Tensor | None], factor: float) -> None:
        """Add shards, each times `factor`, to what has landed; one per slot, laid out as the parameter's."""
        for index, target in landed_in(self, self._plan, self._flat).items():
            shard, order = shards[index], self._flat.layout.slots[index].order
            if shard is not None and shard.numel():
                target.add_((shard.permute(order) if order else shard).reshape(-1).to(target.device), alpha=factor)

    def takes_in(self, index: int) -> bool:
        """Whether a gradient that is there goes into what is held, if nothing was reduced for it, too: it may have been
        for another replica."""
        return self._holds and self._sharded[index].grad is not None

    def deliver(self, indices: Sequence[int]) -> list[nn.Parameter]:
        """Put the buffer's contents on the parameters: as their gradient, or added to the one they have.

        Returns:
            Those of them that have hooks which wait for it.
        """
        everyone = len(indices) == len(self._sharded)
        parameters = self._sharded if everyone else [self._sharded[index] for index in indices]
        fresh = self._dtensors if everyone else [self._dtensors[self._places[index]] for index in indices]
        with as_tensors():
            have_hooks = any(map(gradient_hooks, parameters))
            gradients = list(map(gradient_of, parameters))
            if self._leaving is not None and (have_hooks or self._holds or with_hooks(parameters) or set(gradients) != {None}):
                self._leaving.wait()  # see Note [Who waits on the host]
            if self._holds:
                return self._hold(parameters, gradients, fresh)
            if not have_hooks and set(gradients) == {None}:
                for parameter, more in zip(parameters, fresh, strict=True):
                    parameter.grad = more
                return with_hooks(parameters)
        if have_hooks:
            fresh = list(map(hooked, parameters, fresh))
            gradients = list(map(gradient_of, parameters))  # hooks of the user's may have changed them
        self._add(parameters, gradients, fresh)
        return with_hooks(parameters)

    @staticmethod
    def _hold(
        parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None], fresh: Sequence[Tensor]
    ) -> list[nn.Parameter]:
        for parameter, gradient, more in zip(parameters, gradients, fresh, strict=True):
            assert isinstance(more, DTensor)
            if isinstance(gradient, DTensor) and gradient.placements == more.placements:
                local_of(gradient).add_(local_of(more))
                continue
            if isinstance(gradient, DTensor):  # the mean of earlier backwards, the same on every replica
                refuse_hooks_again(parameter)
                local_of(more).add_(local_of(gradient))
            parameter.grad = more
        return []

    @staticmethod
    def _add(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None], fresh: Sequence[Tensor]) -> None:
        for parameter, gradient, more in zip(parameters, gradients, fresh, strict=True):
            if gradient is None:
                parameter.grad = more
            elif isinstance(gradient, DTensor) and isinstance(more, DTensor):
                if gradient.placements != more.placements:  # of a loss made from the parameter itself
                    parameter.grad = gradient = gradient.redistribute(placements=more.placements)
                local_of(gradient).add_(local_of(more))
            else:
                gradient.add_(more)

    @property
    def nbytes(self) -> int:
        """Bytes that the gradients hold now."""
        return self._buffer.untyped_storage().nbytes() if self._buffer is not None else 0
