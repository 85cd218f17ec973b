"""Claim: annotating takes 1.3 times FSDP2's time, 1.8 times with a comparison of all values.

Measures what a model goes through besides its steps: it is annotated, takes a first step, a later
one, a forward without gradients; gradients are clipped; state dicts are made, loaded, written and
read. One model has few large units, one has a hundred small ones, and one of 1,000 modules is on
the meta device. At last, what `import composable` takes after torch's own modules.

Usage:

    # 43 million elements in seven units, and 100 units of twelve small parameters
    python benchmarks/life.py
    python benchmarks/life.py --rounds 11 --layers 100
"""

from __future__ import annotations

import argparse
import gc
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from harness import ROOT, Measure, Sample, compete, device_of, ratios, series, spread
from models import GPT, Block
from options import parse, parser
from publish import Claim, bars, compared, emit, rounded, table
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
)

CHECK: Final = "composable"
OFF: Final = "composable-off"
FSDP2: Final = "fsdp2"
ANNOTATE: Final = "annotate"
BYTES: Final = "bytes"  # no time, as all else in a sample is
CLAIMS: Final[list[Claim]] = [(OFF, FSDP2, 1.3), (CHECK, FSDP2, 1.8)]
IMPORT: Final = """
import sys, time, torch, torch.distributed.fsdp, torch.distributed.tensor
sys.path.insert(0, sys.argv[1])
start = time.process_time()
import composable
took = time.process_time() - start
print(took, sum(name.split(".")[0] == "composable" for name in sys.modules))
"""


def annotate(contender: str, model: nn.Module, units: type[nn.Module] | None) -> None:
    if contender == FSDP2:
        from torch.distributed.fsdp import fully_shard

        for module in list(model.modules()):
            if units is not None and isinstance(module, units):
                fully_shard(module)
        fully_shard(model)
        return
    from composable import fully_shard

    mode = "off" if contender == OFF else "check"
    policy = None if units is None else {units}
    fully_shard(model, policy=policy, sync_module_states=mode)


def life_of(contender: str, model: GPT, context: int, folder: Path) -> Sample:
    """Seconds that each part takes."""
    sample: Sample = {}

    def timed(name: str, part: Callable[[], Any]) -> Any:
        dist.barrier()
        start = time.perf_counter()
        made = part()
        sample[name] = time.perf_counter() - start
        return made

    tokens = torch.randint(256, (1, context), device=next(model.parameters()).device)
    timed(ANNOTATE, lambda: annotate(contender, model, Block))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def forward() -> torch.Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    def step() -> None:
        optimizer.zero_grad()
        forward().backward()
        optimizer.step()

    timed("first step", step)
    timed("step", step)
    with torch.no_grad():
        timed("forward without gradients", forward)
    forward().backward()
    timed("clipping", lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    whole = StateDictOptions(full_state_dict=True)
    full = timed("full state dict", lambda: get_model_state_dict(model, options=whole))
    every = [full]
    dist.broadcast_object_list(every)  # rank 0 alone may have it
    timed("load of it", lambda: set_model_state_dict(model, every[0], options=whole))
    timed("get_state_dict", lambda: get_state_dict(model, optimizer))
    timed("state_dict", model.state_dict)
    timed("dcp.save", lambda: dcp.save(model.state_dict(), checkpoint_id=folder))
    timed("dcp.load", lambda: dcp.load(model.state_dict(), checkpoint_id=folder))
    return sample


def build(contender: str, options: argparse.Namespace) -> Measure:
    """The lives of all models per call."""
    device = device_of(options)

    def measure() -> Sample:
        sample: Sample = {}
        sizes = {"large": (6, options.width), "small": (options.layers, 8)}
        for name, (layers, width) in sizes.items():
            torch.manual_seed(options.seed)
            with device:
                model = GPT(layers=layers, width=width, heads=2, context=options.context)
            sample[f"{name}, {BYTES}"] = sum(each.nbytes for each in model.parameters())
            folder = Path(options.folder) / f"{contender}-{name}"
            life = life_of(contender, model, options.context, folder)
            sample |= {f"{name}, {part}": seconds for part, seconds in life.items()}
            del model
            gc.collect()
        with torch.device("meta"):
            model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(options.modules)])
        dist.barrier()
        start = time.perf_counter()
        annotate(contender, model, None)
        sample[f"meta, {ANNOTATE}"] = time.perf_counter() - start
        took = sum(value for name, value in sample.items() if not name.endswith(BYTES))
        return {"step": took, **sample}

    return measure


def imported(times: int) -> tuple[float, int]:
    """Seconds of the processor, the median, and the number of modules of the package."""
    found = []
    for _ in range(times):
        call = [sys.executable, "-c", IMPORT, str(ROOT)]
        took, number = subprocess.check_output(call, text=True).split()
        found.append((float(took), int(number)))
    return statistics.median(took for took, _ in found), found[0][1]


def main() -> None:
    options = parser(__doc__.splitlines()[0], rounds=5, steps=1, warmup=1)
    options.add_argument("--width", type=int, default=768, help="of the six large blocks")
    options.add_argument("--layers", type=int, default=100, help="number of the small blocks")
    options.add_argument("--modules", type=int, default=1000, help="on the meta device")
    options.add_argument("--context", type=int, default=64, help="tokens of a sequence")
    options.set_defaults(settle=0)
    found = parse(options, width=16, layers=2, modules=4, context=8)
    names = [FSDP2, CHECK, OFF]
    with ExitStack() as stack:
        found.folder = stack.enter_context(tempfile.TemporaryDirectory())
        rounds = compete(build, names, found)
    parts = [
        name
        for name in rounds[FSDP2][0]
        if name not in ("step", "best") and not name.endswith(BYTES)
    ]
    rows = []
    for part in parts:
        medians = [spread(series(rounds, name, part))["median"] for name in names]
        beside = [spread(ratios(rounds, name, FSDP2, part))["median"] for name in (CHECK, OFF)]
        rows.append([part, *[f"{x * 1e3:.1f}" for x in medians], *[f"{x:.2f}" for x in beside]])
    header = ["part", *[f"{name}, ms" for name in names], f"{CHECK} / {FSDP2}", f"{OFF} / {FSDP2}"]
    tables, data = [table(header, rows)], {}
    for part in parts:
        if part.endswith(ANNOTATE):
            text, data[part] = compared(rounds, CLAIMS, metric=part)
            tables.append(text)
    first, second = (series(rounds, name, f"large, {ANNOTATE}") for name in (CHECK, OFF))
    beyond = statistics.median(a - b for a, b in zip(first, second, strict=True))
    price = beyond / rounds[CHECK][0][f"large, {BYTES}"] * 1e9
    tables.append(f"The comparison of all values takes {price:.2f} s per GB of parameters.")
    seconds, number = imported(found.rounds)
    tables.append(
        f"`import composable` after torch: {seconds * 1e3:.0f} ms of the processor, {number}"
        " modules of the package."
    )
    title = f"The life of a model on {found.ranks} ranks, {found.device}"
    figures = {
        f"{name}, {part}": {k: v * 1e3 for k, v in spread(series(rounds, name, part)).items()}
        for part in parts
        if part.endswith(ANNOTATE)
        for name in names
    }

    def draw(path: Path) -> None:
        bars(path, title, "milliseconds to annotate", figures)

    emit(
        "life",
        found,
        title=title,
        tables=tables,
        data={
            "ratios": data,
            "seconds_per_gb": price,
            "import_seconds": seconds,
            "import_modules": number,
            "rounds": rounded(rounds),
        },
        draw=draw,
    )


if __name__ == "__main__":
    main()
