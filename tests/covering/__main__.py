"""Runs all rows, or some, and says what kinds of failures there are.

python -m tests.covering                        # all rows that run on hosts
python -m tests.covering --array replicate --row 17
python -m tests.covering --device sim           # those that offload, on a simulated accelerator
python -m tests.covering --with mesh=hybrid "event=none"
python -m tests.covering --refused
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

from tests.accelerator.build import build
from tests.covering.cover import is_excluded
from tests.covering.options import ARRAYS
from tests.covering.table import (
    Line,
    defaults,
    exclusions,
    failure,
    lines,
    refusal,
    refusals,
)
from tests.helpers.world import Pool, RanksFailed

# Then workers begin anew: some programs leave meshes behind, whose groups keep threads.
ROWS_PER_POOL: Final = 40


def kind_of(text: str) -> str:
    """What failures of one kind have in common."""
    said = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in said if re.match(r"[\w.]*(Error|Failed|Exception|Warning)\b", line)]
    hung = [line for line in said if "hung; it stands at" in line]
    first = (errors or hung or [line for line in said if line.startswith("rank")] or said)[0]
    return re.sub(r"'[^']*'|\b\d[\d.e+-]*", "#", re.sub(r"^rank \d+: ", "", first))[:150]


def chosen(options: argparse.Namespace) -> list[Line]:
    wanted = dict(each.split("=", 1) for each in options.having)
    names = options.array or [n for n, array in ARRAYS.items() if array.device == options.device]
    found = [line for name in names for line in lines(name)]
    if options.row:
        return [line for line in found if line.number in options.row]
    return [
        line
        for line in found[:: options.every]
        if all(line.row.get(name) == value for name, value in wanted.items())
        and not any(line.row.get(n) == v for n, v in (e.split("=", 1) for e in options.without))
    ]


def smaller(pool: Pool, line: Line, text: str) -> tuple[Line, str]:
    """The same failure with as many options as possible at their first values."""
    kind, usual = kind_of(text), defaults(ARRAYS[line.array])
    for option in line.row:
        if line.row[option] == usual[option]:
            continue
        fewer = replace(line, row={**line.row, option: usual[option]})
        if is_excluded(fewer.row, exclusions(line.array)):
            continue
        found = tried(pool, fewer)
        if found and kind_of(found) == kind:
            line, text = fewer, found
    return line, text


def tried(pool: Pool, line: Line) -> str:
    try:
        return failure(pool, line)
    except RanksFailed as error:
        return str(error)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the covering table of options.")
    parser.add_argument("--array", nargs="*", choices=list(ARRAYS), help="which of the tables")
    parser.add_argument("--row", nargs="*", type=int, help="numbers in it, or in them")
    parser.add_argument("--with", dest="having", nargs="*", default=[], metavar="OPTION=VALUE")
    parser.add_argument("--without", nargs="*", default=[], metavar="OPTION=VALUE")
    parser.add_argument("--smaller", action="store_true", help="find what a failure needs")
    parser.add_argument("--every", type=int, default=1, help="one row of so many")
    parser.add_argument("--device", choices=("cpu", "sim"), default="cpu")
    parser.add_argument("--refused", action="store_true", help="what must be refused, in place")
    options = parser.parse_args()
    console = Console()
    extension = (
        build(Path(".pytest_cache/simulated-accelerator")) if options.device == "sim" else None
    )
    new_pool = partial(Pool, device=options.device, extension=extension)
    pool = new_pool()
    if options.refused:
        return _refused(pool, console, options)
    kinds: dict[str, list[Line]] = {}
    least: dict[str, Any] = {}  # what failures of a kind need
    rows = chosen(options)
    began = time.monotonic()
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        for number, line in enumerate(progress.track(rows, description="rows")):
            if number and not number % ROWS_PER_POOL:
                pool.stop()
                pool = new_pool()
                failed = sum(map(len, kinds.values()))
                progress.console.print(f"{number} of {len(rows)} rows, {failed} failed")
            text = tried(pool, line)
            if not text:
                continue
            kind = next((k for k, of in least.items() if _is_of(kind_of(text), k, of, line)), "")
            if not kind:
                fewer, text = smaller(pool, line, text) if options.smaller else (line, text)
                progress.console.print(f"--- {fewer}\n{text}\n", markup=False, highlight=False)
                kind = f"{kind_of(text)} / {fewer}" if options.smaller else kind_of(text)
                least[kind] = fewer.row.items() - defaults(ARRAYS[line.array]).items()
            kinds.setdefault(kind, []).append(line)
    pool.stop()
    console.rule(f"{len(rows)} rows in {time.monotonic() - began:.0f} s")
    _summarise(console, kinds)
    return 1 if kinds else 0


def _is_of(found: str, kind: str, needs: Any, line: Line) -> bool:
    """Whether a failure is of a known kind, and a row has what that needs."""
    return kind.split(" / ")[0] == found and needs <= line.row.items()


def _summarise(console: Console, kinds: dict[str, list[Line]]) -> None:
    for kind, failed in sorted(kinds.items(), key=lambda item: -len(item[1])):
        console.print(f"{len(failed)} x {kind}", markup=False, highlight=False)
        for value, count in _in_common(failed):
            console.print(f"    {count} of {len(failed)}: {value}", markup=False, highlight=False)
        where = ", ".join(f"{line.array} {line.number}" for line in failed[:12])
        console.print(f"    rows: {where}", markup=False, highlight=False)


def _in_common(failed: Sequence[Line]) -> list[tuple[str, int]]:
    """Values that fail more often than others: where to look first."""
    found = []
    for name, value in {(n, v): None for line in failed for n, v in line.row.items()}:
        of_it = sum(line.row.get(name) == value for line in failed)
        every = lines(failed[0].array)
        usual = sum(line.row.get(name) == value for line in every) / len(every)
        if of_it >= 2 and of_it / len(failed) > min(0.99, 2 * usual):
            found.append((f"{name} = {value}", of_it))
    return sorted(found, key=lambda each: -each[1])[:4]


def _refused(pool: Pool, console: Console, options: argparse.Namespace) -> int:
    failed = 0
    for name in options.array or [n for n, a in ARRAYS.items() if a.device == options.device]:
        for line, expected in refusals(name):
            try:
                said = refusal(pool, line, late=bool(expected.late))
            except (RanksFailed, AssertionError) as error:
                said = str(error)
            right = expected.words in said
            failed += not right
            mark = "refused" if right else "NOT REFUSED"
            console.print(f"{mark}: {line}\n    {said}", markup=False, highlight=False)
    pool.stop()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
