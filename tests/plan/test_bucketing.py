"""Which gradients travel together: all of them, in order, within the cap, never two kinds in one message."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composable.plan.bucketing import buckets_in_order, fill_buckets

_SETTINGS = settings(max_examples=60, deadline=None)
_ITEMS = st.lists(st.tuples(st.integers(0, 20), st.sampled_from(["float32", "float16"])), max_size=12)
_CAPS = st.tuples(st.integers(1, 25), st.one_of(st.none(), st.integers(1, 25)))


def _filled(items: list[tuple[int, str]], cap: int, first_cap: int | None) -> list[list[int]]:
    return fill_buckets([size for size, _ in items], [kind for _, kind in items], cap=cap, first_cap=first_cap)


@_SETTINGS
@given(_ITEMS, _CAPS)
def test_every_gradient_is_in_one_bucket_with_its_kind_in_the_order_in_which_it_became_ready(
    items: list[tuple[int, str]], caps: tuple[int, int | None]
) -> None:
    buckets = _filled(items, *caps)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(items)))
    assert all(bucket for bucket in buckets)
    assert all(bucket == sorted(bucket) for bucket in buckets)
    assert [bucket[0] for bucket in buckets] == sorted(bucket[0] for bucket in buckets)
    assert all(len({items[index][1] for index in bucket}) == 1 for bucket in buckets)


@_SETTINGS
@given(_ITEMS, _CAPS)
def test_a_bucket_holds_no_more_than_its_cap_unless_one_gradient_alone_is_larger(
    items: list[tuple[int, str]], caps: tuple[int, int | None]
) -> None:
    cap, first_cap = caps
    for position, bucket in enumerate(_filled(items, *caps)):
        limit = first_cap if first_cap is not None and position == 0 else cap
        assert len(bucket) == 1 or sum(items[index][0] for index in bucket) <= limit


@_SETTINGS
@given(_ITEMS, _CAPS)
def test_no_bucket_ends_while_the_next_gradient_of_its_kind_would_fit(
    items: list[tuple[int, str]], caps: tuple[int, int | None]
) -> None:
    cap, first_cap = caps
    buckets = _filled(items, *caps)
    for position, bucket in enumerate(buckets):
        limit = first_cap if first_cap is not None and position == 0 else cap
        follower = next((other for other in buckets[position + 1 :] if items[other[0]][1] == items[bucket[0]][1]), None)
        if follower is not None:
            assert sum(items[index][0] for index in bucket) + items[follower[0]][0] > limit


def test_a_small_first_bucket_lets_communication_start_early() -> None:
    assert fill_buckets([4, 4, 4, 4], ["f"] * 4, cap=8, first_cap=4) == [[0], [1, 2], [3]]


def test_a_large_gradient_waits_for_no_others_and_stands_where_it_is_complete() -> None:
    assert buckets_in_order([1, 4, 1, 4], ["f"] * 4, cap=8, alone_bytes=4) == [[1], [0, 2], [3]]
    assert buckets_in_order([1, 4, 1, 4], ["f"] * 4, cap=8, alone_bytes=5) == [[0, 1, 2], [3]]


def test_a_kind_in_between_does_not_end_a_bucket() -> None:
    assert fill_buckets([4, 1, 4], ["f", "h", "f"], cap=8) == [[0, 2], [1]]


def test_nothing_gives_no_bucket() -> None:
    assert fill_buckets([], [], cap=8) == []


def test_a_cap_that_holds_nothing_is_refused() -> None:
    with pytest.raises(ValueError) as refused:
        fill_buckets([1], ["f"], cap=0)
    assert str(refused.value) == "cap must be at least 1 byte, got 0"


def test_sizes_without_kinds_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        fill_buckets([1, 2], ["f"], cap=8)
