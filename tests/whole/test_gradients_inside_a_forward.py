"""A forward may ask for gradients, as models of molecules do: it sees a model as if it were not annotated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.battery import Case
from tests.helpers.battery.case import mean_square, rows
from tests.helpers.battery.odd import Layer
from tests.helpers.compare import assert_same_gradients
from tests.helpers.schemes import SCHEMES, SHARDED
from tests.helpers.world import Pool, need_devices


class Forces(nn.Module):
    """The gradient of an energy, as models of molecules compute it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(3)])
        self.energy = nn.Linear(6, 1)
        self.scale = nn.Linear(6, 6)
        self.builds_graph = True

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = x
            for layer in self.layers:
                y = layer(y)
            (force,) = torch.autograd.grad(self.energy(y).sum(), x, create_graph=self.builds_graph)
        return self.scale(force) + self.layers[0](x)


class Molecule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 6)
        self.forces = Forces()
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.forces(self.embed(x)))


_MOLECULE: Final = Case("forces", Molecule, rows(4, 6), mean_square, (Layer, Forces))


def one_step(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    return loss


def two_forwards_and_one_backward(model: nn.Module, x: Tensor) -> None:
    (model(x).square().mean() + model(2 * x).square().mean()).backward()


def evaluation_before_a_step(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        seen = model(x)
    model(x).square().mean().backward()
    return seen


def gradients_that_nothing_goes_through(model: nn.Module, x: Tensor) -> None:
    assert isinstance(model, Molecule)
    model.forces.builds_graph = False
    two_forwards_and_one_backward(model, x)


INSIDE: Final[dict[str, Callable[[nn.Module, Tensor], object]]] = {
    program.__name__: program
    for program in (
        one_step,
        two_forwards_and_one_backward,
        evaluation_before_a_step,
        gradients_that_nothing_goes_through,
    )
}


def _run_inside(program: str, scheme: str) -> None:
    assert_same_gradients(_MOLECULE, SCHEMES[scheme].annotate, INSIDE[program])


@pytest.mark.parametrize("scheme", SHARDED)
@pytest.mark.parametrize("program", INSIDE)
def test_a_forward_may_ask_for_gradients(pool: Pool, program: str, scheme: str, device: str) -> None:
    need_devices(device, 2)
    pool.run(2, _run_inside, program, scheme, device=device)
