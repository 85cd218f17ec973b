"""The check against the un-annotated model can fail, and says how."""

from __future__ import annotations

import math

import pytest
from expecttest import assert_expected_inline

from examples.demo.options import DemoError
from examples.demo.train import check_parity


def test_losses_that_differ_by_rounding_pass() -> None:
    check_parity(0, 5.0004, 5.0)
    check_parity(0, 4.9996, 5.0)


def test_losses_that_differ_by_more_are_refused_with_both_values() -> None:
    with pytest.raises(DemoError) as refusal:
        check_parity(2, 5.001, 5.0)
    assert_expected_inline(
        str(refusal.value),
        """step 3: the annotated model's loss is 5.0010000, the un-annotated model's 5.0000000; they differ by 2.0e-04 of it, and 1e-04 is allowed""",  # noqa: E501
    )


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_refused(loss: float) -> None:
    with pytest.raises(DemoError, match=r"step 1: the annotated model's loss is (nan|inf)"):
        check_parity(0, loss, 5.0)
