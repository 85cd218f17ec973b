"""Runs a selection of the benchmarks and puts their tables and charts into README.md.

Must not measure anything itself.

Usage:

    # under ten minutes on two cores
    python benchmarks/run_all.py
    python benchmarks/run_all.py --only step,memory
    # shows that every benchmark runs; README.md stays as it is
    python benchmarks/run_all.py --smoke
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contenders import MEANING
from harness import ROOT
from options import RESULTS
from publish import table

PAIR = "composable,fsdp2"
README = Path(__file__).resolve().parent / "README.md"


@dataclass(frozen=True)
class Job:
    """One section of README.md: `name` is its marker, and the name under which the benchmark stores
    its results.
    """

    name: str
    script: str
    arguments: tuple[str, ...] = ()
    # beside --smoke; None: another job shows already that this script runs
    smoke: tuple[str, ...] | None = ()
    selected: bool = True  # part of what runs when nobody asks for more


SWEEP = ("--contenders", "un-annotated,composable,fsdp2")
JOBS = (
    Job(
        "step",
        "step.py",
        ("--rounds", "5", "--steps", "2", "--settle", "2", "--contenders", "[!f]*,fsdp2*,fsdp1"),
    ),
    Job("step-small", "step.py", ("--model", "small", "--rounds", "5"), None, selected=False),
    Job(
        "step-conv",
        "step.py",
        (
            "--model",
            "conv",
            "--rounds",
            "3",
            "--steps",
            "2",
            "--contenders",
            "un-annotated,*composable*,fsdp2,fsdp1,ddp-views",
        ),
        None,
        selected=False,
    ),
    Job("overhead", "overhead.py", ("--rounds", "11")),
    Job("inside", "inside.py", ("--rounds", "7")),
    Job(
        "overhead-units",
        "overhead.py",
        ("--rounds", "3", "--units", "1,8,32,128", *SWEEP),
        None,
        selected=False,
    ),
    Job(
        "overhead-params",
        "overhead.py",
        ("--rounds", "3", "--units", "16", "--params", "1,4,16", *SWEEP),
        ("--units", "2", "--params", "1,2", "--contenders", "un-annotated,composable"),
        selected=False,
    ),
    Job(
        "memory",
        "memory.py",
        ("--rounds", "1"),
        ("--contenders", "un-annotated,composable*,fsdp2"),
        selected=False,
    ),
    Job(
        "memory-default",
        "memory.py",
        (
            "--rounds",
            "1",
            "--warmup",
            "5",
            "--allocator",
            "default",
            "--contenders",
            "composable*,fsdp2*,fsdp1,ddp-views",
        ),
        None,
    ),
    Job("floor", "floor.py", ("--rounds", "3", "--steps", "2")),
    Job(
        "floor-keep", "floor.py", ("--keep", "--rounds", "3", "--steps", "2"), None, selected=False
    ),
    Job("optimizer", "optimizer.py", ("--rounds", "7")),
    Job(
        "optimizer-long",
        "optimizer.py",
        (
            "--rounds",
            "5",
            "--steps",
            "2",
            "--width",
            "2048",
            "--units",
            "3",
            "--fake-world",
            "2",
            "--contenders",
            PAIR,
        ),
        None,
        selected=False,
    ),
    Job("matrices", "matrices.py", ("--rounds", "5", "--steps", "2"), selected=False),
    Job(
        "scale",
        "scale.py",
        ("--rounds", "21", "--worlds", "8,1024,16384", "--contenders", "composable"),
    ),
    Job("timeline", "timeline.py", selected=False),
    # the larger model takes minutes for each bandwidth: --limit 3600
    Job("plans", "plans.py", selected=False),
    Job("life", "life.py"),
    Job("load", "load.py"),
    Job("local-steps", "local_steps.py", selected=False),
    Job("watch", "watch.py", selected=False),
    Job("constants", "constants.py", ("--rounds", "5", "--steps", "2"), selected=False),
    Job(
        "collectives",
        "collectives.py",
        ("--rounds", "3", "--sizes", "1024,16384,262144,4194304,67108864"),
    ),
)


def run(job: Job, out: Path, *, smoke: bool, limit: float) -> bool:
    """Run one benchmark in a process of its own; True if it stored its results."""
    arguments = ["--smoke", *(job.smoke or ())] if smoke else list(job.arguments)
    call = [sys.executable, str(Path(__file__).parent / job.script), "--out", str(out), *arguments]
    print(f"{job.name}: {job.script} {' '.join(arguments)}", flush=True)
    started = time.monotonic()
    try:
        done = subprocess.run(
            call, cwd=ROOT, capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        print(f"  {job.name} did not end within {limit:.0f} s", flush=True)
        return False
    if done.returncode or not (out / f"{job.name}.json").exists():
        print(
            f"  {job.name} failed:\n"
            + "\n".join("  " + line for line in (done.stdout + done.stderr).splitlines()[-25:]),
            flush=True,
        )
        return False
    print(f"  {job.name} took {time.monotonic() - started:.0f} s", flush=True)
    return True


def conditions(line: dict[str, Any]) -> str:
    """One sentence on where, when and how a result was obtained."""
    machine = line["machine"]
    place = f"{machine['processor']}, {machine['cores']} cores" + (
        f", {machine['device']}" if "device" in machine else ""
    )
    versions = ", ".join(f"{name} {version}" for name, version in line["versions"].items())
    return (
        f"`{line['command']}`  \n{line['when'][:10]}; {place}; load {machine.get('load', '?')} at"
        f" the end; {versions}"
    )


def section(name: str, out: Path) -> str:
    line = json.loads((out / f"{name}.json").read_text())
    text = (out / f"{name}.md").read_text().strip()
    chart = f"\n\n![{line['title']}](results/{name}.png)" if (out / f"{name}.png").exists() else ""
    return f"**{line['title']}**\n\n{text}{chart}\n\n{conditions(line)}"


def put(readme: str, name: str, text: str) -> str:
    """`readme` with `text` between the markers of `name`.

    Raises:
        ValueError: the markers are not there, or not in order.
    """
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    if not 0 <= readme.find(begin) < readme.find(end):
        raise ValueError(f"README.md lacks the markers {begin} and {end}, in this order")
    return (
        f"{readme[: readme.index(begin) + len(begin)]}\n\n{text}\n\n{readme[readme.index(end) :]}"
    )


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument(
        "--only",
        help="sections, separated by commas; 'all': every one, which takes some twenty minutes",
    )
    options.add_argument("--out", type=Path, default=RESULTS)
    options.add_argument(
        "--limit", type=float, default=400.0, help="seconds that one benchmark may take"
    )
    options.add_argument("--smoke", action="store_true")
    found = options.parse_args()
    everything = found.only == "all" or (found.smoke and not found.only)
    names = (found.only or "").split(",") if found.only and not everything else []
    names = names or [job.name for job in JOBS if job.selected or everything]
    unknown = [name for name in names if name not in {job.name for job in JOBS}]
    if unknown:
        options.error(
            f"--only: no section named {', '.join(unknown)}; there are"
            f" {', '.join(job.name for job in JOBS)}"
        )
    out = Path(tempfile.mkdtemp(prefix="composable-bench-")) if found.smoke else found.out
    sections = {"contenders": table(["name", "what it is"], [[k, v] for k, v in MEANING.items()])}
    failed = []
    jobs = [job for job in JOBS if job.name in names and not (found.smoke and job.smoke is None)]
    # What measures has the machine for itself.
    pool = ThreadPoolExecutor(2 if found.smoke else 1)
    ended = pool.map(lambda job: run(job, out, smoke=found.smoke, limit=found.limit), jobs)
    for job, succeeded in zip(jobs, ended, strict=True):
        if not succeeded:
            failed.append(job.name)
            continue
        sections[job.name] = section(job.name, out)
        readme = README.read_text()  # anew: somebody may have written on the page meanwhile
        for name, text in sections.items():
            readme = put(readme, name, text)
        if not found.smoke and out.resolve() == RESULTS:
            README.write_text(readme)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
