"""Features that are right alone are right together: every two values of two axes meet, on 2 and 4
ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.helpers.compositions import REFUSED, combinations_of, pairs_of, refusal, run
from tests.helpers.world import Pool, need_devices

_PARTS = 4  # of all combinations, so that a run shows progress and a failure repeats quickly
_DRAWN = {ranks: combinations_of(ranks) for ranks in (2, 4)}
_TASKS = [
    pytest.param(
        ranks,
        part,
        id=(
            f"{ranks} ranks, {len(_DRAWN[ranks][part::_PARTS])} of {len(_DRAWN[ranks])}"
            " combinations"
        ),
    )
    for ranks in (2, 4)
    for part in range(_PARTS)
]


@pytest.mark.parametrize(("ranks", "part"), _TASKS)
def test_combinations_compute_what_they_say(
    pool: Pool, ranks: int, part: int, device: str, record_property: Callable[[str, object], None]
) -> None:
    need_devices(device, ranks)
    for results in pool.run(ranks, run, _DRAWN[ranks][part::_PARTS], device=device):
        assert [(combination, found) for combination, found in results if found] == []
    record_property(
        f"combinations of features computed what they say, on {ranks} ranks",
        len(_DRAWN[ranks][part::_PARTS]),
    )


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_two_values_that_can_meet_do(
    ranks: int, record_property: Callable[[str, object], None]
) -> None:
    met = {pair for combination in _DRAWN[ranks] for pair in combination.pairs}
    assert [pair for pair in pairs_of(ranks) if pair not in met] == []
    record_property(f"pairs of features met in them, on {ranks} ranks", len(pairs_of(ranks)))


@pytest.mark.parametrize("pair", REFUSED, ids=" with ".join)
def test_what_cannot_meet_is_refused_by_name(pool: Pool, pair: tuple[str, str]) -> None:
    pool.run(4 if "verbs=experts" in pair else 2, refusal, pair)
