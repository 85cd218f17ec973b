"""Which dtypes a policy means for one parameter."""

from __future__ import annotations

import pytest

from composable.plan.precision import Precision, resolve


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, Precision("float32", "float32", "float32", "float32")),
        ({"param": "bfloat16"}, Precision("float32", "bfloat16", "bfloat16", "float32")),
        ({"param": "bfloat16", "reduce": "float32"}, Precision("float32", "bfloat16", "float32", "float32")),
        ({"reduce": "bfloat16"}, Precision("float32", "float32", "bfloat16", "float32")),
        ({"param": "bfloat16", "keep_reduced": True}, Precision("float32", "bfloat16", "bfloat16", "bfloat16")),
        ({"param": "float32", "reduce": "float32"}, Precision("float32", "float32", "float32", "float32")),
    ],
)
def test_gradients_are_summed_in_the_dtype_of_the_computation_unless_told_otherwise(
    asked: dict[str, str], expected: Precision
) -> None:
    assert resolve("float32", **asked) == expected  # type: ignore[arg-type]


def test_whether_anything_is_cast_is_a_question_to_the_parameter_and_not_to_the_policy() -> None:
    assert not resolve("bfloat16", "bfloat16").changes
    assert resolve("float32", "bfloat16").changes
    assert resolve("bfloat16", "bfloat16", "float32").changes


@pytest.mark.parametrize("original", ["int64", "bool", "complex64", "float8_e4m3fn"])
def test_what_is_no_real_number_of_two_bytes_or_more_keeps_its_dtype(original: str) -> None:
    assert not resolve(original, "bfloat16", "float16", keep_reduced=True).changes
