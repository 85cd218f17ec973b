"""By how much gradients are divided: once and after the sum, or in two steps where the sum could overflow."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composable.engine.grad_bucket import division_factors
from tests.engine.layouts import SETTINGS

_RANKS = st.one_of(st.integers(1, 64), st.integers(0, 14).map(lambda power: 2**power), st.integers(1, 5000))


@SETTINGS
@given(_RANKS, st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_a_dtype_that_cannot_overflow_is_divided_once_and_after_the_sum(ranks: int, dtype: torch.dtype) -> None:
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
