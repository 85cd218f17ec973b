"""Some generated programs of optimizers of whole matrices end as one process does;
`python -m tests.optim.generated_optimizers --minutes 60` runs more of them.
"""

from __future__ import annotations

import pytest

from tests.helpers.world import Pool
from tests.optim.generated_optimizers import program_of, run_program


@pytest.mark.filterwarnings("ignore")  # what torch's checkpoints warn of
@pytest.mark.sampled(15)
@pytest.mark.parametrize("seed", range(30))
def test_generated_optimizers_step_are_copied_and_resume_as_in_one_process(
    pool: Pool, seed: int
) -> None:
    run_program(pool, program_of(seed))
