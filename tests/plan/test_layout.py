"""Every element of every parameter has one owner and one place, whatever the shapes, the ranks and the routes."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from expecttest import assert_expected_inline as assert_text
from hypothesis import given, settings
from hypothesis import strategies as st

from composable.plan.layout import Layout, ParamSpec, Slot, plan_layout
from composable.plan.routes import Route
from tests.plan.layouts import Planned, planned

_SETTINGS = settings(max_examples=60, deadline=None)


def _overlaps(ranges: list[tuple[int, int]]) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    filled = sorted((start, end) for start, end in ranges if end > start)
    return [(one, other) for one, other in itertools.pairwise(filled) if other[0] < one[1]]


def _single(shape: tuple[int, ...], num_shards: int, dim: int | None = 0, direct: int = 0) -> Slot:
    return plan_layout([ParamSpec("p", shape, dim)], num_shards=num_shards, direct_numel=direct, align=1).slots[0]


@_SETTINGS
@given(planned())
def test_slots_keep_the_order_the_names_and_the_shapes_of_the_parameters(plan: Planned) -> None:
    assert [(slot.name, slot.shape) for slot in plan.layout.slots] == [(spec.name, spec.shape) for spec in plan.specs]


@_SETTINGS
@given(planned())
def test_every_index_of_a_cut_dimension_has_exactly_one_owner(plan: Planned) -> None:
    for slot in plan.layout.slots:
        if slot.route is Route.WHOLE:
            assert {slot.local_shape(rank) for rank in range(plan.num_shards)} == {slot.shape}
            continue
        owners: Counter[int] = Counter()
        for rank in range(plan.num_shards):
            start, length = slot.extent(rank)
            assert length >= 0
            owners.update(range(start, start + length))
        assert owners == Counter(range(slot.shape[slot.dim]))
        assert sum(slot.local_numel(rank) for rank in range(plan.num_shards)) == slot.numel


@_SETTINGS
@given(planned())
def test_shards_are_those_of_torch_chunk(plan: Planned) -> None:
    for slot in plan.layout.slots:
        if slot.route is Route.WHOLE:
            continue
        whole = torch.arange(slot.numel).view(slot.shape)
        chunks = whole.chunk(plan.num_shards, slot.dim)
        for rank in range(plan.num_shards):
            start, length = slot.extent(rank)
            mine = whole.narrow(slot.dim, start, length)
            assert mine.shape == torch.Size(slot.local_shape(rank))
            assert mine.numel() == slot.local_numel(rank) <= slot.chunk_numel
            if rank < len(chunks):
                assert torch.equal(mine, chunks[rank])
            else:
                assert mine.numel() == 0


@_SETTINGS
@given(planned())
def test_places_in_the_shard_buffer_are_aligned_inside_it_and_apart(plan: Planned) -> None:
    layout = plan.layout
    ranges = [(slot.shard_start, slot.shard_start + slot.chunk_numel) for slot in layout.slots]
    assert _overlaps(ranges) == []
    assert all(start >= 0 and end <= layout.shard_numel for start, end in ranges)
    for slot in layout.slots:
        assert slot.shard_start % (plan.align if slot.route is Route.DIRECT else plan.packed_align) == 0


@_SETTINGS
@given(st.one_of(planned(), planned(copied=True)))
def test_places_in_the_unsharded_buffer_are_aligned_inside_it_and_apart(plan: Planned) -> None:
    layout = plan.layout
    ranges = [(slot.full_start, slot.full_start + slot.full_numel) for slot in layout.slots]
    assert _overlaps(ranges) == []
    assert all(start >= 0 and end <= layout.full_numel for start, end in ranges)
    assert all(slot.full_start % plan.align == 0 for slot in layout.slots)


@_SETTINGS
@given(st.one_of(planned(), planned(copied=True)))
def test_the_unsharded_buffer_can_be_cut_evenly_over_any_number_of_neighbours(plan: Planned) -> None:
    for neighbours in range(1, plan.num_shards + 1):
        if plan.num_shards % neighbours == 0:
            assert plan.layout.full_numel % neighbours == 0


@_SETTINGS
@given(st.one_of(planned(), planned(copied=True)))
def test_there_is_room_for_all_of_each_parameter(plan: Planned) -> None:
    for slot in plan.layout.slots:
        if slot.aliased:
            assert slot.full_numel == 0, "it lives in the shard buffer only"
        if slot.route is Route.WHOLE:
            assert slot.chunk_numel == slot.numel
        else:
            assert slot.full_numel >= slot.numel
            if slot.even:
                assert slot.full_numel == slot.numel, "nothing is padded where nothing needs padding"


@_SETTINGS
@given(planned())
def test_packed_slots_lie_side_by_side_so_that_one_message_carries_them(plan: Planned) -> None:
    layout = plan.layout
    end_of_all = layout.packed_start + layout.packed_numel
    for slot in layout.slots:
        end = slot.shard_start + slot.chunk_numel
        if slot.route is Route.PACKED:
            assert layout.packed_start <= slot.shard_start <= end <= end_of_all
        elif slot.chunk_numel:
            assert end <= layout.packed_start or slot.shard_start >= end_of_all
    if not layout.of(Route.PACKED):
        assert layout.packed_numel == 0


@_SETTINGS
@given(planned())
def test_packed_slots_of_one_size_lie_at_equal_distances_in_both_buffers(plan: Planned) -> None:
    """So that one strided copy serves all of them."""
    packed = sorted(plan.layout.of(Route.PACKED), key=lambda slot: slot.shard_start)
    sizes = [slot.chunk_numel for slot in packed]
    assert sizes == sorted(sizes, reverse=True)
    for size, group in itertools.groupby((s for s in packed if s.dim == 0 and s.chunk_numel), key=lambda s: s.chunk_numel):
        alike = list(group)
        for starts in ([slot.shard_start for slot in alike], [slot.full_start for slot in alike]):
            distances = [other - one for one, other in itertools.pairwise(starts)]
            assert len(dict.fromkeys(distances)) <= 1, f"slots of {size} elements"


@_SETTINGS
@given(planned())
def test_direct_rows_land_where_the_unsharded_parameter_has_them(plan: Planned) -> None:
    """Rank r's chunk, laid at r times the chunk, is r's rows of the parameter: so nothing needs to be copied out."""
    for slot in plan.layout.of(Route.DIRECT):
        whole = torch.arange(slot.numel).view(slot.shape)
        landed = torch.full((slot.full_numel,), -1)
        for rank in range(plan.num_shards):
            start, length = slot.extent(rank)
            landed[rank * slot.chunk_numel :][: slot.local_numel(rank)] = whole.narrow(0, start, length).reshape(-1)
        assert torch.equal(landed[: slot.numel], whole.view(-1))


@_SETTINGS
@given(planned())
def test_a_layout_is_a_function_of_its_inputs_only(plan: Planned) -> None:
    """Ranks plan on their own; so equal inputs must give equal plans."""
    direct = [slot.chunk_numel for slot in plan.layout.of(Route.DIRECT)]
    direct_numel = min(direct, default=10**9)
    again = plan_layout(
        plan.specs,
        num_shards=plan.num_shards,
        direct_numel=direct_numel,
        align=plan.align,
        packed_align=plan.packed_align,
    )
    assert again == plan.layout


@pytest.mark.parametrize(
    ("shape", "dim", "num_shards", "direct", "route"),
    [
        ((8, 4), 0, 1, 0, Route.WHOLE),  # nobody to share it with
        ((), None, 4, 0, Route.WHOLE),  # nothing to cut
        ((8, 4), None, 4, 0, Route.WHOLE),  # not to be cut
        ((8, 4), 0, 4, 8, Route.DIRECT),
        ((8, 4), 0, 4, 9, Route.PACKED),  # too small for a message of its own
        ((7, 4), 0, 4, 8, Route.DIRECT),  # padded rows count
        ((8, 4), 1, 4, 0, Route.PACKED),  # its pieces are not contiguous in the whole
        ((0, 4), 0, 4, 0, Route.PACKED),  # an empty message of its own makes no sense
        ((1,), 0, 4, 1, Route.DIRECT),
    ],
)
def test_a_parameter_takes_the_cheapest_way_that_it_can(
    shape: tuple[int, ...], dim: int | None, num_shards: int, direct: int, route: Route
) -> None:
    assert _single(shape, num_shards, dim, direct).route is route


@pytest.mark.parametrize(
    ("size", "num_shards", "shards"),
    [
        (8, 4, [2, 2, 2, 2]),
        (7, 4, [2, 2, 2, 1]),
        (5, 4, [2, 2, 1, 0]),
        (3, 4, [1, 1, 1, 0]),
        (1, 4, [1, 0, 0, 0]),
        (0, 4, [0, 0, 0, 0]),
        (6, 4, [2, 2, 2, 0]),
    ],
)
def test_the_first_ranks_have_full_shards_and_the_last_ones_fewer_or_none(
    size: int, num_shards: int, shards: list[int]
) -> None:
    slot = _single((size, 3), num_shards)
    assert [slot.extent(rank)[1] for rank in range(num_shards)] == shards
    assert slot.even is (len(set(shards)) == 1)


def test_a_layout_without_cut_parameters_needs_no_message() -> None:
    assert not plan_layout([ParamSpec("scale", (), None), ParamSpec("w", (4,), None)], num_shards=4).gathered
    assert plan_layout([ParamSpec("scale", (), None), ParamSpec("w", (4,))], num_shards=4).gathered


def test_a_unit_of_whole_parameters_is_its_own_unsharded_form_unless_modules_compute_in_another_dtype() -> None:
    specs = [ParamSpec("scale", (), None), ParamSpec("w", (4,), None)]
    alias, copies = plan_layout(specs, num_shards=4), plan_layout(specs, num_shards=4, copied=True)
    assert alias.aliased
    assert alias.full_numel == 0
    assert not copies.aliased
    assert not copies.gathered
    assert [slot.full_numel for slot in copies.slots] == [1, 4]
    assert not any(slot.copied for slot in plan_layout([ParamSpec("w", (4,))], num_shards=2, copied=True).slots)


@pytest.mark.parametrize(("num_shards", "align"), [(0, 16), (-1, 16), (2, 0)])
def test_impossible_numbers_are_refused(num_shards: int, align: int) -> None:
    with pytest.raises(ValueError) as refused:
        plan_layout([ParamSpec("w", (4,))], num_shards=num_shards, align=align)
    assert str(refused.value) == f"num_shards and align must be at least 1, got num_shards={num_shards}, align={align}"


@pytest.mark.parametrize("packed_align", [0, 3, 32])
def test_slots_of_a_message_are_not_aligned_to_what_others_are_not(packed_align: int) -> None:
    with pytest.raises(ValueError) as refused:
        plan_layout([ParamSpec("w", (4,))], num_shards=2, align=16, packed_align=packed_align)
    assert str(refused.value) == f"packed_align must divide align=16, got {packed_align}"


def _drawn(layout: Layout) -> str:
    lines = [
        f"{slot.name} {slot.route.name}: shard {slot.shard_start}+{slot.chunk_numel}, whole {slot.full_start}+{slot.full_numel}"
        for slot in layout.slots
    ]
    lines.append(f"packed {layout.packed_start}+{layout.packed_numel}")
    return "\n".join([*lines, f"shard buffer {layout.shard_numel}, unsharded buffer {layout.full_numel}"])


def test_a_linear_layer_on_two_ranks() -> None:
    specs = [ParamSpec("weight", (5, 8)), ParamSpec("bias", (5,)), ParamSpec("scale", (), None)]
    assert_text(
        _drawn(plan_layout(specs, num_shards=2, direct_numel=10, align=4)),
        """\
