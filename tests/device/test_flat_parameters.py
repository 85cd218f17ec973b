"""Parameters and gradients go through flat buffers and come out as they went in, for any shapes, cuts and numbers of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from composable.device.collectives import ReducePart
from composable.device.flat_parameters import FlatParameters, dtype_named, pair_rows, shape_like_rows, widened
from composable.device.memory import MemoryPool
from composable.device.parameter_forms import cut, make_unsharded
from composable.device.sharded_gradients import GradientRows, GradientShards
from composable.plan.layout import Layout, ParamSpec, plan_layout, plan_reduction
from composable.plan.precision import Precision, resolve
from composable.plan.routes import Route
from tests.device.in_process import Seat, gather, reduce
from tests.plan.layouts import Planned, planned

CPU = torch.device("cpu")
NAN = float("nan")
_SETTINGS = settings(max_examples=60, deadline=None)


def _plan(*specs: ParamSpec, num_shards: int, direct: int = 10**9) -> Planned:
    return Planned(list(specs), num_shards, 4, plan_layout(specs, num_shards=num_shards, direct_numel=direct, align=4))


_FLOAT32 = resolve("float32")
# Shapes that once went wrong, or nearly did.
_NOTHING_ALONG_THE_CUT = _plan(ParamSpec("w", (3, 0), 1), num_shards=2)
_ONLY_EMPTY = _plan(ParamSpec("w", (0, 4)), ParamSpec("b", (0,)), num_shards=3)
_FEWER_ROWS_THAN_RANKS = _plan(ParamSpec("w", (2, 3)), ParamSpec("v", (3, 2), 1), num_shards=5)


def _values(layout: Layout, seed: int = 0) -> list[Tensor]:
    """Small whole numbers: sums of them are exact, whatever their order."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, 100, slot.shape, generator=generator).to(torch.float32) for slot in layout.slots]


def _flats(
    layout: Layout, pool: MemoryPool, *, even_only: bool = False, precision: Precision = _FLOAT32
) -> list[FlatParameters]:
    return [
        FlatParameters(
            layout,
            precision=precision,
            device=CPU,
            communicator=Seat(r, layout.num_shards, even_only=even_only),
            pool=pool,
        )  # type: ignore[arg-type]
        for r in range(layout.num_shards)
    ]


def _fill(flats: Sequence[FlatParameters], whole: Sequence[Tensor]) -> None:
    """Every rank keeps its shards, with NaN wherever nothing belongs."""
    for flat in flats:
        flat.shard.fill_(NAN)
        for index, tensor in enumerate(whole):
            flat.shard_view(index).copy_(cut(tensor, flat.layout.slots[index], flat.rank))


def _unshard(flats: Sequence[FlatParameters]) -> None:
    for flat in flats:
        for buffer in flat.unsharded:
            buffer.allocate()
            buffer.tensor.data.fill_(NAN)
        flat.begin_gather()
    gather([flat.gather_plan for flat in flats])
    for flat in flats:
        flat.copy_out()
        flat.end_gather()


def _free(flat: FlatParameters) -> None:
    for buffer in flat.unsharded:
        buffer.free()


@_SETTINGS
@given(planned())
@example(_NOTHING_ALONG_THE_CUT)
@example(_ONLY_EMPTY)
@example(_FEWER_ROWS_THAN_RANKS)
def test_gathered_parameters_are_the_ones_that_were_cut(plan: Planned) -> None:
    flats = _flats(plan.layout, MemoryPool())
    for step in range(2):
        whole = _values(plan.layout, seed=step)
        _fill(flats, whole)
        _unshard(flats)
        for flat in flats:
            for view, tensor in zip(flat.full_views, whole, strict=True):
                assert torch.equal(view, tensor)
        for flat in flats:
            _free(flat)


@_SETTINGS
@given(planned(copied=True))
@example(_NOTHING_ALONG_THE_CUT)
def test_parameters_that_are_computed_with_in_another_dtype_are_gathered_in_it(plan: Planned) -> None:
    flats = _flats(plan.layout, MemoryPool(), precision=resolve("float32", "bfloat16"))
    for step in range(2):
        whole = [values / 7 for values in _values(plan.layout, seed=step)]
        _fill(flats, whole)
        _unshard(flats)
        for flat in flats:
            for view, tensor in zip(flat.full_views, whole, strict=True):
                assert torch.equal(view, tensor.to(torch.bfloat16))
            for index, tensor in enumerate(whole):
                assert torch.equal(flat.shard_view(index), cut(tensor, flat.layout.slots[index], flat.rank))
            _free(flat)


