"""Reduce gradients that share a message: a plan that is the same in every step, and `Reduction`,
one message in flight.

State machine of a `Reduction`:

| state        | `advance`                      | `land`    |
|--------------|--------------------------------|-----------|
| REDUCING     | ALL_REDUCING on a hybrid mesh  | LANDED    |
| ALL_REDUCING | -                              | LANDED    |
| LANDED       | -                              | -         |

The first stage sums over the shard dimension (reduce-scatter), the second over the replicate
dimension (all-reduce); a message has the stages of its mesh. A gradient is copied in (cast to the
reduce dtype, which the sum is computed in), reduced, and scaled so that the sum becomes a mean:
`scales_of` has the table.

A rank without a gradient sends zeros, so that launches do not depend on which gradients arrived.

A small row of flags follows the gradients of a message. Each rank writes the row when it launches
the message, and reads its sum over the ranks when the message lands.

| column | a rank writes | the sum tells |
|--------|---------------|---------------|
| used: one per parameter | 1 if it has a gradient | whether any rank has one |
| text: 4 bits | a checksum of the launch's text | whether the ranks mean one message |
| held: 4 bits | how many backwards it accumulated before | whether all did as many |

A bit is stored in two elements, "it is 0" and "it is 1", of which a rank sets one. If the sums of
both are not zero, two ranks differ. This works in any dtype.

The column `used` is always there. The others exist only where ranks compare: on hosts, where
reading the sums does not wait for a device, and in debug mode. Between messages only one row is
kept, for any number of ranks.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import repeat
from operator import attrgetter
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composable.comm.base import DONE, Work
from composable.comm.launch import Launch, LaunchKind
from composable.comm.ledger import checksum, debug_enabled
from composable.comm.mesh_info import MeshInfo
from composable.engine.params.layout import ReduceLayout, Route, Slot, plan_reduction
from composable.engine.params.param import as_parameter
from composable.engine.params.precision import Precision
from composable.errors import RanksDisagreeError
from composable.memory.elastic import ElasticBuffer
from composable.torch_private import chunk_cat, local_tensor, no_views, storage_key

_CACHE_LINE: Final = 64  # bytes
_PLANS: Final = 4  # for sets of parameters that train; where others come up, plans are made anew
_itemsize: Final = attrgetter("itemsize")


def division_factors(dtype: torch.dtype, divisor: float) -> tuple[float, float]:
    """What gradients are divided by before and after their sum; the product is `divisor`.

    float16 overflows and underflows early: it is divided by about the square root before the sum,
    and by the rest after it.

    Example:
        >>> division_factors(torch.float16, 8), division_factors(torch.float32, 8)
        ((4.0, 2.0), (1.0, 8.0))
    """
    if dtype is not torch.float16:
        return 1.0, float(divisor)
    before = 2.0 ** math.floor((math.log2(divisor) + 1.0) / 2)
    while before > 1.0 and divisor % before and before * before > divisor:
        before /= 2
    return before, divisor / before


class Scales(NamedTuple):
    """What turns sums into a mean, by where it is applied, see `scales_of`."""

    before: float
    first: float
    carried: float
    second: float


@cache
def scales_of(
    before: float, after: float, shards: int, replicas: int, *, is_mean: bool, by_hook: bool
) -> Scales:
    """Where one message is scaled, so that a mean over all ranks lands.

    | stages                     | gradients  | first sum         | carried           | second sum |
    |----------------------------|------------|-------------------|-------------------|------------|
    | one                        | / `before` | / `after`         | -                 | -          |
    | two                        | / `before` | -                 | shards / `before` | / `after`  |
    | two, the first to a mean   | / `before` | `before` / shards | -                 | / replicas |
    | the first is a user's hook | -          | the hook's        | -                 | / replicas |

    In row three `before` cancels: the first sum becomes the mean over the shard dimension, and the
    mean of these over the replicas, which have equally many ranks, is the mean over all.

    `before` and `after` are `division_factors` of all ranks. Carried are means over the shard
    dimension, of earlier backwards under `no_sync(level="replicate")`; they are added between the
    stages. What must be a mean after the first stage is what such a backward accumulates, and what
    a user's hook gets in place of the second stage. A hook makes a mean by itself. Where
    `grad_reduce` asks for something else, the bucket multiplies gradients as they come.

    Args:
        is_mean: the first stage makes a mean over the shard dimension.
        by_hook: the first stage is a user's hook.
    """
    if by_hook:
        return Scales(1.0, 1.0, 1.0, 1.0 / replicas)
    if is_mean:
        return Scales(before, before / shards, 1.0, 1.0 / replicas)
    if shards > 1 and replicas > 1:
        return Scales(before, 1.0, shards / before, 1.0 / after)
    return Scales(before, 1.0 / after, 1.0, 1.0)


# What takes the place of a collective, and makes a mean. It reduces the gradients of the parameters
# with these indices; in the first stage whole ones, also where the only stage is an all-reduce.
# When the returned work is complete, the results are in the third argument, and the sum of the
# fourth, the row, is in its place. The last one is the launch.
Stage = Callable[[Sequence[int], Sequence[Tensor], Sequence[Tensor], Tensor, Launch], Work]


# --- the row behind the gradients ---------------------------------------------------------------


_BITS: Final = 4  # the low ones of `text`, and of `held`


class MessageRow:
    """The rows of messages with the gradients of these parameters.

    Args:
        parameters: indices.
        dtype, device: of the messages.
        compares: there are the columns `text` and `held`.
    """

    def __init__(
        self, parameters: Sequence[int], dtype: torch.dtype, device: torch.device, *, compares: bool
    ) -> None:
        self._parameters = tuple(parameters)
        self._dtype, self._device = dtype, device
        self._bits = 2 * _BITS if compares else 0
        self.numel = len(self._parameters) + 2 * self._bits
        self._last: tuple[object, Tensor] | None = None  # most rows are like the one before

    def write(self, unused: Sequence[int], text: int, held: int) -> Tensor:
        """This rank's row.

        Args:
            unused: indices of parameters that this rank has no gradient of.
            text, held: see the table at the top of this file.
        """
        key = tuple(unused), text, held
        if self._last is not None and self._last[0] == key:
            return self._last[1]
        said = [index not in unused for index in self._parameters]
        number = text % 2**_BITS + held % 2**_BITS * 2**_BITS
        for bit in range(self._bits):
            is_set = bool(number >> bit & 1)
            said += [not is_set, is_set]
        with torch.inference_mode(False):
            row = torch.empty(self.numel, dtype=self._dtype, device=self._device)
            row.copy_(torch.tensor(said, dtype=self._dtype), non_blocking=True)
        self._last = key, row
        return row

    def used(self, sums: Sequence[float]) -> dict[int, bool]:
        """By parameter, whether any rank has a gradient."""
        return dict(zip(self._parameters, map(bool, sums), strict=False))

    def agrees(self, sums: Sequence[float]) -> bool:
        """Whether all ranks wrote the same text and number: of each bit, one sum is zero."""
        return sums[len(self._parameters) :].count(0.0) == self._bits


# --- the same in every step ---------------------------------------------------------------------


class Reducer:
    """Reduces the gradients of some parameters in one message. Nothing here belongs to a step.

    Args:
        at_rest: the parameters on which the gradients will land.
        slots: of these parameters.
        keeps: the sums have memory of their own from step to step.

    Attributes:
        text, unit: of its launches.
        shard_comm: of the first stage; None if there is none.
        mesh_info: its `replicate` is of the second stage, or of the only one for replicated
            parameters.
        is_alone: one rank, so that there is nothing to reduce.
        first_stage, second_stage: what reduces in place of the collectives (`Stages`).
        scales: of a message, by whether it is reduced over the shard dimension only.
        compares: messages carry the columns `text` and `held`, and the ranks compare them.
        simulated: sums have no values; all ranks are like this one.
    """

    def __init__(
        self,
        at_rest: Sequence[nn.Parameter],
        slots: Sequence[Slot],
        precision: Precision,
        device: torch.device,
        mesh_info: MeshInfo,
        *,
        keeps: bool,
    ) -> None:
        self.at_rest = tuple(at_rest)
        self.slots = tuple(slots)
        self.precision = precision
        self.device = device
        self.mesh_info = mesh_info
        self.keeps = keeps
        self.text = self.unit = ""
        self.shard_comm = mesh_info.shard if mesh_info.shard.size > 1 else None
        self.is_alone = self.shard_comm is None and mesh_info.replicate is None
        self.compares = debug_enabled() or not mesh_info.all.traits.on_stream
        self.simulated = mesh_info.all.traits.simulated
        self.make_stages(None, None)

    def rename(self, text: str, unit_name: str) -> None:
        self.text, self.unit = text, unit_name
        for plan in self.plans.values():
            plan.rename(self)

    def make_stages(self, first: Stage | None, second: Stage | None) -> None:
        """From now on these make the stages; None: a collective."""
        self.first_stage, self.second_stage = first, second
        self.plans: dict[tuple[bool, ...], ReducePlan] = {}
        every, shards = self.mesh_info.all.size, self.mesh_info.shard.size
        divisors = division_factors(self.precision.reduce, every)
        self.scales = [
            scales_of(
                *divisors, shards, every // shards,
                is_mean=shards_only or second is not None, by_hook=first is not None,
            )
            for shards_only in (False, True)
        ]  # fmt: skip

    def plan_of(self, trainable: tuple[bool, ...]) -> ReducePlan:
        """The plan of a message while these parameters train."""
        plan = self.plans.get(trainable)
        if plan is None:
            kind = KeptReducePlan if self.keeps else ReducePlan
            if len(self.plans) >= kind.most:
                del self.plans[next(iter(self.plans))]  # the oldest
            plan = self.plans[trainable] = kind(self, trainable)
        return plan

    def dense(self, index: int, gradient: Tensor | None) -> Tensor:
        """A whole gradient with the strides of its parameter; zeros where there is none."""
        slot = self.slots[index]
        dense = _in_memory_order(slot, gradient, self.precision.reduce, self.device)
        return as_parameter(dense.contiguous(), slot)


def _in_memory_order(
    slot: Slot, gradient: Tensor | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A whole gradient with its dimensions in the order of memory; zeros where there is none."""
    if gradient is None:
        return torch.zeros(slot.shape, dtype=dtype, device=device)
    return gradient.permute(slot.order) if slot.order else gradient


