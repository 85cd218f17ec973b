"""Gradients of gradients and torch.func's transforms see a model as if it were not annotated."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable import describe, fully_shard, no_sync, replicate
from tests.helpers.battery import BATTERY, Case
from tests.helpers.battery.case import mean_square, rows
from tests.helpers.battery.odd import Layer
from tests.helpers.compare import assert_mean_gradients, assert_same_gradients, full
from tests.helpers.refusals import refusal
from tests.helpers.schemes import SCHEMES, SHARDED
from tests.helpers.world import current_device, spmd


def _penalty(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (gradient.norm(dim=1) - 1).square().mean()


# --- a discriminator, as adversarial networks train it ------------------------------------------


def a_penalty_alone(model: nn.Module, x: Tensor) -> Tensor:
    penalty = _penalty(model, x)
    penalty.backward()
    return penalty


def a_penalty_after_the_loss(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).mean() - model(x.cos()).mean()
    loss = loss + 10 * _penalty(model, x.sin())
    loss.backward()
    return loss


def a_penalty_with_an_evaluation_in_between(model: nn.Module, x: Tensor) -> Tensor:
    penalty = _penalty(model, x)
    with torch.no_grad():
        seen = model(x.cos()).mean()
    (penalty * seen).backward()
    return penalty


def a_penalty_with_an_evaluation_and_another_loss(model: nn.Module, x: Tensor) -> Tensor:
    penalty = _penalty(model, x)
    with torch.no_grad():
        model(x)
    (penalty + model(x.cos()).square().mean()).backward()
    return penalty


def two_penalties_one_after_the_other(model: nn.Module, x: Tensor) -> Tensor:
    penalties = [_penalty(model, x), _penalty(model, x.cos()) + model(x).square().mean()]
    for penalty in penalties:
        penalty.backward()
    return penalties[1]


def two_penalties_backwards(model: nn.Module, x: Tensor) -> Tensor:
    penalties = [_penalty(model, x), model(x).square().mean(), _penalty(model, x.cos())]
    for penalty in reversed(penalties):
        penalty.backward()
    model(x).square().mean().backward()
    return penalties[0]


def a_penalty_of_a_penalty(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
    loss = second.square().mean()
    loss.backward()
    return loss


def a_penalty_after_a_backward_that_retains_the_graph(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    output = model(x)
    output.square().mean().backward(retain_graph=True)
    (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    gradient.square().mean().backward()
    return gradient


# --- transforms ---------------------------------------------------------------------------------


def a_transformed_gradient(model: nn.Module, x: Tensor) -> Tensor:
    return torch.func.grad(lambda y: model(y).square().sum())(x)


def a_backward_through_a_transformed_gradient(model: nn.Module, x: Tensor) -> Tensor:
    gradient = torch.func.grad(lambda y: model(y).square().sum())(x)
    gradient.square().sum().backward()
    return gradient


def a_gradient_per_sample(model: nn.Module, x: Tensor) -> Tensor:
    return torch.func.vmap(torch.func.grad(lambda y: model(y).square().sum()))(x)


def a_mapped_forward(model: nn.Module, x: Tensor) -> Tensor:
    output: Tensor = torch.func.vmap(model)(x)
    output.square().mean().backward()
    return output


def a_mapped_forward_of_what_was_cast_and_frozen(model: nn.Module, x: Tensor) -> Tensor:
    model.float().double().get_parameter("head.bias").requires_grad_(False)
    return a_mapped_forward(model, x)


def a_jacobian_by_rows(model: nn.Module, x: Tensor) -> Tensor:
    return torch.func.jacrev(model)(x)


def _forward_mode(transform: Callable[[], Tensor]) -> Tensor:
    with warnings.catch_warnings():
        # torch's own, when it first loads what forward mode needs
        for kind in (DeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", kind)
        return transform()


def a_jacobian_by_columns(model: nn.Module, x: Tensor) -> Tensor:
    return _forward_mode(lambda: torch.func.jacfwd(model)(x))


def a_hessian(model: nn.Module, x: Tensor) -> Tensor:
    return _forward_mode(lambda: torch.func.hessian(lambda y: model(y).square().sum())(x[:1]))


PROGRAMS: Final[dict[str, Callable[[nn.Module, Tensor], object]]] = {
    program.__name__: program
    for program in (
        a_penalty_alone,
        a_penalty_after_the_loss,
        a_penalty_with_an_evaluation_in_between,
        a_penalty_with_an_evaluation_and_another_loss,
        two_penalties_one_after_the_other,
        two_penalties_backwards,
        a_penalty_of_a_penalty,
        a_penalty_after_a_backward_that_retains_the_graph,
        a_transformed_gradient,
        a_backward_through_a_transformed_gradient,
        a_gradient_per_sample,
        a_mapped_forward,
        a_mapped_forward_of_what_was_cast_and_frozen,
        a_jacobian_by_rows,
        a_jacobian_by_columns,
        a_hessian,
    )
}


class Reshaping(Layer):
    """Returns a view, which wrapped tensors cannot be asked for their memory about."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).unflatten(-1, (2, 3)).transpose(-1, -2)


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Layer()
        self.second = Reshaping()
        self.third = Layer()
        self.head = nn.Linear(6, 1)
        self.register_buffer("scale", torch.full((1,), 0.9))  # shared in every forward

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x * self.scale)).flatten(-2)
        return self.head(self.third(x))


