"""Runs generated programs for as long as wanted, and says how to repeat what it finds.

python -m tests.whole.generated --minutes 60 --seed 0
# one of them again
python -m tests.whole.generated --count 1 --seed 4711 --ranks 2 --comm ordered
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final

from tests.helpers.programs import plan_of, run_seeds
from tests.helpers.world import Pool, RanksFailed

BATCH: Final = 10
SECONDS: Final = 40.0  # until a collective gives up


def failures(
    pool: Pool, ranks: int, seeds: Sequence[int], *, ordered: bool
) -> tuple[int, str] | None:
    """The first seed that fails and why; None if all of them end with the numbers of one
    process.
    """
    chosen = list(seeds)
    try:
        by_rank = pool.run(
            ranks, run_seeds, chosen, ordered, timeout=60 * SECONDS, group_timeout=SECONDS
        )
    except RanksFailed as error:
        return _seed_in(str(error), chosen), str(error)
    for results in zip(*by_rank, strict=True):
        differing = [
            f"rank {rank}: {line}" for rank, (_, found, _) in enumerate(results) for line in found
        ]
        if differing:
            return results[0][0], "\n".join(differing)
        launched = [labels for _, _, labels in results]
        if any(labels != launched[0] for labels in launched):
            return results[0][0], _first_difference(launched)
    return None


def _seed_in(text: str, seeds: Sequence[int]) -> int:
    return next((seed for seed in seeds if f"seed {seed}:" in text), seeds[0])


def _first_difference(launched: Sequence[Sequence[str]]) -> str:
    place = next(
        (i for i, labels in enumerate(zip(*launched, strict=False)) if len(set(labels)) > 1), -1
    )
    around = [
        f"rank {rank}: {list(labels[max(0, place - 3) : place + 3])}"
        for rank, labels in enumerate(launched)
    ]
    return "\n".join([f"the ranks launch something else at place {place}", *around])


def main(write: Callable[[str], object] = sys.stdout.write) -> int:
    parser = argparse.ArgumentParser(description="Run generated programs.")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0, help="the first one; the others follow")
    parser.add_argument("--count", type=int, default=0, help="end after so many seeds")
    parser.add_argument("--ranks", type=int, default=0, help="2 and 4 by turns unless given")
    parser.add_argument("--comm", choices=["pairs", "ordered"], help="both by turns unless given")
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    pool, seed, done, failed = Pool(), options.seed, 0, 0
    batch = min(BATCH, options.count) or BATCH
    while time.monotonic() < end and not (options.count and done >= options.count):
        turn = done // batch
        ranks = options.ranks or (2, 2, 4)[turn % 3]
        comm = options.comm or ("pairs", "ordered")[turn % 2]
        found = failures(pool, ranks, range(seed, seed + batch), ordered=comm == "ordered")
        if found is not None:
            failed += 1
            write(f"\nseed {found[0]} fails: {plan_of(found[0], ranks)}\n{found[1]}\n")
            write(
                f"again: python -m tests.whole.generated --count 1 --seed {found[0]} --ranks"
                f" {ranks} --comm {comm}\n"
            )
        seed, done = seed + batch, done + batch
        write(f"\rseeds {options.seed} to {seed - 1}: {done} programs, {failed} batches failed")
    write("\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
