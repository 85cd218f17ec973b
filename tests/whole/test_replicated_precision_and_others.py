"""Mixed precision of replicated modules next to all the rest: shards, compilers, errors, sparse gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
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
from composable.errors import RanksDisagreeError
from tests.helpers import compiled
from tests.helpers.compare import full_gradients, full_parameters
from tests.helpers.world import Pool
from tests.whole.test_precision import loss_of
from tests.whole.test_precision_of_parts import KEPT, Part, numbers, parts

BF16: Final = torch.bfloat16
F32: Final = torch.float32
LOW: Final = MixedPrecisionPolicy("bf16", "fp32", buffer_dtype="bf16")


def _seat() -> tuple[int, int]:
    return (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)


def _classes_keep_their_dtype() -> None:
    """As `fully_shard` has it, which is compared with the same arithmetic by hand."""
    _, rank = _seat()
    for policy in (None, {Part}, {nn.LayerNorm}):
        one, other = parts(), parts()
        fully_shard(one, policy={Part}, mp_policy=KEPT)
        replicate(other, policy=policy, mp_policy=KEPT, broadcast_buffers=False)
        for step in range(2):
            one.zero_grad()
            other.zero_grad()
            outputs = one(numbers(step, rank)), other(numbers(step, rank))
            assert torch.equal(*outputs)
            assert other[0].seen == (BF16, F32, BF16, F32)
            for output in outputs:
                output.float().square().mean().backward()
        for (name, gradient), own in zip(full_gradients(one).items(), other.parameters(), strict=True):
            assert torch.equal(gradient, own.grad), name  # type: ignore[arg-type]
        remove(other, replicate)
        assert not other[0].norm._forward_hooks
        assert other(numbers(0)).dtype is F32


def _next_to_shards_both_compute_in_the_low_dtype() -> None:
    _, rank = _seat()
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
    with compiled.fresh_compiler():
        for whole in (False, True):
            eager, other = (replicate(parts(), mp_policy=LOW) for _ in range(2))
            called: Any = other
            if whole:
                called = torch.compile(other, backend="aot_eager")
            else:
                for part in other[:2]:
                    part.compile(backend="aot_eager")
            for step in range(3):
                outputs = [model(numbers(step, _seat()[1])) for model in (eager, called)]
                assert [output.dtype for output in outputs] == [BF16, BF16]
                torch.testing.assert_close(*outputs, rtol=2e-2, atol=2e-2)
                for output in outputs:
                    output.float().square().mean().backward()
            for one, two in zip(eager.parameters(), other.parameters(), strict=True):
                assert two.grad is not None
                assert two.grad.dtype is F32
                torch.testing.assert_close(two.grad, one.grad, rtol=5e-2, atol=5e-2)


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


def _an_overflow_in_float16_leaves_the_step_out() -> None:
    model = replicate(nn.Linear(4, 4, bias=False), mp_policy="float16")
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1.0), torch.amp.GradScaler("cpu", init_scale=2.0**17)
    before = model.weight.detach().clone()
    for scale in (2.0**17, 2.0**16):
        assert scaler.get_scale() == scale
        scaler.scale(model(torch.ones(1, 4)).float().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert torch.equal(model.weight, before)


def _steps_in_backward_are_those_after_it() -> None:
    _, rank = _seat()
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


def _ranks_that_ask_for_other_dtypes_are_told() -> None:
    with pytest.raises(RanksDisagreeError, match="param_dtype=bfloat16"):
        replicate(nn.Linear(4, 4), mp_policy="bf16" if dist.get_rank() else None)


@pytest.mark.parametrize(
    "body",
    [
        _classes_keep_their_dtype,
        _next_to_shards_both_compute_in_the_low_dtype,
        _compiled_modules_cast_too,
        _an_overflow_in_float16_leaves_the_step_out,
        _steps_in_backward_are_those_after_it,
        _ranks_that_ask_for_other_dtypes_are_told,
    ],
)
def test_with_all_the_rest_on_two_ranks(pool: Pool, body: Callable[[], None]) -> None:
    pool.run(2, body)


@pytest.mark.parametrize("body", [_compiled_modules_cast_too, _what_fails_leaves_the_parameters_that_were_there])
def test_with_the_rest_where_there_is_no_group(body: Callable[[], None]) -> None:
    body()


def _sparse_lookups_bring_rows_in_the_dtype_of_the_parameter() -> None:
    ranks, rank = _seat()
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
    ranks, rank = _seat()
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
