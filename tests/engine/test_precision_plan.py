"""Which dtypes a mixed precision policy means for one parameter, and by how much gradients are
divided: once and after the sum, or in two steps where the sum could overflow.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import bfloat16, float16, float32

from composable import MixedPrecisionPolicy
from composable.engine.gradients.reduction import division_factors, scales_of
from composable.engine.params.precision import Precision, resolve
from tests.engine.layouts import SETTINGS


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, Precision(float32, float32, float32, float32)),
        ({"param_dtype": bfloat16}, Precision(float32, bfloat16, bfloat16, float32)),
        (
            {"param_dtype": bfloat16, "reduce_dtype": float32},
            Precision(float32, bfloat16, float32, float32),
        ),
        ({"reduce_dtype": bfloat16}, Precision(float32, float32, bfloat16, float32)),
        (
            {"param_dtype": bfloat16, "keep_grads_in_reduce_dtype": True},
            Precision(float32, bfloat16, bfloat16, bfloat16),
        ),
    ],
)
def test_gradients_are_summed_in_the_dtype_of_the_computation_unless_asked_otherwise(
    asked: dict[str, torch.dtype], expected: Precision
) -> None:
    policy = MixedPrecisionPolicy(**asked)
    assert resolve(policy, float32) == expected
    assert not resolve(policy, float32, exact=True).changes


@pytest.mark.parametrize(
    ("asked", "own", "expected"),
    [
        ({}, float32, Precision(bfloat16, bfloat16, float32, float32, float32)),
        (
            {"reduce_dtype": bfloat16},
            float32,
            Precision(bfloat16, bfloat16, bfloat16, float32, float32),
        ),
        ({"reduce_dtype": "grad_dtype"}, None, Precision(*[bfloat16] * 4)),
        (
            {"reduce_dtype": "grad_dtype", "param_dtype": float32},
            None,
            Precision(bfloat16, float32, bfloat16, bfloat16),
        ),
        ({"keep_grads_in_reduce_dtype": True, "reduce_dtype": float32}, None,
         Precision(bfloat16, bfloat16, float32, float32)),
    ],
)  # fmt: skip
def test_a_parameter_may_say_in_which_dtype_its_gradient_is(
    asked: dict[str, Any], own: torch.dtype | None, expected: Precision
) -> None:
    assert resolve(MixedPrecisionPolicy(**asked), bfloat16, grad_dtype=own) == expected


def test_whether_anything_is_cast_depends_on_the_parameter() -> None:
    low = MixedPrecisionPolicy("bf16")
    assert resolve(low, float32).casts
    assert not resolve(low, bfloat16).changes
    assert resolve(MixedPrecisionPolicy("bf16", reduce_dtype=float32), bfloat16).changes


@pytest.mark.parametrize(
    "original", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn]
)
def test_what_is_no_real_number_of_two_bytes_or_more_keeps_its_dtype(original: torch.dtype) -> None:
    policy = MixedPrecisionPolicy(bfloat16, reduce_dtype=float16, keep_grads_in_reduce_dtype=True)
    assert not resolve(policy, original).changes


_RANKS = st.one_of(
    st.integers(1, 64), st.integers(0, 14).map(lambda power: 2**power), st.integers(1, 5000)
)


@SETTINGS
@given(_RANKS, st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_a_dtype_that_cannot_overflow_is_divided_once_and_after_the_sum(
    ranks: int, dtype: torch.dtype
) -> None:
    assert division_factors(dtype, ranks) == (1.0, float(ranks))


@SETTINGS
@given(_RANKS)
def test_float16_is_divided_before_the_sum_exactly_and_never_too_much(ranks: int) -> None:
    before, after = division_factors(torch.float16, ranks)
    assert before * after == ranks
    assert min(before, after) >= 1
    assert math.log2(before).is_integer(), "a power of two loses no digit"
    assert before <= math.sqrt(2 * ranks), "more would make small gradients vanish"


@pytest.mark.parametrize("ranks", [2**power for power in range(15)])
def test_float16_is_divided_by_about_the_square_root_on_both_sides(ranks: int) -> None:
    for factor in division_factors(torch.float16, ranks):
        assert math.sqrt(ranks / 2) <= factor <= math.sqrt(ranks * 2)


@pytest.mark.unsampled
@pytest.mark.parametrize("dtype", [float16, float32])
@pytest.mark.parametrize("by_hook", [False, True])
@pytest.mark.parametrize("is_mean", [False, True])
@pytest.mark.parametrize(("shards", "replicas"), [(4, 1), (1, 4), (4, 2)])
def test_sums_and_carried_means_are_scaled_to_a_mean(
    shards: int, replicas: int, is_mean: bool, by_hook: bool, dtype: torch.dtype
) -> None:
    two = shards > 1 and replicas > 1
    if is_mean and not two:
        return  # it is asked for between two stages only
    factors = division_factors(dtype, shards * replicas)
    scales = scales_of(*factors, shards, replicas, is_mean=is_mean, by_hook=by_hook)
    first, second = (shards, replicas) if two else (shards * replicas, 1)
    # every rank has the gradient 8, and the mean 3 of an earlier backward
    reduced = 8.0 if by_hook else 8.0 / scales.before * first * scales.first
    if two:
        reduced = (reduced + 3.0 * scales.carried) * second * scales.second
    assert reduced == (11.0 if two else 8.0)
    if is_mean or by_hook:
        assert scales.carried == 1.0, "the first stage makes a mean"