weight DIRECT: shard 0+24, whole 0+48
bias PACKED: shard 24+3, whole 48+6
scale WHOLE: shard 28+1, whole 56+0
packed 24+4
shard buffer 32, unsharded buffer 56""",
    )


def test_messages_land_apart_and_take_no_room_in_the_unsharded_buffer() -> None:
    specs = [ParamSpec("weight", (5, 8)), ParamSpec("bias", (5,))]
    layout = plan_layout(specs, num_shards=2, align=4, direct_numel=99)
    assert layout.packed_numel > 0
    assert layout.full_numel == sum(slot.full_numel for slot in layout.slots) + 2


@pytest.mark.parametrize("others", [[], [ParamSpec("scalar", (), None)], [ParamSpec("empty", (0, 4), 0)]])
def test_where_all_is_packed_the_padding_lands_with_it(others: list[ParamSpec]) -> None:
    """Or else a buffer of padding alone would come and go with every gather."""
    layout = plan_layout([ParamSpec("p", (5, 4), 0), *others], num_shards=2, direct_numel=99, align=16)
    assert layout.landing == (0, layout.full_numel)


def test_what_is_sent_by_itself_does_not_land_with_the_packed_ones() -> None:
    layout = plan_layout(
        [ParamSpec("large", (8, 16), 0), ParamSpec("small", (2, 2), 0)], num_shards=2, direct_numel=64, align=16
    )
    start, end = layout.landing
    large, small = layout.slots
    assert (large.route, small.route) == (Route.DIRECT, Route.PACKED)
    assert start <= small.full_start < end
    assert not start <= large.full_start < end


def test_the_largest_parameters_get_the_messages_that_a_launch_takes_also_where_many_are_equal() -> None:
    specs = [ParamSpec(f"w{k}", (8, 64 + k % 2)) for k in range(10)]

    def direct(**options: int) -> list[int]:
        slots = plan_layout(specs, num_shards=2, direct_numel=100, **options).slots
        return [index for index, slot in enumerate(slots) if slot.route is Route.DIRECT]

    assert direct() == direct(max_direct=10) == list(range(10))
    assert direct(max_direct=7) == [0, 1, 2, 3, 5, 7, 9]
    assert direct(max_direct=5) == [1, 3, 5, 7, 9]
    assert direct(max_direct=0) == []
