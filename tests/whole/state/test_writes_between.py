"""Shards that are written to between a forward and its backward: refused where plain autograd
refuses, and only there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest
import torch
from torch import Tensor, nn

from composable import fully_shard
from tests.helpers.world import Pool, current_device, need_devices, spmd


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


def _load(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})


def _scale_one(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        model[2].weight.mul_(2.0)  # type: ignore[index, union-attr, operator]


WRITES: Final[dict[str, Callable[[nn.Module, torch.optim.Optimizer], None]]] = {
    "step": _step,
    "load": _load,
    "in place": _scale_one,
}


def _model(after: bool | None) -> tuple[nn.Module, nn.Module, Tensor]:
    device = current_device()
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).to(device))
    fully_shard(models[1], policy={nn.Linear}, reshard_after_forward=after)
    return models[0], models[1], torch.ones(2, 3, device=device)


def _refusal(write: str, after: bool | None) -> list[str]:
    said = []
    plain, sharded, x = _model(after)
    for model in (plain, sharded):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model(x).sum().backward()
        first, second = model(x), model(2 * x)
        first.sum().backward()
        WRITES[write](model, optimizer)
        try:
            second.square().mean().backward()
        except RuntimeError as error:
            said.append(str(error).partition(":")[0])
    # A step afterwards is as it should be.
    optimizer.zero_grad()
    y = sharded(x)
    y.sum().backward()
    torch.testing.assert_close(
        sharded[2].bias.grad.full_tensor(), torch.full((3,), 2.0, device=x.device)
    )  # type: ignore[index]
    return said


@pytest.mark.parametrize("after", [None, True, False])
@pytest.mark.parametrize("write", WRITES)
def test_a_backward_through_values_that_are_gone_is_refused(
    pool: Pool, write: str, after: bool | None, device: str
) -> None:
    need_devices(device, 2)
    for said in pool.run(2, _refusal, write, after, device=device):
        assert (
            said
            == [
                "one of the variables needed for gradient computation has been modified by an"
                " inplace operation"
            ]
            * 2
        )


def _a_step_for_another_part(model: nn.Module, x: Tensor) -> None:
    """One optimizer holds both parts, each has its own loss; one part gets a gradient, and only it
    is stepped.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    left, right = model[0](x), model[2](torch.ones(2, 5, device=x.device, requires_grad=True))  # type: ignore[index]
    left.square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    right.square().sum().backward()


def _a_step_of_weights_that_are_not_needed(model: nn.Module, x: Tensor) -> None:
    """The first weight is multiplied with what needs no gradient, so that nothing needs the weight
    itself.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first, second = model[0](x), model[0](2 * x)  # type: ignore[index]
    first.square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    second.square().sum().backward()


LEGAL: Final = {
    program.__name__: program
    for program in (_a_step_for_another_part, _a_step_of_weights_that_are_not_needed)
}


@pytest.mark.parametrize("after", [None, True, False])
@pytest.mark.parametrize("program", LEGAL)
@spmd(ranks=2)
def test_what_plain_autograd_allows_is_allowed(program: str, after: bool | None) -> None:
    plain, sharded, x = _model(after)
    for _ in range(2):
        for model in (plain, sharded):
            model.zero_grad()
            LEGAL[program](model, x)
        for expected, actual in zip(plain.parameters(), sharded.parameters(), strict=True):
            assert (expected.grad is None) == (actual.grad is None)
            if expected.grad is not None:
                torch.testing.assert_close(actual.grad.full_tensor(), expected.grad)  # type: ignore[union-attr]


class _Target(nn.Module):
    """As an average of weights that teaches: its outputs are detached, and its parameters train."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).detach()  # type: ignore[no-any-return]


@spmd(ranks=2)
def test_writes_that_no_counter_shows_are_followed_behind_a_forward_with_detached_outputs() -> None:
    device = current_device()
    torch.manual_seed(0)
    plain = _Target().to(device)
    model = _Target().to(device)
    model.load_state_dict(plain.state_dict())
    fully_shard(model, policy={nn.Linear})
    x = torch.ones(2, 3, device=device)
    for _ in range(3):
        torch.testing.assert_close(model(x), plain(x))
        for each in (model, plain):
            for parameter in each.parameters():
                parameter.data.mul_(0.5)
