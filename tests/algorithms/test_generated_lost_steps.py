"""Steps that ranks lose at drawn places are lost on all ranks, and the next ones give the bits of a
run without them.

`python -m tests.algorithms.generated_lost_steps --minutes 60` runs more of them.
"""

from __future__ import annotations

from typing import Final

import pytest

from tests.algorithms.generated_lost_steps import failure, plan_of
from tests.helpers.world import Pool

SEEDS: Final = 4


@pytest.mark.parametrize(
    "ranks", [2, *(pytest.param(ranks, marks=pytest.mark.in_full_only) for ranks in (3, 4))]
)
def test_drawn_steps_are_lost_on_all_ranks(pool: Pool, ranks: int) -> None:
    plans = [plan for seed in range(SEEDS) if (plan := plan_of(seed)).world == ranks]
    found = failure(pool, plans)
    assert found is None, f"{plans[found[0]]}\n{found[1]}"


def test_a_seed_draws_the_same_plan_every_time() -> None:
    assert [plan_of(seed) for seed in range(50)] == [plan_of(seed) for seed in range(50)]
