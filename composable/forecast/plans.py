"""Several ways to annotate one model, side by side, and a search for the fastest that fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from composable.api.checkpoint import checkpoint
from composable.api.fully_shard import fully_shard
from composable.api.replicate import replicate
from composable.config import MixedPrecisionPolicy
from composable.errors import ForecastError
from composable.forecast.devices import GIB, Device, device_of
from composable.forecast.forecast import forecast
from composable.forecast.result import Forecast
from composable.policies.rules import CustomPolicy

MARGIN: Final = 0.05  # of the memory, which no forecast counts
SHOWN: Final = 8  # rows of a table


@dataclass(frozen=True)
class Comparison:
    """Forecasts of several plans, the fastest that fits first, then what does not fit.

    Attributes:
        forecasts: by the name of the plan.
        memory: bytes that a plan may use.
    """

    forecasts: Mapping[str, Forecast]
    memory: int

    @property
    def best(self) -> str | None:
        """The fastest plan that fits."""
        name, found = next(iter(self.forecasts.items()))
        return name if found.peak <= self.memory else None

    def __str__(self) -> str:
        rows = [("", "peak, GiB", "step, ms", "waits, ms", "messages", "")]
        best, more = self.best, len(self.forecasts) - SHOWN
        for name, found in list(self.forecasts.items())[:SHOWN]:
            fits = found.peak <= self.memory
            note = "best" if name == best else "" if fits else "does not fit"
            rows.append(
                (
                    name, f"{found.peak / GIB:.2f}", f"{found.seconds * 1e3:.1f}",
                    f"{found.exposed * 1e3:.1f}", str(found.messages), note,
                )
            )  # fmt: skip
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        lines = [
            "  ".join(
                [row[0].ljust(widths[0]), *map(str.rjust, row[1:5], widths[1:]), row[5]]
            ).rstrip()
            for row in rows
        ]
        return "\n".join([*lines, f"... and {more} more"] if more > 0 else lines)

    def plot(self, path: str | Path) -> None:
        """Draw peak and time of each plan; needs matplotlib."""
        from composable.forecast.picture import draw_comparison  # noqa: PLC0415 - an extra

        draw_comparison(Path(path), self)


def compare(
    make_model: Callable[[], nn.Module],
    plans: Mapping[str, Callable[..., object]],
    make_batch: Callable[[], Any],
    *,
    ranks: int,
    memory: int | None = None,
    **options: Any,
) -> Comparison:
    """Forecast several ways to annotate a model.

    Args:
        make_model, make_batch, ranks: as for `forecast`.
        plans: by name, what annotates the model; one that takes two arguments gets the mesh, too.
        memory: bytes that a plan may use; None: what the device has, less a margin of 5 %.
        options: as for `forecast`.

    Example:
        >>> print(
        ...     compare(
        ...         make_model,
        ...         {
        ...             "shard": lambda model: fully_shard(model, policy={Block}),
        ...             "replicate": replicate,
        ...         },
        ...         make_batch,
        ...         ranks=8,
        ...     )
        ... )
    """
    found = {
        name: forecast(make_model, annotate, make_batch, ranks=ranks, **options)
        for name, annotate in plans.items()
    }
    return _ranked(found, _memory(memory, options.get("device", "h100")))


def _memory(memory: int | None, device: str | Device) -> int:
    return int(device_of(device).capacity * (1 - MARGIN)) if memory is None else memory


def _ranked(found: Mapping[str, Forecast], memory: int) -> Comparison:
    def order(item: tuple[str, Forecast]) -> tuple[bool, float]:
        fits = item[1].peak <= memory
        return (not fits, item[1].seconds if fits else float(item[1].peak))

    return Comparison(dict(sorted(found.items(), key=order)), memory)


# --- a search -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """One way to annotate a model.

    Attributes:
        verb: "replicate" or "fully_shard".
        block: the class of the units.
        keep: parameters stay unsharded between forward and backward.
        shards: ranks that share one copy; None: all.
        recomputed: how many of the blocks, the first ones, recompute their forward.
        half: compute in bfloat16.
    """

    verb: str
    block: type[nn.Module]
    keep: bool = False
    shards: int | None = None
    recomputed: int = 0
    half: bool = False

    def mesh(self, ranks: int) -> dict[str, int]:
        if self.shards is None:
            return {"ranks": ranks}
        return {"replicate": ranks // self.shards, "shard": self.shards}

    def annotate(self, model: nn.Module, mesh: Any) -> None:
        blocks = [module for module in model.modules() if type(module) is self.block]
        if self.recomputed:
            chosen = dict.fromkeys(map(id, blocks[: self.recomputed]))
            checkpoint(model, policy=CustomPolicy(lambda module: id(module) in chosen))
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if self.half else None
        options: dict[str, Any] = {} if precision is None else {"mp_policy": precision}
        if self.verb == "replicate":
            replicate(model, mesh=mesh, **options)
            return
        if self.keep:
            options["reshard_after_forward"] = False
        fully_shard(model, policy={self.block}, mesh=mesh, **options)

    def code(self, ranks: int) -> str:
        """What to write for it."""
        name, lines, options = self.block.__name__, [], ""
        if self.recomputed:
            lines += [
                f"blocks = [m for m in model.modules() if isinstance(m, {name})]",
                f"checkpoint(model, policy=lambda module: module in blocks[:{self.recomputed}])",
            ]
        if self.half:
            lines.append("bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)")
            options += ", mp_policy=bf16"
        if self.verb == "replicate":
            return "\n".join([*lines, f"replicate(model{options})"])
        if self.shards is not None:
            sizes = f"({ranks // self.shards}, {self.shards})"
            lines.append(
                f'mesh = init_device_mesh("cuda", {sizes}, mesh_dim_names=("replicate", "shard"))'
            )
            options += ", mesh=mesh"
        if self.keep:
            options += ", reshard_after_forward=False"
        return "\n".join([*lines, f"fully_shard(model, policy={{{name}}}{options})"])

    def __str__(self) -> str:
        parts = [self.verb]
        if self.shards is not None:
            parts.append(f"in groups of {self.shards}")
        if self.keep:
            parts.append("kept after forward")
        if self.recomputed:
            parts.append(f"{self.recomputed} blocks recomputed")
        return ", ".join(parts)


@dataclass(frozen=True)
class Suggestion:
    """What `suggest` found.

    Attributes:
        code: to paste.
        plan: what it stands for.
        forecast: of it.
        comparison: all plans that were tried.
    """

    code: str
    plan: Plan
    forecast: Forecast
    comparison: Comparison

    def __str__(self) -> str:
        return f"{self.code}\n\n{self.comparison}"


def suggest(
    make_model: Callable[[], nn.Module],
    make_batch: Callable[[], Any],
    *,
    ranks: int,
    memory: int | None = None,
    device: str | Device = "h100",
    block: type[nn.Module] | None = None,
    half: bool = False,
    progress: Callable[[str], object] | None = None,
    **options: Any,
) -> Suggestion:
    """Search for the fastest way to train a model that fits.

    Tried are `replicate`; `fully_shard` over all ranks, and inside of nodes with replicas across
    them, each with parameters that stay or go after forward; and where that does not fit,
    recomputing blocks, as few as do.

    Args:
        make_model, make_batch, ranks: as for `forecast`.
        memory: bytes that a step may use; None: what the device has, less a margin of 5 %.
        block: the class of the units; None: that of the largest modules of which there
            are several.
        half: also compute in bfloat16, where parameters are float32.
        progress: is told each plan before it is tried.
        options: as for `forecast`.

    Raises:
        ForecastError: nothing that was tried fits, or no class of modules repeats; in the message
            how much the smallest plan needs.
    """
    found = device_of(device)
    limit = _memory(memory, found)
    with torch.device("meta"):
        model = make_model()
    kind, count = repeated(model) if block is None else (block, _count(model, block))
    whole = sum(parameter.nbytes for parameter in model.parameters())
    tried: dict[Plan, Forecast] = {}

    def fits(plan: Plan) -> bool:
        if plan not in tried:
            if progress is not None:
                progress(str(plan))
            tried[plan] = forecast(
                make_model, plan.annotate, make_batch,
                ranks=ranks, mesh=plan.mesh(ranks), device=found, **options,
            )  # fmt: skip
        return tried[plan].peak <= limit

    # with less than parameters and gradients no replicated step fits
    for base in _bases(ranks, kind, half, found, replicates=2 * whole <= limit):
        if fits(base):
            continue
        every = _recomputing(base, count)
        if not fits(every):
            continue
        low, high = 0, count  # the fewest that fit
        while high - low > max(1, count // 8):
            middle = (low + high) // 2
            low, high = (low, middle) if fits(_recomputing(base, middle)) else (middle, high)
    comparison = _ranked({str(plan): each for plan, each in tried.items()}, limit)
    name = comparison.best
    if name is None:
        least = min(each.peak for each in tried.values())
        raise ForecastError(
            f"suggest: nothing that was tried fits into {limit / GIB:.1f} GiB; the least is"
            f" {least / GIB:.1f} GiB. Use more ranks, a smaller batch, or"
            " offload_activations(model) and CPUOffloadPolicy, which were not tried\n"
            f"{comparison}"
        )
    plan = next(plan for plan in tried if str(plan) == name)
    return Suggestion(plan.code(ranks), plan, tried[plan], comparison)


def _bases(
    ranks: int, block: type[nn.Module], half: bool, device: Device, *, replicates: bool
) -> Iterator[Plan]:
    if replicates:
        yield Plan("replicate", block, half=half)
    groups: Sequence[int | None] = [None]
    if ranks > device.per_node and ranks % device.per_node == 0:
        groups = [None, device.per_node]
    for shards in groups:
        for keep in (True, False):
            yield Plan("fully_shard", block, keep=keep, shards=shards, half=half)


def _recomputing(plan: Plan, count: int) -> Plan:
    return Plan(plan.verb, plan.block, plan.keep, plan.shards, count, plan.half)


def repeated(model: nn.Module) -> tuple[type[nn.Module], int]:
    """The class of the largest modules of which there are several, and how many."""
    sizes: Counter[type[nn.Module]] = Counter()
    counts: Counter[type[nn.Module]] = Counter()
    for module in model.modules():
        if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            continue
        sizes[type(module)] += sum(parameter.numel() for parameter in module.parameters())
        counts[type(module)] += 1
    several = [kind for kind, count in counts.items() if count > 1 and sizes[kind]]
    if not several:
        raise ForecastError(
            f"suggest: no class of modules repeats in the {type(model).__name__}; say block="
        )
    best = max(several, key=lambda kind: sizes[kind] / counts[kind])
    return best, counts[best]


def _count(model: nn.Module, block: type[nn.Module]) -> int:
    return sum(type(module) is block for module in model.modules())
