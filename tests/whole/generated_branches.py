"""Runs generated programs with branches for as long as wanted; says what kinds of failures there
are, and how to repeat them.

    python -m tests.whole.generated_branches --minutes 60 --seed 0
    python -m tests.whole.generated_branches --count 200 --ranks 2 --without copies sparse
    # one of them again, made smaller
    python -m tests.whole.generated_branches --count 1 --seed 4711 --ranks 2 --smaller
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final

from tests.helpers.branches import FEATURES, Plan, plan_of
from tests.helpers.branches_run import PATIENCE, run_plans
from tests.helpers.smaller import smallest
from tests.helpers.world import Pool, RanksFailed, RanksLaunchedApart

BATCH: Final = 10


def failure(pool: Pool, plans: Sequence[Plan], *, annotated: bool = True) -> tuple[int, str] | None:
    """The first of the plans that fails, by its place, and why; None if all of them end as in one
    process.
    """
    try:
        by_rank = pool.run(
            plans[0].world,
            run_plans,
            list(plans),
            annotated,
            timeout=20 * PATIENCE,
            group_timeout=PATIENCE,
        )
    except RanksLaunchedApart as error:
        pool.stop()
        # a plan that failed on one rank alone says more
        return _first_failure(pool, error.returned) or (0, str(error))
    except RanksFailed as error:
        pool.stop()
        text = str(error)
        return next((index for index, plan in enumerate(plans) if str(plan) in text), 0), text
    return _first_failure(pool, by_rank)


def _first_failure(
    pool: Pool, by_rank: Sequence[Sequence[tuple[list[str], list[str]]]]
) -> tuple[int, str] | None:
    for index in range(max(map(len, by_rank))):
        results = [
            results[index] if index < len(results) else ([], ["nothing"]) for results in by_rank
        ]
        lines: dict[str, list[int]] = {}
        for rank, (found, _) in enumerate(results):
            for line in found:
                lines.setdefault(line, []).append(rank)
        if lines:
            pool.stop()  # ranks may still wait for others, or have left something
            # What follows from another rank's error comes last.
            said = sorted(lines, key=lambda line: "CommunicationError" in line or "/gloo/" in line)
            return index, "\n".join(
                f"rank {', '.join(map(str, lines[line]))}: {line}" for line in said
            )
        launched = [labels for _, labels in results]
        if any(labels != launched[0] for labels in launched):
            pool.stop()
            return index, f"the ranks launch something else: {launched}"
    return None


def kind_of(text: str) -> str:
    """What failures of one kind have in common."""
    lines = text.splitlines()
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Warning): ", line)]
    line = next((line for line in lines if line.startswith("rank")), (errors or lines)[0])
    line = re.sub(r"^rank [\d, ]+: (op \d+, )?", "", line)
    return re.sub(r"'[^']*'|(?<!line )\b\d[\d.e+-]*|\b[abc]\.[\w.]+", "#", line)[:160]


def _write(text: str) -> None:
    print(text, end="", flush=True)


def main(write: Callable[[str], object] = _write) -> int:
    parser = argparse.ArgumentParser(description="Run generated programs with branches.")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0, help="the first one; the others follow")
    parser.add_argument("--count", type=int, default=0, help="end after so many seeds")
    parser.add_argument(
        "--ranks", type=int, default=0, help="of all kinds; 1 to 4 by turns unless given"
    )
    parser.add_argument(
        "--without", nargs="*", default=[], choices=FEATURES, help="features to draw plans without"
    )
    parser.add_argument(
        "--plain",
        action="store_true",
        help="run plans in one process twice, to see that they are legal",
    )
    parser.add_argument(
        "--smaller", action="store_true", help="make the first plan of each kind of failure smaller"
    )
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    pool, done = Pool(), 0
    kinds: dict[str, list[str]] = {}
    while time.monotonic() < end and not (options.count and done >= options.count):
        ranks = options.ranks or (2, 2, 4, 2, 3, 1)[done // BATCH % 6]
        count = min(BATCH, options.count - done) if options.count else BATCH
        plans = [
            plan_of(options.seed + done + each, ranks, options.without) for each in range(count)
        ]
        found = failure(pool, plans, annotated=not options.plain)
        if found is not None:
            plan, text = plans[found[0]], found[1]
            kind = kind_of(text)
            if kind not in kinds:
                if options.smaller:
                    plan, text = _made_smaller(pool, plan, text)
                write(f"\r{' ' * 70}\r--- {kind}\n{plan}\n{text}\n\n")
            kinds.setdefault(kind, []).append(f"{plan.seed} --ranks {ranks}")
            done += found[0] + 1
        else:
            done += count
        write(
            f"\r{_bar(options, done, end)} {done} programs, {sum(map(len, kinds.values()))} failed"
        )
    write("\n")
    for kind, seeds in kinds.items():
        write(
            f"{len(seeds)} x {kind}\n    again: python -m tests.whole.generated_branches --count 1"
            f" --seed {seeds[0]}"
        )
        write(f" --without {' '.join(options.without)}\n" if options.without else "\n")
    pool.stop()
    return 1 if kinds else 0


def _made_smaller(pool: Pool, plan: Plan, text: str) -> tuple[Plan, str]:
    kind = kind_of(text)

    def fails(smaller: Plan) -> bool:
        nonlocal text
        found = failure(pool, [smaller])
        if found is None or kind_of(found[1]) != kind:
            return False
        text = found[1]
        return True

    return smallest(plan, fails), text


def _bar(options: argparse.Namespace, done: int, end: float) -> str:
    part = (
        done / options.count
        if options.count
        else 1 - (end - time.monotonic()) / (60 * options.minutes)
    )
    filled = int(20 * min(max(part, 0.0), 1.0))
    return f"[{'#' * filled}{'.' * (20 - filled)}]"


if __name__ == "__main__":
    sys.exit(main())
