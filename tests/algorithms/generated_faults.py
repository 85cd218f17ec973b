"""Programs with a fault, drawn at random: `watch` must name it, and must not be late.

    python -m tests.algorithms.generated_faults --minutes 10 --seed 0
    # one of them again
    python -m tests.algorithms.generated_faults --count 1 --seed 4711 --ranks 2

The programs are those of `generated_watch.py`; a fault is planted on one rank in one step.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from composable import watch
from composable.contract.values import map_tensors
from composable.errors import NonFiniteError, RanksDisagreeError
from composable.torch_private import local_tensor
from tests.algorithms.generated_watch import (
    ANNOTATIONS,
    AROUND,
    OPTIMIZERS,
    STEPS,
    WAYS,
    Model,
    Plan,
    Run,
    _rank,
    plan_of,
)
from tests.helpers.world import Pool, RanksFailed

KINDS: Final = ("batch", "output", "backward", "weight", "at rest", "lr", "replica", "buffer")
# Several units in one module's place, or blocks that are no units.
_WHOLE: Final = ("one unit", "one unit, bf16")


@dataclass(frozen=True)
class Fault:
    """What goes wrong, where, and in which step."""

    kind: str
    rank: int
    step: int
    block: int
    value: float

    def strikes(self, step: int) -> bool:
        return (self.rank, self.step) == (_rank(), step) and torch.is_grad_enabled()


class _Spoiled(torch.autograd.Function):
    """The same value, whose gradient is spoiled."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: float) -> Tensor:
        ctx.value = value
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone()
        gradient.view(-1)[-1] = ctx.value
        return gradient, None


def _spoiled(tensor: Tensor, value: float) -> Tensor:
    found: Tensor = _Spoiled.apply(tensor, value)  # type: ignore[no-untyped-call]
    return found


def is_possible(plan: Plan, fault: Fault) -> bool:
    kind, whole = fault.kind, _is_whole(plan)
    replicas = "replicate" in plan.annotation and plan.annotation != "replicate in shards"
    refused = (
        plan.annotation in ("compiled blocks", "several roots", "one unit of two"),
        plan.optimizer == "in backward",  # it has stepped when its findings are exchanged
        plan.around in ("join", "detect_anomaly", "skipped"),
        plan.way == "together" and plan.around == "hook that keeps replicas apart",  # refused
        # counted, as it may be the scale's
        plan.way == "scaler" and kind in ("backward", "weight"),
        # hyper-parameters are compared where an optimizer steps
        plan.way in ("scaler", "steps left out") and kind == "lr",
        # an infinity that is no NaN at the end of a large unit may be none
        whole and kind in ("output", "backward") and fault.value == torch.inf,
        kind in ("weight", "backward") and plan.block in ("AllFrozen", "Recurrent", "Attention"),
        kind in ("weight", "backward") and plan.around == "hook that keeps replicas apart",
        # infinities below zero are suspects in the first step: they are usual if it ends well
        plan.block == "Logarithm" and fault.step < 2,
        # what is written in the middle of a step is not looked at before the next one
        kind == "at rest" and plan.way == "every second step",
        # of six rows the last of four ranks has none
        kind in ("at rest", "replica") and fault.rank == 3,
        kind == "lr" and (plan.optimizer == "LBFGS" or plan.around == "scheduler"),
        kind == "replica" and not (replicas or plan.annotation.startswith("hybrid")),
        kind == "replica" and plan.around in ("local_steps", "hook that keeps replicas apart"),
        kind == "buffer" and (plan.block != "Masked" or replicas or fault.step == 0),
        # each replica has buffers of its own, and is one rank
        kind == "buffer" and plan.around == "local_steps" and plan.ranks == 2,
    )
    return not any(refused)


def _is_whole(plan: Plan) -> bool:
    alone = plan.annotation.startswith("replicate,") or plan.annotation == "replicate"
    return plan.annotation in _WHOLE or alone


def program_of(seed: int, ranks: int, kinds: Sequence[str] = KINDS) -> tuple[Plan, Fault]:
    draw = random.Random(f"fault {seed} {ranks}")
    while True:
        plan = plan_of(draw.randrange(1 << 30), ranks, repeat=False)
        plan = replace(plan, between=(), every=1, agree=1)
        value = draw.choice([float("nan"), float("nan"), float("inf")])
        where = draw.randrange(ranks), draw.randrange(STEPS), draw.randrange(3)
        fault = Fault(draw.choice(kinds), *where, value)
        if is_possible(plan, fault):
            return plan, fault


def _expected(plan: Plan, fault: Fault) -> tuple[str, str, str]:
    """The unit, the phase, and how the name of the tensor begins."""
    whole, nested = _is_whole(plan), plan.annotation == "nested"
    unit = "(root)" if whole else f"blocks.{fault.block}"
    below = f"blocks.{fault.block}." if whole else ""
    weight = (f"{unit}.down", "weight") if nested else (unit, f"{below}down.weight")
    return {
        "batch": ("(root)", "input", "input 0"),
        "output": (unit, "output", "output"),
        "backward": (unit, "gradient", ""),
        "weight": (weight[0], "gradient", weight[1]),
        "at rest": ("(root)", "parameter", "stem.weight"),
        "lr": ("", "hyper-parameter", "lr of group 0"),
        "replica": ("(root)", "parameter", "stem.weight"),
        "buffer": (unit, "buffer", f"{below}mask"),
    }[fault.kind]


