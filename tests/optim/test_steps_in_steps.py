"""Optimizers whose own step calls that of their base class, or clears gradients: hooks of both run,
and the step counts once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from composable import fully_shard, join, keep_unsharded, local_steps, replicate, step_on_shards
from tests.helpers.compare import full
from tests.helpers.world import current_device, spmd


class Shrinking(AdamW):
    """Steps, and then makes all parameters smaller."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            torch._foreach_mul_(group["params"], 0.9)


class Clearing(Optimizer):
    """Clears the gradients that it has stepped by."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    raises = False

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if not self.raises:
                    parameter.add_(parameter.grad, alpha=-0.1)
        self.zero_grad()
        if self.raises:
            raise MemoryError("as planned")


class Plain(SGD):
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return super().step(closure)


def _model() -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).to(current_device())
    return copy.deepcopy(model), model, torch.ones(2, 3, device=current_device())


def _same(plain: nn.Module, model: nn.Module) -> None:
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(mine), theirs)


@spmd(ranks=2)
def test_a_step_that_calls_its_base_class_is_one_step() -> None:
    # torch calls hooks of a class once an optimizer of this class was made
    for kind in (AdamW, SGD):
        kind([nn.Parameter(torch.zeros(1))], lr=0.1)
    plain, model, x = _model()
    fully_shard(model)
    optimizers = [Shrinking(each.parameters(), lr=0.1) for each in (plain, model)]
    with keep_unsharded(model):
        for _ in range(2):
            for each, optimizer in zip((plain, model), optimizers, strict=True):
                each(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            torch.testing.assert_close(model(x), plain(x))
    _same(plain, model)
    plain, model, x = _model()
    replicate(model)
    optimizer = Plain(model.parameters(), lr=0.1)
    rounds = local_steps(model, optimizer, every=4)
    for _ in range(3):
        model(x).square().mean().backward()
        optimizer.step()
    assert rounds.steps == 3
    rounds.remove()


@spmd(ranks=2)
def test_ranks_without_data_take_one_step_for_a_step_that_calls_its_base_class() -> None:
    SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    plain, model, x = _model()
    replicate(model)
    rank = torch.distributed.get_rank()
    optimizer, of_plain = Plain(model.parameters(), lr=0.1), Plain(plain.parameters(), lr=0.1)
    for step in range(3):  # what one process does with the mean over the ranks that have data
        (plain(x).square().mean() / (1 if step < 1 else 2)).backward()
        of_plain.step()
        of_plain.zero_grad()
    with join(model, optimizer):
        for _ in range(1 if rank else 3):
            model(x).square().mean().backward()
            optimizer.step(None)
            optimizer.zero_grad()
    _same(plain, model)


@spmd(ranks=2)
def test_gradients_that_a_step_on_shards_clears_are_cleared() -> None:
    plain, model, x = _model()
    fully_shard(model)
    optimizers = [Clearing(each.parameters()) for each in (plain, model)]
    step_on_shards(optimizers[1], elementwise=True)
    for raises in (False, True, False):  # of a step that an error ended, gradients may be newer
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            each(x).square().mean().backward()
            optimizer.raises = raises
            with pytest.raises(MemoryError) if raises else nullcontext():
                optimizer.step()
            if raises:
                each.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
    _same(plain, model)
