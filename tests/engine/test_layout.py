"""Every element of every parameter has one owner and one place, whatever the shapes, the ranks and
the routes.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable

import pytest
import torch
from expecttest import assert_expected_inline as assert_text
from hypothesis import given
from hypothesis import strategies as st

from composable.engine.params.layout import (
    GatherLayout,
    ParamShape,
    Route,
    Slot,
    plan_layout,
    plan_reduction,
)
from tests.engine.layouts import SETTINGS, Planned, planned


def _assert_apart(places: Iterable[tuple[int, int]], numel: int) -> None:
    """Each (start, length) lies in a buffer of `numel` elements, and none overlaps another."""
    filled = sorted((start, start + length) for start, length in places if length)
    assert all(start >= 0 and end <= numel for start, end in filled)
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(filled))


# --- shards and the full buffer -----------------------------------------------------------------


@SETTINGS
@given(planned())
def test_shards_are_those_of_torch_chunk(plan: Planned) -> None:
    assert [(slot.name, slot.shape) for slot in plan.layout.slots] == [
        (each.name, each.shape) for each in plan.shapes
    ]
    for slot in plan.layout.slots:
        if slot.route is Route.WHOLE:
            assert {slot.local_shape(rank) for rank in range(plan.num_shards)} == {slot.shape}
            assert slot.chunk_numel == slot.full_numel == slot.numel
            continue
        whole = torch.arange(slot.numel).view(slot.shape)
        chunks = whole.chunk(plan.num_shards, slot.dim)
        pieces = [whole.narrow(slot.dim, *slot.extent(rank)) for rank in range(plan.num_shards)]
        assert [tuple(piece.shape) for piece in pieces] == [
            slot.local_shape(rank) for rank in range(plan.num_shards)
        ]
        assert all(torch.equal(chunk, piece) for chunk, piece in zip(chunks, pieces, strict=False))
        assert torch.equal(torch.cat(pieces, slot.dim), whole), "every index has exactly one owner"
        assert all(piece.numel() <= slot.chunk_numel for piece in pieces)


@SETTINGS
@given(planned())
def test_places_in_both_buffers_are_aligned_and_apart(plan: Planned) -> None:
    layout = plan.layout
    _assert_apart(
        [(slot.shard_start, slot.chunk_numel) for slot in layout.slots], layout.shard_numel
    )
    for slot in layout.slots:
        assert (
            slot.shard_start % (plan.align if slot.route is Route.DIRECT else plan.packed_align)
            == 0
        )
        assert slot.full_start % plan.align == 0
        assert slot.full_numel >= slot.numel
        assert not slot.even or slot.full_numel == slot.numel, "padded where nothing needs padding"
    late = layout.of(Route.PACKED) if plan.late else []
    _assert_apart([(slot.full_start, slot.full_numel) for slot in late], layout.late_numel)
    early = [slot for slot in layout.slots if slot not in late]
    _assert_apart([(slot.full_start, slot.full_numel) for slot in early], layout.full_numel)
    assert all(
        layout.full_numel % near == 0
        for near in range(1, plan.num_shards + 1)
        if plan.num_shards % near == 0
    )


@SETTINGS
@given(planned())
def test_packed_shards_lie_side_by_side_so_that_one_message_carries_them(plan: Planned) -> None:
    layout = plan.layout
    end_of_all = layout.cut_numel
    for slot in layout.slots:
        end = slot.shard_start + slot.chunk_numel
        if slot.route is Route.PACKED:
            assert layout.packed_start <= slot.shard_start <= end <= end_of_all
        elif slot.chunk_numel:
            assert end <= layout.packed_start or slot.shard_start >= end_of_all
    packed_numel = layout.cut_numel - layout.packed_start
    assert packed_numel == 0 or layout.of(Route.PACKED)
    assert packed_numel % plan.packed_align == 0
    assert not any(slot.chunk_numel % plan.packed_align for slot in layout.of(Route.DIRECT)), (
        "no message is padded"
    )


def test_packed_shards_of_one_size_are_neighbours_so_that_one_copy_moves_them() -> None:
    shapes = [(8, 4), (6,), (4, 8), (5,), (7, 4)]  # shards of 16, 3, 16, 3 and 16 elements
    layout = plan_layout([ParamShape(str(s), s) for s in shapes], num_shards=2)
    assert [slot.chunk_numel for slot in layout.of(Route.PACKED)] == [16, 16, 16, 3, 3]


@SETTINGS
@given(planned())
def test_direct_rows_land_where_the_whole_parameter_has_them(plan: Planned) -> None:
    """Rank r's chunk, laid at r times the chunk, is r's rows of the parameter: so nothing needs to
    be copied out.
    """
    assert len(plan.layout.of(Route.DIRECT)) <= plan.max_direct
    for slot in plan.layout.of(Route.DIRECT):
        whole = torch.arange(slot.numel).view(slot.shape)
        landed = [
            whole.narrow(0, *slot.extent(rank)).reshape(-1) for rank in range(plan.num_shards)
        ]
        assert {len(chunk) for chunk in landed} == {slot.chunk_numel}
        assert torch.equal(torch.cat(landed), whole.view(-1))


def _slot(
    shape: tuple[int, ...],
    num_shards: int,
    dim: int | None = 0,
    direct: int = 0,
    packed_align: int = 1,
) -> Slot:
    shapes = [ParamShape("p", shape, dim)]
    return plan_layout(
        shapes, num_shards=num_shards, direct_numel=direct, packed_align=packed_align
    ).slots[0]


@pytest.mark.parametrize(
    ("shape", "dim", "num_shards", "direct", "route"),
    [
        ((8, 4), 0, 1, 0, Route.WHOLE),  # one rank
        ((), None, 4, 0, Route.WHOLE),  # no dimension
        ((8, 4), None, 4, 0, Route.WHOLE),  # not to be cut
        ((8, 4), 0, 4, 8, Route.DIRECT),
        ((8, 4), 0, 4, 9, Route.PACKED),  # too small for a message of its own
        ((7, 4), 0, 4, 1, Route.PACKED),  # padded
        ((8, 4), 1, 4, 0, Route.PACKED),  # its pieces are not contiguous in the whole
        ((0, 4), 0, 4, 0, Route.PACKED),  # an empty message makes no sense
        ((4,), 0, 4, 1, Route.DIRECT),
    ],
)
def test_a_parameter_takes_the_cheapest_route_that_it_can(
    shape: tuple[int, ...], dim: int | None, num_shards: int, direct: int, route: Route
) -> None:
    assert _slot(shape, num_shards, dim, direct).route is route


def test_a_message_that_is_not_aligned_is_packed() -> None:
    assert _slot((8, 4), 4, packed_align=4).route is Route.DIRECT
    assert _slot((8, 3), 4, packed_align=4).route is Route.PACKED


def test_a_layout_without_cut_parameters_needs_no_message() -> None:
    whole = [ParamShape("scale", (), None), ParamShape("w", (4,), None)]
    assert not plan_layout(whole, num_shards=4).gathered
    assert plan_layout([*whole, ParamShape("v", (4,))], num_shards=4).gathered


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(10, list(range(10))), (7, [0, 1, 2, 3, 5, 7, 9]), (5, [1, 3, 5, 7, 9]), (0, [])],
)
def test_the_largest_parameters_get_the_messages_of_their_own(
    limit: int, expected: list[int]
) -> None:
    shapes = [ParamShape(f"w{k}", (8, 64 + k % 2)) for k in range(10)]
    slots = plan_layout(shapes, num_shards=2, direct_numel=100, max_direct=limit).slots
    assert [index for index, slot in enumerate(slots) if slot.route is Route.DIRECT] == expected


def _drawn(layout: GatherLayout) -> str:
    lines = [
        f"{slot.name} {slot.route.name}: shard {slot.shard_start}+{slot.chunk_numel}, full"
        f" {slot.full_start}+{slot.full_numel}"
        for slot in layout.slots
    ]
    return "\n".join(
        [
            *lines,
            f"packed {layout.packed_start}+{layout.cut_numel - layout.packed_start},"
            f" buffers of {layout.shard_numel}, {layout.full_numel} and {layout.late_numel}",
        ]
    )


def test_a_linear_layer_on_two_ranks() -> None:
    shapes = [ParamShape("weight", (6, 8)), ParamShape("bias", (5,)), ParamShape("scale", (), None)]
    assert_text(
        _drawn(plan_layout(shapes, num_shards=2, direct_numel=10, align=4)),
        """\
