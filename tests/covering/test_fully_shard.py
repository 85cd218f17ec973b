"""Programs that multiply the options of `fully_shard` train as in one process."""

from __future__ import annotations

import pytest

from tests.covering.table import Line, failure, lines
from tests.helpers.world import Pool


@pytest.mark.sampled(20)
@pytest.mark.parametrize("line", lines("fully_shard"), ids=str)
def test_it_trains_as_in_one_process(pool: Pool, line: Line) -> None:
    assert failure(pool, line) == ""
