"""Claim: while a folder of weights is loaded, a rank holds its shards and one tensor.

Measures memory of the host and time, from a model on the meta device to one with weights.

Pages of mapped files count as resident, and the kernel drops them when memory is short. So two
figures are shown, the highest of samples that a thread takes every millisecond: anonymous
memory (RssAnon), which is what a process needs, and all that is resident (VmRSS). Both are above
what the process held before, of the rank that needs most. glibc is told to give large blocks back
at once.

Usage:

    # a model of 417 MB over 2 ranks
    python benchmarks/load.py
    python benchmarks/load.py --ranks 4 --blocks 40
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import Measure, Sample, compete, device_of, series, spread
from options import parse, parser
from publish import Claim, bars, compared, emit, rounded, table
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor

MB: Final = 1e6
CLAIMS: Final[list[Claim]] = [
    ("composable", "fsdp2-dcp", 1.00),
    ("composable", "fsdp2-broadcast", 1.00),
    ("composable", "fsdp2-whole", 0.50),
]


def model_of(options: argparse.Namespace) -> nn.Module:
    width, rows = options.width, 4 * options.width
    blocks = [nn.Linear(width, width, bias=False) for _ in range(options.blocks)]
    return nn.Sequential(nn.Embedding(rows, width), *blocks)


def write(options: argparse.Namespace, folder: Path) -> int:
    """A folder of files with an index; each tensor has its number everywhere. Returns bytes."""
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in model_of(options).state_dict().items()}
    at, total = {}, 0
    for number, (name, shape) in enumerate(shapes.items()):
        at[name] = f"model-{number // 8:05}.safetensors"
        total += shape.numel() * 4
    for file in dict.fromkeys(at.values()):
        tensors = {
            name: torch.full(shape, float(number))
            for number, (name, shape) in enumerate(shapes.items())
            if at[name] == file
        }
        save_file(tensors, folder / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": total}, "weight_map": at}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def read_all(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def ours(options: argparse.Namespace, folder: Path) -> nn.Module:
    from composable import fully_shard, load

    with torch.device("meta"):
        model = model_of(options)
    fully_shard(model, policy={nn.Linear})
    load(model, folder)
    return model


def _fsdp2(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for module in model:
        if isinstance(module, nn.Linear):
            fully_shard(module)
    return fully_shard(model)


def _fsdp2_empty(options: argparse.Namespace) -> nn.Module:
    with torch.device("meta"):
        model = model_of(options)
    return _fsdp2(model).to_empty(device=device_of(options))


def by_dcp(options: argparse.Namespace, folder: Path) -> nn.Module:
    """torch's own reader of such folders."""
    model = _fsdp2_empty(options)
    dcp.load(model.state_dict(), storage_reader=HuggingFaceStorageReader(str(folder)))
    return model


def by_broadcast(options: argparse.Namespace, folder: Path, *, copied: bool = False) -> nn.Module:
    """Rank 0 has the whole state dict: in mapped files, or copied, as `torch.load` makes it."""
    model = _fsdp2_empty(options)
    state = read_all(folder) if dist.get_rank() == 0 else {}
    if copied:
        state = {name: tensor.clone() for name, tensor in state.items()}
    how = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=how)
    return model


def by_broadcast_copied(options: argparse.Namespace, folder: Path) -> nn.Module:
    return by_broadcast(options, folder, copied=True)


def whole(options: argparse.Namespace, folder: Path) -> nn.Module:
    """Every rank has the whole model and then shards it."""
    with torch.device("meta"):
        model = model_of(options)
    model.to_empty(device="cpu")
    model.load_state_dict(read_all(folder))
    return _fsdp2(model.to(device_of(options)))


LOADS: Final[dict[str, Callable[[argparse.Namespace, Path], nn.Module]]] = {
    "composable": ours,
    "fsdp2-dcp": by_dcp,
    "fsdp2-broadcast": by_broadcast,
    "fsdp2-broadcast-copied": by_broadcast_copied,
    "fsdp2-whole": whole,
}


def _now() -> dict[str, int]:
    """Bytes of this process."""
    status = Path("/proc/self/status").read_text()
    return {
        name: int(found[1]) * 1024
        for name in ("RssAnon", "VmRSS")
        if (found := re.search(rf"^{name}:\s+(\d+) kB", status, re.MULTILINE)) is not None
    }


class Sampled:
    """The highest of samples that a thread takes inside of the scope, above what was there."""

    def __enter__(self) -> Sampled:
        gc.collect()
        self._before = _now()
        self._peak = dict(self._before)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.001):
            for name, value in _now().items():
                self._peak[name] = max(self._peak[name], value)

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def above(self, name: str) -> int:
        return self._peak[name] - self._before[name]


def _check(model: nn.Module) -> None:
    for number, tensor in enumerate(model.state_dict().values()):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        assert bool((local == number).all()), f"tensor {number} was not loaded"


def build(contender: str, options: argparse.Namespace) -> Measure:
    """One load per call."""

    def measure() -> Sample:
        dist.barrier()
        with Sampled() as sampled:
            start = time.perf_counter()
            model = LOADS[contender](options, Path(options.folder))
            seconds = time.perf_counter() - start
        _check(model)
        return {
            "step": seconds,
            "anonymous": sampled.above("RssAnon"),
            "resident": sampled.above("VmRSS"),
        }

    return measure


def main() -> None:
    options = parser(__doc__.splitlines()[0], rounds=3, steps=1, warmup=1)
    options.add_argument("--width", type=int, default=2048)
    options.add_argument("--blocks", type=int, default=21, help="weights of width x width")
    options.set_defaults(settle=0)
    found = parse(options, width=128, blocks=3)
    # read by every process at its start
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(64 << 10)
    names = [*LOADS]
    with ExitStack() as stack:
        found.folder = stack.enter_context(tempfile.TemporaryDirectory())
        total = write(found, Path(found.folder))
        rounds = compete(build, names, found, key="anonymous", together=False)
    title = (
        f"Loading {total / MB:.0f} MB over {found.ranks} ranks, the largest tensor"
        f" {16 * found.width**2 / MB:.0f} MB, {found.device}"
    )
    rows = []
    for name in names:
        medians = {
            metric: spread(series(rounds, name, metric))["median"]
            for metric in ("anonymous", "resident", "step")
        }
        anonymous, resident = medians["anonymous"], medians["resident"]
        rows.append(
            [
                name,
                f"{anonymous / MB:.0f}",
                f"{resident / MB:.0f}",
                f"{medians['step'] * 1e3:.0f}",
            ]
        )
    header = ["contender", "peak, MB", "with pages of files, MB", "ms"]
    ratio_table, ratio_data = compared(rounds, CLAIMS, metric="anonymous")
    peaks = {
        name: {k: v / MB for k, v in spread(series(rounds, name, "anonymous")).items()}
        for name in names
    }

    def draw(path: Path) -> None:
        bars(path, title, "megabytes of anonymous memory at the peak, of the worst rank", peaks)

    data: dict[str, Any] = {"model": total, "ratios": ratio_data, "rounds": rounded(rounds)}
    emit(
        "load", found, title=title, tables=[table(header, rows), ratio_table], data=data, draw=draw
    )


if __name__ == "__main__":
    main()
