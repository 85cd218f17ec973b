"""`replicate` averages gradients from the annotation on, however the module is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from composable import replicate
from tests.helpers.compare import assert_mean_gradients, averaged_gradients
from tests.helpers.means import WIDTH, batch_of, copies
from tests.helpers.world import spmd


class Tower(nn.Module):
    """A module with a head that is read and never called, and a step of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)[None]
        x = self.attention(x, x, x, need_weights=False)[0][0]
        return F.linear(x, self.head.weight)

    def training_step(self, x: Tensor) -> Tensor:
        return self.forward(x).square().sum()


def _assert_trains_as_one(
    plain: nn.Module, ours: nn.Module, loss: Callable[[Any, Tensor], Tensor], steps: int = 3
) -> None:
    """Three steps; gradients must be the means over the ranks, and so the weights stay those of the
    plain model.
    """
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (plain, ours)]
    for step in range(steps):
        for model in (plain, ours):
            model.zero_grad()
            loss(model, batch_of(step)).backward()
        assert_mean_gradients(plain, ours, step)
        for parameter, mean in zip(
            plain.parameters(), averaged_gradients(plain).values(), strict=True
        ):
            parameter.grad = mean
        for optimizer in optimizers:
            optimizer.step()


def _parts(model: Tower) -> None:
    for module in (model.head, model.attention.out_proj, model.attention, model.body):
        replicate(module)


def _without_hooks(model: Tower) -> None:
    replicate(model)
    for module in model.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()


_USES: Final[dict[str, tuple[Callable[[Tower], object], Callable[[Any, Tensor], Tensor]]]] = {
    "model.forward": (replicate, lambda model, x: model.forward(x).square().sum()),
    "a method": (replicate, lambda model, x: model.training_step(x)),
    "parts that others read": (_parts, lambda model, x: model(x).square().sum()),
    "hooks that were cleared": (_without_hooks, lambda model, x: model(x).square().sum()),
}


@pytest.mark.parametrize("use", _USES)
@spmd(ranks=2)
def test_gradients_are_means_though_the_module_is_never_called(use: str) -> None:
    annotate, loss = _USES[use]
    plain, ours = copies(Tower, annotate)
    _assert_trains_as_one(plain, ours, loss)


# --- parameters that change after the annotation ------------------------------------------------


def _unfreeze(model: Tower) -> None:
    model.body.requires_grad_(False)
    replicate(model)
    model.body.requires_grad_(True)


def _replace(model: Tower) -> None:
    replicate(model)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())


_CHANGES: Final[dict[str, Callable[[Tower], object]]] = {
    "unfrozen": _unfreeze,
    "replaced": _replace,
}


@pytest.mark.parametrize("change", _CHANGES)
@spmd(ranks=2)
def test_a_call_notices_what_became_of_the_parameters(change: str) -> None:
    plain, ours = copies(Tower, _CHANGES[change])
    _assert_trains_as_one(plain, ours, lambda model, x: model(x).square().sum())