_DISCRIMINATOR: Final = Case("discriminator", Discriminator, rows(4, 6), mean_square, (Layer,))


_TRANSFORMS: Final = [name for name in PROGRAMS if "penalt" not in name]
_RUNS: Final = [
    *((program, scheme) for scheme in SHARDED for program in PROGRAMS),
    *(
        (program, scheme)
        for scheme in ("replicate", "replicate inside fully_shard")
        for program in _TRANSFORMS
    ),
]


@pytest.mark.parametrize(("program", "scheme"), _RUNS)
@spmd(ranks=2)
def test_gradients_are_those_of_the_plain_model(program: str, scheme: str) -> None:
    assert_same_gradients(_DISCRIMINATOR, SCHEMES[scheme].annotate, PROGRAMS[program])


# --- gradients that a forward asks for ----------------------------------------------------------


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


def two_forwards_and_one_backward(model: nn.Module, x: Tensor) -> None:
    (model(x).square().mean() + model(2 * x).square().mean()).backward()


def gradients_that_nothing_goes_through(model: nn.Module, x: Tensor) -> None:
    assert isinstance(model, Molecule)
    model.forces.builds_graph = False
    two_forwards_and_one_backward(model, x)


@pytest.mark.parametrize("scheme", SHARDED)
@pytest.mark.parametrize(
    "program", [two_forwards_and_one_backward, gradients_that_nothing_goes_through]
)
@spmd(ranks=2)
def test_a_forward_may_ask_for_gradients(program: Callable[..., None], scheme: str) -> None:
    assert_same_gradients(_MOLECULE, SCHEMES[scheme].annotate, program)


# --- what is kept for penalties -----------------------------------------------------------------


def _unsharded(model: nn.Module) -> list[str]:
    return [row.unit for row in describe(model).rows if row.state == "UNSHARDED"]


