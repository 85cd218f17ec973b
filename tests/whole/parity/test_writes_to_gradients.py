"""Gradients are the user's to write to, with autograd as well: scaled by a norm of the weights, or
with a part of the weights added, without `torch.no_grad()`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import pytest
import torch
from torch import nn

from composable import fully_shard, replicate
from tests.helpers.compare import full, full_parameters
from tests.helpers.world import current_device, spmd


def _beside(model: nn.Sequential) -> None:
    replicate(model[0])
    fully_shard(model)


WAYS: Final[dict[str, Callable[[nn.Sequential], object]]] = {
    "replicated": replicate,
    "in buckets": partial(replicate, gradient_as_bucket_view=True),
    "beside shards": _beside,
    "sharded": fully_shard,
}


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)
    return nn.Sequential(*layers).double().to(current_device())


def _train(model: nn.Sequential) -> None:
    inputs = torch.linspace(-1, 1, 18, dtype=torch.float64).view(3, 6).to(current_device())
    for step in range(3):
        model(inputs + step).square().mean().backward()
        for parameter in model.parameters():
            gradient = parameter.grad
            assert gradient is not None
            gradient.add_(parameter, alpha=0.01)
            gradient.mul_(parameter.norm() / gradient.norm())
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=0.1)
        model.zero_grad(set_to_none=step == 0)


@pytest.mark.parametrize("way", WAYS)
@spmd(ranks=2)
def test_gradients_are_written_to_with_autograd_as_in_one_process(way: str) -> None:
    plain, ours = _model(), _model()
    WAYS[way](ours)
    _train(plain)
    _train(ours)
    for name, value in full_parameters(ours).items():
        torch.testing.assert_close(value, plain.get_parameter(name).detach())


@pytest.mark.parametrize("way", [way for way in WAYS if way != "in buckets"])  # one tensor
@spmd(ranks=2)
def test_a_write_to_one_gradient_leaves_what_graphs_have_saved_of_others(way: str) -> None:
    ours = _model()
    WAYS[way](ours)
    ours(torch.ones(3, 6, dtype=torch.float64).to(current_device())).sum().backward()
    first, second = [*ours.parameters()][:2]
    assert first.grad is not None
    assert second.grad is not None
    expected = full(second.grad).clone()
    loss = (second * second.grad).sum()
    first.grad.zero_()
    torch.testing.assert_close(full(*torch.autograd.grad(loss, second)), expected)
