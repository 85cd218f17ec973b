"""Models of the battery train on the simulated accelerator as in one process, whatever is annotated; each pair of a model and a
scheme that is left out here has both of them in other pairs."""

from __future__ import annotations

from typing import Final

import pytest

from tests.helpers.battery import BATTERY
from tests.helpers.compare import assert_same_training
from tests.helpers.schemes import SCHEMES
from tests.helpers.world import Pool

_MISSING: Final = ("recurrent",)  # fused cells, which foreign devices must have kernels for
_EVERY: Final = 4  # of the pairs
_OF_TWO: Final = [name for name, scheme in SCHEMES.items() if 2 in scheme.ranks]
_OF_FOUR: Final = [name for name, scheme in SCHEMES.items() if 2 not in scheme.ranks and 4 in scheme.ranks]
_CASES: Final = [name for name in BATTERY if name not in _MISSING]
_PAIRS: Final = [
    *[(case, how, 2) for i, case in enumerate(_CASES) for j, how in enumerate(_OF_TWO) if (i + j) % _EVERY == 0],
    *[(case, how, 4) for case in _CASES[::_EVERY] for how in _OF_FOUR],
]


def _train(case: str, scheme: str) -> None:
    how = SCHEMES[scheme]
    assert_same_training(BATTERY[case], how.annotate, replicated=how.replicated, statistics=not how.recomputes)


@pytest.mark.parametrize(("case", "scheme", "ranks"), _PAIRS)
def test_training_is_that_of_one_process(pool: Pool, case: str, scheme: str, ranks: int) -> None:
    pool.run(ranks, _train, case, scheme, device="sim")
