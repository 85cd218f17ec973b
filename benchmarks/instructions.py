"""Claim: little Python stands between the user and the hardware.

Counts the host's instructions per unit; times nothing.

`overhead.py` times the same work, and needs a machine that does nothing else. Instructions come out
the same on a busy one, to a few in a thousand. So does what time has beside them: memory that is
not in the caches, here those of a processor with 32 KiB for instructions, 32 KiB for data and 1 MiB
for both, or as much as `--cache` says. Lines of 64 bytes that are in neither are counted, to about
three in a hundred: where things lie differs from run to run. Clipping and the optimizer's step,
between a backward and the next forward, are done and not counted.

    # 16 transformer blocks, forward and backward; takes some minutes
    python benchmarks/instructions.py
    # ... on a processor with a second-level cache of 2 MiB
    python benchmarks/instructions.py --cache 2048

Needs valgrind, with its headers, and a C compiler.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from contenders import CONTENDERS, LOCAL, scale
from harness import join_group
from models import adamw
from options import parser
from overhead import make_task
from publish import table

NAMES = (LOCAL, "composable", "fsdp2")
CACHES = ("--cache-sim=yes", "--I1=32768,8,64", "--D1=32768,8,64")
WAY = 128  # KiB: what one way of the larger cache holds
SWITCH = """
#include <valgrind/callgrind.h>
void begin(void) { CALLGRIND_START_INSTRUMENTATION; }
void toggle(void) { CALLGRIND_TOGGLE_COLLECT; }
"""


def count_here(contender: str, switch: Path, options: argparse.Namespace) -> None:
    """Take some steps in this process, whose instructions valgrind counts while the switch is
    on.
    """
    join_group(options, 0, "")
    task = make_task(options)
    model = scale(
        contender,
        task.model,
        task.units,
        device=next(task.model.parameters()).device,
        world=options.fake_world,
    )
    parameters = list(model.parameters())
    optimizer = adamw(parameters, "foreach", rate=1e-6)
    library = ctypes.CDLL(str(switch))

    def step(toggle: Callable[[], object]) -> None:
        toggle()
        task.loss(model, 0).backward()
        toggle()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step(lambda: None)
    gc.collect()
    gc.freeze()
    gc.disable()
    library.begin()
    for _ in range(options.steps):
        step(library.toggle)


def counted(contender: str, switch: Path, options: argparse.Namespace) -> tuple[float, float]:
    """Instructions of one step's forward and backward, and lines that were not in the caches."""
    with tempfile.TemporaryDirectory() as folder:
        found = subprocess.run(
            [
                "valgrind",
                "--tool=callgrind",
                "--instr-atstart=no",
                "--collect-atstart=no",
                f"--callgrind-out-file={folder}/out",
            ]
            + [*CACHES, f"--LL={options.cache << 10},{options.cache // WAY},64"]
            + [
                sys.executable,
                __file__,
                "--units",
                str(options.units),
                "--steps",
                str(options.steps),
            ]
            + [
                "--fake-world",
                str(options.fake_world),
                "--count-here",
                contender,
                "--switch",
                str(switch),
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
            capture_output=True,
            text=True,
            check=False,
        )
    match = re.search(r"Collected : ([\d ]+)", found.stderr)
    if found.returncode or match is None:
        raise SystemExit(
            f"{contender}: valgrind ended with {found.returncode}\n{found.stderr[-3000:]}"
        )
    instructions, *_, instruction_lines, read_lines, written_lines = map(int, match[1].split())
    return (
        instructions / options.steps,
        (instruction_lines + read_lines + written_lines) / options.steps,
    )


def main() -> None:
    options = parser(__doc__.splitlines()[0], rounds=1, steps=2, warmup=0)
    options.set_defaults(fake_world=8, params=0)
    options.add_argument(
        "--units", type=int, default=16, help="transformer blocks of 12 parameters"
    )
    options.add_argument(
        "--cache", type=int, default=1024, metavar="KIB", help=f"for both, a multiple of {WAY}"
    )
    options.add_argument("--count-here", choices=list(CONTENDERS), help=argparse.SUPPRESS)
    options.add_argument("--switch", type=Path, help=argparse.SUPPRESS)
    found = options.parse_args()
    if found.count_here:
        count_here(found.count_here, found.switch, found)
        return
    if found.cache <= 0 or found.cache % WAY:
        options.error(f"--cache {found.cache}: a multiple of {WAY} KiB is needed")
    missing = [name for name in ("valgrind", "gcc") if shutil.which(name) is None]
    if missing:
        options.error(f"needs {' and '.join(missing)}")
    with tempfile.TemporaryDirectory() as folder:
        switch = Path(folder) / "switch.so"
        subprocess.run(
            ["gcc", "-shared", "-fPIC", "-xc", "-", "-o", str(switch)],
            input=SWITCH,
            text=True,
            check=True,
        )
        whole = {}
        for name in NAMES:
            print(f"  counting {name}", file=sys.stderr, flush=True)
            whole[name] = counted(name, switch, found)
    added = {
        name: [
            (each - alone) / found.units
            for each, alone in zip(whole[name], whole[LOCAL], strict=True)
        ]
        for name in NAMES
        if name != LOCAL
    }
    rows = []
    for name, (instructions, lines) in added.items():
        of_theirs = [
            f"{mine / theirs:.3f}"
            for mine, theirs in zip((instructions, lines), added["fsdp2"], strict=True)
        ]
        rows.append(
            [name, f"{instructions / 1e3:.0f}", of_theirs[0], f"{lines / 1e3:.1f}", of_theirs[1]]
        )
    where = f"fake process group of {found.fake_world} ranks, cpu, {found.cache} KiB of cache"
    print(f"\nForward and backward of {found.units} transformer blocks, {where}\n")
    heads = [
        "added per unit",
        "thousands of instructions",
        "of FSDP2's",
        "thousands of lines not in caches",
        "of FSDP2's",
    ]
    print(table(heads, rows))
    counts = {
        name: dict(zip(("instructions", "lines"), each, strict=True))
        for name, each in added.items()
    }
    shape = {"benchmark": "instructions", "units": found.units, "cache_kib": found.cache}
    print(json.dumps({**shape, "whole": whole, "added_per_unit": counts}))


if __name__ == "__main__":
    main()
