"""Claim: each backend gets the algorithm that moves its bytes fastest.

Times algorithms by size; knows no model.

The rate is the full tensor's size over the slowest rank's time, whatever the algorithm sends behind
the scenes. The second table asks from which shard size on a parameter deserves a message of its
own: the planner's threshold.

    python benchmarks/collectives.py                       # gloo, 2 and 4 ranks, 1 KiB to 64 MiB
    python benchmarks/collectives.py --world 2,4,8
    python benchmarks/collectives.py --device cuda --world 8
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from algorithms import (
    GATHERS,
    REDUCTIONS,
    Move,
    gather_each,
    gather_packed,
    gather_pairs,
    gather_tensor,
)
from harness import Measure, Rounds, Sample, compete, device_of, series, spread
from options import counts, parse, parser
from publish import curves, emit, rounded, table

MOVES = {**GATHERS, **REDUCTIONS}
MESSAGES = {
    "own: pairs": (gather_each, gather_pairs),
    "packed: pairs": (gather_packed, gather_pairs),
}
MESSAGES |= {
    "own: tensor": (gather_each, gather_tensor),
    "packed: tensor": (gather_packed, gather_tensor),
}
TOGETHER = 12  # parameters of a unit, as in a transformer block
TIMED_SECONDS = 0.05  # a sample repeats what is quicker than this


def _timed(move: Move, repeats: int, device: torch.device) -> float:
    dist.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        move()()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / repeats


def _repeats(move: Move, device: torch.device) -> int:
    """As many as fill the time of a sample, the same number on every rank."""
    once = torch.tensor([min(_timed(move, 2, device) for _ in range(2))], device=device)
    dist.all_reduce(once, op=dist.ReduceOp.MAX)
    return max(1, min(100, int(TIMED_SECONDS / once.item())))


def _moves(size: int, device: torch.device) -> dict[str, Move]:
    ranks = dist.get_world_size()
    numel = max(size // 4 // ranks, 1)
    shard = torch.ones(numel, device=device)
    whole = torch.zeros(numel * ranks, device=device)
    moves = {f"{size} {name}": make(shard, whole) for name, make in GATHERS.items()}
    # An all-reduce in place grows what it sums: zeros stay zeros, however often it is repeated.
    return moves | {
        f"{size} {name}": make(torch.zeros_like(whole), torch.zeros_like(shard))
        for name, make in REDUCTIONS.items()
    }


def _messages(size: int, device: torch.device) -> dict[str, Move]:
    shards = [torch.ones(max(size // 4, 1), device=device) for _ in range(TOGETHER)]
    wholes = [torch.zeros(shard.numel() * dist.get_world_size(), device=device) for shard in shards]
    return {f"{size} {name}": many(shards, wholes, one) for name, (many, one) in MESSAGES.items()}


def build(what: str, options: argparse.Namespace) -> Measure:
    """One sample: seconds of each algorithm at each size, one after the other; `step` is their
    sum.
    """
    device = device_of(options)
    moves: dict[str, Move] = {}
    for size in options.sizes if what == "moves" else options.shards:
        moves |= _moves(size, device) if what == "moves" else _messages(size, device)
    repeats = {name: _repeats(move, device) for name, move in moves.items()}

    def measure() -> Sample:
        seconds = {name: _timed(move, repeats[name], device) for name, move in moves.items()}
        slowest = torch.tensor(list(seconds.values()), dtype=torch.float64, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        sample = dict(zip(seconds, slowest.tolist(), strict=True))
        return {**sample, "step": sum(sample.values())}

    return measure


def readable(size: int) -> str:
    return (
        f"{size >> 20} MiB"
        if size >= 1 << 20
        else f"{size >> 10} KiB"
        if size >= 1 << 10
        else f"{size} B"
    )


def threshold(rounds: Rounds, shards: list[int], kind: str) -> int | None:
    """The least shard size from which on, at every size measured, a message of its own is no slower
    than a packed.
    """
    found = None
    for size in sorted(shards, reverse=True):
        own, packed = (
            spread(series(rounds, "messages", f"{size} {way}: {kind}"))["median"]
            for way in ("own", "packed")
        )
        if own > packed:
            return found
        found = size
    return found


def main() -> None:
    options = parser(__doc__.splitlines()[0], rounds=5, steps=1)
    options.set_defaults(settle=0)
    options.add_argument(
        "--world", type=counts, default="2,4", help="numbers of ranks; replaces --ranks"
    )
    options.add_argument(
        "--sizes", type=counts, default=f"{1 << 10}..{64 << 20}", help="bytes of the full tensor"
    )
    options.add_argument(
        "--shards",
        type=counts,
        default=f"{1 << 10}..{1 << 20}",
        help="bytes of one parameter's shard",
    )
    found = parse(options, world=[2], sizes=[1 << 10, 1 << 18], shards=[1 << 10, 1 << 14], rounds=1)
    if found.fake_world:
        options.error("--fake-world: a faked process group moves no bytes")
    if found.sizes == counts(f"{1 << 10}..{64 << 20}"):
        found.sizes = found.sizes[::2]  # every other power of two shows the curve as well
    tables, data, lines, backend = [], {}, {}, "nccl" if found.device == "cuda" else "gloo"
    moves, messages = list(MOVES), list(MESSAGES)
    kinds = list(dict.fromkeys(name.partition(": ")[2] for name in messages))
    for ranks in found.world:
        run = argparse.Namespace(**{**vars(found), "ranks": ranks})
        rounds = compete(build, ["moves", "messages"], run)

        def rate(size: int, name: str, rounds: Rounds = rounds) -> float:
            return float(size / spread(series(rounds, "moves", f"{size} {name}"))["median"] / 1e9)

        rows = [
            [readable(size), *[f"{rate(size, name):.3f}" for name in moves]] for size in found.sizes
        ]
        tables.append(
            f"GB/s of the full tensor, {ranks} ranks, {backend}:\n\n"
            + table(["size", *moves], rows)
        )
        rows = []
        for size in found.shards:
            medians = [
                spread(series(rounds, "messages", f"{size} {name}"))["median"] for name in messages
            ]
            rows.append([readable(size), *[f"{value * 1e3:.3f}" for value in medians]])
        edges = {kind: threshold(rounds, found.shards, kind) for kind in kinds}
        said = "; ".join(
            f"{kind}: {'never' if at is None else 'from ' + readable(at)}"
            for kind, at in edges.items()
        )
        tables.append(
            f"ms to gather {TOGETHER} parameters, each in a message of its own or all packed in"
            f" one, {ranks} ranks:\n\n"
            + table(["shard", *messages], rows)
            + f"\n\nA message of its own pays, {said}."
        )
        lines[f"{ranks} ranks"] = {
            name: {float(size): rate(size, name) for size in found.sizes} for name in moves
        }
        data[str(ranks)] = {"direct_bytes": edges, "seconds": rounded(rounds)}
    title = f"Collectives: {backend}, {found.device}, {', '.join(map(str, found.world))} ranks"

    def draw(path: Path) -> None:
        curves(path, title, lines, x_label="bytes of the full tensor", y_label="GB/s")

    emit("collectives", found, title=title, tables=tables, data={"worlds": data}, draw=draw)


if __name__ == "__main__":
    main()