def _plant(run: Run, fault: Fault) -> None:
    """Let the forward of a block, or of the model, meet the fault."""
    block: Any = run.model.blocks[fault.block]
    if fault.kind == "batch":
        batch = run.batch

        def spoiled_batch(rows: int | None = None) -> Tensor:
            x = batch(rows)
            if fault.strikes(run.step):
                x[0, 0] = fault.value
            return x

        run.batch = spoiled_batch  # type: ignore[method-assign]
    elif fault.kind in ("output", "backward"):
        inner = block.forward

        def forward(x: Tensor) -> Any:
            strikes = fault.strikes(run.step)
            if strikes and fault.kind == "backward":
                x = _spoiled(x, fault.value)
            out = inner(x)
            if strikes and fault.kind == "output":
                out = map_tensors(out, lambda each: each + fault.value)
            return out

        block.forward = forward
    elif fault.kind == "weight":
        down = block.down

        def layer(x: Tensor) -> Tensor:
            weight = down.weight
            if fault.strikes(run.step):
                weight = _spoiled(weight, fault.value)
            return F.linear(x, weight, down.bias)

        down.forward = layer


def _strike(run: Run, fault: Fault) -> None:
    """What happens between two steps."""
    if (fault.rank, fault.step) != (_rank(), run.step):
        return
    # of 6 rows each of two or four ranks has some
    stem = local_tensor(run.model.stem.weight)
    if fault.kind == "at rest":
        with torch.no_grad():
            stem.view(-1)[0] = fault.value
    elif fault.kind == "replica":
        stem.data.view(-1)[0] += 0.5
    elif fault.kind == "buffer":
        run.model.blocks[fault.block].mask.data[1] += 0.5
    elif fault.kind == "lr":
        for group in run.optimizer.param_groups:
            group["lr"] = group["lr"] * 2


def run_fault(plan: Plan, fault: Fault) -> str:
    """What is wrong with what `watch` says of it; or nothing."""
    torch.manual_seed(plan.seed)
    model: Any = Model(plan.block)
    ANNOTATIONS[plan.annotation](model)
    optimizer = OPTIMIZERS[plan.optimizer](model)
    torch.manual_seed(plan.seed * 100 + _rank())
    random.seed(plan.seed * 100 + _rank())
    draws = random.Random(f"{plan.seed}"), random.Random(f"{plan.seed} {_rank()}")
    run = Run(model, optimizer, *draws)
    _plant(run, fault)
    run.watched = watch(model, action="raise", agree=1)
    around = AROUND[plan.around](run) if plan.around else nullcontext(lambda: None)
    raised, planted = -1, -1
    try:
        with run.watched, around as follow:
            for run.step in range(STEPS + 1):
                if run.step == fault.step:
                    planted = run.watched.step
                _strike(run, fault)
                WAYS[plan.way](run)
                follow()
    except (NonFiniteError, RanksDisagreeError):
        raised = run.step
    finite = all(bool(local_tensor(each).detach().isfinite().all()) for each in model.parameters())
    if not run.watched.findings:
        return "missed"
    found = run.watched.findings[0]
    late = raised > fault.step + (plan.way == "every second step")
    if found.step != planted or late or (not finite and fault.kind != "at rest"):
        return f"late: planted in step {planted}, raised in {raised}, finite: {finite}:\n{found}"
    unit, phase, tensor = _expected(plan, fault)
    reported = not any(name == "rank" for name, _ in found.lines)
    right = (
        (found.unit == unit or fault.kind == "lr" or _is_inside(found.unit, plan, fault)),
        found.phase == phase,
        found.tensor.startswith(tensor),
        fault.rank in found.ranks if not reported else found.ranks == (fault.rank,),
    )
    return "" if all(right) else f"named other than {(unit, phase, tensor)} {right}:\n{found}"


def _is_inside(unit: str, plan: Plan, fault: Fault) -> bool:
    """Whether a unit inside of a block is named, which sees a gradient first."""
    inside = plan.annotation == "nested" and fault.kind == "backward"
    return inside and unit.startswith(f"blocks.{fault.block}")


def run_faults(programs: Sequence[tuple[Plan, Fault]]) -> list[str]:
    said = []
    for plan, fault in programs:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
                text = run_fault(plan, fault)
        except Exception as error:
            raise AssertionError(f"{fault} in {plan}: {type(error).__name__}: {error}") from error
        said.append(text and f"{fault} in {plan}: {text}")
    return said


# --- by hand -------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description="Watch generated programs with a fault.")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0, help="the first one; the others follow")
    parser.add_argument("--count", type=int, default=0, help="end after so many seeds")
    parser.add_argument("--ranks", type=int, default=0, help="2 and 4 by turns unless given")
    parser.add_argument("--kinds", nargs="*", default=KINDS, choices=KINDS)
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    pool, done, failed = Pool(), 0, 0
    while time.monotonic() < end and not (options.count and done >= options.count):
        ranks = options.ranks or (2, 2, 2, 4)[done % 4]
        program = program_of(options.seed + done, ranks, options.kinds)
        try:
            said = pool.run(ranks, run_faults, [program], timeout=60, group_timeout=25)
            text = "\n".join(dict.fromkeys(each for some in said for each in some if each))
        except RanksFailed as error:
            pool.stop()
            text = f"{program}\n{error}"
        if text:
            failed += 1
            print(
                f"--- --count 1 --seed {options.seed + done} --ranks {ranks}\n{text}\n", flush=True
            )
        done += 1
    print(f"{done} programs: {failed} failed")
    pool.stop()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
