"""A few of the generated folders; `python -m tests.state.generated_folders` runs more."""

from __future__ import annotations

import pytest

from tests.helpers.world import Pool
from tests.state.generated_folders import run_seeds


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("seed", [0, 20, 40])
def test_generated_folders_are_read_as_in_one_process(pool: Pool, seed: int, ranks: int) -> None:
    assert pool.run(ranks, run_seeds, [*range(seed, seed + 20)]) == [[]] * ranks
