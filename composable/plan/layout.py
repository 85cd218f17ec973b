"""Where every element of a unit's parameters lives: slots, padding, shards, rows of messages; knows no tensor and no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from composable.plan.routes import Route, choose_route


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """What the planner needs to know of one parameter: its FQN, its shape and the dimension to cut (None: do not cut).

    Shape and dimension as they are in memory, from the outermost dimension to the innermost. `order` says which dimensions of
    the parameter these are; nothing for a contiguous one, whose dimensions are in that order.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None = 0
    order: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter's place in the shard buffer and in the unsharded buffer, in elements.

    Shards follow `torch.chunk`: each of the first ranks has `chunk` indices of dimension `dim`, the last ones fewer or none.
    Shape and `dim` are those in memory, see `ParamSpec`. `copied` says that a `WHOLE` one has an unsharded form of its own.
    """

    name: str
    shape: tuple[int, ...]
    dim: int
    num_shards: int
    route: Route
    shard_start: int
    full_start: int
    order: tuple[int, ...] = ()
    copied: bool = False

    @property
    def aliased(self) -> bool:
        """Whether its unsharded form is the memory that the sharded one lives in."""
        return self.route is Route.WHOLE and not self.copied

    @property
    def cut_dim(self) -> int:
        """The dimension of the parameter that is cut."""
        return self.order[self.dim] if self.order else self.dim

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def chunk(self) -> int:
        """Indices of dimension `dim` that a full shard holds."""
        return self.shape[self.dim] if self.route is Route.WHOLE and self.shape else self._chunk()

    def _chunk(self) -> int:
        return -(-self.shape[self.dim] // self.num_shards) if self.shape else 1

    @property
    def outer(self) -> int:
        return math.prod(self.shape[: self.dim])

    @property
    def inner(self) -> int:
        return math.prod(self.shape[self.dim + 1 :])

    @property
    def chunk_numel(self) -> int:
        """Elements that a full shard holds, and that every shard has room for."""
        return self.numel if self.route is Route.WHOLE else self.outer * self.chunk * self.inner

    @property
    def full_numel(self) -> int:
        """Elements reserved in the unsharded buffer: rows are padded so that each rank's rows land where they belong."""
        if self.route is Route.WHOLE:
            return self.numel if self.copied else 0
        return self.num_shards * self.chunk_numel if self.dim == 0 else self.numel

    @property
    def even(self) -> bool:
        """Whether every rank's shard is full, so that nothing is padded."""
        return self.route is Route.WHOLE or self.shape[self.dim] == self.num_shards * self.chunk

    def extent(self, rank: int) -> tuple[int, int]:
        """First index and number of indices of dimension `dim` that `rank` owns."""
        if self.route is Route.WHOLE:
            return 0, self.shape[self.dim] if self.shape else 1
        size = self.shape[self.dim]
        start = min(rank * self.chunk, size)
        return start, min(self.chunk, size - start)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        if self.route is Route.WHOLE:
            return self.shape
        return (*self.shape[: self.dim], self.extent(rank)[1], *self.shape[self.dim + 1 :])

    def local_numel(self, rank: int) -> int:
        return self.numel if self.route is Route.WHOLE else self.outer * self.extent(rank)[1] * self.inner