@_SETTINGS
@given(planned())
@example(_NOTHING_ALONG_THE_CUT)
def test_gathering_again_does_not_look_like_a_write_to_autograd(plan: Planned) -> None:
    flats = _flats(plan.layout, MemoryPool())
    _fill(flats, _values(plan.layout))
    parameters = [make_unsharded(view, requires_grad=True) for view in flats[0].full_views]
    versions = [parameter._version for parameter in parameters]
    for _ in range(2):
        _unshard(flats)
        _free(flats[0])
    assert [parameter._version for parameter in parameters] == versions


def test_autograd_uses_saved_parameters_that_were_freed_and_gathered_again_in_between() -> None:
    for direct in (1, 10**9):
        layout = plan_layout([ParamSpec("w", (3, 4)), ParamSpec("v", (4, 3), 1)], num_shards=2, direct_numel=direct)
        flats = _flats(layout, MemoryPool())
        whole = _values(layout)
        _fill(flats, whole)
        _unshard(flats)
        w, v = [make_unsharded(view, requires_grad=True) for view in flats[0].full_views]
        x = torch.ones(2, 4, requires_grad=True)
        loss = ((x @ w.t()) @ v.t()).square().sum()
        _free(flats[0])
        assert w.untyped_storage().nbytes() == 0
        _unshard(flats)
        loss.backward()
        expected = torch.ones(2, 4, requires_grad=True)
        ((expected @ whole[0].t()) @ whole[1].t()).square().sum().backward()
        assert torch.equal(x.grad, expected.grad)


@_SETTINGS
@given(planned())
def test_a_write_to_a_shard_is_noticed_on_the_buffer(plan: Planned) -> None:
    (flat, *_) = _flats(plan.layout, MemoryPool())
    for index in range(len(plan.layout.slots)):
        before = flat.shard._version
        flat.shard_view(index).add_(1)
        between = flat.shard._version
        assert between > before
        flat.local(index).add_(1)
        assert flat.shard._version > between


@_SETTINGS
@given(planned())
def test_a_parameter_that_is_not_cut_has_one_memory_for_both_of_its_forms(plan: Planned) -> None:
    (flat, *_) = _flats(plan.layout, MemoryPool())
    for index, slot in enumerate(plan.layout.slots):
        if slot.route is Route.WHOLE and slot.numel:
            flat.shard_view(index).fill_(3.0)
            assert torch.equal(flat.full_views[index], torch.full(slot.shape, 3.0))
            assert flat.full_views[index].data_ptr() == flat.shard_view(index).data_ptr()


@pytest.mark.parametrize("direct_numel", [1, 10**9])
def test_buffers_made_in_inference_mode_can_be_trained_with_later(direct_numel: int) -> None:
    layout = plan_layout([ParamSpec("w", (3, 4)), ParamSpec("s", (), None)], num_shards=2, direct_numel=direct_numel)
    with torch.inference_mode():
        flats = _flats(layout, MemoryPool())
        rows = GradientRows(flats[0], plan_reduction(layout, trainable=[True, True], even_only=False), 2, torch.float32)
        parameter = make_unsharded(flats[0].full_views[0], requires_grad=True)
    assert not any(view.is_inference() for flat in flats for view in (*flat.full_views, flat.shard, flat.shard_view(0)))
    assert not rows.buffer.tensor.is_inference()
    assert not parameter.is_inference()
    _fill(flats, _values(layout))
    _unshard(flats)
    parameter.sum().backward()
    assert parameter.grad is not None


@_SETTINGS
@given(planned())
@example(_NOTHING_ALONG_THE_CUT)
@example(_ONLY_EMPTY)
@example(_FEWER_ROWS_THAN_RANKS)
def test_paired_rows_match_a_whole_with_its_chunks_in_both_directions(plan: Planned) -> None:
    for slot in plan.layout.slots:
        if slot.route is Route.WHOLE:
            continue
        whole = torch.arange(1, slot.numel + 1, dtype=torch.float32).view(slot.shape)
        for room in dict.fromkeys((slot.numel, slot.full_numel)):
            flat = torch.full((room,), NAN)
            flat[: slot.numel] = whole.view(-1)
            columns = torch.full((plan.num_shards, slot.chunk_numel), NAN)
            for rows, pieces in pair_rows(slot, flat, columns):
                assert rows.shape == pieces.shape
                pieces.copy_(rows)
            for rank in range(plan.num_shards):
                mine = cut(whole, slot, rank)
                assert torch.equal(columns[rank, : mine.numel()], mine.reshape(-1))
            back = torch.full((room,), NAN)
            for rows, pieces in pair_rows(slot, back, columns):
                rows.copy_(pieces)
            assert torch.equal(back[: slot.numel].view(slot.shape), whole)


