"""Which tests `make test` leaves to `make test-ci`: those that take long.

    python -m tests.slow < LOG    # of pytest --sample --durations=0: writes slow.txt

All cases of a test that has a case which took longer than `SECONDS`, on two idle cores.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Final

SECONDS: Final = 1.5
LIST: Final = Path(__file__).with_name("slow.txt")


@cache
def slow() -> frozenset[str]:
    """The tests, without what is in brackets."""
    return frozenset(LIST.read_text().split())


def main() -> None:
    took: defaultdict[str, float] = defaultdict(float)  # by case
    for line in sys.stdin:
        if found := re.match(r"\s*([\d.]+)s (?:call|setup|teardown)\s+(\S+?::.*\S)", line):
            took[found[2]] += float(found[1])
    names = {case.partition("[")[0] for case, seconds in took.items() if seconds > SECONDS}
    LIST.write_text("".join(f"{name}\n" for name in sorted(names)))
    left = sum(seconds for case, seconds in took.items() if case.partition("[")[0] not in names)
    print(f"{len(names)} tests are slow; the others took {left:.0f} of {sum(took.values()):.0f} s")


if __name__ == "__main__":
    main()
