"""Who runs next, as a guess from what ran before: right when nothing changes, harmless when something does."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composable.plan.schedule import BackwardOrder, ForwardOrder

_SETTINGS = settings(max_examples=60, deadline=None)
_RUNS = st.lists(st.integers(0, 4), max_size=12)


def _after(*forwards: list[int]) -> ForwardOrder:
    order = ForwardOrder()
    for forward in forwards:
        for unit in forward:
            order.record(unit)
        order.complete()
    return order


@_SETTINGS
@given(_RUNS, st.integers(1, 3))
def test_a_forward_in_the_recorded_order_is_foretold_exactly_even_if_units_run_several_times(
    run: list[int], depth: int
) -> None:
    order = _after(run)
    for position, unit in enumerate(run):
        order.record(unit)
        assert order.next_units(depth) == tuple(run[position + 1 : position + 1 + depth])
    assert order.complete() is False


def test_nothing_is_foretold_before_the_first_forward_is_complete() -> None:
    order = ForwardOrder()
    for unit in (0, 1, 2):
        order.record(unit)
        assert order.next_units(2) == ()
    assert order.current == (0, 1, 2)
    assert order.complete() is True
    assert order.recorded == (0, 1, 2)
    assert order.current == ()


@_SETTINGS
@given(_RUNS, _RUNS)
def test_the_last_complete_forward_is_the_record_and_a_changed_one_is_reported(before: list[int], now: list[int]) -> None:
    order = _after(before)
    for unit in now:
        order.record(unit)
    assert order.complete() is (before != now)
    assert order.recorded == tuple(now)


@_SETTINGS
@given(_RUNS, _RUNS, st.integers(0, 3))
def test_a_guess_is_always_a_piece_of_the_record_and_never_longer_than_asked(
    before: list[int], now: list[int], depth: int
) -> None:
    order = _after(before)
    for unit in now:
        order.record(unit)
        guess = order.next_units(depth)
        assert len(guess) <= depth
        assert any(tuple(before[i : i + len(guess)]) == guess for i in range(len(before) + 1))


def test_a_skipped_unit_does_not_disturb_the_guess_for_those_after_it() -> None:
    order = _after([0, 1, 2, 3])
    order.record(0)
    order.record(2)
    assert order.next_units(1) == (3,)


@pytest.mark.parametrize("stranger", [9, 0])
def test_a_unit_out_of_turn_leaves_the_guess_where_it_was(stranger: int) -> None:
    order = _after([0, 1, 2, 3])
    for unit in (0, 1, stranger):
        order.record(unit)
    assert order.next_units(2) == (2, 3)


def test_a_forward_that_failed_leaves_the_record_as_it_was() -> None:
    order = _after([0, 1, 2])
    order.record(0)
    order.record(2)
    order.drop()
    assert order.recorded == (0, 1, 2)
    assert order.current == ()
    assert order.next_units(1) == (0,)


# --- backward ---------------------------------------------------------------------------------------------------------


@_SETTINGS
@given(_RUNS, st.integers(0, 3))
def test_backward_goes_through_finished_units_from_the_newest_to_the_oldest(run: list[int], depth: int) -> None:
    order = BackwardOrder()
    for unit in run:
        order.forward_finished(unit)
    expected = run[::-1]
    assert order.next_units(depth) == tuple(expected[:depth])
    for position, unit in enumerate(expected):
        order.enter(unit)
        assert order.next_units(depth) == tuple(expected[position + 1 : position + 1 + depth])


def test_units_passed_over_in_backward_are_not_expected_any_more() -> None:
    order = BackwardOrder()
    for unit in (0, 1, 2, 3):
        order.forward_finished(unit)
    order.enter(1)
    assert order.next_units(3) == (0,)


def test_a_unit_that_did_not_finish_its_forward_changes_nothing() -> None:
    order = BackwardOrder()
    for unit in (0, 1):
        order.forward_finished(unit)
    order.enter(7)
    assert order.next_units(2) == (1, 0)


def test_a_unit_used_twice_is_expected_once_more_after_its_newest_use() -> None:
    order = BackwardOrder()
    for unit in (5, 1, 5):
        order.forward_finished(unit)
    order.enter(5)
    assert order.next_units(3) == (1, 5)


def test_a_cleared_order_expects_nobody() -> None:
    order = BackwardOrder()
    order.forward_finished(1)
    order.clear()
    assert order.next_units(1) == ()