class ReducePlan:
    """How gradients travel while a given set of parameters trains.

    Attributes:
        at_rest: see `Reducer`.
        launch, second_launch: of the stages of its messages.
        checksum: of the text of the launch, for `MessageRow`.
        layout: `direct` gradients are sent as they are, and their sums land at the start of the
            flat buffer. The others are `columns` of a row for each rank, flags behind them
            (`flags_start`); this rank's reduced row lands behind the direct sums (`row_start`).
        segments: by index of each trainable parameter, where in the flat buffer this rank's sum is:
            shape, strides and start.
        row: what is behind the gradients of each rank.
        row_at: where in the flat buffer its sum is.
        message: the rows of the reduce-scatter, one per rank; `sent` and `rows` are views of it.
        most: plans of this kind that a reducer keeps.
        specs: of DTensors that gradients can be wrapped as quickly, since they are wrapped as their
            parameters are.
        stand_in: what such a DTensor is made around.
    """

    most = _PLANS

    def __init__(self, reducer: Reducer, trainable: tuple[bool, ...]) -> None:
        """In this order, as each needs those before it: the layout; where in the flat buffer this
        rank's sums are; how gradients are made of these; the message; what is copied into it.
        """
        info, precision = reducer.mesh_info, reducer.precision
        self.at_rest = reducer.at_rest
        self.rename(reducer)
        self._slots = reducer.slots
        self._ranks = info.shard.size
        smallest = min(precision.reduce.itemsize, precision.gradient.itemsize)
        trained = [index for index, trains in enumerate(trainable) if trains]
        dtype, device = precision.reduce, reducer.device
        self.row = MessageRow(trained, dtype, device, compares=reducer.compares)
        self.layout: ReduceLayout = plan_reduction(
            reducer.slots,
            trainable,
            align=max(1, _CACHE_LINE // smallest),
            packed_align=max(1, info.all.traits.align // smallest),
            numbers=self.row.numel - sum(trainable),
        )
        row_start = self.layout.row_start + self.layout.flags_start
        self.row_at = slice(row_start, row_start + self.row.numel)
        starts = dict(self.layout.direct)
        for index, start, _ in self.layout.columns:
            starts[index] = self.layout.row_start + start
        self.segments: dict[int, tuple[Sequence[int], Sequence[int], int]] = {}
        for index in self.layout.trainable:
            slot = reducer.slots[index]
            local = torch.empty(slot.local_shape(info.shard.rank), device="meta")
            local = as_parameter(local, slot)
            self.segments[index] = local.shape, local.stride(), starts.get(index, 0)
        rests_on = local_tensor(reducer.at_rest[0]).device
        self.stand_in = torch.empty(0, dtype=precision.gradient, device=rests_on)
        self.specs: dict[int, Any] = {}
        if precision.gradient == precision.original:  # a `_spec` says its parameter's dtype
            at_rest = [(index, reducer.at_rest[index]) for index in self.layout.trainable]
            self.specs = {i: each._spec for i, each in at_rest if isinstance(each, DTensor)}
        numel = self._ranks * self.layout.row_numel
        self.message = ElasticBuffer(numel, dtype, device)
        with torch.inference_mode(False):
            self.sent = self.message.tensor.data
            self.rows = self.sent.view(self._ranks, -1)
        # a hook does not write to what is between gradients
        self._new = self.sent.new_zeros if reducer.first_stage else self.sent.new_empty
        self._plan_copies()

    def _plan_copies(self) -> None:
        """Plan how packed gradients are copied into the message."""
        layout, slots = self.layout, self._slots
        # Which columns can be handed to `chunk_cat` as autograd made them: cut along their first
        # dimension, or not cut at all. What each rank gets whole is repeated first.
        self._plain = all(
            slot.dim == 0
            and not slot.order
            and slot.shape
            and (slot.route is not Route.WHOLE or self._ranks == 1)
            for slot in (slots[index] for index, _, _ in layout.columns)
        )
        # What `chunk_cat` gets, as indices in gradients and zeros: these are between two columns
        # that start at multiples of the alignment, and where the row goes.
        self._order: list[int] = []
        self._gaps: list[int] = []
        ends = [*(start for _, start, _ in layout.columns[1:]), layout.flags_start]
        for (index, start, numel), end in zip(layout.columns, ends, strict=False):
            self._order.append(index)
            if gap := end - start - numel:
                self._order.append(len(slots) + len(self._gaps))
                self._gaps.append(gap)
        self._order.append(len(slots) + len(self._gaps))
        self._gaps.append(layout.row_numel - layout.flags_start)
        # `chunk_cat` repeats no rows, but fills missing ones with zeros
        self._zeros: dict[torch.dtype, list[Tensor]] = {}

    def rename(self, reducer: Reducer) -> None:
        text, unit = reducer.text, reducer.unit
        self.checksum = checksum(text)
        self.launch = Launch(text, LaunchKind.REDUCE, self, unit)
        second = f"{text} over replicas"
        self.second_launch = Launch(second, LaunchKind.REDUCE_OVER_REPLICAS, self, unit)

    def make_flat(self) -> Tensor:
        """Memory for the sums of one message."""
        return self._new(self.layout.numel)

    def views(self, flat: Tensor, indices: Sequence[int]) -> list[Tensor]:
        """This rank's shards of these parameters' gradients, in a flat gradient buffer."""
        first = flat.storage_offset()
        with no_views():  # users write to gradients with autograd, too
            return [
                flat.as_strided(shape, strides, first + start)
                for shape, strides, start in map(self.segments.__getitem__, indices)
            ]

    def gradients_in(self, sent: Sequence[Tensor]) -> dict[int, Tensor]:
        """By parameter, the parts of what is sent in the first stage, or reduced in place. Empty if
        a comm has copied it into memory that somebody supplies.
        """
        layout = self.layout
        if self._ranks == 1:
            return dict(zip(layout.trainable, self.views(sent[0], layout.trainable), strict=True))
        if sent[-1] is not self.sent:
            return {}
        parts = {index: term for (index, _), term in zip(layout.direct, sent, strict=False)}
        for index, start, numel in layout.columns:
            parts[index] = self.rows[:, start : start + numel]
        return parts

    # --- rows ------------------------------------------------------------------------------------

    def copy_in(
        self, gradients: Sequence[Tensor | None], missing: Sequence[int], row: Tensor, rows: Tensor
    ) -> None:
        """Fill the rows, one per rank, with that rank's chunk of every gradient, cast to the dtype
        of `rows`, and with `row`.

        Args:
            missing: no gradient is None but those with these indices.
        """
        dtypes: set[Any] = {*map(getattr, gradients, repeat("dtype"), repeat(None))} - {None}
        source: torch.dtype = min(dtypes, key=_itemsize, default=rows.dtype)
        if missing or not self._plain:
            gradients = self._as_columns(gradients, source)
        exact: Sequence[Tensor | None] = ()
        if len(dtypes) > 1:
            # Gradients that were summed over tensor-parallel ranks have the reduce dtype already,
            # and `chunk_cat` takes one dtype.
            exact = gradients
            gradients = [None if each is None else each.to(source) for each in gradients]
        if source not in self._zeros:
            with torch.inference_mode(False):
                self._zeros[source] = [
                    self.sent.new_zeros(1, gap, dtype=source) for gap in self._gaps
                ]
        pieces = [*gradients, *self._zeros[source]]
        chunk_cat(list(map(pieces.__getitem__, self._order)), 0, self._ranks, out=rows)
        start = self.layout.flags_start
        rows[:, start : start + row.numel()].copy_(row)
        for index, start, numel in self.layout.columns if exact else ():
            column = exact[index]
            if column is not None and column.dtype != source:
                chunks = chunk_cat([column], 0, self._ranks).view(self._ranks, -1)
                rows[:, start : start + numel].copy_(chunks)

    def _as_columns(
        self, gradients: Sequence[Tensor | None], dtype: torch.dtype
    ) -> list[Tensor | None]:
        """Gradients that `chunk_cat` cuts into a row per rank; zeros where there is none."""
        columns = list(gradients)
        for index, _, _ in self.layout.columns:
            slot = self._slots[index]
            whole = _in_memory_order(slot, gradients[index], dtype, self.sent.device)
            columns[index] = self._as_rows(slot, whole)
        return columns

    def _as_rows(self, slot: Slot, gradient: Tensor) -> Tensor:
        """A gradient in memory order as something that `chunk_cat` cuts into a row per rank."""
        ranks = self._ranks
        if slot.route is Route.WHOLE:
            return gradient.reshape(1, -1).expand(ranks, -1)
        if slot.dim == 0:
            return gradient
        if slot.even:
            return gradient.reshape(slot.outer, ranks, -1).transpose(0, 1).reshape(ranks, -1)
        rows = gradient.new_zeros(ranks, slot.chunk_numel)
        for rank in range(ranks):
            chunk = gradient.narrow(slot.dim, *slot.extent(rank)).reshape(-1)
            rows[rank, : chunk.numel()] = chunk
        return rows


class KeptReducePlan(ReducePlan):
    """The sums of every message arrive in the same memory, and gradients are views of it from step
    to step (`gradient_as_bucket_view`). Where other parameters train, the memory goes.
    """

    most = 1

    def __init__(self, reducer: Reducer, trainable: tuple[bool, ...]) -> None:
        super().__init__(reducer, trainable)
        self._flat = super().make_flat()
        segments = self.segments
        # Detached, they are no views to autograd, but share the version counter: a later message
        # writes to what a graph may have saved.
        self._views = {
            index: self._flat.as_strided(*segments[index]).detach()
            for index in self.layout.trainable
        }

    def make_flat(self) -> Tensor:
        return self._flat

    def views(self, flat: Tensor, indices: Sequence[int]) -> list[Tensor]:
        """The same objects in every step, by which `copy_in` knows them."""
        return [self._views[index] for index in indices]

    def copy_in(
        self, gradients: Sequence[Tensor | None], missing: Sequence[int], row: Tensor, rows: Tensor
    ) -> None:
        if all(gradients[index] is view for index, view in self._views.items()):
            # all gradients are where the sums arrive: autograd has added to them there
            self._flat[self.row_at].copy_(row)
            return
        # Their memory is about to be written to; users may have made other views of it.
        own = storage_key(self._flat)
        gradients = [
            gradient.clone() if gradient is not None and storage_key(gradient) == own else gradient
            for gradient in gradients
        ]
        super().copy_in(gradients, missing, row, rows)


# --- one message --------------------------------------------------------------------------------


class ReductionState(enum.Enum):
    """Where the gradients of one message are."""

    REDUCING = "the first stage is in flight"
    ALL_REDUCING = "the all-reduce of a hybrid mesh is in flight"
    LANDED = "the sums are there"


class Reduction:
    """A message in flight, launched when it is made. To give it up is to wait for what was
    launched, and to drop it.

    Args:
        gradients: of all parameters, whole; None where this rank has none.
        held: how many backwards this rank accumulated before.
        absent: indices of parameters for which this backward brought nothing; a gradient that is
            there is of an earlier one.
        carried: shards that are means over the shard dimension already, to be added before the
            second stage.
        shards_only: sum over the shard dimension only.

    Attributes:
        flat: this rank's part of the sums, and the sum of the rows.
        missing: indices of parameters that this rank has no gradient of.
    """

    def __init__(
        self,
        reducer: Reducer,
        plan: ReducePlan,
        gradients: list[Tensor | None],
        held: int,
        *,
        absent: Sequence[int],
        carried: Sequence[tuple[int, Tensor]],
        shards_only: bool,
    ) -> None:
        self.reducer = reducer
        self.plan = plan
        self.held = held
        self.carried = carried
        self.shards_only = shards_only
        self.state = ReductionState.REDUCING
        trainable = plan.layout.trainable
        self.missing = [index for index in trainable if gradients[index] is None or index in absent]
        self.flat = plan.make_flat()
        there = dict(carried)
        unused = [index for index in self.missing if index not in there]  # nor carried
        try:
            self.work: Work = self._launch(gradients, unused)
        except BaseException:
            plan.message.free()
            raise

    def _launch(self, gradients: list[Tensor | None], unused: list[int]) -> Work:
        reducer, plan, flat = self.reducer, self.plan, self.flat
        layout, dtype = plan.layout, flat.dtype
        scales = reducer.scales[self.shards_only]
        row = plan.row.write(unused, plan.checksum, self.held)
        if reducer.first_stage is not None:
            sums = flat[plan.row_at].copy_(row)
            terms = [reducer.dense(index, gradients[index]).to(dtype) for index in layout.trainable]
            into = plan.views(flat, layout.trainable)
            return reducer.first_stage(layout.trainable, terms, into, sums, plan.launch)
        if scales.before != 1.0:
            gradients = [None if each is None else each / scales.before for each in gradients]
        if reducer.shard_comm is None:
            plan.copy_in(gradients, self.missing, row, flat.view(1, -1))
            replicas = reducer.mesh_info.replicate
            assert replicas is not None
            return replicas.all_reduce([flat], plan.launch, scales.first)
        pairs = []
        for index, start in layout.direct:
            slot = reducer.slots[index]
            gradient = _in_memory_order(slot, gradients[index], dtype, reducer.device)
            # Cast each term: a sum is computed in the dtype of its terms.
            term = gradient.to(dtype).reshape(-1)
            pairs.append((flat[start : start + slot.chunk_numel], term))
        plan.message.allocate()
        plan.copy_in(gradients, self.missing, row, plan.rows)
        pairs.append((flat[layout.row_start :], plan.sent))
        return reducer.shard_comm.reduce_scatter(pairs, plan.launch, scales.first)

    def advance(self) -> bool:
        """On a hybrid mesh: wait for the first stage and launch the second. Returns whether there
        is one.
        """
        reducer, plan, flat = self.reducer, self.plan, self.flat
        replicas = None if reducer.shard_comm is None else reducer.mesh_info.replicate
        if replicas is None or self.shards_only or self.state is not ReductionState.REDUCING:
            return False
        self.wait()
        scales = reducer.scales[self.shards_only]
        for index, shard in self.carried:
            (view,) = plan.views(flat, (index,))
            view.add_(shard.to(flat.device), alpha=scales.carried)
        self.state = ReductionState.ALL_REDUCING
        launch = plan.second_launch
        if reducer.second_stage is not None:
            indices = plan.layout.trainable
            here = dict(zip(indices, plan.views(flat, indices), strict=True))
            # PowerSGD and others cannot take shards without rows
            here = {index: shard for index, shard in here.items() if shard.numel()}
            shards = list(here.values())
            self.work = reducer.second_stage(list(here), shards, shards, flat[plan.row_at], launch)
        else:
            self.work = replicas.all_reduce([flat], launch, scales.second)
        return True

    def wait(self) -> None:
        """Wait for what was launched last; on an accelerator its stream does, and not the host."""
        work, self.work = self.work, DONE
        try:
            work.wait()
        finally:
            self.plan.message.free()

    def used(self) -> dict[int, bool]:
        """When the sums are there: whether any rank had a gradient, by parameter. On an accelerator
        the host waits.
        """
        if self.reducer.simulated:
            return dict.fromkeys(self.missing, False)
        return self.plan.row.used(self.flat[self.plan.row_at].tolist())

    def land(self) -> None:
        """Wait for the sums.

        Raises:
            RanksDisagreeError: ranks sent gradients of other steps.
        """
        self.advance()
        self.wait()
        self.state = ReductionState.LANDED
        if self.reducer.compares and not self.reducer.simulated:
            self._compare()

    def _compare(self) -> None:
        """Refuse gradients of other units or steps."""
        reducer, plan = self.reducer, self.plan
        if plan.row.agrees(self.flat[plan.row_at].tolist()):
            return
        comm = reducer.mesh_info.shard if self.shards_only else reducer.mesh_info.all
        said = []
        mine = reducer.text, self.held
        every = comm.all_gather_objects(mine, Launch("exchange of what the ranks reduce"))
        for rank, (text, held) in enumerate(every):
            before = "" if text == reducer.text else f" before its {text}"
            said.append(f"rank {rank} accumulated {held} backwards{before}")
        raise RanksDisagreeError(
            f"{reducer.text}: the ranks brought gradients of different units or steps. Before it,"
            f" {'; '.join(said)}. Every rank must run the same backwards, and the same of them"
            " under no_sync. These gradients are dropped"
        )
