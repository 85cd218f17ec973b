"""What cannot be stepped on whole matrices is refused by name, and the nearest program that can is
not.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from composable import (
    fully_shard,
    rebind_optimizer,
    step_on_matrices,
)
from composable.errors import OptimizerError, RanksDisagreeError
from tests.helpers.compare import all_full
from tests.helpers.world import current_device, spmd
from tests.optim.matrix_models import Net, OneProcess, Shampoo, Whitening, backward, made, muon

# --- ranks that differ ---------------------------------------------------------------------------


@spmd(ranks=[2, 3])
def test_gradients_of_other_matrices_on_one_rank_are_refused_before_anything_is_written() -> None:
    model = made(Net)
    fully_shard(model, policy={nn.Linear})
    alone = OneProcess(model, Shampoo)
    optimizer = step_on_matrices(Shampoo(model.parameters()))
    alone.step_beside(optimizer, range(2), dist.get_rank(), 7)
    backward(model, 2, dist.get_rank(), 7)
    kept = model.layers[3].weight.grad
    if dist.get_rank() == 1:
        model.layers[3].weight.grad = None
    with pytest.raises(RanksDisagreeError, match=r"rank 1 .*Nothing was written"):
        optimizer.step()
    alone.check("after the refusal")
    model.layers[3].weight.grad = kept
    optimizer.calls -= 1  # of the code that was refused
    optimizer.zero_grad()
    alone.step_beside(optimizer, range(3, 5), dist.get_rank(), 7)


# --- optimizers that cannot be given some of their parameters ------------------------------------


class _Coupled(Optimizer):
    """Keeps a matrix per vector."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                flat = parameter.grad.reshape(-1)
                self.state[parameter]["outer"] = torch.outer(flat, flat)
                parameter.sub_((self.state[parameter]["outer"] @ flat).view_as(parameter))


@spmd(ranks=2)
def test_vectors_that_are_not_stepped_element_by_element_are_refused_unless_selected() -> None:
    for which in (None, lambda parameter: True):
        model = made(Net, biases=True)
        fully_shard(model, policy={nn.Linear})
        alone = OneProcess(model, _Coupled)
        optimizer = step_on_matrices(_Coupled(model.parameters()), which)
        if which is None:
            backward(model, 0, dist.get_rank(), 7)
            with pytest.raises(
                OptimizerError, match=r"keeps 'outer' of shape .*Select it by which="
            ):
                optimizer.step()
        else:
            alone.step_beside(optimizer, range(2), dist.get_rank(), 7)


class _Breaking(Whitening):
    """Raises where it comes to a matrix of some shape."""

    breaks: tuple[int, ...] = ()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        shapes = [tuple(each.shape) for group in self.param_groups for each in group["params"]]
        if self.breaks in shapes:
            raise ArithmeticError(f"no step of {self.breaks}")
        super().step()


@spmd(ranks=2)
def test_after_an_error_in_its_code_on_all_ranks_the_next_step_is_that_of_one_process() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(6, 6, bias=False) for _ in range(4)]).double()
    model.to(current_device())
    fully_shard(model, policy={nn.Linear})
    optimizer = step_on_matrices(_Breaking(model.parameters()))
    backward(model, 0, dist.get_rank(), 6)
    optimizer.step()
    optimizer.breaks = (6, 6)
    with pytest.raises(ArithmeticError):
        optimizer.step()
    optimizer.breaks = ()
    alone = OneProcess(model, Whitening)
    again = step_on_matrices(Whitening(model.parameters()))
    alone.step_beside(again, range(1, 3), dist.get_rank(), 6)
    optimizer.zero_grad()
    backward(model, 3, dist.get_rank(), 6)
    optimizer.step()
    wholes = all_full([p.detach() for p in model.parameters()])
    assert all(bool(whole.isfinite().all()) for whole in wholes)


@spmd(ranks=2)
def test_an_optimizer_with_state_on_the_owners_is_not_bound_to_other_parameters() -> None:
    model = made(Net)
    optimizer = step_on_matrices(muon(model.parameters()))
    fully_shard(model, policy={nn.Linear})
    rebind_optimizer(model, optimizer)  # it has no state
    alone = OneProcess(model, muon)
    alone.step_beside(optimizer, range(2), dist.get_rank(), 7)
    with pytest.raises(OptimizerError, match="keeps the state of whole matrices on the ranks"):
        rebind_optimizer(model, optimizer)
    alone.step_beside(optimizer, range(2, 3), dist.get_rank(), 7)
