"""Mixed precision of replicated modules next to all the rest: shards, compilers, errors, sparse gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import nn

from composable import (
    MixedPrecisionPolicy,
    apply_optimizer_in_backward,
    describe,
    fully_shard,
    no_sync,
    remove,
    replicate,
)
from tests.helpers import compiled
from tests.helpers.compare import full_gradients, full_parameters
from tests.helpers.world import Pool
from tests.whole.test_precision import loss_of, seat
from tests.whole.test_precision_of_parts import KEPT, Part, numbers, parts

BF16: Final = torch.bfloat16
F32: Final = torch.float32
LOW: Final = MixedPrecisionPolicy("bf16", "fp32", buffer_dtype="bf16")


def _next_to_shards_both_compute_in_the_low_dtype() -> None:
    _, rank = seat()
    expected, model = parts(2), parts(2)
    fully_shard(expected, policy={Part}, mp_policy=LOW)
    replicate(model[0], mp_policy=LOW, broadcast_buffers=False)
    fully_shard(model, policy={Part}, mp_policy=LOW)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (expected, model)]
    for step in range(2):
        for each, optimizer in zip((expected, model), optimizers, strict=True):
            for number in (step, step + 5):
                with no_sync(each, enabled=number == step):
                    each(numbers(number, rank)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert model[0].seen[:3] == (BF16, BF16, BF16)
    for one, other in zip(full_parameters(expected).values(), full_parameters(model).values(), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)


def _compiled_modules_cast_too() -> None:
    _compiled_cast_too(lambda model: replicate(model, mp_policy=LOW), (False, True))


def _compiled_units_cast_too() -> None:
    _compiled_cast_too(lambda model: fully_shard(model, policy={Part}, mp_policy=KEPT), (False,))


def _compiled_cast_too(annotate: Callable[[nn.Module], Any], ways: tuple[bool, ...]) -> None:
    with compiled.fresh_compiler():
        for whole in ways:
            eager, other = (annotate(parts()) for _ in range(2))
            called: Any = other
            if whole:
                called = torch.compile(other, backend="aot_eager")
            else:
                for part in other[:2]:
                    part.compile(backend="aot_eager")
            for step in range(3):
                outputs = [model(numbers(step, seat()[1])) for model in (eager, called)]
                assert [output.dtype for output in outputs] == [BF16, BF16]
                torch.testing.assert_close(*outputs, rtol=2e-2, atol=2e-2)
                for output in outputs:
                    output.float().square().mean().backward()
            assert other[0].seen == eager[0].seen
            for one, two in zip(full_gradients(eager).values(), full_gradients(other).values(), strict=True):
                assert two is not None
                assert two.dtype is F32
                torch.testing.assert_close(two, one, rtol=5e-2, atol=5e-2)


def _what_fails_leaves_the_parameters_that_were_there() -> None:
    model = parts()
    replicate(model, policy={Part}, mp_policy=LOW)
    weight = model[0].up.weight
    handle = model[1].register_forward_pre_hook(_fails)
    with pytest.raises(ValueError, match="as planned"):
        model(numbers(0))
    handle.remove()
    assert model[0].up.weight is weight
    loss_of(model(numbers(0))).backward()
    assert weight.grad is not None


def _fails(*_: object) -> None:
    raise ValueError("as planned")


def _steps_in_backward_are_those_after_it() -> None:
    _, rank = seat()
    for policy in (LOW, MixedPrecisionPolicy("bf16", full_precision_classes=nn.BatchNorm1d)):  # summed in float32, or not
        one, other = parts(4), parts(4)
        for model in (one, other):
            replicate(model, policy={Part}, mp_policy=policy, broadcast_buffers=False)
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        apply_optimizer_in_backward(torch.optim.SGD, other.parameters(), {"lr": 0.1})
        for step in range(3):
            for model in (one, other):
                model(numbers(step, rank)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            for p, q in zip(one.parameters(), other.parameters(), strict=True):
                assert torch.equal(p, q)
                assert q.grad is None


@pytest.mark.parametrize(
    "body",
    [
        _next_to_shards_both_compute_in_the_low_dtype,
        _compiled_modules_cast_too,
        _compiled_units_cast_too,
        _steps_in_backward_are_those_after_it,
    ],
)
def test_with_all_the_rest_on_two_ranks(pool: Pool, body: Callable[[], None]) -> None:
    pool.run(2, body)


@pytest.mark.parametrize("body", [_compiled_modules_cast_too, _what_fails_leaves_the_parameters_that_were_there])
def test_with_the_rest_where_there_is_no_group(body: Callable[[], None]) -> None:
    body()


def _sparse_lookups_bring_rows_in_the_dtype_of_the_parameter() -> None:
    ranks, rank = seat()
    model = replicate(nn.Embedding(5, 3, sparse=True), mp_policy="bf16")
    for _ in range(2):
        model.zero_grad()
        model(torch.tensor([1, 1, 2 + rank])).float().sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.is_sparse
    assert model.weight.grad.dtype is F32
    expected = torch.zeros(5, 3)
    expected[1] = 2.0
    for other in range(ranks):
        expected[2 + other] += 1.0 / ranks
    assert torch.equal(model.weight.grad.to_dense(), expected)


@pytest.mark.sparse
def test_sparse_lookups_bring_rows_in_the_dtype_of_the_parameter(pool: Pool) -> None:
    _sparse_lookups_bring_rows_in_the_dtype_of_the_parameter()
    pool.run(2, _sparse_lookups_bring_rows_in_the_dtype_of_the_parameter)


def test_the_table_of_units_says_so() -> None:
    model = parts()
    replicate(model, mp_policy=KEPT)
    row = describe(model).rows[0]
    assert (row.dtypes, row.computes_in, row.reduces_in) == (("float32",), ("float32", "bfloat16"), ("float32",))


def _gradients_are_kept_in_the_dtype_of_the_sum() -> None:
    ranks, rank = seat()
    for dtype in (BF16, F32):
        torch.manual_seed(0)
        plain = nn.Linear(4, 4).to(dtype)
        model = copy.deepcopy(plain)
        replicate(model, mp_policy=MixedPrecisionPolicy("bf16", "fp64", keep_grads_in_reduce_dtype=True))
        batches = torch.randn(2, ranks, 3, 4, generator=torch.Generator().manual_seed(1))
        wanted = torch.zeros(4, 4, dtype=torch.float64)
        for held, batch in zip((True, False), batches, strict=True):
            with no_sync(model, enabled=held):
                model(batch[rank]).sum().backward()
            for each in batch:
                low = copy.deepcopy(plain).to(BF16)
                low(each.to(BF16)).sum().backward()
                wanted += low.weight.grad.double() / ranks  # type: ignore[union-attr]
        assert model.weight.dtype is dtype
        assert model.weight.grad is not None
        assert model.weight.grad.dtype is torch.float64
        assert torch.equal(model.weight.grad, wanted)
        assert not torch.equal(wanted.to(dtype).double(), wanted) or dtype is F32, "more bits than the parameter has"
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        remove(model, replicate)
        assert model.weight.grad.dtype is dtype


@pytest.mark.parametrize("ranks", [2, 4])
def test_gradients_are_kept_in_the_dtype_of_the_sum(pool: Pool, ranks: int) -> None:
    pool.run(ranks, _gradients_are_kept_in_the_dtype_of_the_sum)
    if ranks == 2:
        _gradients_are_kept_in_the_dtype_of_the_sum()
