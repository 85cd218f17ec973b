"""By how much gradients are divided: by the number of ranks, in two steps where one could overflow."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composable.plan.scaling import division_factors, may_scale_inputs, scaling_of

_RANKS = st.one_of(st.integers(1, 64), st.integers(0, 14).map(lambda power: 2**power), st.integers(1, 5000))


@settings(max_examples=60, deadline=None)
@given(_RANKS, st.sampled_from(["float16", "float32", "float64", "bfloat16"]))
def test_both_divisions_together_give_the_mean(ranks: int, dtype: str) -> None:
    before, after = division_factors(dtype, ranks)
    assert before * after == ranks
    assert before >= 1
    assert after >= 1


@settings(max_examples=60, deadline=None)
@given(_RANKS, st.sampled_from(["float32", "float64", "bfloat16"]))
def test_a_dtype_that_cannot_overflow_is_divided_once_and_after_the_sum(ranks: int, dtype: str) -> None:
    assert division_factors(dtype, ranks) == (1.0, float(ranks))


@pytest.mark.parametrize("ranks", [2**power for power in range(15)])
def test_float16_is_divided_by_about_the_square_root_before_the_sum(ranks: int) -> None:
    before, after = division_factors("float16", ranks)
    assert math.sqrt(ranks / 2) <= before <= math.sqrt(ranks * 2)
    assert math.sqrt(ranks / 2) <= after <= math.sqrt(ranks * 2)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5000))
def test_dividing_float16_before_the_sum_is_exact_and_never_too_much(ranks: int) -> None:
    before, _ = division_factors("float16", ranks)
    assert math.log2(before).is_integer(), "a power of two loses no digit"
    assert before <= math.sqrt(2 * ranks), "more would make small gradients vanish"


@settings(max_examples=60, deadline=None)
@given(_RANKS)
def test_what_comes_after_the_sum_of_float16_stays_there(ranks: int) -> None:
    _, after = division_factors("float16", ranks)
    assert not may_scale_inputs("float16", 1.0 / after)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "complex64"])
def test_wide_dtypes_may_be_scaled_before_the_sum_by_powers_of_two(dtype: str) -> None:
    assert [ranks for ranks in range(1, 10) if may_scale_inputs(dtype, 1.0 / ranks)] == [1, 2, 4, 8]


@settings(max_examples=60, deadline=None)
@given(_RANKS, st.sampled_from(["float32", "float64", "bfloat16"]), st.booleans())
def test_gradients_are_divided_once_where_a_pass_does_it_at_no_price(ranks: int, dtype: str, on_the_way_in: bool) -> None:
    scaling = scaling_of(dtype, ranks, on_the_way_in=on_the_way_in)
    assert (scaling.before, scaling.after) == ((ranks, 1.0) if on_the_way_in else (1.0, ranks))


@settings(max_examples=60, deadline=None)
@given(_RANKS, st.booleans())
def test_float16_is_divided_before_and_after_whatever_way_it_goes(ranks: int, on_the_way_in: bool) -> None:
    scaling = scaling_of("float16", ranks, on_the_way_in=on_the_way_in)
    assert (scaling.before, scaling.after) == division_factors("float16", ranks)
    assert scaling.input_factor is None


@pytest.mark.parametrize("on_the_way_in", [False, True])
def test_terms_are_scaled_as_they_are_read_where_that_rounds_alike_and_somebody_reads_them(on_the_way_in: bool) -> None:
    found = [scaling_of("float32", ranks, on_the_way_in=on_the_way_in).input_factor for ranks in (2, 3, 4)]
    assert found == [0.5, None, 0.25]
    assert scaling_of("float32", 4, on_the_way_in=on_the_way_in, reads_inputs=False).input_factor is None
