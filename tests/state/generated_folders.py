"""Reads generated folders into generated plans for as long as wanted, and compares with torch's
`load_state_dict` of the same tensors in one process.

    python -m tests.state.generated_folders --minutes 10 --seed 0

What differs is printed with its seed; `--count 1 --seed N --ranks R` repeats one.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from composable import fully_shard, load, replicate
from composable.errors import RanksDisagreeError, StateError
from tests.helpers.compare import full
from tests.helpers.world import Pool, current_device
from tests.state.models import PLANS, Block, Net, plain


def _parallel(verb: Callable[..., object], model: nn.Module) -> None:
    """Uneven shards over tensor-parallel ranks, and what is left over the others."""
    mesh = init_device_mesh(
        current_device().type, (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp")
    )
    for _, block in _blocks(model):
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    _mark(model)  # torch's call makes other parameters
    verb(model, mesh=mesh["dp"])


def _mark(model: nn.Module) -> None:
    model.get_parameter("blocks.1.up.weight").no_decay = True  # type: ignore[attr-defined]


_PLANS: dict[str, Callable[[nn.Module], None]] = {
    **PLANS,
    "tensor parallel, shards": partial(_parallel, fully_shard),
    "tensor parallel, replicas": partial(_parallel, replicate),
}
_DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Case:
    """What a seed stands for."""

    plan: str
    on_meta: bool
    wrapped: bool
    strict: bool
    files: int
    indexed: bool
    prefix: str
    drops: tuple[int, ...]
    unknown: int
    tied_twice: bool
    nan: bool
    saved_as: torch.dtype
    dtype: torch.dtype | None


def case_of(seed: int) -> Case:
    draw = random.Random(seed)
    strict = draw.random() < 0.5
    left = not strict or draw.random() < 0.2
    files = draw.choice([1, 1, 2, 3])
    return Case(
        plan=draw.choice([*_PLANS]),
        on_meta=draw.random() < 0.5,
        wrapped=draw.random() < 0.3,
        strict=strict,
        files=files,
        indexed=files > 1 and draw.random() < 0.7,
        prefix=draw.choice(["", "", "module."]),
        drops=tuple(draw.sample(range(12), draw.randint(0, 2))) if left else (),
        unknown=draw.randint(0, 2) if left else 0,
        tied_twice=draw.random() < 0.5,
        nan=draw.random() < 0.3,
        saved_as=draw.choice(_DTYPES),
        dtype=draw.choice([None, None, torch.bfloat16, torch.float64]),
    )


def tensors_of(case: Case, seed: int) -> dict[str, Tensor]:
    """What the folder has, by names of the model."""
    saved = {name: value.cpu().clone() for name, value in plain(seed % 97 + 1).state_dict().items()}
    for name, value in saved.items():
        if value.is_floating_point():
            saved[name] = value.to(case.saved_as)
    if case.nan:
        saved["head.weight"].view(-1)[-1] = torch.nan
        saved["embed.weight"].view(-1)[-1] = torch.nan
    if not case.tied_twice:
        del saved["head.weight" if seed % 2 else "embed.weight"]
    for index in sorted(case.drops, reverse=True):
        del saved[[*saved][index]]
    for index in range(case.unknown):
        saved[f"unknown.{index}"] = torch.ones(2)
    return saved


def _write(case: Case, saved: dict[str, Tensor], folder: Path) -> None:
    parts: list[dict[str, Tensor]] = [{} for _ in range(case.files)]
    for index, (name, value) in enumerate(saved.items()):
        parts[index % case.files][case.prefix + name] = value
    names = [f"model-{index}.safetensors" for index in range(case.files)]
    if case.files == 1:
        names = ["model.safetensors"]
    for name, part in zip(names, parts, strict=True):
        save_file(part, folder / name)
    if case.indexed:
        at = {n: name for name, part in zip(names, parts, strict=True) for n in part}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": at}))


def _made(case: Case, *, annotated: bool) -> Net:
    model = plain(0)
    if annotated and case.on_meta:
        with torch.device("meta"):
            model = Net()
    _mark(model)
    model.blocks[0].norm.requires_grad_(False)
    if case.wrapped:
        model.blocks[2] = checkpoint_wrapper(model.blocks[2])
    if annotated:
        _PLANS[case.plan](model)
    return model


def _said(model: nn.Module) -> list[tuple[str, bool, bool]]:
    return [
        (name, each.requires_grad, hasattr(each, "no_decay"))
        for name, each in model.named_parameters()
    ]


def differences(seed: int) -> list[str]:
    """What is other than in one process; all ranks call it."""
    case = case_of(seed)
    saved, model = tensors_of(case, seed), _made(case, annotated=True)
    alone = _made(case, annotated=False)
    where = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(where)
    folder = Path(where[0])
    if dist.get_rank() == 0:
        _write(case, saved, folder)
    dist.barrier()
    before = _said(alone)
    if case.dtype is not None:
        table = {name: each.table for name, each in _blocks(alone)}
        alone.to(case.dtype)
        for name, block in _blocks(alone):
            block.table = table[name]  # it is in no state dict
    expected = alone.load_state_dict(saved, strict=False)
    # of tied tensors one name is enough
    tied = {"head.weight", "embed.weight"}
    missing = [n for n in expected.missing_keys if n not in tied or tied.isdisjoint(saved)]
    unexpected = [case.prefix + name for name in expected.unexpected_keys]
    torch.manual_seed(0)
    try:
        found = load(
            model,
            folder,
            dtype=case.dtype,
            strict=case.strict,
            rename=(lambda name: name.removeprefix(case.prefix)) if case.prefix else None,
        )
    except (StateError, RanksDisagreeError) as error:
        if case.strict and (missing or unexpected):
            return []
        return [f"refused: {error}"]
    if case.strict and (missing or unexpected):
        return ["not refused"]
    wrong = []
    if sorted(found.missing_keys) != sorted(missing):
        wrong.append(f"missing {found.missing_keys} for {missing}")
    if sorted(found.unexpected_keys) != sorted(unexpected):
        wrong.append(f"unexpected {found.unexpected_keys} for {unexpected}")
    if _said(model) != before:
        wrong.append(f"requires_grad or attributes: {_said(model)} for {before}")
    state = model.state_dict()
    if [*state] != [*alone.state_dict()]:
        wrong.append(f"names {[*state]}")
    for name, value in alone.state_dict().items():
        mine = full(state[name]).cpu()
        # what the folder lacks is initialised on meta, and else as it was
        known = name not in missing or not case.on_meta
        if mine.dtype != value.dtype:
            wrong.append(f"{name} is {mine.dtype} for {value.dtype}")
        elif known and not torch.equal(_octets(mine), _octets(value.cpu())):
            wrong.append(f"{name} has other values")
    for (name, one), (_, other) in zip(_blocks(model), _blocks(alone), strict=True):
        if one.table.dtype != other.table.dtype or not torch.equal(one.table, other.table):
            wrong.append(f"{name}.table is {one.table} for {other.table}")
    return wrong


def _blocks(model: nn.Module) -> list[tuple[str, Block]]:
    return [(name, each) for name, each in model.named_modules() if isinstance(each, Block)]


def _octets(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def run_seeds(seeds: Sequence[int]) -> list[str]:
    """On each rank: lines about seeds that differ."""
    assert current_device() is not None
    lines = []
    for seed in seeds:
        try:
            found = differences(seed)
        except Exception as error:
            found = [f"{type(error).__name__}: {error}"]
        lines += [f"seed {seed}: {line}" for line in found]
        said: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(said, len(found))
        if any(said):
            lines.append(f"seed {seed}: {case_of(seed)}")
    return lines


def _write_out(text: str) -> None:
    print(text, end="", flush=True)


def main(write: Callable[[str], object] = _write_out) -> int:
    parser = argparse.ArgumentParser(description="Read generated folders.")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0, help="the first one; the others follow")
    parser.add_argument("--count", type=int, default=0, help="end after so many seeds")
    parser.add_argument("--ranks", type=int, default=0, help="2 and 4 by turns unless given")
    asked = parser.parse_args()
    pool, end, seed, failed = Pool(), time.monotonic() + 60 * asked.minutes, asked.seed, 0
    batch = min(20, asked.count or 20)
    try:
        while time.monotonic() < end and (not asked.count or seed < asked.seed + asked.count):
            ranks = asked.ranks or (2, 4)[(seed // batch) % 2]
            lines = pool.run(ranks, run_seeds, [*range(seed, seed + batch)])
            for line in dict.fromkeys(line for each in lines for line in each):
                failed += 1
                write(f"{ranks} ranks, {line}\n")
            seed += batch
    finally:
        pool.stop()
    write(f"{seed - asked.seed} programs, {failed} lines about what differs\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