@dataclass(frozen=True, slots=True)
class Layout:
    """The shard buffer and the unsharded buffer of one unit and dtype.

    The shard buffer holds the direct slots, then the packed ones side by side, so that one message can carry them, then the
    whole ones. Packed slots of one size are neighbours, so that one copy can serve them all. The unsharded buffer holds the
    direct and the packed slots in the same order. Packed messages land in a buffer apart, a row for each rank, which is needed
    for as long as a gather takes.
    """

    slots: tuple[Slot, ...]
    num_shards: int
    shard_numel: int
    full_numel: int
    packed_start: int
    packed_numel: int

    def of(self, route: Route) -> tuple[Slot, ...]:
        return tuple(slot for slot in self.slots if slot.route is route)

    @property
    def gathered(self) -> bool:
        """Whether unsharding needs any message at all."""
        return any(slot.route is not Route.WHOLE for slot in self.slots)

    @property
    def aliased(self) -> bool:
        """Whether there is nothing to unshard: every unsharded form is the memory that the sharded one lives in."""
        return all(slot.aliased for slot in self.slots)

    @property
    def landing(self) -> tuple[int, int]:
        """Where in the unsharded buffer the packed slots start and end, with what nobody uses behind the last of all."""
        packed = self.of(Route.PACKED)
        start = min((slot.full_start for slot in packed), default=0)
        end = max((slot.full_start + slot.full_numel for slot in packed), default=0)
        last = packed and all(slot.full_start < end for slot in self.slots if slot.full_numel and not slot.aliased)
        return start, self.full_numel if last else end

    @property
    def cut_numel(self) -> int:
        """Elements at the start of the shard buffer that belong to parameters which are cut."""
        return self.packed_start + self.packed_numel


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def plan_layout(
    specs: Sequence[ParamSpec],
    *,
    num_shards: int,
    direct_numel: int = 0,
    max_direct: int | None = None,
    align: int = 16,
    packed_align: int | None = None,
    copied: bool = False,
    direct_multiple: int = 1,
) -> Layout:
    """Lay `specs` out over `num_shards` ranks.

    Args:
        specs: the parameters of one unit and one dtype, in the order of their FQNs.
        num_shards: number of ranks that the parameters are cut over.
        direct_numel: elements in one shard from which a parameter travels in a message of its own.
        max_direct: messages of their own at most; the largest parameters get them.
        align: every slot of the unsharded buffer, and every direct slot, starts at a multiple of this many elements.
        packed_align: the same for the other slots of the shard buffer, a divisor of `align`; by default `align`. The less,
            the more often they lie without gaps, as in a message.
        copied: modules compute in another dtype, so that whole ones have an unsharded form of their own.
        direct_multiple: messages of a parameter's own have a multiple of this many elements for each rank.

    Example:
        >>> plan_layout([ParamSpec("weight", (5, 4))], num_shards=2, align=4).slots[0].local_shape(1)
        (2, 4)
    """
    packed_align = align if packed_align is None else packed_align
    if num_shards < 1 or align < 1:
        raise ValueError(f"num_shards and align must be at least 1, got num_shards={num_shards}, align={align}")
    if packed_align < 1 or align % packed_align:
        raise ValueError(f"packed_align must divide align={align}, got {packed_align}")
    routes = [
        choose_route(spec.shape, spec.dim, num_shards=num_shards, direct_numel=direct_numel, multiple=direct_multiple)
        for spec in specs
    ]
    if max_direct is not None:
        alone = [index for index, route in enumerate(routes) if route is Route.DIRECT]
        for index in sorted(alone, key=lambda index: -math.prod(specs[index].shape))[max_direct:]:
            routes[index] = Route.PACKED
    shard_cursor = full_cursor = packed_start = packed_end = 0
    placed: dict[int, Slot] = {}
    for route, shard_align in ((Route.DIRECT, align), (Route.PACKED, packed_align), (Route.WHOLE, packed_align)):
        slots = [
            (
                index,
                Slot(
                    spec.name, spec.shape, spec.dim or 0, num_shards, route, 0, 0, spec.order, copied and route is Route.WHOLE
                ),
            )
            for index, spec in enumerate(specs)
            if routes[index] is route
        ]
        if route is Route.PACKED:
            packed_start = packed_end = shard_cursor
            slots.sort(key=lambda pair: -pair[1].chunk_numel)
        for index, slot in slots:
            placed[index] = replace(slot, shard_start=shard_cursor, full_start=full_cursor)
            shard_cursor = _round_up(shard_cursor + slot.chunk_numel, shard_align)
            full_cursor = _round_up(full_cursor + slot.full_numel, align)
        if route is Route.PACKED:
            packed_end = shard_cursor
    return Layout(
        slots=tuple(placed[index] for index in range(len(specs))),
        num_shards=num_shards,
        shard_numel=shard_cursor,
        # A multiple of `num_shards` too, so that neighbours can keep equal cuts of the whole buffer after forward.
        full_numel=_round_up(full_cursor, num_shards * align),
        packed_start=packed_start,
        packed_numel=packed_end - packed_start,
    )


@dataclass(frozen=True, slots=True)
class Column:
    """A slot's place in every row of a reduction message, in elements; the row for rank r carries what r will own."""

    slot: int
    start: int
    numel: int


