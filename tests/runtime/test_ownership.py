"""Units come and go while those that live are listed."""

from __future__ import annotations

import gc

from composable.runtime import ownership
from tests.helpers.world import Pool


class Unit:
    """Ended by the collector alone, as units are: modules and units refer to each other."""

    name = ""

    def __init__(self) -> None:
        self.number, self.held = ownership.next_number(), frozenset[int]()
        self.itself = self


def _list_units_that_the_collector_ends() -> None:
    kept = Unit()
    ownership.enroll(kept)
    thresholds = gc.get_threshold()
    for often in range(1, 12):  # so that the collector runs everywhere once, also where a container for units is made
        gc.set_threshold(often)
        for count in range(3_000):
            ownership.enroll(Unit())
            if count % 3 == 0:
                for unit in ownership.units():
                    assert type(unit) is Unit
    gc.set_threshold(*thresholds)
    del unit
    gc.collect()
    assert list(ownership.units()) == [kept]


def test_the_collector_may_end_units_while_all_are_listed(pool: Pool) -> None:
    pool.run(1, _list_units_that_the_collector_ends)  # where it ends the process, the pool says so