@_SETTINGS
@given(
    dtype=st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.complex64, torch.float64]),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 2, 4, 6, 16])),
    gaps=st.tuples(st.integers(0, 4), st.integers(0, 4)),
    starts=st.tuples(st.integers(0, 16), st.integers(0, 16)),
)
def test_wider_elements_move_the_same_bits(
    dtype: torch.dtype, shape: tuple[int, int, int], gaps: tuple[int, int], starts: tuple[int, int]
) -> None:
    """Of any bits, NaNs with a payload too, whatever the strides and starts allow."""
    generator = torch.Generator().manual_seed(0)
    ends = []
    for gap, start in zip(gaps, starts, strict=True):
        row = shape[2] + gap
        strides = (shape[1] * row, row, 1)
        room = start + shape[0] * strides[0]
        buffer = torch.randint(0, 256, (room * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)
        ends.append(buffer.as_strided(shape, strides, start))
    target, source = ends
    bits = source.contiguous().view(torch.uint8)
    rest = torch.ones(target.untyped_storage().nbytes() // dtype.itemsize, dtype=torch.bool)
    rest.as_strided(shape, target.stride(), target.storage_offset()).fill_(False)
    whole = target.as_strided((len(rest),), (1,), 0)
    before = whole[rest].view(torch.uint8)
    wide_target, wide_source = widened(target, source)
    wide_target.copy_(wide_source)
    assert torch.equal(target.contiguous().view(torch.uint8), bits)
    assert torch.equal(whole[rest].view(torch.uint8), before)


def test_short_rows_are_copied_in_the_widest_elements_that_fit() -> None:
    layout = plan_layout([ParamSpec("up", (8, 4)), ParamSpec("down", (8, 4))], num_shards=8, direct_numel=10**9)
    (flat, *_) = _flats(layout, MemoryPool())
    (target,), (source,) = flat._packed_copies
    assert target.dtype is source.dtype is torch.complex128
    assert target.shape == (2, 8, 1)
    odd = torch.zeros(9)
    assert widened(odd[1:5], odd[:4])[0].dtype is torch.float32
    assert widened(odd[2:4], odd[:2])[0].dtype is torch.int64


# --- gradients --------------------------------------------------------------------------------------------------------


@_SETTINGS
@given(planned(), st.booleans(), st.data())
@example(_NOTHING_ALONG_THE_CUT, False, None)
@example(_ONLY_EMPTY, False, None)
@example(_FEWER_ROWS_THAN_RANKS, True, None)
def test_reduced_gradients_are_the_shards_of_the_sum(plan: Planned, even_only: bool, data: st.DataObject | None) -> None:
    """With gradients frozen everywhere, missing on some ranks or missing on all of them."""
    layout, num_shards = plan.layout, plan.num_shards
    count = len(layout.slots)
    flags = st.lists(st.booleans(), min_size=count, max_size=count)
    # A unit in which nothing is trained has no reduction.
    trainable = data.draw(flags.filter(any)) if data is not None else [True] * count
    present = [data.draw(flags) if data is not None else [True] * count for _ in range(num_shards)]
    reduction = plan_reduction(layout, trainable=trainable, even_only=even_only)
    flats = _flats(layout, MemoryPool(), even_only=even_only)
    rows = [GradientRows(flat, reduction, num_shards, flat.compute_dtype) for flat in flats]
    shards = [GradientShards(flat, [nn.Parameter(flat.shard_view(i)) for i in range(count)], reduction) for flat in flats]
    for step in range(2):
        gradients = [_values(layout, seed=10 * step + rank) for rank in range(num_shards)]
        given_ = [[g if present[r][i] else None for i, g in enumerate(gradients[r])] for r in range(num_shards)]
        for rank in range(num_shards):
            rows[rank].buffer.allocate()
            rows[rank].buffer.tensor.fill_(NAN)
            rows[rank].copy_in(given_[rank])
            assert shards[rank].refresh() is (step == 0)
            shards[rank].buffer.fill_(NAN)
        reduce([ReducePart(row.buffer.tensor, reduction.row_numel, to.row) for row, to in zip(rows, shards, strict=True)])
        for rank in range(num_shards):
            shards[rank].take_from_row()
            for column in reduction.columns:
                slot = shards[rank].slots[column.slot]
                total = torch.stack([gradients[r][column.slot] * present[r][column.slot] for r in range(num_shards)]).sum(0)
                assert torch.equal(shape_like_rows(shards[rank].buffer, slot, rank), cut(total, slot, rank))
            assert rows[rank].flags.unused(reduction.flagged, shards[rank].row[reduction.flags_start :].tolist()) == [
                index for index in range(count) if trainable[index] and not any(present[r][index] for r in range(num_shards))
            ]
            rows[rank].buffer.free()


@_SETTINGS
@given(planned(copied=True), st.sampled_from(["bfloat16", "float32", "float64"]), st.booleans())
def test_gradients_are_summed_in_the_dtype_that_was_asked_for(plan: Planned, reduce_dtype: str, keep: bool) -> None:
    """And land in the parameters' own, or stay in it."""
    layout, num_shards = plan.layout, plan.num_shards
    reduction = plan_reduction(layout, trainable=[True] * len(layout.slots), even_only=False)
    precision = resolve("float32", "bfloat16", reduce_dtype, keep_reduced=keep)
    flats = _flats(layout, MemoryPool(), precision=precision)
    rows = [GradientRows(flat, reduction, num_shards, flat.compute_dtype) for flat in flats]
    shards = [GradientShards(flat, [nn.Parameter(view.data) for view in flat.full_views], reduction) for flat in flats]
    summed, kept = dtype_named(precision.reduce), dtype_named(precision.gradient)
    gradients = [[(v / 7).to(torch.bfloat16) for v in _values(layout, seed=rank)] for rank in range(num_shards)]
    for rank in range(num_shards):
        rows[rank].buffer.allocate()
        assert rows[rank].copy_in(gradients[rank]) == []
        assert shards[rank].refresh()
    for position, index in enumerate(reduction.direct):
        slot = layout.slots[index]
        sources = [torch.zeros(num_shards * slot.chunk_numel, dtype=summed) for _ in range(num_shards)]
        for rank, source in enumerate(sources):
            source[: slot.numel] = gradients[rank][index].reshape(-1)
        reduce([ReducePart(source, slot.chunk_numel, to.direct[position]) for source, to in zip(sources, shards, strict=True)])
    reduce([ReducePart(row.buffer.tensor, reduction.row_numel, to.row) for row, to in zip(rows, shards, strict=True)])
    for rank in range(num_shards):
        shards[rank].take_from_row()
        assert rows[rank].flags.unused(reduction.flagged, shards[rank].row[reduction.flags_start :].tolist()) == []
        shards[rank].close()
        assert shards[rank].buffer.dtype is kept
        for index, slot in enumerate(layout.slots):
            total = torch.stack([of_rank[index].to(summed) for of_rank in gradients]).sum(0).to(kept)
            assert torch.equal(shape_like_rows(shards[rank].buffer, slot, rank), cut(total, slot, rank))


@_SETTINGS
@given(planned())
def test_gradients_are_packed_whatever_their_strides(plan: Planned) -> None:
    """Autograd hands out transposed and expanded gradients too."""
    layout, num_shards = plan.layout, plan.num_shards
    reduction = plan_reduction(layout, trainable=[True] * len(layout.slots), even_only=False)
    flats = _flats(layout, MemoryPool())
    messages = []
    for strided in (False, True):
        rows = GradientRows(flats[0], reduction, num_shards, torch.float32)
        rows.buffer.allocate()
        rows.buffer.tensor.fill_(0.0)
        values = _values(layout)
        if strided:
            values = [v.transpose(0, -1).contiguous().transpose(0, -1) if v.ndim > 1 else v for v in values]
        else:
            values = [v.clone() for v in values]
        rows.copy_in(values)
        messages.append(rows.buffer.tensor.clone())
    assert torch.equal(*messages)


def test_an_expanded_gradient_is_packed_like_a_contiguous_one() -> None:
    layout = plan_layout([ParamSpec("w", (5, 3)), ParamSpec("s", (2, 2), None)], num_shards=2, direct_numel=10**9)
    reduction = plan_reduction(layout, trainable=[True, True], even_only=False)
    (flat, _) = _flats(layout, MemoryPool())
    rows = GradientRows(flat, reduction, 2, torch.float32)
    rows.buffer.allocate()
    rows.copy_in([torch.ones(()).expand(5, 3), torch.ones(()).expand(2, 2)])
    message = rows.buffer.tensor.view(2, reduction.row_numel)
    column = reduction.columns[0]
    assert message[0, column.start : column.start + 9].tolist() == [1.0] * 9
    assert message[1, column.start : column.start + 6].tolist() == [1.0] * 6


def test_packing_takes_nothing_from_the_gradients_given() -> None:
    layout = plan_layout([ParamSpec("w", (5, 3)), ParamSpec("v", (3, 5), 1)], num_shards=2, direct_numel=10**9)
    reduction = plan_reduction(layout, trainable=[True, True], even_only=False)
    (flat, _) = _flats(layout, MemoryPool())
    rows = GradientRows(flat, reduction, 2, torch.float32)
    rows.buffer.allocate()
    values = _values(layout)
    before = [value.clone() for value in values]
    rows.copy_in(values)
    assert all(torch.equal(one, other) for one, other in zip(values, before, strict=True))


def test_an_unsharded_parameter_is_a_leaf_with_the_memory_of_its_view() -> None:
    view = torch.zeros(2, 2)
    parameter = make_unsharded(view, requires_grad=False)
    assert isinstance(parameter, nn.Parameter)
    assert parameter.is_leaf
    assert not parameter.requires_grad
    assert parameter.data_ptr() == view.data_ptr()
