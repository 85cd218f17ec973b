"""Row 33 of the behaviours: uneven inputs end with the numbers of one process that has exactly
those batches.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from composable import (
    CPUOffloadPolicy,
    checkpoint,
    clip_grad_norm_,
    fully_shard,
    join,
    no_sync,
    replicate,
)
from tests.helpers.compare import full
from tests.helpers.world import Pool, current_device

Pattern = Sequence[int]  # the number of batches of each rank


@dataclass(frozen=True)
class Plan:
    """How a model is trained.

    Attributes:
        initial: gradients are divided by all ranks, and not by those that have data.
        micro_batches: per step; each counts as a batch of its own in a pattern.
        max_norm: that gradients are clipped to; 0: they are not.
        scales: by a `GradScaler`.
    """

    scheme: str
    initial: bool = True
    micro_batches: int = 1
    max_norm: float = 0.0
    scales: bool = False
    checkpoints: bool = False
    offloads: bool = False
    adam: bool = False
    level: str = "all"
    reshard: bool | int | None = None


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return (
        nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), nn.Tanh(), nn.Linear(2, 1))
        .double()
        .to(current_device())
    )


def annotate(model: nn.Sequential, plan: Plan) -> None:
    options: dict[str, Any] = {"policy": {nn.Linear}, "reshard_after_forward": plan.reshard}
    if plan.offloads:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if plan.checkpoints:
        checkpoint(model[2])
    if plan.scheme in ("replicate", "views"):
        replicate(model, gradient_as_bucket_view=plan.scheme == "views")
    elif plan.scheme == "hybrid":
        fully_shard(
            model,
            mesh=init_device_mesh(current_device().type, (2, dist.get_world_size() // 2)),
            **options,
        )
    else:
        if plan.scheme == "mixed":
            replicate(model[2])
        fully_shard(model, **options)


def make_optimizer(model: nn.Module, plan: Plan) -> torch.optim.Optimizer:
    if plan.adam:
        return torch.optim.AdamW(model.parameters(), lr=0.05)
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss_of(model: nn.Module, rank: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + number)
    batch = torch.randn(2, 3, generator=generator, dtype=torch.float64).to(current_device())
    loss: Tensor = model(batch).square().mean()
    return loss


class Alone:
    """The training of one process that has the batches of all ranks."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.model = make_model()
        self.optimizer = make_optimizer(self.model, plan)

    def train(self, pattern: Pattern, first: int) -> None:
        plan = self.plan
        for start in range(0, max(pattern), plan.micro_batches):
            self.optimizer.zero_grad()
            micro_batches = range(start, min(start + plan.micro_batches, max(pattern)))
            for number in micro_batches:
                # What was accumulated is divided when it is reduced, and so is what earlier
                # micro-batches brought.
                divisor = (
                    len(pattern) if plan.initial else sum(number < batches for batches in pattern)
                )
                for rank, batches in enumerate(pattern):
                    if number < batches:
                        (loss_of(self.model, rank, first + number) / divisor).backward()
            if plan.max_norm:
                nn.utils.clip_grad_norm_(self.model.parameters(), plan.max_norm)
            self.optimizer.step()


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan, pattern: Pattern, first: int
) -> None:
    """The same, on the ranks that have the batches."""
    rank, longest = dist.get_rank(), max(pattern)
    scaler = torch.amp.GradScaler(current_device().type, init_scale=8.0, enabled=plan.scales)
    with join(model, optimizer, scaler, divide_by_initial_world_size=plan.initial):
        for number in range(pattern[rank]):
            if number % plan.micro_batches == 0:
                optimizer.zero_grad()
            ends = (number + 1) % plan.micro_batches == 0 or number + 1 == longest
            with no_sync(model, enabled=not ends, level=plan.level):
                scaler.scale(loss_of(model, rank, first + number)).backward()
            if ends:
                if plan.max_norm:
                    scaler.unscale_(optimizer)
                    clip_grad_norm_(model, plan.max_norm)
                scaler.step(optimizer)
                scaler.update()


def _train_patterns(plan: Plan, patterns: Sequence[Pattern], fresh: int) -> None:
    """One training over all patterns, begun anew after some of them."""
    for start in range(0, len(patterns), fresh):
        alone, model = Alone(plan), make_model()
        annotate(model, plan)
        optimizer = make_optimizer(model, plan)
        for number, pattern in enumerate(patterns[start : start + fresh]):
            alone.train(pattern, 10 * number)
            train(model, optimizer, plan, pattern, 10 * number)
        for (name, parameter), other in zip(
            model.named_parameters(), alone.model.parameters(), strict=True
        ):
            found, expected = full(parameter.detach()).cpu(), other.detach().cpu()
            where = f"{name} after {patterns[start : start + fresh]}, {plan}"
            torch.testing.assert_close(
                found, expected, rtol=1e-9, atol=1e-11, msg=partial("{}: {}".format, where)
            )


_WORLDS = [
    (ranks, scheme) for ranks in (1, 2, 3, 4) for scheme in ("shard", "replicate", "mixed")
] + [(2, "views"), (4, "hybrid")]


@pytest.mark.parametrize(("ranks", "scheme"), _WORLDS)
def test_33_patterns_of_missing_batches_trains_as_one_process(
    pool: Pool, ranks: int, scheme: str, device: str
) -> None:
    patterns = [
        tuple(3 - missing for missing in each) for each in itertools.product(range(4), repeat=ranks)
    ]
    random.Random(0).shuffle(patterns)  # so that a new model begins with any
    fresh = {1: 1, 2: 1, 3: 8, 4: 16}[ranks]
    for initial in (True, False):
        # Every pattern on up to two ranks; on three and four some, and fewer of what shares their
        # code.
        some = {1: 1, 2: 1, 3: 2 if initial else 8, 4: 8 if initial and scheme != "mixed" else 16}[
            ranks
        ]
        part = patterns[::some]
        pool.run(
            ranks, _train_patterns, Plan(scheme, initial), part, fresh, device=device, timeout=600
        )


def _random_plan(generator: random.Random, ranks: int) -> tuple[Plan, list[Pattern]]:
    def sometimes() -> bool:
        return generator.random() < 0.4

    schemes = ["shard", "replicate", "views", "mixed", *(["hybrid"] if ranks == 4 else [])]
    plan = Plan(
        generator.choice(schemes),
        sometimes(),
        scales=sometimes(),
        checkpoints=sometimes(),
        adam=sometimes(),
    )
    plan = replace(
        plan, max_norm=0.1 if sometimes() else 0.0, micro_batches=generator.choice([1, 1, 2, 3])
    )
    plan = replace(
        plan,
        offloads=plan.scheme not in ("replicate", "views") and sometimes(),
        level=generator.choice(["all", "replicate"]),
    )
    plan = replace(
        plan,
        reshard=generator.choice(
            [None, True, False, *([2] if ranks == 4 and plan.scheme == "shard" else [])]
        ),
    )
    if plan.micro_batches > 1:
        # otherwise ranks that ended within a step would count in it
        plan = replace(plan, initial=True)
    return plan, [tuple(generator.randrange(6) for _ in range(ranks)) for _ in range(5)]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_33_random_patterns_and_features_train_as_one_process(
    pool: Pool, ranks: int, device: str
) -> None:
    generator = random.Random(ranks)
    for _ in range(7):
        plan, patterns = _random_plan(generator, ranks)
        pool.run(ranks, _train_patterns, plan, patterns, len(patterns), device=device, timeout=600)
