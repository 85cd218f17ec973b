"""Some models of the battery train on the simulated accelerator as in one process; all schemes of
two ranks are met.
"""

from __future__ import annotations

from typing import Final

import pytest

from tests.helpers.battery import BATTERY
from tests.helpers.compare import assert_same_training
from tests.helpers.schemes import SCHEMES
from tests.helpers.world import Pool

# others have not all been seen to run here
_MODELS: Final = ("transformer", "attention", "mixture")
_EVERY: Final = 4  # of the pairs
_OF_TWO: Final = [name for name, scheme in SCHEMES.items() if 2 in scheme.ranks]
_CASES: Final = [name for name in BATTERY if name.startswith(_MODELS)]
_PAIRS: Final = [
    (case, how)
    for i, case in enumerate(_CASES)
    for j, how in enumerate(_OF_TWO)
    if (i + j) % _EVERY == 0
]


def _train(case: str, scheme: str) -> None:
    how = SCHEMES[scheme]
    assert_same_training(BATTERY[case], how.annotate, replicated=how.replicated)


@pytest.mark.parametrize(("case", "scheme"), _PAIRS)
def test_training_is_that_of_one_process(pool: Pool, case: str, scheme: str) -> None:
    pool.run(2, _train, case, scheme, device="sim")
