"""Parameters that torch exchanges in place when a module is moved or loaded, as all do under
`torch.__future__.set_swap_module_params_on_conversion`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest
import torch
from torch import nn

from composable import fully_shard, replicate
from composable.contract.contract import Verb
from tests.helpers.compare import full_gradients, full_parameters
from tests.helpers.world import current_device, spmd

WAYS: Final[dict[str, Callable[[nn.Module], object]]] = {
    "moved": lambda model: model.double(),
    "loaded": lambda model: model.load_state_dict(
        {name: value.clone() for name, value in model.state_dict().items()}
    ),
    "its own": lambda model: model.load_state_dict(model.state_dict()),
}


@contextmanager
def _exchanging() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).to(current_device())


def _train(model: nn.Module) -> None:
    """A step, and the gradients of another one."""
    dtype = next(model.parameters()).dtype
    inputs = torch.linspace(-1, 1, 12, dtype=dtype).view(3, 4).to(current_device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.step()
        optimizer.zero_grad()
        model(inputs).square().mean().backward()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("verb", [replicate, fully_shard])
@spmd(ranks=[1, 2])
def test_parameters_that_torch_exchanges_go_on_as_in_one_process(
    verb: Verb[..., Any], way: str
) -> None:
    plain, ours = _model(), _model()
    verb(ours)
    for model in (plain, ours):
        _train(model)
        model.zero_grad()
        with _exchanging():
            WAYS[way](model)
        _train(model)
    values, gradients = full_parameters(ours), full_gradients(ours)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(values[name], parameter.detach())
        torch.testing.assert_close(gradients[name], parameter.grad)
