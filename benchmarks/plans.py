"""Claim: `suggest` finds what is within 5 % of the best plan made by hand, in under two minutes.

The models, ranks and bandwidths are those of `timeline.py`; here no block recomputes anything by
itself, and AdamW steps, too. Everything is a forecast: nothing says what a device would do.

    python benchmarks/plans.py
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from harness import ROOT  # noqa: F401 - the checkout of these benchmarks is the one looked at
from options import counts, parse, parser
from publish import emit, table
from timeline import SHAPES, Block, Llama, Shape
from torch import Tensor, nn

from composable import checkpoint, fully_shard, offload_activations, replicate
from composable.forecast import DEVICES, compare, suggest

LIMIT = 1.05
SECONDS = 120.0  # of a processor, for the smaller model
MEMORY = DEVICES["h100"].usable


def shard(model: nn.Module, mesh: Any, **options: Any) -> None:
    fully_shard(model, policy={Block}, mesh=mesh, **options)


def recompute(model: nn.Module, mesh: Any, *, every: int = 1, **options: Any) -> None:
    for block in list(model.get_submodule("blocks").children())[::every]:
        checkpoint(block)
    shard(model, mesh, **options)


def recompute_and_offload(model: nn.Module, mesh: Any) -> None:
    for index, block in enumerate(model.get_submodule("blocks").children()):
        (checkpoint if index % 4 else offload_activations)(block)
    shard(model, mesh)


def recompute_most(model: nn.Module, mesh: Any) -> None:
    for index, block in enumerate(model.get_submodule("blocks").children()):
        if index % 4:
            checkpoint(block)
    shard(model, mesh)


def all_reduce(model: nn.Module, mesh: Any) -> None:
    replicate(model, mesh=mesh)


def keep(annotate: Callable[..., None]) -> Callable[..., None]:
    return partial(annotate, reshard_after_forward=False)


# by name: what annotates, and ranks that share one copy (0: all)
PLANS: Mapping[str, tuple[Callable[..., None], int]] = {
    "replicate": (all_reduce, 0),
    "ZeRO-3": (shard, 0),
    "ZeRO-2": (keep(shard), 0),
    "nodes, ZeRO-3": (shard, 8),
    "nodes, ZeRO-2": (keep(shard), 8),
    "ZeRO-3, prefetch=2": (partial(shard, prefetch=2), 0),
    "ZeRO-3, all recomputed": (recompute, 0),
    "ZeRO-3, three of four recomputed": (recompute_most, 0),
    "ZeRO-3, every second recomputed": (partial(recompute, every=2), 0),
    "ZeRO-3, three of four recomputed, one offloaded": (recompute_and_offload, 0),
    "four nodes, three of four recomputed": (recompute_most, 32),
}
# what may fit
BY_HAND = {"7B": list(PLANS)[:6], "70B": list(PLANS)[6:], "tiny": list(PLANS)[1:10:4]}


def model_of(shape: Shape) -> nn.Module:
    torch.set_default_dtype(torch.bfloat16)
    try:
        return Llama(shape)
    finally:
        torch.set_default_dtype(torch.float32)


def tokens_of(shape: Shape) -> Tensor:
    return torch.zeros(1, shape.tokens, dtype=torch.int64)


def look(name: str, ranks: int, bandwidth: int) -> dict[str, Any]:
    """What was made by hand, and what was suggested, at `bandwidth` GB/s."""
    shape = replace(SHAPES[name], recompute=False)
    speed = bandwidth * 1e9
    device = replace(DEVICES["h100"], links=speed, network=speed)
    make, batch = partial(model_of, shape), partial(tokens_of, shape)
    forecasts = {}
    for plan in BY_HAND[name]:
        annotate, shards = PLANS[plan]
        mesh = {"replicate": ranks // shards, "shard": shards} if shards else {"ranks": ranks}
        named = {plan: lambda model, mesh, annotate=annotate: annotate(model, mesh)}
        forecasts |= compare(make, named, batch, ranks=ranks, mesh=mesh, device=device).forecasts
    started, worked = time.monotonic(), time.process_time()
    found = suggest(make, batch, ranks=ranks, device=device)
    worked, started = time.process_time() - worked, time.monotonic() - started
    fit = {plan: each for plan, each in forecasts.items() if each.peak <= MEMORY}
    best = min(fit, key=lambda plan: fit[plan].seconds)
    print(f"{name}, {bandwidth} GB/s: {found.plan}, beside {best}", file=sys.stderr, flush=True)
    return {
        "by hand": {plan: [each.seconds, each.peak] for plan, each in forecasts.items()},
        "best": best,
        "suggested": str(found.plan),
        "step": found.forecast.seconds,
        "peak": found.forecast.peak,
        "ratio": found.forecast.seconds / fit[best].seconds,
        "tried": len(found.comparison.forecasts),
        "cpu": worked,
        "clock": started,
    }


def rows_of(name: str, bandwidth: int, found: Mapping[str, Any]) -> Sequence[str]:
    seconds = found["by hand"][found["best"]][0]
    fast = name != "7B" or found["cpu"] <= SECONDS
    return [
        f"{name}, {bandwidth} GB/s",
        found["best"],
        f"{seconds * 1e3:.1f}",
        found["suggested"],
        f"{found['step'] * 1e3:.1f}",
        f"{found['ratio']:.3f}",
        "yes" if found["ratio"] <= LIMIT and fast else "no",
        str(found["tried"]),
        f"{found['cpu']:.0f}",
        f"{found['clock']:.0f}",
    ]


def tables(seen: Mapping[tuple[str, int], Mapping[str, Any]]) -> list[str]:
    """What was suggested beside the best plan by hand, and all of these."""
    header = ["", "best by hand", "step, ms", "suggested", "step, ms", "ratio"]
    header += [f"within {LIMIT:.2f}", "tried", "CPU, s", "clock, s"]
    plans = [plan for plan in PLANS if any(plan in each["by hand"] for each in seen.values())]
    hand = []
    for plan in plans:
        times = [each["by hand"].get(plan) for each in seen.values()]
        cells = [
            "" if time is None else f"{time[0] * 1e3:.1f}{'' if time[1] <= MEMORY else ' (no)'}"
            for time in times
        ]
        hand.append([plan, *cells])
    return [
        table(header, [rows_of(*setup, each) for setup, each in seen.items()]),
        table(["step, ms", *[f"{name}, {speed} GB/s" for name, speed in seen]], hand),
    ]


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.set_defaults(fake_world=64)
    options.add_argument("--models", default="7B,70B", help=f"some of {', '.join(BY_HAND)}")
    options.add_argument(
        "--bandwidths", type=counts, default="50,150,350", help="of a rank in collectives, GB/s"
    )
    found = parse(options, models="tiny", bandwidths=[50])
    setups = [(model, speed) for model in found.models.split(",") for speed in found.bandwidths]
    seen = {setup: look(setup[0], found.fake_world, setup[1]) for setup in setups}
    emit(
        "plans",
        found,
        title=f"`suggest` beside plans made by hand: forecasts at {found.fake_world} ranks",
        tables=tables(seen),
        data={"figures": {f"{name}, {speed} GB/s": each for (name, speed), each in seen.items()}},
    )


if __name__ == "__main__":
    main()