@pytest.mark.parametrize("evaluates", [False, True], ids=["", "with evaluations between them"])
@spmd(ranks=2)
def test_penalties_that_wait_for_each_other_train_and_a_forward_frees_what_they_kept(
    evaluates: bool,
) -> None:
    device = current_device()
    plain, model = _DISCRIMINATOR.model(0, 0, device), _DISCRIMINATOR.model(0, 0, device)
    fully_shard(model, policy={Layer})
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    kept: list[list[str]] = []  # what stays unsharded until the next forward has begun
    model.first.register_forward_pre_hook(lambda *_: kept.append(_unsharded(model)))
    for step in range(3):
        (x,) = _DISCRIMINATOR.inputs(0, step, 0, device)  # the same on all ranks
        kept.clear()
        for each in (plain, model):
            penalties = [_penalty(each, x), _penalty(each, x.cos())]
            # In the first forward nothing is left of the step before; in the second one the first
            # one's graph keeps all.
            assert each is plain or kept == [["", "first"], ["", "first", "second", "third"]]
            for penalty in penalties:
                penalty.backward()
                if evaluates and penalty is penalties[0]:
                    with torch.no_grad():
                        each(x)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if evaluates:
            with torch.no_grad():
                torch.testing.assert_close(model(x), plain(x))
            assert _unsharded(model) == []  # no graph waits for parameters that were stepped since
        for (name, one), other in zip(plain.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(full(other), one, msg=f"{name} in step {step}")


@spmd(ranks=2)
def test_what_a_graph_kept_is_freed_also_if_the_tree_changes_before_the_next_step() -> None:
    model = _DISCRIMINATOR.model(0, 0, current_device())
    fully_shard(model, policy={Layer})
    (x,) = _DISCRIMINATOR.inputs(0, 0, 0, current_device())
    _penalty(model, x)
    assert _unsharded(model) == ["", "first", "second", "third"]
    outer = nn.Sequential(model)
    fully_shard(outer)  # another root from now on
    outer(x).sum().backward()
    assert _unsharded(outer) == []


@pytest.mark.parametrize(
    ("annotate", "refused"),
    [
        (replicate, ""),
        (
            fully_shard,
            (
                "parameter 'first.up.weight' of unit '(root)' was replaced by a DTensor that is no"
                " nn.Parameter, as torch.func.functional_call does inside torch.func.grad; nothing"
                " would gather it. Gradients of sharded parameters come by backward(); transforms"
                " over inputs, torch.func.grad(...)(x), work"
            ),
        ),
    ],
)
@spmd(ranks=2, everywhere=True)
def test_gradients_over_parameters_are_those_of_the_rank_or_refused_by_name(
    annotate: Callable[[nn.Module], object], refused: str
) -> None:
    plain, model = _DISCRIMINATOR.model(0, 0), _DISCRIMINATOR.model(0, 0)
    annotate(model)
    (x,) = _DISCRIMINATOR.inputs(0, 0, dist.get_rank())
    expected, gradients = [
        lambda each=each: torch.func.grad(
            lambda p: torch.func.functional_call(each, p, (x,)).square().mean()
        )(dict(each.named_parameters()))
        for each in (plain, model)
    ]
    if refused:
        assert refusal(gradients) == f"ForeignParameterError: {refused}"
    else:
        torch.testing.assert_close(gradients(), expected())
    for each in (plain, model):
        each(x).square().mean().backward()
    assert_mean_gradients(plain, model)


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph")
@pytest.mark.parametrize(("annotate", "unit"), [(fully_shard, "other"), (replicate, "(root)")])
@spmd(ranks=2, everywhere=True)
def test_gradients_of_parameters_are_not_differentiated(annotate: Any, unit: str) -> None:
    case = BATTERY["a unit used several times"]
    model = case.model(0, 0)
    annotate(model, policy=set(case.units) if unit == "other" else None)
    (x,) = case.inputs(0, 0, 0)
    for _ in range(2):  # the order of buckets is agreed in the second
        model(x).square().mean().backward()
        model.zero_grad()
    assert (
        refusal(lambda: model(x).square().mean().backward(create_graph=True))
        == "DifferentiationError: backward(create_graph=True) brought gradients to parameters of"
        f" unit '{unit}'. They are reduced outside of autograd's graph, so nothing could be"
        " differentiated through them. Ask for gradients of inputs only,"
        " torch.autograd.grad(loss, inputs, create_graph=True), or leave create_graph=True out"
    )


class _Looked(nn.Module):
    """A sparse table, and rows from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3, sparse=True)

    def forward(self, x: Tensor, rows: Tensor, *, learns: bool) -> Tensor:
        found = self.table(x)
        return ((found if learns else found.detach()) + rows).square().sum()


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph")
@spmd(ranks=2)
def test_sparse_gradients_are_not_differentiated_and_a_graph_without_any_is_legal() -> None:
    model, x = _Looked(), torch.tensor([1, 3])
    replicate(model)
    rows = torch.randn(2, 3, requires_grad=True)
    assert refusal(lambda: model(x, rows, learns=True).backward(create_graph=True)).startswith(
        "DifferentiationError: backward(create_graph=True) brought gradients to parameters of unit"
    )

    def penalty() -> None:
        loss = model(x, rows, learns=False)
        (gradient,) = torch.autograd.grad(loss, rows, create_graph=True)
        gradient.square().sum().backward()

    model.zero_grad()
    penalty()
    assert model.table.weight.grad is None
    with no_sync(model):
        model(x, rows, learns=True).backward()
        penalty()  # what waits is no gradient of its graph
    model(x, rows, learns=True).backward()
    assert model.table.weight.grad is not None
