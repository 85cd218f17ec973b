"""Modules that give their own parameters another dtype, or other memory, while they compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest
import torch
from torch import Tensor, nn

from composable import fully_shard
from composable.errors import ForeignParameterError
from tests.helpers.world import Pool


def _by_to(layer: nn.Linear) -> nn.Linear:
    return layer.to(torch.float64)


def _by_data(layer: nn.Linear) -> nn.Linear:
    layer.weight.data = layer.weight.data.to(torch.float64)
    return layer


def _by_another_parameter(layer: nn.Linear) -> nn.Linear:
    layer.weight = nn.Parameter(layer.weight.to(torch.float64))
    return layer


def _by_other_memory(layer: nn.Linear) -> nn.Linear:
    layer.weight.data = layer.weight.data * 2
    return layer


_CURE: Final = (
    " Cast the module before fully_shard, so that the forward has nothing to do, or let fully_shard cast what it computes with "
    "(mp_policy=); or cast a copy of the weight for the computation alone; or compute under torch.autocast"
)
_MOVED: Final = (
    "the forward of unit '(root)' gave its parameter 'layer.weight' other memory ({}, where the unit keeps torch.float32), as "
    "`.data = ...` and a module's `.to()` do; what is gathered would not reach it any more. The parameter is as before." + _CURE
)
_REPLACED: Final = (
    "the forward of unit '(root)' replaced its parameter 'layer.weight' (torch.float32) by another one (torch.float64), which "
    "would get this rank's gradient alone. The parameter from before is there again." + _CURE
)
_WAYS: Final[list[tuple[Callable[[nn.Linear], nn.Linear], str]]] = [
    (_by_to, _MOVED.format("torch.float64")),
    (_by_data, _MOVED.format("torch.float64")),
    (_by_another_parameter, _REPLACED),
    (_by_other_memory, _MOVED.format("torch.float32")),
]


class _Router(nn.Module):
    def __init__(self, change: Callable[[nn.Linear], nn.Linear]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3, bias=False)
        self.change = change
        self.at_work = True

    def forward(self, x: Tensor) -> Tensor:
        if self.at_work:
            self.layer = self.change(self.layer)
        return self.layer(x.to(self.layer.weight.dtype)).to(x.dtype)


def _train(way: int, grad: bool, keep: bool) -> tuple[str, list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    router, plain = _Router(_WAYS[way][0]), _Router(_WAYS[way][0])
    plain.load_state_dict(router.state_dict())
    fully_shard(router, reshard_after_forward=not keep)
    x = torch.arange(8.0).reshape(2, 4)
    said = ""
    try:
        with torch.set_grad_enabled(grad):
            router(x)
    except ForeignParameterError as error:
        said = str(error)
    found = []
    for model in (router, plain):
        model.at_work = False
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            found.append(model(x))
    return said, found[:1], found[1:]


@pytest.mark.parametrize("way", range(len(_WAYS)), ids=[change.__name__.removeprefix("_by_") for change, _ in _WAYS])
@pytest.mark.parametrize(("grad", "keep"), [(True, False), (True, True), (False, False)])
def test_a_forward_that_gives_itself_other_parameters_is_refused_and_training_goes_on(
    pool: Pool, way: int, grad: bool, keep: bool
) -> None:
    for said, ours, theirs in pool.run(2, _train, way, grad, keep):
        assert said == _WAYS[way][1]
        torch.testing.assert_close(ours, theirs)


def _cast_before() -> tuple[torch.dtype, torch.dtype]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), _Router(_by_to))
    model[1].to(torch.float64)
    fully_shard(model)
    model(torch.ones(2, 4)).sum().backward()
    grads = [parameter.grad for parameter in (model[0].weight, model[1].layer.weight)]
    return grads[0].dtype, grads[1].dtype


def test_a_cast_that_was_done_before_sharding_finds_nothing_to_do(pool: Pool) -> None:
    assert pool.run(2, _cast_before) == [(torch.float32, torch.float64)] * 2
