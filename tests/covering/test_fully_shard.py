"""Programs that multiply the options of `fully_shard` train as in one process."""

from __future__ import annotations

import pytest

from tests.covering.table import Line, cases, failure
from tests.helpers.world import Pool


@pytest.mark.sampled(20)
@pytest.mark.parametrize("line", cases("fully_shard"))
def test_it_trains_as_in_one_process(pool: Pool, line: Line) -> None:
    assert failure(pool, line) == ""
