"""Where every element of a parameter group lives: shards, the full buffer, and the rows of
messages. Integers only, no torch.

A parameter travels in one of three ways:

* `DIRECT`: it is cut evenly along dimension 0 and its shard is large. Its rows go straight from the
  shards to their place in the full buffer, and its gradient straight to the shards: nothing is
  copied in or out.
* `PACKED`: everything else that is cut. A message costs about 0.1 ms whatever its size, so small
  parameters share one, which lands in a staging buffer and is copied out.
* `WHOLE`: it is not cut, because it has no dimension or the shard dimension of the mesh has one
  rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Route(Enum):
    """How a parameter travels between its shards and the full buffer."""

    DIRECT = "in a message of its own"
    PACKED = "in a message with others"
    WHOLE = "not at all: every rank has all of it"


@dataclass(frozen=True, slots=True)
class ParamShape:
    """What the layout depends on.

    Attributes:
        shape: sizes in memory order, from the outermost dimension to the innermost.
        dim: the position in `shape` that is cut; None if the parameter is not cut.
        order: which dimension of the parameter each position of `shape` is; empty if they are in
            order (contiguous).
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None = 0
    order: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter's place, in elements. Shards follow `torch.chunk`: the last ranks may have
    fewer rows, or none.
    """

    name: str
    shape: tuple[int, ...]
    dim: int
    num_shards: int
    route: Route
    shard_start: int  # in the shard buffer
    full_start: int  # in the full buffer
    order: tuple[int, ...]
    chunk_numel: int  # elements of the largest shard; every rank reserves as many

    @property
    def is_cut(self) -> bool:
        """Whether ranks have different parts of it."""
        return self.route is not Route.WHOLE

    @property
    def cut_dim(self) -> int:
        """The dimension of the parameter that is cut."""
        return self.order[self.dim] if self.order else self.dim

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def outer(self) -> int:
        return math.prod(self.shape[: self.dim])

    @property
    def full_numel(self) -> int:
        """Elements in the full buffer. Along dimension 0 rows are padded, so that rank r's rows
        land r chunks from the start.
        """
        return self.num_shards * self.chunk_numel if self.is_cut and self.dim == 0 else self.numel

    @property
    def even(self) -> bool:
        return not self.is_cut or self.shape[self.dim] % self.num_shards == 0

    def extent(self, rank: int) -> tuple[int, int]:
        """First index and number of indices of `dim` that `rank` has, of a parameter that is
        cut.
        """
        size = self.shape[self.dim]
        chunk = -(-size // self.num_shards)
        start = min(rank * chunk, size)
        return start, min(chunk, size - start)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        if self.route is Route.WHOLE:
            return self.shape
        return (*self.shape[: self.dim], self.extent(rank)[1], *self.shape[self.dim + 1 :])

    def local_numel(self, rank: int) -> int:
        return math.prod(self.local_shape(rank))


@dataclass(frozen=True, slots=True)
class GatherLayout:
    """The shard buffer holds direct parameters, then packed ones side by side (that stretch is the
    message), then whole ones.

    Attributes:
        packed_start: where packed parameters begin.
        cut_numel: elements at the start of the shard buffer that are sent: direct and packed ones.
        full_numel: of direct and whole parameters; packed ones have a buffer of their own, of
            `late_numel`.
    """

    slots: tuple[Slot, ...]
    num_shards: int
    shard_numel: int
    packed_start: int
    cut_numel: int
    full_numel: int
    late_numel: int

    def of(self, route: Route) -> list[Slot]:
        """In the order of the shard buffer."""
        return sorted(
            (slot for slot in self.slots if slot.route is route), key=lambda slot: slot.shard_start
        )

    @property
    def gathered(self) -> bool:
        """Whether unsharding takes a message."""
        return any(slot.is_cut for slot in self.slots)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _route(spec: ParamShape, num_shards: int, direct_numel: int, align: int) -> Route:
    if num_shards == 1 or spec.dim is None or not spec.shape:
        return Route.WHOLE
    chunk = math.prod(spec.shape) // num_shards
    even = spec.dim == 0 and spec.shape[0] % num_shards == 0
    is_direct = even and chunk >= max(direct_numel, 1) and chunk % align == 0
    return Route.DIRECT if is_direct else Route.PACKED


def _chunk_numel(spec: ParamShape, num_shards: int, route: Route) -> int:
    numel = math.prod(spec.shape)
    if route is Route.WHOLE or not numel:
        return numel
    size = spec.shape[spec.dim or 0]
    return numel // size * -(-size // num_shards)


def plan_layout(
    specs: Sequence[ParamShape],
    *,
    num_shards: int,
    direct_numel: int = 1 << 60,
    max_direct: int = 1 << 30,
    align: int = 16,
    packed_align: int = 1,
    late: bool = True,
) -> GatherLayout:
    """Lay parameters out over `num_shards` ranks.

    Args:
        direct_numel: elements in a shard from which a parameter travels in a message of its own.
        max_direct: messages of their own at most; the largest parameters get them.
        align: slots of the full buffer, and direct shards, start at multiples of this many
            elements.
        packed_align: the same for packed shards, a divisor of `align`.
        late: packed parameters have a full buffer of their own, which gets its memory when their
            message has landed.
    """
    routes = [_route(spec, num_shards, direct_numel, packed_align) for spec in specs]
    direct = [index for index, route in enumerate(routes) if route is Route.DIRECT]
    for index in sorted(direct, key=lambda index: -math.prod(specs[index].shape))[max_direct:]:
        routes[index] = Route.PACKED
    chunks = [
        _chunk_numel(spec, num_shards, route) for spec, route in zip(specs, routes, strict=True)
    ]
    slots: dict[int, Slot] = {}
    shard, sizes = 0, {"full": 0, "late": 0}
    ends = {}  # of the routes in the shard buffer
    for route in (Route.DIRECT, Route.PACKED, Route.WHOLE):
        buffer = "late" if late and route is Route.PACKED else "full"
        indices = [index for index, each in enumerate(routes) if each is route]
        if route is Route.PACKED:
            # Those of one size side by side, to be copied out at once; and behind those that are
            # rows those that are not.
            indices.sort(key=lambda index: (bool(specs[index].dim), -chunks[index]))
        for index in indices:
            spec, chunk = specs[index], chunks[index]
            slot = Slot(
                spec.name, spec.shape, spec.dim or 0, num_shards, route,
                shard, sizes[buffer], spec.order, chunk,
            )  # fmt: skip
            slots[index] = slot
            shard = round_up(shard + chunk, align if route is Route.DIRECT else packed_align)
            sizes[buffer] = round_up(sizes[buffer] + slot.full_numel, align)
        ends[route] = shard
    return GatherLayout(
        slots=tuple(map(slots.__getitem__, range(len(specs)))),
        num_shards=num_shards,
        shard_numel=shard,
        packed_start=ends[Route.DIRECT],
        cut_numel=ends[Route.PACKED],
        # A multiple of `num_shards`, so that neighbours can keep equal cuts of the whole buffer
        # after forward.
        full_numel=round_up(sizes["full"], num_shards * align),
        late_numel=sizes["late"],
    )


@dataclass(frozen=True, slots=True)
class ReduceLayout:
    """How the gradients of one bucket travel: direct ones as they are, the others as columns of one
    row per rank.

    Behind the columns each row has one flag per gradient. A rank without a gradient for a parameter
    sends zeros and a zero flag, so the sum of the flags tells every rank whether any rank used the
    parameter, without another message.

    Attributes:
        trainable: indices of the slots that get a gradient.
        direct: of these, those that travel as they are, with where their sum lands in the flat
            gradient buffer.
        columns: slot index, start and length in a row, in the order of the row.
        row_start: where the reduced row lands in the flat gradient buffer.
        flags_start: where in a row the flags are; they and the numbers behind them fill it to
            `row_numel`.
        numel: of the flat gradient buffer.
    """

    trainable: tuple[int, ...]
    direct: tuple[tuple[int, int], ...]
    columns: tuple[tuple[int, int, int], ...]
    row_start: int
    flags_start: int
    row_numel: int
    numel: int


def plan_reduction(
    slots: Sequence[Slot],
    trainable: Sequence[bool],
    *,
    align: int = 16,
    packed_align: int = 1,
    numbers: int = 0,
) -> ReduceLayout:
    """Lay out the message of the gradients that are wanted, and the buffer that their sums land in.

    Args:
        numbers: how many travel behind the flags.
    """
    wanted = tuple(index for index, want in enumerate(trainable) if want)
    direct, columns = [], []
    row_start = cursor = 0
    for index in wanted:
        numel = slots[index].chunk_numel
        if slots[index].route is Route.DIRECT:
            direct.append((index, row_start))
            row_start = round_up(row_start + numel, align)
        elif numel:
            columns.append((index, cursor, numel))
            cursor = round_up(cursor + numel, packed_align)
    row_numel = round_up(cursor + len(wanted) + numbers, packed_align)
    return ReduceLayout(
        wanted, tuple(direct), tuple(columns), row_start, cursor, row_numel, row_start + row_numel
    )
