"""`compare` forecasts several ways to annotate one model, and `suggest` searches for the fastest
that fits (`Plan`).
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Annotated, Any, Final

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from composable import apply_tp_plan, checkpoint, fully_shard, offload_activations, replicate
from composable.checked import PositiveInt, Takes, checked
from composable.config import MixedPrecisionPolicy
from composable.errors import ForecastError, first_line
from composable.extras.forecast.devices import Device, amount, device_of, milliseconds, unit_for
from composable.extras.forecast.forecast import Forecast, MakeModel, aligned, forecast
from composable.torch_private import SHARDS

WORTHWHILE: Final = 0.02  # of a step, or of a model: less is not looked into
SHOWN: Final = 8  # rows of a table
MOST: Final = 24  # forecasts that a search makes
_NEVER_TRIED: Final = "pipelines, an offload_policy, and other batches"
Bytes = Annotated[float, Takes("a number of bytes (such as 80 * 10**9)", lambda value: value >= 1)]


@dataclass(frozen=True)
class Comparison:
    """Forecasts of several plans, the fastest that fits first, then what does not fit.

    Attributes:
        forecasts: by the name of the plan.
        shares: for tensor-parallel plans that are compared with others, how many ranks share the
            same rows. That many steps count as one, so that all plans train on the same number of
            rows.

    Example:
        >>> plans = {"shard": fully_shard, "replicate": replicate}
        >>> found = compare(make_model, plans, make_batch, ranks=8)
        >>> fastest = next(iter(found.forecasts))
    """

    forecasts: Mapping[str, Forecast]
    shares: Mapping[str, int] = field(default_factory=dict)

    @property
    def best(self) -> str | None:
        """The fastest plan that fits."""
        name, found = next(iter(self.forecasts.items()))
        return name if found.fits else None

    def times(self, name: str) -> tuple[float, float]:
        """Seconds of a step of a plan, and of these exposed ones."""
        found, share = self.forecasts[name], self.shares.get(name, 1)
        return found.seconds * share, found.exposed * share

    def __str__(self) -> str:
        found = list(self.forecasts.values())
        size, unit = unit_for(max(each.peak for each in found))
        rows = [("", f"peak, {unit}", "step, ms", "waits, ms", "messages", "")]
        fastest = min(self.times(name)[0] for name in self.forecasts)
        for name, each in list(self.forecasts.items())[:SHOWN]:
            seconds, exposed = self.times(name)
            note = "best" if name == self.best else "" if each.fits else "does not fit"
            rows.append(
                (
                    name, amount(each.peak, (size, unit)).split()[0],
                    milliseconds(seconds, fastest), milliseconds(exposed, fastest),
                    str(each.messages * self.shares.get(name, 1)), note,
                )
            )  # fmt: skip
        lines = aligned(rows)
        if (more := len(self.forecasts) - SHOWN) > 0:
            lines.append(f"... and {more} more")
        ranks = prod(found[0].mesh.values())
        return "\n".join([f"{found[0].subject}", f"{found[0].device.name}, {ranks} ranks", *lines])

    def plot(self, path: str | Path) -> None:
        """Draw peak and time of each plan; needs matplotlib."""
        # matplotlib is an extra
        import_module("composable.extras.forecast.picture").draw_comparison(Path(path), self)


@checked
def compare(
    make_model: MakeModel,
    plans: Mapping[str, Callable[..., object]],
    make_batch: Callable[[], Any],
    *,
    ranks: PositiveInt,
    memory: Bytes | None = None,
    device: str | Device = "h100",
    **options: Any,
) -> Comparison:
    """Forecast several ways to annotate a model.

    Args:
        make_model, make_batch, ranks, device: as for `forecast`.
        plans: maps names to functions that annotate the model. A function with two arguments also
            gets the mesh.
        memory: bytes of the device; None: what it has. A plan fits that leaves its `margin` free.
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
    if not plans:
        raise ValueError('compare: plans must name at least one plan, as in {"shard": fully_shard}')
    limited = device_with(memory, device)
    return _ranked(
        {
            name: forecast(make_model, annotate, make_batch, ranks=ranks, device=limited, **options)
            for name, annotate in plans.items()
        },
        shares={},
    )


