"""Random programs in which ranks and steps take different branches inside of units end as in one
process.

`python -m tests.whole.generated_branches --minutes 60` runs more of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final
from unittest import mock

import pytest

from tests.helpers.branches import FEATURES, Plan, Unit, plan_of
from tests.helpers.branches_run import differences
from tests.helpers.smaller import _smaller, smallest
from tests.helpers.world import Pool
from tests.whole.generated_branches import failure

WITHOUT: Final = ()
SEEDS: Final = {1: range(8), 2: range(100, 132), 3: range(200, 206), 4: range(300, 306)}


@pytest.mark.parametrize("ranks", SEEDS)
def test_programs_with_branches_end_as_in_one_process(pool: Pool, ranks: int) -> None:
    plans = [plan_of(seed, ranks, WITHOUT) for seed in SEEDS[ranks]]
    found = failure(pool, plans)
    assert found is None, f"{plans[found[0]]}\n{found[1]}"


def _compared_with_sums(plan: Plan) -> list[str]:
    with mock.patch.object(Unit, "factor", return_value=1.0):
        return differences(plan)[0]


def test_a_program_that_ends_otherwise_fails_and_says_where(pool: Pool) -> None:
    plan = plan_of(0, 2, FEATURES)
    assert failure(pool, [plan]) is None
    for found in pool.run(2, _compared_with_sums, plan):
        assert found[0].startswith("op 1, backward: gradient of a.first.weight is off by ")


def test_a_seed_makes_the_same_program_every_time() -> None:
    for seed in range(50):
        assert plan_of(seed, 2) == plan_of(seed, 2)
    assert len({str(plan_of(seed, 2)) for seed in range(50)}) == 50
    drawn = "\n".join(str(plan_of(seed, 4)) for seed in range(200))
    for feature in (
        "freeze",
        "copy",
        "(all)",
        "(replicate)",
        "checkpoint",
        "hybrid",
        "sparse",
        "pair",
        "retain",
        "roots are one unit",
        "event 3 metric",
        "_in_keep_unsharded",
        "resume",
        "of rows",
        "of bytes",
        "tensor-parallel",
    ):
        assert feature in drawn


def test_events_leave_the_rest_of_a_program_as_it_is() -> None:
    for seed in range(100):
        plan, without = plan_of(seed, 2), plan_of(seed, 2, ["events", "scopes"])
        ops = tuple(op for op in plan.ops if op.kind not in ("event", "resume"))
        assert replace(plan, ops=ops) == without
        assert "event" not in str(without)


def test_a_program_is_made_as_small_as_what_fails_in_it() -> None:
    def fails(plan: Plan) -> bool:
        return "freeze p0" in str(plan) and "p0: outputs" in str(plan)

    small = smallest(next(plan for seed in range(500) if fails(plan := plan_of(seed, 2))), fails)
    assert [op.kind for op in small.ops] == ["freeze"]
    assert [part.kind for part in small.parts] == ["outputs"]


def test_what_one_rank_does_is_made_smaller_too() -> None:
    def fails(plan: Plan) -> bool:
        kinds = [op.kind for op in plan.ops]
        return "event" in kinds and "resume" in kinds[kinds.index("event") :] and "step" in kinds

    small = smallest(next(plan for seed in range(500) if fails(plan := plan_of(seed, 4))), fails)
    assert sorted(op.kind for op in small.ops) == ["event", "resume", "step"]
    assert not any(part.form for part in small.parts)
    assert small.tensor == 1


def test_events_that_would_come_into_a_step_go_when_a_program_is_made_smaller() -> None:
    def fails(plan: Plan) -> bool:
        return [op.kind for op in plan.ops].count("event") > 1

    for seed in range(200):
        plan = plan_of(seed, 2)
        for smaller in _smaller(plan) if fails(plan) else ():
            pending: set[int] = set()
            for op in smaller.ops:
                assert op.kind != "event" or not pending
                pending |= set(op.numbers) if op.kind == "forward" else set()
                pending -= set(op.numbers) if op.kind == "backward" and not op.retain else set()
