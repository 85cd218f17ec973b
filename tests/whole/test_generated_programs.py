"""Random trees of units and random programs, in which every rank leaves out what it likes, end as in one process.

`python -m tests.whole.generated --minutes 60` runs more of them.
"""

from __future__ import annotations

import pytest

from tests.helpers.illegal_plans import illegal_plan_of
from tests.helpers.programs import plan_of
from tests.helpers.world import Pool
from tests.whole.generated import failures, illegal_failures


@pytest.mark.parametrize("communicator", ["tags", "ordered"])
@pytest.mark.parametrize(("ranks", "seeds"), [(2, range(20)), (4, range(100, 108))], ids=["2 ranks", "4 ranks"])
def test_programs_end_with_the_numbers_of_one_process_and_the_same_launches(
    pool: Pool, ranks: int, seeds: range, communicator: str
) -> None:
    found = failures(pool, ranks, seeds, ordered=communicator == "ordered")
    assert found is None, f"{plan_of(found[0], ranks)}\n{found[1]}"


@pytest.mark.host
@pytest.mark.parametrize(("ranks", "seeds"), [(2, range(30)), (4, range(100, 110))], ids=["2 ranks", "4 ranks"])
def test_programs_in_which_one_rank_does_what_it_may_not_end_right_or_with_errors_that_name_a_unit(
    pool: Pool, ranks: int, seeds: range
) -> None:
    found = illegal_failures(pool, ranks, seeds)
    assert found is None, f"{illegal_plan_of(found[0], ranks)}\n{found[1]}"


def test_a_seed_makes_the_same_program_every_time() -> None:
    for seed in range(50):
        assert str(plan_of(seed, 2)) == str(plan_of(seed, 2))
        assert str(illegal_plan_of(seed, 2)) == str(illegal_plan_of(seed, 2))
    assert len({str(plan_of(seed, 2)) for seed in range(50)}) > 45