weight DIRECT: shard 0+24, full 0+48
bias PACKED: shard 24+3, full 0+6
scale WHOLE: shard 27+1, full 48+1
packed 24+3, buffers of 28, 56 and 8""",
    )


# --- messages of gradients ----------------------------------------------------------------------


@SETTINGS
@given(planned(), st.data())
def test_every_wanted_gradient_travels_once_and_its_sum_has_a_place(
    plan: Planned, data: st.DataObject
) -> None:
    slots = plan.layout.slots
    trainable = data.draw(st.lists(st.booleans(), min_size=len(slots), max_size=len(slots)))
    reduction = plan_reduction(slots, trainable, align=plan.align, packed_align=plan.packed_align)
    wanted = [index for index in range(len(slots)) if trainable[index]]
    assert list(reduction.trainable) == wanted
    carried = Counter(
        [*(index for index, _ in reduction.direct), *(index for index, _, _ in reduction.columns)]
    )
    assert carried == Counter(index for index in wanted if slots[index].numel), (
        "empty ones need no space"
    )
    assert all(slots[index].route is Route.DIRECT for index, _ in reduction.direct)
    assert all(numel == slots[index].chunk_numel for index, _, numel in reduction.columns)
    columns = [(start, numel) for _, start, numel in reduction.columns]
    _assert_apart([*columns, (reduction.flags_start, len(wanted))], reduction.row_numel)
    starts = [*(start for start, _ in columns), reduction.flags_start, reduction.row_numel]
    assert starts == sorted(starts)
    assert not any(start % plan.packed_align for start in starts)
    sums = [(start, slots[index].chunk_numel) for index, start in reduction.direct]
    _assert_apart([*sums, (reduction.row_start, reduction.row_numel)], reduction.numel)
    assert not any(start % plan.align for start, _ in sums)


def test_what_is_frozen_takes_no_space() -> None:
    shapes = [
        ParamShape("bias", (8,)),
        ParamShape("weight", (8, 64)),
        ParamShape("norm", (8,)),
        ParamShape("scale", (), None),
    ]
    slots = plan_layout(shapes, num_shards=2, direct_numel=100, align=16, packed_align=4).slots
    everything = plan_reduction(slots, [True] * 4, align=16, packed_align=4)
    assert (everything.row_start, everything.flags_start) == (256, 4 + 4 + 4)
    assert everything.row_numel == 16, "bias, norm and scale, then four flags"
    some = plan_reduction(slots, [False, False, True, True], align=16, packed_align=4)
    assert (some.row_start, some.flags_start, some.row_numel) == (0, 8, 12)
    assert plan_reduction(slots, [False] * 4).numel == 0
