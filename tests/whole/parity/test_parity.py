"""Every model of the battery, annotated in every way, trains as it does in one process; knows only
the public verbs.
"""

from __future__ import annotations

import pytest

from tests.helpers.battery import BATTERY
from tests.helpers.compare import assert_same_training
from tests.helpers.schemes import SCHEMES
from tests.helpers.world import Pool, need_devices

# Largest worlds last, and all cases of a world together: process groups are formed once per world.
_WORLDS = [
    (ranks, name)
    for ranks in (1, 2, 3, 4)
    for name, scheme in SCHEMES.items()
    if ranks in scheme.ranks
]


def _train(case: str, scheme: str) -> None:
    how = SCHEMES[scheme]
    assert_same_training(BATTERY[case], how.annotate, replicated=how.replicated)


@pytest.mark.parametrize(("ranks", "scheme"), _WORLDS)
@pytest.mark.parametrize("case", BATTERY)
def test_training_is_that_of_one_process(
    pool: Pool, case: str, scheme: str, ranks: int, device: str
) -> None:
    need_devices(device, ranks)
    pool.run(ranks, _train, case, scheme, device=device)
