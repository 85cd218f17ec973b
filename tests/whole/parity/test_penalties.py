"""A loss may be made from sharded parameters, too: how autograd passes on the gradient of that part
changes no number.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from composable import checkpoint, fully_shard
from composable.errors import DifferentiationError
from tests.helpers.world import current_device, spmd


def _penalty(model: nn.Module) -> Tensor:
    terms = [parameter.square().sum() for parameter in model.parameters()]
    return torch.stack(
        [term.full_tensor() if isinstance(term, DTensor) else term for term in terms]
    ).sum()


@pytest.mark.parametrize("rows", [1, 3, 4])
@spmd(ranks=2)
def test_a_penalty_on_parameters_trains_as_in_one_process(rows: int) -> None:
    """Of one row, DTensor makes gradients that every rank holds whole."""
    torch.manual_seed(0)
    model = nn.Linear(8, rows).to(current_device())
    plain = copy.deepcopy(model)
    fully_shard(model)
    everybody = torch.linspace(-1, 1, 4 * 8, device=current_device()).view(-1, 8)
    mine = everybody.chunk(dist.get_world_size())[dist.get_rank()]
    for each, x in ((model, mine), (plain, everybody)):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(3):
            (each(x).square().mean() + 0.1 * _penalty(each)).backward()
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert isinstance(one, DTensor)
        torch.testing.assert_close(one.full_tensor(), other)


# --- read inside of a forward, where the parameter is at rest -----------------------------------


class Fused(nn.Module):
    """A loss that is fused with its head, which is a unit of its own: torch's error for mixed
    tensors is worked around.
    """

    def __init__(self, runs: bool = True) -> None:
        super().__init__()
        self.body, self.norm, self.head = (
            nn.Linear(4, 4),
            nn.LayerNorm(4),
            nn.Linear(4, 3, bias=False),
        )
        self.runs = runs

    def forward(self, x: Tensor) -> Tensor:
        x, weight = self.norm(self.body(x)), self.head.weight
        out = (
            F.linear(x, weight.full_tensor() if isinstance(weight, DTensor) else weight)
            .square()
            .mean()
        )
        return out + self.head(x).mean() if self.runs else out


_READ: Final = (
    "a forward of unit '(root)' read parameter 'weight' of unit 'head' outside of that unit's"
    " forward, where it is at rest: its gradient would be that of each rank's own batch, and not"
    " the mean. Annotate the module that reads it and its own as one unit"
)


@pytest.mark.parametrize("runs", [True, False])
@pytest.mark.parametrize("recomputed", [False, True])
@spmd(ranks=2)
def test_a_parameter_that_a_forward_reads_outside_of_its_unit_is_refused_on_all_ranks(
    recomputed: bool, runs: bool
) -> None:
    torch.manual_seed(0)
    model = Fused(runs)
    if recomputed:
        checkpoint(model.body)
    for module in (model.body, model.norm, model.head, model):
        fully_shard(module)
    with pytest.raises(DifferentiationError) as caught:
        model(torch.randn(3, 4)).backward()
    assert str(caught.value).startswith(_READ)
    model.zero_grad()
    (model.head(model.norm(model.body(torch.randn(3, 4))))).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def _before(model: nn.Module, x: Tensor) -> Tensor:
    penalty = _penalty(model)
    return model(x).square().mean() + penalty  # type: ignore[no-any-return]


def _between_two_forwards(model: nn.Module, x: Tensor) -> Tensor:
    first = model(x).square().mean()
    penalty = _penalty(model)
    return first + penalty + model(x.sin()).square().mean()  # type: ignore[no-any-return]


def _of_a_model_that_waits(model: nn.Module, x: Tensor) -> Tensor:
    """Of its output, too: backward comes to the penalty while it is in the second forward."""
    first = model(x)
    return model(first * _penalty(model)).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("loss", [_before, _between_two_forwards, _of_a_model_that_waits])
@spmd(ranks=2)
def test_penalties_around_forwards_train_as_in_one_process(
    loss: Callable[[nn.Module, Tensor], Tensor],
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4)).double()
    plain = copy.deepcopy(model)
    fully_shard(model, policy={nn.Linear})
    # the same batch on all ranks, so that products of penalties are means
    x = torch.linspace(-1, 1, 12).view(3, 4).double()
    for each in (model, plain):
        loss(each, x).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert isinstance(one.grad, DTensor)
        torch.testing.assert_close(one.grad.full_tensor(), other.grad)
