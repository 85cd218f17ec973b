"""Predicted peaks of memory, groups and kernels for what the tests of every day leave out: other
worlds, hybrid, replicate.
"""

from __future__ import annotations

from typing import Any, Final

import pytest

from tests.whole.memory.test_predicted_memory import measured


@pytest.mark.parametrize("ranks", [8, 512])
def test_peaks_are_those_of_fsdp2_or_less_at_any_number_of_ranks(ranks: int) -> None:
    freeing, keeping = measured(ranks)[False], measured(ranks)[True]
    assert freeing["forward"] <= 3.0
    assert freeing["backward"] - freeing["gradients"] <= 4.0
    assert keeping["forward"] <= 8.0
    assert keeping["backward"] <= measured(ranks, "fsdp2")[True]["backward"] + 0.01, (
        "sharded gradients included"
    )


BLOCKS: Final = 6


def _calls(operations: dict[str, int], *names: str) -> dict[str, int]:
    return {
        name: count for name, count in operations.items() if any(each in name for each in names)
    }


def _collectives(found: dict[str, Any], phase: str) -> int:
    return sum(_calls(found["operations"][phase], "c10d").values())


def test_hybrid_peaks_are_those_of_fsdp2_or_less_over_one_group_for_each_dimension_and_one_for_both() -> None:  # fmt: skip  # noqa: E501
    ours, rival = measured(64, "composable-hybrid"), measured(64, "fsdp2-hybrid")
    for keep in (False, True):
        assert ours[keep]["forward"] <= rival[keep]["forward"]
        assert ours[keep]["backward"] <= rival[keep]["backward"] + 0.01
        assert ours[keep]["annotating"] <= ours[keep]["gradients"] + 0.02
        assert ours[keep]["groups"] <= rival[keep]["groups"]
        assert ours[keep]["reads"] == 0


def test_a_hybrid_unit_takes_one_gather_and_one_copy_and_on_its_way_back_two_sums_and_two_kernels() -> None:  # fmt: skip  # noqa: E501
    found = measured(64, "composable-hybrid")[True]
    assert _collectives(found, "forward") == BLOCKS
    assert _collectives(found, "backward") == 2 * BLOCKS
    assert _calls(found["operations"]["forward"], "split_with_sizes_copy", "_foreach") == {
        "aten::split_with_sizes_copy.out": BLOCKS
    }
    assert _calls(
        found["operations"]["backward"], "split_with_sizes_copy", "_chunk_cat", "_foreach"
    ) == {
        "aten::_chunk_cat.out": BLOCKS,
        "aten::_foreach_mul_.Scalar": BLOCKS,
    }


def test_replicated_gradients_take_no_memory_beside_their_buckets() -> None:
    """Each matrix is larger than a bucket: one for each, and what is small travels with a large
    one.
    """
    found = measured(64, "replicate")[False]
    assert found["annotating"] == 0
    assert found["backward"] - found["gradients"] <= 0.25, (
        "gradients of one matrix, on their way to a bucket"
    )
    assert _collectives(found, "forward") == 0
    assert _collectives(found, "backward") == 7 * BLOCKS
    assert found["groups"] == 1, "all ranks"
    assert found["reads"] == 0