def device_with(memory: float | None, device: str | Device) -> Device:
    found = device_of(device)
    return found if memory is None else replace(found, capacity=int(memory))


def _ranked(found: Mapping[str, Forecast], shares: Mapping[str, int]) -> Comparison:
    unsorted = Comparison(found, shares)

    def order(item: tuple[str, Forecast]) -> tuple[bool, float]:
        fits = item[1].fits
        return (not fits, unsorted.times(item[0])[0] if fits else float(item[1].peak))

    return Comparison(dict(sorted(found.items(), key=order)), shares)


# --- a search -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """One way to annotate a model.

    Attributes:
        verb: "replicate" or "fully_shard".
        blocks: the classes of the units.
        keep: parameters stay unsharded between forward and backward.
        shards: ranks that share one copy; None: all.
        recomputed: how many of the blocks, the first ones, recompute their forward.
        offloaded: how many of them, evenly spaced, keep their activations in host memory.
        half: compute in bfloat16.
        tp: ranks that share rows, each with a part of the weights.
        experts: each of these has whole experts, in place of a part of every one.
        tp_plan: torch's styles by name, for `parallelize_module`; None: the model's own plan.

    Example:
        >>> plan = suggest(make_model, make_batch, ranks=8).plan
        >>> print(plan.verb, plan.recomputed)
    """

    verb: str
    blocks: tuple[type[nn.Module], ...]
    keep: bool = False
    shards: int | None = None
    recomputed: int = 0
    offloaded: int = 0
    half: bool = False
    tp: int = 1
    experts: bool = False
    tp_plan: Mapping[str, ParallelStyle] | None = field(default=None, compare=False, repr=False)

    def mesh(self, ranks: int) -> dict[str, int]:
        """Names and sizes of its dimensions, those of the verb first."""
        copies, dims = ranks // self.tp, {"tp": self.tp} if self.tp > 1 else {}
        if self.shards is not None:
            return {"replicate": copies // self.shards, "shard": self.shards, **dims}
        return {"dp" if dims else "ranks": copies, **dims}

    def annotate(self, model: nn.Module, mesh: Any) -> None:
        """Do what `code` says; a test compares them."""
        if self.tp > 1:
            if self.tp_plan is None:
                apply_tp_plan(model, mesh["tp"], experts=self.experts)
            else:
                parallelize_module(model, mesh["tp"], dict(self.tp_plan))
            self._refuse_uneven(model)
            mesh = mesh["dp"] if self.shards is None else mesh["replicate", "shard"]
        blocks = [module for module in model.modules() if isinstance(module, self.blocks)]
        if self.recomputed:
            first = blocks[: self.recomputed]
            checkpoint(model, policy=lambda module: module in first)
        if self.offloaded:
            spaced = [blocks[k * len(blocks) // self.offloaded] for k in range(self.offloaded)]
            offload_activations(model, policy=lambda module: module in spaced)
        options: dict[str, Any] = {"mesh": mesh}
        if self.half:
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        if self.verb == "replicate":
            replicate(model, **options)
            return
        if self.keep:
            options["reshard_after_forward"] = False
        fully_shard(model, policy=set(self.blocks), **options)

    def _refuse_uneven(self, model: nn.Module) -> None:
        """Raise for blocks of which ranks have parts of other sizes: only this rank's are known."""
        blocks = [module for module in model.modules() if isinstance(module, self.blocks)]
        for name, parameter in (named for each in blocks for named in each.named_parameters()):
            for placement in parameter.placements if isinstance(parameter, DTensor) else ():
                if isinstance(placement, SHARDS) and parameter.shape[placement.dim] % self.tp:
                    raise ForecastError(
                        f"suggest: {self.tp} ranks do not divide '{name}', {tuple(parameter.shape)}"
                    )

    def code(self, ranks: int, device_type: str = "cuda") -> str:
        """What to write for it, where `model` is the model, and `tp_plan` what was passed. It
        imports what it needs but classes of the program itself.
        """
        names = ", ".join(block.__qualname__ for block in self.blocks)
        imports, uses, lines, options = [], [self.verb], [], ""
        sizes = self.mesh(ranks)
        if len(sizes) > 1:
            imports.append("from torch.distributed.device_mesh import init_device_mesh")
            lines += [
                f"names = {tuple(sizes)}".replace("'", '"'),
                f'mesh = init_device_mesh("{device_type}", {tuple(sizes.values())},'
                " mesh_dim_names=names)",
            ]
            of_verb = str([name for name in sizes if name != "tp"]).replace("'", '"')
            options = f", mesh=mesh{of_verb}" if self.tp > 1 else ", mesh=mesh"
        if self.tp > 1 and self.tp_plan is None:
            uses.append("apply_tp_plan")
            whole = ", experts=True" if self.experts else ""
            lines.append(f'apply_tp_plan(model, mesh["tp"]{whole})')
        elif self.tp > 1:
            imports.append("from torch.distributed.tensor.parallel import parallelize_module")
            lines.append('parallelize_module(model, mesh["tp"], tp_plan)')
        if self.half:
            imports.insert(0, "import torch")
            uses.append("MixedPrecisionPolicy")
            lines.append("bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)")
            options += ", mp_policy=bf16"
        if self.recomputed or self.offloaded:
            kinds = names if len(self.blocks) == 1 else f"({names})"
            lines.append(f"blocks = [m for m in model.modules() if isinstance(m, {kinds})]")
        if self.recomputed:
            uses.append("checkpoint")
            lines.append(f"checkpoint(model, policy=lambda m: m in blocks[:{self.recomputed}])")
        if self.offloaded:
            uses.append("offload_activations")
            lines += [
                f"spaced = [blocks[k * len(blocks) // {self.offloaded}]"
                f" for k in range({self.offloaded})]",
                "offload_activations(model, policy=lambda m: m in spaced)",
            ]
        if self.verb == "fully_shard":
            kept = ", reshard_after_forward=False" if self.keep else ""
            options = f", policy={{{names}}}{options}{kept}"
        lines.append(f"{self.verb}(model{options})")
        imports.append(f"from composable import {', '.join(sorted(uses))}")
        if self.verb == "fully_shard" or self.recomputed or self.offloaded:
            imports += dict.fromkeys(filter(None, map(_import_of, self.blocks)))
        return "\n".join([*imports, "", *lines])

    def __str__(self) -> str:
        parts = {
            f"tensor parallel over {self.tp}{' by experts' if self.experts else ''}": self.tp > 1,
            f"in groups of {self.shards}": self.shards is not None,
            "kept after forward": self.keep,
            f"{self.recomputed} blocks recomputed": self.recomputed,
            f"{self.offloaded} offloaded": self.offloaded,
            "bf16": self.half,
        }
        return ", ".join([self.verb, *(text for text, is_so in parts.items() if is_so)])


