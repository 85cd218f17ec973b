"""Which dtypes a mixed precision policy means for one parameter."""

from __future__ import annotations

import pytest
import torch
from torch import bfloat16, float16, float32

from composable import MixedPrecisionPolicy
from composable.engine.precision import Precision, resolve


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, Precision(float32, float32, float32, float32)),
        ({"param_dtype": bfloat16}, Precision(float32, bfloat16, bfloat16, float32)),
        ({"param_dtype": bfloat16, "reduce_dtype": float32}, Precision(float32, bfloat16, float32, float32)),
        ({"reduce_dtype": bfloat16}, Precision(float32, float32, bfloat16, float32)),
        ({"param_dtype": bfloat16, "keep_grads_in_reduce_dtype": True}, Precision(float32, bfloat16, bfloat16, bfloat16)),
    ],
)
def test_gradients_are_summed_in_the_dtype_of_the_computation_unless_told_otherwise(
    asked: dict[str, torch.dtype], expected: Precision
) -> None:
    policy = MixedPrecisionPolicy(**asked)
    assert resolve(policy, float32) == expected
    assert not resolve(policy, float32, exact=True).changes


def test_whether_anything_is_cast_depends_on_the_parameter() -> None:
    low = MixedPrecisionPolicy("bf16")
    assert resolve(low, float32).casts
    assert not resolve(low, bfloat16).changes
    assert resolve(MixedPrecisionPolicy("bf16", reduce_dtype=float32), bfloat16).changes


@pytest.mark.parametrize("original", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_what_is_no_real_number_of_two_bytes_or_more_keeps_its_dtype(original: torch.dtype) -> None:
    policy = MixedPrecisionPolicy(bfloat16, reduce_dtype=float16, keep_grads_in_reduce_dtype=True)
    assert not resolve(policy, original).changes
