"""Random trees of units and random programs, in which every rank leaves out what it likes, end as
in one process.

`python -m tests.whole.generated --minutes 60` runs more of them.
"""

from __future__ import annotations

import pytest

from tests.helpers.programs import plan_of
from tests.helpers.world import Pool
from tests.whole.generated import failures


@pytest.mark.parametrize("comm", ["pairs", "ordered"])
@pytest.mark.parametrize(
    ("ranks", "seeds"), [(2, range(20)), (4, range(100, 108))], ids=["2 ranks", "4 ranks"]
)
def test_programs_end_with_the_numbers_of_one_process_and_the_same_launches(
    pool: Pool, ranks: int, seeds: range, comm: str
) -> None:
    found = failures(pool, ranks, seeds, ordered=comm == "ordered")
    assert found is None, f"{plan_of(found[0], ranks)}\n{found[1]}"


def test_a_seed_makes_the_same_program_every_time() -> None:
    for seed in range(50):
        assert str(plan_of(seed, 2)) == str(plan_of(seed, 2))
    assert len({str(plan_of(seed, 2)) for seed in range(50)}) > 45
    drawn = "\n".join(str(plan_of(seed, 4)) for seed in range(300))
    for event in ("event metric", "event orders_in_keep_unsharded", "event evaluated", "resume"):
        assert event in drawn
