"""Interrupts training at random lines for as long as wanted, and says how to repeat what it finds. Knows seeds and pools."""

from __future__ import annotations

import argparse
import sys
from collections import Counter

from tests.helpers.interrupts import plan_of, run_seeds
from tests.helpers.world import Pool, RanksFailed


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--scheme", default="")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--batch", type=int, default=1)
    options = parser.parse_args()
    pool = Pool()
    bad: Counter[str] = Counter()
    runs: Counter[str] = Counter()
    for first in range(options.seed, options.seed + options.count, options.batch):
        seeds = list(range(first, first + options.batch))
        try:
            rows = pool.run(options.ranks, run_seeds, seeds, options.seconds, options.scheme, timeout=240, group_timeout=200.0)
        except RanksFailed as error:
            print(f"FAILED {[plan_of(s, options.ranks, options.scheme) for s in seeds]}\n{str(error)[-6000:]}", flush=True)
            bad["failed"] += 1
            continue
        for per_rank in zip(*rows, strict=True):
            plan = plan_of(per_rank[0].seed, options.ranks, options.scheme)
            runs[plan.scheme] += 1
            if any(seen.wrong for seen in per_rank):
                bad[plan.scheme] += 1
                print(f"\n--- {plan}")
                for rank, seen in enumerate(per_rank):
                    print(f"  rank {rank}: at {seen.where}; slowest {seen.slowest:.1f} s")
                    for text in seen.wrong[:4]:
                        print(f"     WRONG {text}")
                    for step, text in seen.errors.items():
                        print(f"     step {step}: {text.splitlines()[0][:260]}")
                sys.stdout.flush()
    print(f"runs {dict(runs)}\nbad {dict(bad)}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
