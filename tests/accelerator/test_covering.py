"""Programs that multiply the options of `fully_shard` with parameters that rest on the host train
as in one process, or are refused by name.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.covering.table import Line, cases, failure, refusal, refusals
from tests.helpers.world import Pool


@pytest.mark.sampled(12)
@pytest.mark.parametrize("line", cases("offloaded"))
def test_it_trains_as_in_one_process(pool: Pool, line: Line) -> None:
    assert failure(pool, line) == ""


@pytest.mark.parametrize(("line", "expected"), refusals("offloaded"), ids=str)
def test_what_is_refused_says_why_on_all_ranks_and_changes_nothing(
    pool: Pool, line: Line, expected: Any
) -> None:
    assert expected.words in refusal(pool, line, late=bool(expected.late))
