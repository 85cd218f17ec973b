"""`watch` in some of the programs that `generated_watch.py` and `generated_faults.py` draw."""

from __future__ import annotations

import pytest

from tests.algorithms.generated_faults import program_of, run_faults
from tests.algorithms.generated_watch import kinds, plan_of, run_plans
from tests.helpers.world import Pool

PROGRAMS = 4  # in one call


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("seed", range(100, 112, PROGRAMS))
def test_in_legal_programs_nothing_is_found(pool: Pool, seed: int, ranks: int) -> None:
    plans = [plan_of(seed + each, ranks, repeat=False) for each in range(PROGRAMS)]
    assert not any(text for some in pool.run(ranks, run_plans, plans) for text in some)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("seed", range(100, 112, PROGRAMS))
def test_a_fault_is_named_in_its_step(pool: Pool, seed: int, ranks: int) -> None:
    programs = [program_of(seed + each, ranks) for each in range(PROGRAMS)]
    assert not any(text for some in pool.run(ranks, run_faults, programs) for text in some)


def test_legal_programs_are_drawn_from_many_parts() -> None:
    assert kinds() > 80
