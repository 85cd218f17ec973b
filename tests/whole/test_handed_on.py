"""A unit may return tensors that it was given: their maker has its parameters when backward comes to it, on every rank."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from composable import fully_shard
from tests.helpers.battery.case import Case, mean_square, rows
from tests.helpers.battery.odd import Layer
from tests.helpers.compare import assert_same_gradients
from tests.helpers.world import Pool, need_devices


class Skipping(nn.Module):
    """A layer that does nothing on some ranks, as with stochastic depth."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()
        self.skip = False

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"hidden": x if self.skip else self.layer(x)}


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.layers = nn.ModuleList([Skipping() for _ in range(4)])
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)["hidden"]
        return self.head(x)


def _skip(model: nn.Module, rank: int) -> None:
    assert isinstance(model, Stack)
    for index, layer in enumerate(model.layers):
        layer.skip = bool((index + rank) % 2)


_STACK = Case("skipped on some ranks", Stack, rows(4, 6), mean_square, (Skipping,), personalize=_skip)


def _two_steps(model: nn.Module, x: Tensor) -> None:
    for scale in (1, 2):
        model(scale * x).square().mean().backward()


def _run(reshard: bool) -> None:
    assert_same_gradients(
        _STACK, lambda model, case: fully_shard(model, policy={Skipping}, reshard_after_forward=reshard), _two_steps
    )


@pytest.mark.parametrize("reshard", [True, False])
def test_a_unit_that_only_hands_on_on_some_ranks_is_entered_in_backward_on_all(pool: Pool, reshard: bool, device: str) -> None:
    need_devices(device, 2)
    pool.run(2, _run, reshard, device=device)
