"""KeyboardInterrupt at lines of `remove(model, fully_shard)`, on all ranks: all are as before, or all plain."""

from __future__ import annotations

import os
import random
from datetime import timedelta
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import pytest
import torch
import torch.distributed as dist

from composable import fully_shard, registry, remove
from composable.errors import CommunicationError
from tests.helpers.compare import averaged_gradients, full_parameters
from tests.helpers.interrupts import SCHEMES, Interrupter, Model
from tests.helpers.quiet import errors_only
from tests.helpers.world import Pool

pytestmark = [pytest.mark.host, pytest.mark.beyond_sim("groups of accelerators do not tell of a rank that was interrupted")]


def _interrupted(model: Model, at: int | None, flag: Path | None) -> tuple[str, int, str]:
    interrupter = Interrupter(at, flag)
    try:
        with interrupter.at_work():
            remove(model, fully_shard)
    except (KeyboardInterrupt, CommunicationError) as error:
        return type(error).__name__, interrupter.seen, interrupter.where
    return "removed", interrupter.seen, interrupter.where


def _made(scheme: str, steps: int, group: Any) -> tuple[Model, Model]:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Model())
    plain, ours = models
    SCHEMES[scheme](ours, group)
    for step in range(steps):
        _train(plain, ours, step)
    return plain, ours


def _train(plain: Model, ours: Model, step: int) -> None:
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    for model in (plain, ours):
        model.zero_grad()
        model(x).square().mean().backward()
    expected = averaged_gradients(plain)
    for parameter, (name, other) in zip(ours.parameters(), plain.named_parameters(), strict=True):
        gradient = parameter.grad
        assert gradient is not None
        whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        torch.testing.assert_close(whole, expected[name])
        with torch.no_grad():
            other -= 0.1 * expected[name]
            parameter -= 0.1 * gradient


@errors_only()
def _removals(seeds: list[int], scheme: str) -> list[str]:
    rank, wrong = dist.get_rank(), []
    group = dist.new_group(timeout=timedelta(seconds=30))
    _, ours = _made(scheme, 1, group)
    _, lines, _ = _interrupted(ours, None, None)
    for seed in seeds:
        plain, ours = _made(scheme, seed % 2, group)
        at = random.Random(f"{seed} {rank}").randrange(1, lines)
        flag = Path(gettempdir()) / f"removed-{os.getppid()}-{seed}"
        said, _, where = _interrupted(ours, at, flag)
        dist.barrier()
        flag.unlink(missing_ok=True)
        left = bool(registry(ours))
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, (left, said, where))
        if any(other[0] != left for other in found):
            wrong.append(f"seed {seed}: {found}")
            continue
        for name, value in full_parameters(ours).items():
            torch.testing.assert_close(value, dict(plain.named_parameters())[name].detach(), msg=f"{seed} {found} {name}")
        if left:
            _train(plain, ours, 5)
            remove(ours, fully_shard)
        assert not any(registry(module) for module in ours.modules())
        for ours_, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
            assert type(ours_) is torch.nn.Parameter
            torch.testing.assert_close(ours_, theirs, msg=f"{seed} {found}")
    return wrong


@pytest.mark.parametrize("scheme", ["by policy", "nested", "casting"])
def test_an_interrupted_removal_leaves_all_annotated_or_none_and_can_be_made_again(pool: Pool, scheme: str) -> None:
    for wrong in pool.run(2, _removals, list(range(8)), scheme):
        assert wrong == []
