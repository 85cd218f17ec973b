"""What cannot be stepped on whole matrices is refused by name, and the nearest program that can is
not.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.optim import Optimizer

from composable import (
    apply_optimizer_in_backward,
    fully_shard,
    no_sync,
    rebind_optimizer,
    step_on_matrices,
    step_on_shards,
)
from composable.errors import OptimizerError, RanksDisagreeError
from tests.helpers.compare import all_full
from tests.helpers.refusals import refusal
from tests.helpers.world import current_device, spmd
from tests.optim.matrix_models import Net, OneProcess, Shampoo, Whitening, backward, made, muon


def _parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))]


def test_messages() -> None:
    stepped = Shampoo(_parameters())
    for parameter in stepped.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    stepped.step()
    taken = step_on_matrices(Shampoo(_parameters()))
    in_backward = apply_optimizer_in_backward(optim.SGD, _parameters(), {"lr": 0.1})
    texts = [
        refusal(lambda: step_on_matrices(nn.Linear(1, 1))),  # type: ignore[type-var]
        refusal(lambda: step_on_matrices(optim.LBFGS(_parameters()))),
        refusal(lambda: step_on_matrices(in_backward)),
        refusal(lambda: step_on_matrices(optim.Adam(_parameters(), differentiable=True))),
        refusal(lambda: step_on_matrices(stepped)),
        refusal(lambda: step_on_matrices(taken, lambda parameter: True)),
        refusal(lambda: step_on_matrices(Shampoo(_parameters()), ["no such"])),
        refusal(lambda: step_on_matrices(Shampoo(_parameters()), _parameters())),
        refusal(lambda: step_on_shards(taken, elementwise=True)),
    ]
    assert step_on_matrices(taken) is taken
    lines = [line for text in texts for line in textwrap.wrap(text, 98)]
    assert_expected_inline(
        "\n".join(lines),
        """\
OptimizerError: step_on_matrices: expected a torch.optim.Optimizer, got Linear
OptimizerError: step_on_matrices: LBFGS steps all of its parameters as one, or one by one in
backward, and cannot be given some of them whole. Use another optimizer
OptimizerError: step_on_matrices: OptimizerInBackward steps all of its parameters as one, or one
by one in backward, and cannot be given some of them whole. Use another optimizer
OptimizerError: step_on_matrices: this Adam is differentiable: its steps become part of a graph
that whole matrices would be missing from. Leave differentiable=True out
OptimizerError: step_on_matrices: this Shampoo has state already, of which each rank has a part:
it has stepped, was loaded, or makes some when it is made, as Adagrad does. Call step_on_matrices
when the optimizer is made, and load the state then; one that makes state at once cannot be given
whole matrices
OptimizerError: step_on_matrices: which= was chosen for this Shampoo already, and its state is
with the owners. Make a new optimizer
OptimizerError: step_on_matrices: which= has 'no such', which Shampoo does not hold; there is:
none
OptimizerError: step_on_matrices: which= has a parameter of shape (2, 2), which Shampoo does not
hold; there is: none
OptimizerError: step_on_shards: this Shampoo steps whole matrices (step_on_matrices), and what is
no matrix on its shards. Leave step_on_shards out""",
    )


# --- ranks that differ ---------------------------------------------------------------------------


@spmd(ranks=[2, 3])
@pytest.mark.parametrize("how", ["selected", "missing", "in another order", "none"])
def test_other_matrices_on_one_rank_are_refused_on_all(how: str) -> None:
    model = made(Net)
    fully_shard(model, policy={nn.Linear})
    parameters: list[Any] = list(model.parameters())
    which: Callable[[Any], bool] | None = None
    if dist.get_rank() == 1:
        if how == "selected":
            which = lambda parameter: parameter is not parameters[2]  # noqa: E731
        elif how == "missing":
            del parameters[2]
        elif how == "in another order":
            parameters.reverse()
        else:
            which = lambda parameter: False  # noqa: E731
    with pytest.raises(RanksDisagreeError, match="the ranks step other matrices: rank 0"):
        step_on_matrices(Shampoo(parameters), which)


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


class _Twice(Shampoo):
    """Calls its closure before and after it reads its groups, as sharpness-aware ones do."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            assert group["params"] is not None
        assert closure is not None
        return closure()


@spmd(ranks=2)
def test_a_closure_that_is_called_after_gradients_have_left_is_refused() -> None:
    model = made(Net)
    fully_shard(model, policy={nn.Linear})
    optimizer = step_on_matrices(_Twice(model.parameters()))

    def closure() -> None:
        optimizer.zero_grad()
        backward(model, 0, dist.get_rank(), 7)

    with pytest.raises(OptimizerError, match="calls its closure after it has read its parameter"):
        optimizer.step(closure)


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
def test_a_placement_that_does_not_say_who_has_what_is_refused() -> None:
    mesh = init_device_mesh(current_device().type, (2,))
    for placement in (Partial(), Replicate()):
        local = torch.ones(4, 4, device=current_device())
        parameter = nn.Parameter(DTensor.from_local(local, mesh, [placement]))
        optimizer = Whitening([parameter])
        if placement.is_partial():
            with pytest.raises(OptimizerError, match=r"has the placement P.*Leave it to another"):
                step_on_matrices(optimizer)
        else:
            step_on_matrices(optimizer)
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            assert parameter.to_local().mean().item() != 1


@spmd(ranks=2)
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_gradients_that_lie_otherwise_are_refused(name: str) -> None:
    model = made(Net, biases=True)
    fully_shard(model, policy={nn.Linear})
    optimizer = step_on_matrices(Shampoo(model.parameters()))
    backward(model, 0, dist.get_rank(), 7)
    parameter = getattr(model.layers[4], name)
    kept = parameter.grad
    parameter.grad = kept.redistribute(placements=[Replicate()])
    text = "lies otherwise than the" if name == "weight" else "cannot be stepped on their shards"
    with pytest.raises(OptimizerError, match=text):
        optimizer.step()
    parameter.grad = kept
    optimizer.step()


@spmd(ranks=2)
def test_gradients_that_are_not_reduced_are_refused() -> None:
    model = made(Net)
    fully_shard(model, policy={nn.Linear})
    optimizer = step_on_matrices(muon(model.parameters()))
    with no_sync(model):
        backward(model, 0, dist.get_rank(), 7)
    with pytest.raises(OptimizerError, match="is this rank's alone"):
        optimizer.step()


@spmd(ranks=2)
def test_an_optimizer_with_state_on_the_owners_is_not_bound_to_other_parameters() -> None:
    model = made(Net)
    optimizer = step_on_matrices(muon(model.parameters()))
    fully_shard(model, policy={nn.Linear})
    rebind_optimizer(optimizer, model)  # it has no state
    alone = OneProcess(model, muon)
    alone.step_beside(optimizer, range(2), dist.get_rank(), 7)
    with pytest.raises(OptimizerError, match="keeps the state of whole matrices on the ranks"):
        rebind_optimizer(optimizer, model)
    alone.step_beside(optimizer, range(2, 3), dist.get_rank(), 7)