def _import_of(block: type[nn.Module]) -> str:
    """The line that imports it; empty for what no other module can import."""
    outermost = block.__qualname__.partition(".")[0]
    module = sys.modules.get(block.__module__)
    if module is None or block.__module__ == "__main__" or not hasattr(module, outermost):
        return ""
    return f"from {block.__module__} import {outermost}"


@dataclass(frozen=True)
class Suggestion:
    """What `suggest` found.

    Attributes:
        code: to paste.
        plan: what it stands for.
        forecast: of it.
        comparison: all plans that were tried.
        not_tried: what was left out, and why.

    Example:
        >>> found = suggest(make_model, make_batch, ranks=8)
        >>> print(found.code)
    """

    code: str
    plan: Plan
    forecast: Forecast
    comparison: Comparison
    not_tried: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.code}\n\n{self.comparison}\n{_said(self.not_tried)}"


@checked
def suggest(
    make_model: MakeModel,
    make_batch: Callable[[], Any],
    *,
    ranks: PositiveInt,
    memory: Bytes | None = None,
    device: str | Device = "h100",
    block: type[nn.Module] | None = None,
    half: bool | None = None,
    tp_plan: Mapping[str, ParallelStyle] | None = None,
    progress: Callable[[str], object] | None = None,
    most: PositiveInt = MOST,
    **options: Any,
) -> Suggestion:
    """Search for the fastest way to train a model that fits.

    The search tries `replicate`, and `fully_shard` over all ranks. If ranks would wait for
    messages, it also tries shards in groups of one node or of several, with replicas across the
    groups. For each, it keeps parameters after forward, or reshards them. If this does not fit, it
    recomputes as few blocks as necessary, or keeps their activations in host memory. If even
    recomputing all blocks does not fit, it does both.

    Args:
        make_model, make_batch, ranks, device: as for `forecast`.
        memory: bytes of the device; None: what it has. A plan fits that leaves its `margin` free.
        block: the class of the units. None: the classes of the largest modules that occur several
            times.
        half: compute in bfloat16. None: do so on accelerators if parameters are float32.
        tp_plan: torch's styles by name, as for `parallelize_module`. None: the plan of a model of
            transformers, for its weights and for its experts. If no plan fits, or ranks wait for
            messages, the search tries tensor parallelism over two or more ranks of a node.
        progress: called with each plan before it is tried, and every few seconds with what runs.
        most: the largest number of forecasts. After it, the search ends with the best plan so far.
        options: as for `forecast`.

    Raises:
        ForecastError: no plan that was tried fits, or no class of modules repeats. The message says
            how much memory the smallest plan needs.

    Example:
        >>> print(suggest(make_model, make_batch, ranks=64, device="h100"))
    """
    found = device_with(memory, device)
    with torch.device("meta"):
        model = make_model()
    if half is None:
        half = found.accelerator and any(p.dtype is torch.float32 for p in model.parameters())
    blocks = repeated(model) if block is None else (block,)
    count = sum(isinstance(module, blocks) for module in model.modules())
    if not count:
        raise ValueError(f"suggest: block={block!r} is no class of modules of the model")
    whole = sum(p.numel() * (2 if half else p.element_size()) for p in model.parameters())

    def run(plan: Plan) -> Forecast:
        if progress is not None:
            progress(str(plan))
        return forecast(
            make_model, plan.annotate, make_batch,
            ranks=ranks, mesh=plan.mesh(ranks), device=found, progress=progress, **options,
        )  # fmt: skip

    search = _Search(run, found.usable, count, most)
    lean = Plan("fully_shard", blocks, half=half, tp_plan=tp_plan)
    not_tried = []
    try:
        search.find(lean, ranks, found.per_node, whole)
        several = list(_tensor_parallel(lean, model, ranks, found))
        if not several and search.waits and min(found.per_node, ranks) > 1:
            not_tried.append("tensor parallel, for which the model has no plan (tp_plan=)")
        for each in several:
            if not search.waits:
                break
            try:
                search.find(each, ranks // each.tp, found.per_node // each.tp, whole // each.tp)
            except (RuntimeError, ValueError, AssertionError) as error:  # as it would on the device
                not_tried.append(f"{each}, which does not run")
                if progress is not None:
                    progress(f"{each} does not run: {first_line(error)}")
    except _Enough:
        not_tried.append(f"plans beyond most={most} forecasts")
    not_tried.append(_NEVER_TRIED)
    comparison = _ranked(
        {str(plan): each for plan, each in search.tried.items()},
        {str(plan): plan.tp for plan in search.tried},
    )
    plan = search.best
    if plan is None:
        least = min(each.peak for each in search.tried.values())
        raise ForecastError(
            f"suggest: nothing that was tried fits into {amount(search.limit)}; the least is"
            f" {amount(least)}. Use more ranks, a smaller batch, or an offload_policy\n"
            f"{comparison}\n{_said(not_tried)}"
        )
    code = plan.code(ranks, "cuda" if found.accelerator else "cpu")
    return Suggestion(code, plan, search.tried[plan], comparison, tuple(not_tried))


def _said(not_tried: Sequence[str]) -> str:
    return f"not tried: {'; '.join(not_tried)}"


def _tensor_parallel(lean: Plan, model: nn.Module, ranks: int, device: Device) -> Iterator[Plan]:
    """Plans over ranks of one node, for models that have a plan."""
    # as transformers says it of a model
    by_model, of_experts = (getattr(model, name, None) for name in ("tp_plan", "ep_plan"))
    if lean.tp_plan is None and not by_model:
        return
    tp = 2
    while tp <= min(device.per_node, ranks):
        if ranks % tp == 0:
            for experts in (False, True) if lean.tp_plan is None and of_experts else (False,):
                yield replace(lean, tp=tp, experts=experts)
        tp *= 2


class _Enough(Exception):
    """The search has made as many forecasts as it may."""


class _Search:
    """Note [Search]
    A forecast of a large model takes seconds, so few are made. What recomputing one block saves and
    costs is about the same whatever happens to parameters: it is measured once, on the plan that
    needs the least memory. What fits is then estimated for each of the others, the most promising
    are tried first, and none is tried that could not become the fastest.

    Attributes:
        tried: forecasts by plan.
        limit: bytes.
    """

    def __init__(self, run: Callable[[Plan], Forecast], limit: int, count: int, most: int) -> None:
        self.tried: dict[Plan, Forecast] = {}
        self.limit = limit
        self._most = most
        self._run = run
        self._count = count

    def look(self, plan: Plan) -> Forecast:
        if plan not in self.tried:
            if len(self.tried) >= self._most:
                raise _Enough
            self.tried[plan] = self._run(plan)
        return self.tried[plan]

    def fits(self, plan: Plan) -> bool:
        return self.look(plan).peak <= self.limit

    @property
    def best(self) -> Plan | None:
        fitting = [plan for plan, found in self.tried.items() if found.peak <= self.limit]
        return min(fitting, key=self.seconds, default=None)

    @property
    def waits(self) -> bool:
        """Whether nothing fits, or the best plan waits for messages."""
        best = self.best
        return best is None or self.tried[best].exposed > WORTHWHILE * self.tried[best].seconds

    def seconds(self, plan: Plan) -> float:
        """Of as many rows as there are without tensor parallel."""
        return self.look(plan).seconds * plan.tp

    def find(self, lean: Plan, ranks: int, per_node: int, whole: int) -> None:
        """Try plans until none can be faster than `best`.

        Args:
            lean: shards everything and keeps nothing.
            ranks: that have rows of their own.
            per_node: such ranks of a node.
            whole: bytes of all parameters while modules compute.
        """
        found = self.look(lean)
        if lean.tp > 1 and not self._may_win(lean, -found.exposed * lean.tp):
            return
        rests = sum(found.at_rest.values()) * ranks
        bases = [lean]
        waits = found.exposed > WORTHWHILE * found.seconds
        for shards in (None, *_groups(ranks, per_node)) if waits else (None,):
            for keep in (True, False):
                least = rests // (shards or ranks) + (whole if keep else 0)
                if least <= self.limit:
                    bases.append(replace(lean, shards=shards, keep=keep))
        if rests + whole <= self.limit:
            bases.append(replace(lean, verb="replicate"))
        tight = [base for base in bases if not self.fits(base) and self._may_win(base, 0.0)]
        if not tight:
            return
        every = replace(lean, recomputed=self._count)
        if not self.fits(every):
            for plan in (lean, every):
                self.look(replace(plan, offloaded=self._count))
            return
        saved = (found.peak - self.look(every).peak) / self._count
        cost = (self.seconds(every) - self.seconds(lean)) / self._count

        def needed(base: Plan) -> float:
            return (self.look(base).peak - self.limit) / max(saved, 1.0)

        tight.sort(key=lambda base: self.seconds(base) + needed(base) * cost)
        for base in tight:
            if self._may_win(base, needed(base) * cost):
                self._recompute(base, saved)
        for base in tight:
            blocks = math.ceil(needed(base)) + 1  # some tensors are still on their way
            moved = replace(base, offloaded=min(blocks, self._count))
            if self._may_win(base, 0.0):
                self.look(moved)
                if self.best != moved:
                    break

    def _may_win(self, base: Plan, more: float) -> bool:
        best = self.best
        return best is None or self.seconds(base) + more < self.seconds(best)

    def _recompute(self, base: Plan, saved: float) -> None:
        """Find the fewest blocks that make `base` fit if each saves about as much."""
        low, high, peak = 0, self._count + 1, self.look(base).peak  # does not fit; fits
        while saved > 0 and high - low > 1:
            guess = math.ceil((peak - self.limit) / saved)
            guess = min(max(guess, low + 1), high - 1)
            plan = replace(base, recomputed=guess)
            low, high = (low, guess) if self.fits(plan) else (guess, high)
            following = (peak - self.look(plan).peak) / guess
            if guess == high and math.ceil((peak - self.limit) / max(following, 1.0)) >= high:
                return
            saved = following


def _groups(ranks: int, per_node: int) -> list[int]:
    """Sizes of groups of whole nodes that are less than all ranks."""
    nodes = [per_node << k for k in range(ranks.bit_length())]
    return [size for size in nodes if 1 < size < ranks and ranks % size == 0]


def repeated(model: nn.Module) -> tuple[type[nn.Module], ...]:
    """Classes of blocks: those that transformers does not split, else those of the largest modules
    of which there are several, and of what else is large, as an encoder beside a decoder.
    """
    counts = Counter(map(type, model.modules()))
    whole = {name for m in model.modules() for name in getattr(m, "_no_split_modules", None) or ()}
    found = tuple(kind for kind in counts if counts[kind] > 1 and kind.__name__ in whole)
    if found:
        return found
    while (kind := _largest(model, found)) is not None:
        found += (kind,)
    if not found:
        raise ForecastError(
            f"suggest: no class of modules repeats in the {type(model).__name__}; say block="
        )
    return found


def _largest(model: nn.Module, found: tuple[type[nn.Module], ...]) -> type[nn.Module] | None:
    """The class of the largest modules of which there are several, outside of those of `found`."""
    sizes: dict[type[nn.Module], list[int]] = {}
    for module in _outside(model, found):
        small = bool(found) and not list(module.children())  # beside blocks, as embeddings
        if not small and not isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            size = sum(parameter.numel() for parameter in module.parameters())
            sizes.setdefault(type(module), []).append(size)
    least = WORTHWHILE * sum(parameter.numel() for parameter in model.parameters())
    several = {kind: each for kind, each in sizes.items() if len(each) > 1 and sum(each) > least}
    return max(several, key=lambda kind: sum(several[kind]) / len(several[kind]), default=None)


def _outside(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> Iterator[nn.Module]:
    """`module` and what is below, without modules of `kinds`, what they contain and what contains
    them.
    """
    for child in module.children():
        if not isinstance(child, kinds):
            yield from _outside(child, kinds)
    if not any(isinstance(each, kinds) for each in module.modules()):
        yield module
