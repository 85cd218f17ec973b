"""What a unit's passes do with its gradients, how many left them, and what of a window is left when a step is lost."""

from __future__ import annotations

import pytest

from composable.device.collectives import Steps
from composable.runtime.accumulation import Accumulation, Pass, any_window_open


def _held(passes: int) -> Accumulation:
    accumulation = Accumulation()
    for _ in range(passes):
        accumulation.holds = True
        accumulation.end_pass()
    return accumulation


def test_the_innermost_scope_decides_and_the_one_around_it_afterwards() -> None:
    accumulation = Accumulation()
    seen = [accumulation.now]
    for scope, now in (("outer", Pass.HOLDS), ("inner", Pass.REDUCES)):
        accumulation.open_scope(scope, now)
        seen.append(accumulation.now)
    for scope in ("inner", "inner", "outer"):
        accumulation.close_scope(scope)
        seen.append(accumulation.now)
    assert seen == [Pass.REDUCES, Pass.HOLDS, Pass.REDUCES, Pass.HOLDS, Pass.HOLDS, Pass.REDUCES]


def test_a_pass_counts_once_when_it_ends_and_only_if_it_left_gradients() -> None:
    accumulation = _held(2)
    accumulation.end_pass()
    assert (accumulation.passes, accumulation.in_window, any_window_open()) == (2, True, True)


@pytest.mark.parametrize(("passes", "following"), [(0, 1), (1, Steps.WINDOW)])
def test_a_window_takes_its_steps_with_it_when_it_is_reduced(passes: int, following: int) -> None:
    accumulation, steps = _held(passes), Steps()
    accumulation.end_window(steps)
    assert not accumulation.in_window
    assert steps.next_number == following


def test_a_lost_window_ends_its_steps_at_once_and_once_but_holds_until_it_is_dropped() -> None:
    accumulation, steps = _held(1), Steps()
    accumulation.lose(steps)
    assert (accumulation.passes, steps.next_number) == (1, Steps.WINDOW)
    steps.open()
    accumulation.lose(steps)
    accumulation.drop()
    assert not accumulation.in_window
    assert steps.next_number == Steps.WINDOW + 1


def test_a_step_that_is_lost_inside_a_scope_ends_the_window_though_nothing_is_held_yet() -> None:
    accumulation, steps = Accumulation(), Steps()
    accumulation.open_scope("scope", Pass.HOLDS)
    accumulation.lose(steps)
    assert steps.next_number == Steps.WINDOW


def test_a_step_that_is_lost_outside_of_scopes_ends_the_window_if_there_ever_was_one() -> None:
    """It may be the first of a window whose scopes are around backwards alone."""
    accumulation, steps = Accumulation(), Steps()
    accumulation.lose(steps)
    accumulation.drop()
    assert steps.next_number == 1
    accumulation.open_scope("scope", Pass.HOLDS)
    accumulation.close_scope("scope")
    accumulation.lose(steps)
    assert steps.next_number == Steps.WINDOW
