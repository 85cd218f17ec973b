"""Each row of the table is refused with its words. Rows of as many ranks run in one call of the
workers, and each is reported by its name.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.helpers.world import Pool, need_devices
from tests.refusals import contract, meshes, state, table, training, verbs
from tests.refusals.table import TABLE, run_on_ranks

assert all((contract, verbs, meshes, training, state))  # which fill the table
_ROWS = [pytest.param(name, marks=row.marks) for name, row in TABLE.items()]


def run(names: list[str]) -> dict[str, str]:
    return table.run(TABLE, names)


@pytest.fixture(scope="module")
def wrong(pool: Pool, request: pytest.FixtureRequest) -> Callable[[str, str], str]:
    """What is wrong with a row; runs it with the others of its number of ranks."""
    chosen = [
        item.callspec.params["name"]  # type: ignore[attr-defined]
        for item in request.session.items
        if item.fspath == request.fspath and item.get_closest_marker("skip") is None
    ]
    found: dict[int, dict[str, str]] = {}

    def wrong(name: str, device: str) -> str:
        ranks = TABLE[name].ranks
        if ranks is None:
            return run([name]).get(name, "")
        need_devices(device, ranks)
        if ranks not in found:
            names = [each for each in chosen if TABLE[each].ranks == ranks]
            found[ranks] = run_on_ranks(pool, ranks, device, run, names)
        return found[ranks].get(name, "")

    return wrong


@pytest.mark.unsampled
@pytest.mark.parametrize("name", _ROWS)
def test_it_is_refused_with_its_words(
    name: str, device: str, wrong: Callable[[str, str], str]
) -> None:
    assert not (text := wrong(name, device)), text
