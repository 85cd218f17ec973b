"""Predicted peaks of memory at other numbers of ranks than the tests of every day ask for."""

from __future__ import annotations

import pytest

from tests.whole.test_predicted_memory import measured


@pytest.mark.parametrize("ranks", [8, 128, 512])
def test_peaks_are_those_of_fsdp2_or_less_at_any_number_of_ranks(ranks: int) -> None:
    freeing, keeping = measured(ranks)[False], measured(ranks)[True]
    assert freeing["forward"] <= 3.0
    assert freeing["backward"] - freeing["gradients"] <= 4.0
    assert keeping["forward"] <= 8.0
    assert keeping["backward"] - keeping["gradients"] <= 7.0