@dataclass(frozen=True, slots=True)
class ReduceLayout:
    """How the gradients of one unit and dtype travel: direct ones as they are, the others as columns of one row per rank.

    Behind them each row has one flag per gradient. A rank that has no gradient for a parameter contributes zeros and a
    zero flag, so the sum of the flags tells every rank whether *any* rank used the parameter, at the price of no message.
    Columns may be aligned, and so the flags and the rows: what lies between and behind them is zeros.

    Attributes:
        direct: slots whose gradients travel as they are.
        columns: what a row holds, in the order of the shard buffer.
        flagged: slots that have a flag.
        flags_start: where in a row the flags are.
        row_numel: elements in a row.
        straight: where in a buffer that is laid out like the shard buffer a reduced row may land as it is, since its columns
            are there in the same order, without gaps, and nothing follows them; None if there is no such place.
        first: how many of `direct` are launched before the rest, which is about as much; 0 if all are launched together.
    """

    direct: tuple[int, ...]
    columns: tuple[Column, ...]
    flagged: tuple[int, ...]
    flags_start: int
    row_numel: int
    straight: int | None
    first: int = 0

    @property
    def gaps(self) -> tuple[int, ...]:
        """Elements between the end of each column and what comes next, then those behind the flags."""
        starts = [*(column.start for column in self.columns), self.flags_start, self.row_numel]
        ends = [*(column.start + column.numel for column in self.columns), self.flags_start + len(self.flagged)]
        return tuple(start - end for start, end in zip(starts[1:], ends, strict=True))


def plan_reduction(
    layout: Layout, *, trainable: Sequence[bool], even_only: bool, align: int = 1, divided_numel: int = 0
) -> ReduceLayout:
    """Lay out one reduction.

    Args:
        layout: where the parameters live.
        trainable: for each slot, whether its gradient is wanted.
        even_only: the backend can only cut tensors evenly, so an uneven direct parameter joins the packed ones.
        align: columns, flags and rows start at multiples of this many elements.
        divided_numel: elements for one rank from which a reduction is launched in two parts; 0 if none is.
    """
    slots = layout.slots
    flagged = tuple(index for index in range(len(slots)) if trainable[index])
    direct = tuple(i for i in flagged if slots[i].route is Route.DIRECT and (slots[i].even or not even_only))
    carried = sorted((i for i in flagged if i not in direct and slots[i].numel), key=lambda i: slots[i].shard_start)
    columns: list[Column] = []
    cursor = 0
    for index in carried:
        columns.append(Column(index, cursor, slots[index].chunk_numel))
        cursor = _round_up(cursor + slots[index].chunk_numel, align)
    row_numel = _round_up(cursor + len(flagged), align)
    first = 0
    sizes = [*(slots[i].chunk_numel for i in direct), cursor]  # but for the flags
    if 0 < divided_numel <= sum(sizes):
        first = _first_half(sizes)
    return ReduceLayout(direct, tuple(columns), flagged, cursor, row_numel, _landing_place(layout, columns), first)


def _first_half(sizes: Sequence[int]) -> int:
    """How many are at least half of all; 0 if these are most of it, so that there is not much left."""
    whole, found, count = sum(sizes), 0, 0
    while 2 * found < whole:
        found += sizes[count]
        count += 1
    return count if 4 * found <= 3 * whole else 0


def without_frozen(layout: Layout, trainable: Sequence[int]) -> tuple[dict[int, Slot], int]:
    """The slots that are `trainable`, in a buffer in which the others take no room, and the elements that it has.

    Where nothing is left out between two of them they lie as far from each other as before: what was one stretch still is.
    """
    wanted = dict.fromkeys(trainable)
    ordered = sorted(range(len(layout.slots)), key=lambda index: (layout.slots[index].shard_start, layout.slots[index].numel))
    ends = [*(layout.slots[index].shard_start for index in ordered[1:]), layout.shard_numel]
    placed, left_out = {}, 0
    for index, end in zip(ordered, ends, strict=True):
        slot = layout.slots[index]
        if index in wanted:
            placed[index] = replace(slot, shard_start=slot.shard_start - left_out)
        else:
            left_out += end - slot.shard_start
    return placed, layout.shard_numel - left_out


def _landing_place(layout: Layout, columns: Sequence[Column]) -> int | None:
    slots = layout.slots
    start = slots[columns[0].slot].shard_start if columns else layout.shard_numel
    if any(slots[column.slot].shard_start != start + column.start for column in columns):
        return None
    carried = [column.slot for column in columns]
    others = [slot for index, slot in enumerate(slots) if index not in carried and slot.numel]
    return start if all(slot.shard_start + slot.chunk_numel <= start for slot in others) else None
