"""The first hour on a machine with a GPU: what only a device can tell, on one page.

That is tests, the sanitizer and the figures that only a device gives.

Usage:

    # all of it; the page is benchmarks/results/gpu.md
    make check-gpu
    make check-gpu ARGS="--only tests,memory"
    # without a device: shows that each check starts, and measures nothing
    make check-gpu ARGS=--rehearse

Each check is a command that can be repeated by itself: it stands on the page with what it printed
and how it ended. It measures nothing itself.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import torch
from harness import ROOT
from options import RESULTS
from publish import table, versions

FAKED = ("--device", "cuda", "--fake-world", "64")
PAGE = "gpu.md"
PAGE_LINES = 60  # of what a check printed, from the end
# JSON, and how far a benchmark had come
NOT_ON_PAGE = ("{", "  building ", "  warm-up", "  round ")


@dataclass(frozen=True, eq=False)
class Check:
    """One command.

    Attributes:
        shows: what it says when it passes.
        arguments: of the interpreter.
        devices: how many it needs.
        rehearsal: the arguments without a device; none where nothing can be shown without one.
    """

    name: str
    shows: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    devices: int = 1
    rehearsal: tuple[str, ...] | None = None


def _benchmark(script: str, *arguments: str) -> tuple[str, ...]:
    return (f"benchmarks/{script}.py", *arguments)


def _faked(script: str, *arguments: str) -> dict[str, tuple[str, ...]]:
    return {
        "arguments": _benchmark(script, *FAKED, *arguments),
        "rehearsal": _benchmark(script, "--smoke", *arguments),
    }


def _tests(*arguments: str) -> tuple[str, ...]:
    return ("-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments)


_ON_CUDA = ("--device", "cuda", "-k", "cuda")
# Ranks share a device where there is one only, and everything takes longer there.
_PATIENT = {"COMPOSABLE_TEST_TIMEOUT": "240"}
_OURS = ("--contenders", "composable,composable-keep,composable-replicate")
_AGAINST_RIVALS = ("--contenders", "un-annotated,composable*,fsdp2*,ddp-views")
_LARGE = (
    "--model",
    "large",
    "--contenders",
    "un-annotated,composable,composable-keep,fsdp2,fsdp2-keep",
)

CHECKS = (
    Check(
        "host-waits",
        "no step makes the host wait for the device (`torch.cuda.set_sync_debug_mode`)",
        _tests(*_ON_CUDA, "tests/whole/memory/test_host_waits.py"),
        _PATIENT,
        rehearsal=_tests("tests/whole/memory/test_host_waits.py", "--collect-only"),
    ),
    Check(
        "parity",
        "training agrees with one process, two and four ranks over NCCL",
        _tests(*_ON_CUDA, "tests/whole/parity/test_parity.py"),
        _PATIENT,
        rehearsal=_tests("-k", "cpu", "tests/whole/parity/test_parity.py", "--collect-only"),
    ),
    Check(
        "tests",
        "every test that a device can run passes there",
        _tests(*_ON_CUDA, "tests"),
        _PATIENT,
        rehearsal=_tests("-k", "cpu", "tests/engine", "--collect-only"),
    ),
    Check(
        "sanitizer",
        "no two kernels of different streams touch the same memory unordered (torch's CUDA"
        " sanitizer), 64 faked ranks",
        _benchmark("step", *FAKED, "--smoke", *_OURS),
        {"TORCH_CUDA_SANITIZER": "1"},
        rehearsal=_benchmark("step", "--smoke", *_OURS),
    ),
    Check(
        "sanitizer-nccl",
        "the same with one real rank over NCCL",
        _benchmark("step", "--device", "cuda", "--ranks", "1", "--smoke", *_OURS),
        {"TORCH_CUDA_SANITIZER": "1"},
    ),
    Check(
        "memory",
        "the allocator's peak against FSDP2's, 64 faked ranks",
        **_faked("memory", *_AGAINST_RIVALS),
    ),
    Check(
        "memory-large",
        "the same with six blocks of a 7B model in bfloat16",
        _benchmark("memory", *FAKED, *_LARGE),
    ),
    Check(
        "step",
        "a step's time against FSDP2's and DDP's, 64 faked ranks",
        **_faked("step", *_AGAINST_RIVALS),
    ),
    Check(
        "step-deep",
        "the same where the host decides: twelve small blocks",
        **_faked(
            "step",
            "--model",
            "deep",
            "--contenders",
            "un-annotated,composable,composable-replicate*,fsdp2,ddp-views,ddp",
        ),
    ),
    Check(
        "step-large",
        "the same with six blocks of a 7B model in bfloat16",
        _benchmark("step", *FAKED, *_LARGE),
    ),
    Check(
        "overhead",
        "the host's time against FSDP2's and DDP's, 64 faked ranks",
        **_faked("overhead", "--rounds", "5"),
    ),
    Check(
        "optimizer",
        "an optimizer on local shards against one on DTensors, 64 faked ranks",
        **_faked("optimizer"),
    ),
    Check(
        "step-nccl",
        "a step's time against FSDP2's and DDP's over NCCL, two devices",
        _benchmark("step", "--device", "cuda", "--ranks", "2", *_AGAINST_RIVALS),
        devices=2,
        rehearsal=_benchmark("step", "--smoke", *_AGAINST_RIVALS),
    ),
    Check(
        "collectives",
        "from which size on a parameter deserves a message of its own over NCCL: `direct_bytes`",
        _benchmark("collectives", "--device", "cuda", "--world", "2"),
        devices=2,
        rehearsal=_benchmark("collectives", "--smoke"),
    ),
)


@dataclass(frozen=True)
class Outcome:
    """How a check ended, and what it printed."""

    verdict: str
    seconds: float = 0.0
    printed: str = ""


def run(check: Check, *, devices: int, rehearse: bool, limit: float) -> Outcome:
    arguments = check.rehearsal if rehearse else check.arguments
    if arguments is None:
        return Outcome("left out: needs a device")
    if not rehearse and devices < check.devices:
        return Outcome(f"left out: needs {check.devices} devices, there are {devices}")
    started = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            env={**os.environ, **({} if rehearse else check.environment)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        printed = error.stdout or b""
        text = printed.decode(errors="replace") if isinstance(printed, bytes) else printed
        return Outcome(f"did not end within {limit:.0f} s", limit, text)
    verdict = "passes" if done.returncode == 0 else f"fails with {done.returncode}"
    return Outcome(verdict, time.monotonic() - started, done.stdout)


def page(outcomes: Mapping[Check, Outcome], *, rehearse: bool) -> str:
    """What was found, as Markdown."""
    place = "no device: this was a rehearsal, which measures nothing"
    if not rehearse:
        place = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    facts = ", ".join(f"{name} {version}" for name, version in versions().items())
    parts = [
        "# On this machine's GPU",
        f"{datetime.now(UTC):%Y-%m-%d}; {place}; {facts}",
        table(
            ["check", "what it shows", "outcome", "seconds"],
            [
                [c.name, c.shows, found.verdict, f"{found.seconds:.0f}"]
                for c, found in outcomes.items()
            ],
        ),
    ]
    for check, found in outcomes.items():
        if found.printed:
            lines = [
                line
                for line in found.printed.rstrip().splitlines()
                if not line.startswith(NOT_ON_PAGE)
            ][-PAGE_LINES:]
            parts += [
                f"## {check.name}",
                f"`{_typed(check, rehearse)}`",
                "```text\n" + "\n".join(lines) + "\n```",
            ]
    return "\n\n".join(parts) + "\n"


def _typed(check: Check, rehearse: bool) -> str:
    """The command, as one types it."""
    if rehearse:
        return " ".join(["python", *(check.rehearsal or ())])
    return " ".join(
        [
            *(f"{name}={value}" for name, value in check.environment.items()),
            "python",
            *check.arguments,
        ]
    )


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument(
        "--only",
        help=f"checks, separated by commas; of: {', '.join(check.name for check in CHECKS)}",
    )
    options.add_argument(
        "--out",
        type=Path,
        help=f"the page (default: benchmarks/results/{PAGE}; a rehearsal's is temporary)",
    )
    options.add_argument(
        "--limit", type=float, default=1800.0, help="seconds that one check may take"
    )
    options.add_argument(
        "--rehearse", action="store_true", help="without a device: shows that each check starts"
    )
    found = options.parse_args()
    names = found.only.split(",") if found.only else [check.name for check in CHECKS]
    unknown = [name for name in names if name not in {check.name for check in CHECKS}]
    if unknown:
        options.error(
            f"--only: no check named {', '.join(unknown)}; there are"
            f" {', '.join(c.name for c in CHECKS)}"
        )
    if not found.rehearse and not torch.cuda.is_available():
        options.error("this torch sees no CUDA device; --rehearse shows that each check starts")
    if found.out is None:  # a rehearsal must not overwrite figures that mean something
        found.out = (
            Path(tempfile.mkdtemp(prefix="composable-bench-")) if found.rehearse else RESULTS
        ) / PAGE
    outcomes: dict[Check, Outcome] = {}
    for check in CHECKS:
        if check.name in names:
            print(f"{check.name}: {check.shows}", flush=True)
            outcomes[check] = run(
                check, devices=torch.cuda.device_count(), rehearse=found.rehearse, limit=found.limit
            )
            print(f"  {outcomes[check].verdict}, {outcomes[check].seconds:.0f} s", flush=True)
            found.out.parent.mkdir(parents=True, exist_ok=True)
            found.out.write_text(page(outcomes, rehearse=found.rehearse))  # as far as it has come
    print(f"the page: {found.out}")
    return (
        0
        if all(o.verdict == "passes" or o.verdict.startswith("left out") for o in outcomes.values())
        else 1
    )


if __name__ == "__main__":
    sys.exit(main())
