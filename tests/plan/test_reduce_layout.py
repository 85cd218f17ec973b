"""Every wanted gradient has one place in one message of a reduction, whatever the shapes, the ranks and the routes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from composable.plan.layout import ParamSpec, plan_layout, plan_reduction
from composable.plan.routes import Route
from tests.plan.layouts import Planned, planned

_SETTINGS = settings(max_examples=60, deadline=None)


@_SETTINGS
@given(planned(), st.data())
@example(Planned([], 2, 4, plan_layout([], num_shards=2, align=4)), None)
def test_every_wanted_gradient_travels_exactly_once(plan: Planned, data: st.DataObject | None) -> None:
    slots = plan.layout.slots
    trainable = data.draw(st.lists(st.booleans(), min_size=len(slots), max_size=len(slots))) if data is not None else []
    for even_only in (False, True):
        reduction = plan_reduction(plan.layout, trainable=trainable, even_only=even_only)
        carried = Counter([*reduction.direct, *(column.slot for column in reduction.columns)])
        wanted = [index for index in range(len(slots)) if trainable[index]]
        assert carried == Counter(index for index in wanted if slots[index].numel), "empty ones need no room"
        assert list(reduction.flagged) == wanted, "each has one flag, in order"


@_SETTINGS
@given(planned(), st.booleans())
def test_a_reduction_is_divided_where_half_of_it_to_three_quarters_are_direct(plan: Planned, even_only: bool) -> None:
    slots = plan.layout.slots
    together, divided = (
        plan_reduction(plan.layout, trainable=[True] * len(slots), even_only=even_only, divided_numel=numel) for numel in (0, 1)
    )
    assert together.first == 0
    assert replace(divided, first=0) == together
    sizes = [slots[index].chunk_numel for index in divided.direct]
    whole = sum(sizes) + divided.flags_start
    shares = [sum(sizes[:count]) / whole for count in range(len(sizes) + 1)] if whole else []
    reached = [count for count, share in enumerate(shares) if share >= 0.5]
    assert divided.first == (reached[0] if reached and shares[reached[0]] <= 0.75 else 0)


def test_only_what_is_large_is_reduced_in_two_parts() -> None:
    specs = [ParamSpec(f"w{k}", (8, 64)) for k in range(4)]
    layout = plan_layout(specs, num_shards=2, direct_numel=100)
    for numel, first in ((4 * 256, 2), (4 * 256 + 1, 0)):
        assert plan_reduction(layout, trainable=[True] * 4, even_only=True, divided_numel=numel).first == first


@_SETTINGS
@given(planned(), st.booleans())
def test_columns_fill_a_row_without_gaps_and_the_flags_end_it(plan: Planned, even_only: bool) -> None:
    slots = plan.layout.slots
    reduction = plan_reduction(plan.layout, trainable=[True] * len(slots), even_only=even_only)
    cursor = 0
    for column in reduction.columns:
        assert column.start == cursor
        assert column.numel == slots[column.slot].chunk_numel
        cursor += column.numel
    assert reduction.flags_start == cursor
    assert reduction.row_numel == cursor + len(reduction.flagged)


@_SETTINGS
@given(planned(), st.booleans(), st.sampled_from([1, 2, 8]), st.data())
def test_an_aligned_row_has_aligned_columns_and_flags_and_says_how_much_lies_between(
    plan: Planned, even_only: bool, align: int, data: st.DataObject
) -> None:
    slots = plan.layout.slots
    trainable = data.draw(st.lists(st.booleans(), min_size=len(slots), max_size=len(slots)))
    reduction = plan_reduction(plan.layout, trainable=trainable, even_only=even_only, align=align)
    plain = plan_reduction(plan.layout, trainable=trainable, even_only=even_only)
    assert [(column.slot, column.numel) for column in reduction.columns] == [(c.slot, c.numel) for c in plain.columns]
    assert not any(column.start % align for column in reduction.columns)
    assert reduction.flags_start % align == reduction.row_numel % align == 0
    filled = 0
    for numel, gap in zip([*(c.numel for c in reduction.columns), len(reduction.flagged)], reduction.gaps, strict=True):
        assert 0 <= gap < align
        filled += numel + gap
    assert filled == reduction.row_numel


@_SETTINGS
@given(planned(align=16), st.booleans())
def test_what_a_rank_is_sent_is_a_multiple_of_what_is_asked_for_and_lands_straight(plan: Planned, even_only: bool) -> None:
    layout, multiple = plan.layout, plan.multiple
    reduction = plan_reduction(layout, trainable=[True] * len(layout.slots), even_only=even_only, align=multiple)
    payloads = [layout.packed_numel, *(slot.chunk_numel for slot in layout.of(Route.DIRECT)), reduction.row_numel]
    assert not any(payload % multiple for payload in payloads)
    assert not any(slot.shard_start % multiple for slot in layout.slots)
    uneven = [slot for slot in layout.of(Route.DIRECT) if not slot.even]
    if not (even_only and uneven):
        assert reduction.straight is not None, "columns lie in the row as they do in the shard buffer"


@_SETTINGS
@given(planned(), st.booleans(), st.data())
def test_a_row_lands_straight_in_a_shard_buffer_only_where_it_covers_nothing_else(
    plan: Planned, even_only: bool, data: st.DataObject
) -> None:
    slots = plan.layout.slots
    trainable = data.draw(st.lists(st.booleans(), min_size=len(slots), max_size=len(slots)))
    reduction = plan_reduction(plan.layout, trainable=trainable, even_only=even_only)
    if reduction.straight is None:
        return
    row = range(reduction.straight, reduction.straight + reduction.row_numel)
    carried = {column.slot: column.start for column in reduction.columns}
    for index, slot in enumerate(slots):
        if index in carried:
            assert slot.shard_start == row.start + carried[index]
        elif slot.chunk_numel:
            assert slot.shard_start + slot.chunk_numel <= row.start


def test_a_row_lands_straight_where_everything_is_trained_and_nothing_is_padded() -> None:
    specs = [ParamSpec("bias", (8,)), ParamSpec("weight", (8, 64)), ParamSpec("norm", (8,)), ParamSpec("scale", (), None)]
    layout = plan_layout(specs, num_shards=2, direct_numel=100, align=16, packed_align=4)
    everything = plan_reduction(layout, trainable=[True] * 4, even_only=True)
    assert everything.straight == layout.packed_start == 256
    assert everything.row_numel == 4 + 4 + 1 + 4, "bias, norm and scale, then the flags"
    assert plan_reduction(layout, trainable=[False, True, True, True], even_only=True).straight == 256 + 4
    assert plan_reduction(layout, trainable=[True, True, False, True], even_only=True).straight is None
    aligned = plan_layout(specs, num_shards=2, direct_numel=100, align=16)
    assert plan_reduction(aligned, trainable=[True] * 4, even_only=True).straight is None
    only_direct = plan_layout(specs[1:2], num_shards=2, direct_numel=100)
    assert plan_reduction(only_direct, trainable=[True], even_only=True).straight == only_direct.shard_numel, "the flag"


@_SETTINGS
@given(planned())
def test_only_direct_parameters_are_reduced_where_they_lie_and_uneven_ones_only_where_the_backend_can(plan: Planned) -> None:
    slots = plan.layout.slots
    trainable = [True] * len(slots)
    anyhow = plan_reduction(plan.layout, trainable=trainable, even_only=False)
    evenly = plan_reduction(plan.layout, trainable=trainable, even_only=True)
    direct = [index for index, slot in enumerate(slots) if slot.route is Route.DIRECT]
    assert list(anyhow.direct) == direct
    assert list(evenly.direct) == [index for index in direct if slots[index].even]
