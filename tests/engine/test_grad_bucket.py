"""Reduced gradients are the shards of the mean, whatever is missing, frozen or accumulated; what
users keep does not change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from composable.comm.base import Traits
from composable.comm.mesh_info import MeshInfo
from composable.engine.gradients.grad_bucket import SyncMode
from composable.engine.gradients.reduction import MessageRow, ReductionState
from composable.engine.params.layout import ParamShape
from composable.engine.params.param import cut
from composable.engine.params.precision import Precision
from composable.errors import CommunicationError, PhaseError
from tests.engine.layouts import SETTINGS, shapes
from tests.engine.ranks import (
    DIRECT,
    FLOAT32,
    PACKED,
    Rank,
    each,
    infos_of_replicas,
    infos_of_shards,
    local,
    ranks_of,
    reduce,
    values_of,
)

LOW: Final = Precision(torch.float32, torch.bfloat16, torch.float32, torch.float32)
KEPT_LOW: Final = Precision(torch.float32, torch.bfloat16, torch.bfloat16, torch.bfloat16)
SHAPES: Final = [ParamShape("w", (4, 3)), ParamShape("v", (3, 5), 1), ParamShape("b", (2,), None)]
DIMS: Final = [0, 1, None]
MESHES: Final[dict[str, Callable[[], list[MeshInfo]]]] = {
    "shards": lambda: infos_of_shards(2),
    "packed": lambda: infos_of_shards(2, traits=PACKED),
    "hybrid": lambda: infos_of_shards(2, replicas=2),
    "replicas": lambda: infos_of_replicas(2),
}


def _ranks(mesh: str, precision: Precision = FLOAT32, **options: Any) -> list[Rank]:
    options |= {"shards": mesh != "replicas"}
    return ranks_of(values_of(SHAPES), DIMS, MESHES[mesh](), precision, **options)


def _filled(value: float) -> list[Tensor]:
    return [torch.full(spec.shape, value) for spec in SHAPES]


def _backward(ranks: Sequence[Rank], *values: float) -> None:
    """Each rank has gradients of one value, those of rank 0 first; the mean of two ranks is
    theirs.
    """
    for rank, value in zip(ranks, values, strict=True):
        rank.backward(_filled(value))


def _step(ranks: Sequence[Rank], value: float) -> None:
    _backward(ranks, *[value] * len(ranks))
    reduce(ranks)


def _zero_grad(ranks: Sequence[Rank]) -> None:
    for parameter in _parameters(ranks):
        parameter.grad = None


def _parameters(ranks: Sequence[Rank]) -> list[nn.Parameter]:
    return [parameter for rank in ranks for parameter in rank.at_rest]


def _assert_filled(ranks: Sequence[Rank], value: float) -> None:
    for rank in ranks:
        for gradient in rank.grads:
            assert gradient is not None
            assert torch.equal(gradient, torch.full_like(gradient, value))


# --- sums ---------------------------------------------------------------------------------------


@SETTINGS
@given(
    shapes(),
    st.tuples(st.integers(1, 4), st.integers(1, 3)),
    st.builds(
        Traits,
        st.sampled_from([0, 32, 1 << 60]),
        st.just(1 << 30),
        st.sampled_from([1, 8, 16]),
        st.booleans(),
    ),
    st.sampled_from([FLOAT32, LOW, replace(FLOAT32, reduce=torch.float64)]),
    st.data(),
)
@example([ParamShape("w", (3, 0), 1)], (2, 1), PACKED, FLOAT32, None)  # nothing along the cut
@example([ParamShape("w", (0, 4)), ParamShape("b", (0,))], (3, 2), PACKED, FLOAT32, None)
# fewer rows than ranks
@example([ParamShape("w", (2, 3)), ParamShape("v", (3, 2), 1)], (5, 1), DIRECT, FLOAT32, None)
def test_reduced_gradients_are_the_shards_of_the_mean(
    specs: list[ParamShape],
    mesh: tuple[int, int],
    traits: Traits,
    precision: Precision,
    data: st.DataObject | None,
) -> None:
    """With gradients frozen everywhere, missing on some ranks or on all of them, and with any
    strides.
    """
    number, count = mesh[0] * mesh[1], len(specs)
    flags = st.lists(st.booleans(), min_size=count, max_size=count)
    trainable = data.draw(flags) if data is not None else [True] * count
    infos = infos_of_shards(*mesh, traits=traits)
    ranks = ranks_of(values_of(specs), [spec.dim for spec in specs], infos, precision)
    for rank in ranks:
        for parameter, wanted in zip(rank.at_rest, trainable, strict=True):
            parameter.requires_grad_(wanted)
        rank.bucket.follow()
    for step in range(2):
        present = [data.draw(flags) if data is not None else [True] * count for _ in range(number)]
        given_: list[list[Tensor | None]] = []
        for rank in range(number):
            values = [
                value.to(precision.compute) for value in values_of(specs, seed=10 * step + rank)
            ]
            if step:  # autograd hands out transposed gradients, too
                values = [
                    v.transpose(0, -1).contiguous().transpose(0, -1) if v.ndim > 1 else v
                    for v in values
                ]
            have = [present[rank][index] and trainable[index] for index in range(count)]
            given_.append(
                [value if here else None for value, here in zip(values, have, strict=True)]
            )
        for rank, gradients in zip(ranks, given_, strict=True):
            rank.backward(gradients)
        reduce(ranks)
        for index in range(count):
            there = [
                gradients[index].float() for gradients in given_ if gradients[index] is not None
            ]
            for rank in ranks:
                found = rank.grads[index]
                if not there:
                    assert found is None, "a gradient that no rank has"
                    continue
                assert found is not None
                assert found.dtype is precision.gradient
                mean = torch.stack(there).sum(0) / number
                torch.testing.assert_close(
                    found, cut(mean, rank.group.slots[index], rank.info.shard.rank)
                )
        _zero_grad(ranks)


def test_sums_are_computed_in_the_reduce_dtype_and_kept_in_the_gradients() -> None:
    for precision, expected in ((LOW, 128.5), (KEPT_LOW, 128.0)):  # bfloat16 has no 257
        for mesh in MESHES:
            ranks = _ranks(mesh, precision)
            values = [256.0, 1.0] * (len(ranks) // 2)
            for rank, value in zip(ranks, values, strict=True):
                rank.backward(
                    [torch.full(spec.shape, value, dtype=torch.bfloat16) for spec in SHAPES]
                )
            reduce(ranks)
            _assert_filled(ranks, expected)
            assert {gradient.dtype for gradient in ranks[0].grads if gradient is not None} == {
                precision.gradient
            }


@pytest.mark.parametrize("mesh", ["shards", "packed"])
def test_gradients_of_any_form_are_packed(mesh: str) -> None:
    whole = torch.arange(240.0).view(4, 3, 4, 5).to(memory_format=torch.channels_last)
    ranks = ranks_of([whole, torch.ones(4, 3)], [0, 0], MESHES[mesh]())
    for rank in ranks:
        rank.backward([whole.contiguous(), torch.ones(()).expand(4, 3)])
    reduce(ranks)
    for rank in ranks:
        image, matrix = rank.grads
        assert image is not None
        assert torch.equal(image, cut(whole, rank.group.slots[0], rank.info.shard.rank))
        assert image.stride() == local(rank.at_rest[0]).stride()
        assert torch.equal(matrix, torch.ones(2, 3))


def test_gradients_are_laid_out_over_the_mesh_as_their_parameters_are() -> None:
    expected = {"shards": [(Shard(0),), (Shard(1),), (Replicate(),)]}
    expected["hybrid"] = [(Replicate(), *placements) for placements in expected["shards"]]
    for mesh, placements in expected.items():
        ranks = _ranks(mesh)
        _step(ranks, 1.0)
        for rank in ranks:
            for parameter, placed in zip(rank.at_rest, placements, strict=True):
                gradient = parameter.grad
                assert isinstance(gradient, DTensor)
                assert gradient.placements == parameter.placements == placed
                assert (gradient.shape, gradient.stride()) == (parameter.shape, parameter.stride())
                assert gradient.device_mesh == parameter.device_mesh


# --- what users keep ----------------------------------------------------------------------------

KEPT: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "the object": lambda gradient: gradient,
    "detached": lambda gradient: gradient.detach(),
    "a piece of the local tensor": lambda gradient: local(gradient)[1:],
    "as numpy": lambda gradient: torch.from_numpy(local(gradient).numpy()),
    "in a graph": lambda gradient: local(gradient) * torch.ones((), requires_grad=True),
}


@pytest.mark.parametrize("how", KEPT)
@pytest.mark.parametrize("mesh", MESHES)
def test_a_kept_gradient_does_not_change(mesh: str, how: str) -> None:
    ranks = _ranks(mesh)
    _step(ranks, 1.0)
    kept = [KEPT[how](parameter.grad) for parameter in _parameters(ranks)]
    for value in (2.0, 3.0):
        _zero_grad(ranks)
        _step(ranks, value)
        _assert_filled(ranks, value)
    assert all(bool((local(gradient) == 1.0).all()) for gradient in kept)


@pytest.mark.parametrize("zeros", [True, False], ids=["set to zeros", "added to"])
@pytest.mark.parametrize("mesh", ["shards", "packed", "hybrid"])
def test_a_gradient_that_is_there_is_added_to_in_place(mesh: str, zeros: bool) -> None:
    ranks = _ranks(mesh)
    _step(ranks, 1.0)
    held = [parameter.grad for parameter in _parameters(ranks)]
    for gradient in held if zeros else ():
        gradient.zero_()
    _step(ranks, 2.0)
    _assert_filled(ranks, 2.0 if zeros else 3.0)
    assert all(p.grad is g for p, g in zip(_parameters(ranks), held, strict=True))


# --- gradients that are missing -----------------------------------------------------------------


@pytest.mark.parametrize("on_stream", [False, True])
@pytest.mark.parametrize("mesh", ["shards", "hybrid"])
def test_an_old_gradient_stays_to_the_bit_while_no_rank_has_a_new_one(
    mesh: str, on_stream: bool
) -> None:
    infos = infos_of_shards(2, 1 if mesh == "shards" else 2, replace(DIRECT, on_stream=on_stream))
    ranks = ranks_of(values_of(SHAPES), DIMS, infos)
    _step(ranks, 2.0)
    before = [parameter.grad for rank in ranks for parameter in rank.at_rest[:2]]
    with torch.no_grad():
        for rank in ranks:
            local(rank.at_rest[0].grad).mul_(1.0 + rank.info.all.rank / 3)
    kept = [local(gradient).clone() for gradient in before]
    for rank in ranks:
        rank.backward([None, None, torch.ones(2)])
    reduce(ranks)
    assert all(
        p.grad is g
        for p, g in zip([p for rank in ranks for p in rank.at_rest[:2]], before, strict=True)
    )
    assert all(
        torch.equal(local(gradient), value) for gradient, value in zip(before, kept, strict=True)
    )
    assert all(rank.grads[2].tolist() == [3.0, 3.0] for rank in ranks)


def test_on_a_stream_what_some_rank_lacks_lands_at_the_end_of_backward_as_the_host_must_not_wait() -> None:  # fmt: skip  # noqa: E501
    ranks = ranks_of(
        values_of(SHAPES), DIMS, infos_of_shards(2, traits=replace(DIRECT, on_stream=True))
    )
    one, other = ranks
    one.backward(_filled(2.0))
    other.backward([*_filled(2.0)[:2], None])
    each(ranks, lambda rank: rank.bucket.reduce(), lambda rank: rank.bucket.land())
    assert [gradient is None for gradient in other.grads] == [False, False, True]
    other.bucket.decide()
    assert other.grads[2].tolist() == one.grads[2].tolist() == [1.0, 1.0]


# --- accumulation -------------------------------------------------------------------------------


def _hold(ranks: Sequence[Rank], *values: float) -> None:
    _backward(ranks, *values)
    each(ranks, lambda rank: rank.bucket.reduce(SyncMode.HOLD))


@pytest.mark.parametrize("mesh", ["shards", "packed", "hybrid"])
def test_what_is_accumulated_is_the_gradient_that_users_see_and_is_reduced_once(mesh: str) -> None:
    ranks = _ranks(mesh)
    more = [1.0, 3.0] * (len(ranks) // 2)
    for _ in range(2):
        _hold(ranks, *more)
    for rank, value in zip(ranks, more, strict=True):
        for parameter, spec in zip(rank.at_rest, SHAPES, strict=True):
            gradient = parameter.grad
            assert isinstance(gradient, DTensor)
            assert all(placement == Partial("avg") for placement in gradient.placements)
            assert torch.equal(local(gradient), torch.full(spec.shape, 2 * value))
    _backward(ranks, *more)
    reduce(ranks)
    _assert_filled(ranks, 6.0)
    _zero_grad(ranks)
    _hold(ranks, *more)
    reduce(ranks)  # without a backward
    _assert_filled(ranks, 2.0)
    _hold(ranks, *more)  # onto reduced ones
    _zero_grad(ranks)
    _backward(ranks, *more)
    reduce(ranks)
    _assert_filled(ranks, 2.0)


@pytest.mark.parametrize("mesh", ["shards", "packed", "hybrid"])
def test_a_reduced_gradient_goes_into_what_is_accumulated(mesh: str) -> None:
    ranks = _ranks(mesh)
    _step(ranks, 5.0)
    for rank in ranks:
        # which gradients come may differ; the mean is not lost
        rank.backward([_filled(1.0)[0], None, None])
    each(ranks, lambda rank: rank.bucket.reduce(SyncMode.HOLD))
    reduce(ranks)
    for rank in ranks:
        assert [float(gradient.flatten()[0]) for gradient in rank.grads] == [6.0, 5.0, 5.0]


def test_accumulated_shards_of_a_hybrid_mesh_are_reduced_over_replicas_once() -> None:
    ranks = _ranks("hybrid")
    for value in (1.0, 2.0):
        _backward(ranks, *[value * rank for rank in (0, 2, 4, 6)])
        reduce(ranks, SyncMode.HOLD_SHARDS)
    replicas = [1.0 + 2.0, 5.0 + 10.0]  # means over the shard dimension
    for index, rank in enumerate(ranks):
        gradient = rank.at_rest[0].grad
        assert isinstance(gradient, DTensor)
        assert gradient.placements == (Partial("avg"), Shard(0))
        assert torch.equal(local(gradient), torch.full((2, 3), replicas[index // 2]))
    _hold(ranks, 4.0, 4.0, 4.0, 4.0)  # whole gradients next to shards
    _backward(ranks, 1.0, 1.0, 1.0, 1.0)
    reduce(ranks)
    _assert_filled(ranks, 9.0 + 5.0)


def test_tensor_hooks_would_be_called_twice_for_a_reduced_gradient_and_that_is_refused() -> None:
    ranks = _ranks("shards")
    ranks[0].at_rest[0].register_hook(lambda gradient: gradient)
    _step(ranks, 1.0)
    ranks[0].backward(_filled(1.0))
    with pytest.raises(
        PhaseError,
        match=r"parameter 'p0' has a reduced gradient, for which its tensor hooks were called",
    ):
        ranks[0].bucket.reduce(SyncMode.HOLD)


def test_what_froze_while_others_accumulated_is_reduced_with_them() -> None:
    ranks = _ranks("shards")
    _hold(ranks, 1.0, 3.0)
    for rank in ranks:
        rank.at_rest[0].requires_grad_(False)
        rank.bucket.follow()
        rank.backward([None, *_filled(1.0)[1:]])
    reduce(ranks)
    for rank in ranks:
        assert [float(gradient.flatten()[0]) for gradient in rank.grads] == [2.0, 3.0, 3.0]


# --- hooks of users -----------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", ["shards", "hybrid"])
def test_hooks_are_called_when_the_gradient_lands_and_with_the_mean(mesh: str) -> None:
    ranks, seen = _ranks(mesh), []
    w, *_ = ranks[0].at_rest
    w.register_hook(lambda gradient: gradient * 10.0)

    def after(parameter: nn.Parameter) -> None:
        seen.append(float(local(parameter.grad).sum()))
        parameter.grad = None

    w.register_post_accumulate_grad_hook(after)
    _backward(ranks, *[1.0, 3.0] * (len(ranks) // 2))
    each(ranks, lambda rank: rank.bucket.reduce(), lambda rank: rank.bucket.advance())
    assert seen == []
    each(ranks, lambda rank: rank.bucket.land())
    assert seen == [20.0 * 6]
    assert w.grad is None


# --- states, and steps that are lost ------------------------------------------------------------


@pytest.mark.parametrize("mesh", MESHES)
def test_buckets_go_from_state_to_state(mesh: str) -> None:
    ranks = _ranks(mesh)

    def states() -> set[ReductionState | None]:
        return {rank.bucket.reduction and rank.bucket.reduction.state for rank in ranks}

    for _ in range(2):
        assert states() == {None}
        each(ranks, lambda rank: rank.bucket.land())
        assert states() == {None}
        _backward(ranks, *[1.0] * len(ranks))
        assert all(rank.bucket.has_gradients for rank in ranks)
        each(ranks, lambda rank: rank.bucket.reduce())
        assert not any(rank.bucket.has_gradients for rank in ranks), (
            "gradients that come now are another reduction's"
        )
        assert states() == {ReductionState.REDUCING}
        each(ranks, lambda rank: rank.bucket.advance())
        assert states() == {
            ReductionState.ALL_REDUCING if mesh == "hybrid" else ReductionState.REDUCING
        }
        each(ranks, lambda rank: rank.bucket.land())
    assert states() == {None}
    _assert_filled(ranks, 2.0)


@pytest.mark.parametrize(
    "when", ["backward", "accumulated", "in flight", "over replicas", "failed"]
)
@pytest.mark.parametrize("mesh", ["shards", "packed", "hybrid"])
def test_a_lost_step_leaves_nothing_but_what_was_reduced_before(mesh: str, when: str) -> None:
    ranks = _ranks(mesh)
    _step(ranks, 1.0)
    before = [parameter.grad for parameter in _parameters(ranks)]
    if when == "accumulated":
        _zero_grad(ranks)
        _hold(ranks, *[5.0] * len(ranks))
    _backward(ranks, *[7.0] * len(ranks))
    if when in ("in flight", "over replicas", "failed"):
        each(ranks, lambda rank: rank.bucket.reduce())
    if when == "over replicas":
        each(ranks, lambda rank: rank.bucket.advance())
    if when == "failed":
        for rank in ranks:
            rank.bucket.reduction.work = _Failed()
            with pytest.raises(CommunicationError):
                rank.bucket.land()
    each(ranks, lambda rank: rank.bucket.drop())
    assert {rank.bucket.reduction and rank.bucket.reduction.state for rank in ranks} == {None}
    assert not any(rank.bucket.has_gradients for rank in ranks)
    after = [parameter.grad for parameter in _parameters(ranks)]
    if when == "accumulated":
        assert after == [None] * len(after)
    else:
        assert all(one is other for one, other in zip(after, before, strict=True))
    _zero_grad(ranks)
    _step(ranks, 2.0)
    _assert_filled(ranks, 2.0)


def test_rows_agree_if_all_ranks_wrote_one_text_and_one_number() -> None:
    rows = MessageRow((0, 2), torch.float32, torch.device("cpu"), compares=True)
    mine = rows.write([2], text=0b1010, held=3)
    assert rows.used(mine.tolist()) == {0: True, 2: False}
    assert rows.agrees((mine + rows.write([0], text=0b1010, held=3)).tolist())
    for text, held in ((0b1011, 3), (0b0010, 3), (0b1010, 4), (0b1010, 2)):
        assert not rows.agrees((mine + rows.write([2], text, held)).tolist())


class _Failed:
    def wait(self) -> None:
        raise CommunicationError("as planned")
