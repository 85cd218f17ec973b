"""Modules and parameters that come into an annotated model afterwards: refused by name, unless they
do no harm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

import composable
from composable import fully_shard, remove, replicate, unshard
from composable.errors import AnnotationError, ForeignParameterError
from tests.helpers.compare import assert_mean_gradients, averaged_gradients, full_gradients
from tests.helpers.world import current_device, spmd


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Linear(4, 4, bias=False)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.head = nn.Linear(4, 4, bias=False)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.emb(x))) * self.scale  # type: ignore[no-any-return]


class Adapter(nn.Module):
    """As LoRA puts it around a layer."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.down, self.up = (
            base,
            nn.Linear(4, 2, bias=False),
            nn.Linear(2, 4, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))  # type: ignore[no-any-return]


def _model() -> tuple[Model, Tensor]:
    torch.manual_seed(0)
    return Model().to(current_device()), torch.ones(2, 4, device=current_device())


def _tie_units(model: Model) -> None:
    model.head.weight = model.emb.weight


def _tie_in_a_unit(model: Model) -> None:
    model.scale = model.block[0].bias  # type: ignore[assignment]


def _tie_what_is_new(model: Model) -> None:
    model.head = nn.Linear(4, 4, bias=False, device=model.scale.device)
    model.head.weight = model.emb.weight


def _exchange_a_layer(model: Model) -> None:
    model.block[0] = nn.Linear(4, 4, device=model.scale.device)


def _adapt_a_layer(model: Model) -> None:
    model.block[0] = Adapter(model.block[0]).to(model.scale.device)


def _register_one_more(model: Model) -> None:
    model.block[1].register_parameter(
        "slope", nn.Parameter(torch.ones(1, device=model.scale.device))
    )


def _tied(where: str, name: str, unit: str) -> str:
    return (
        f"{where} was tied to parameter '{name}' of unit '{unit}' after the annotation, and would"
        " not be gathered or cast with it. Call remove() with the module and its verb, tie the"
        " parameters, and annotate again"
    )


def _came(names: str) -> str:
    return (
        f"unit '(root)' (fully_shard): no unit manages {names}, added below it, or left by"
        " remove(), after the annotation: every rank would train its own. Call remove(module,"
        " fully_shard) and annotate again, with ignored_params= for those that are to be trained"
        " as they are"
    )


CHANGES: Final[dict[str, tuple[Callable[[Model], None], str]]] = {
    "a layer exchanged": (_exchange_a_layer, _came("'block.0.weight', 'block.0.bias'")),
    "a layer adapted": (_adapt_a_layer, _came("'block.0.down.weight', 'block.0.up.weight'")),
    "a parameter more": (_register_one_more, _came("'block.1.slope'")),
}


def _in_units(model: Model) -> None:
    fully_shard(model.emb)
    fully_shard(model.head)
    fully_shard(model)


def _mixed(model: Model) -> None:
    replicate(model.block)
    fully_shard(model)


_APART: Final = ("a layer exchanged", "a layer adapted", "a parameter more")
_REFUSED: Final = [
    *[(change, _in_units, steps) for change in CHANGES for steps in (0, 1)],
    *[(change, annotate, 1) for change in _APART for annotate in (replicate, _mixed)],
]


@pytest.mark.parametrize(("change", "annotate", "steps"), _REFUSED)
@spmd(ranks=2)
def test_what_would_train_apart_is_refused_at_the_next_forward(
    change: str, annotate: Callable[[Model], object], steps: int
) -> None:
    model, x = _model()
    annotate(model)
    for _ in range(steps):
        model(x).sum().backward()
    make, text = CHANGES[change]
    make(model)
    for _ in range(2):  # nothing is half done after the first
        with pytest.raises((AnnotationError, ForeignParameterError)) as caught:
            model(x)
        assert str(caught.value) == (
            text.replace("fully_shard", "replicate") if annotate is replicate else text
        )


@spmd(ranks=2)
def test_an_evaluation_that_one_rank_is_refused_ends_no_unshard() -> None:
    model, x = _model()
    fully_shard(model, policy={nn.Linear})
    model(x).sum().backward()
    unshard(model)
    if dist.get_rank() == 0:
        model.more = nn.Parameter(torch.ones(4, device=x.device))
        with torch.no_grad(), pytest.raises(AnnotationError):
            model(x)
        del model.more
    with torch.no_grad():
        model(x)  # no message: the ranks' launches are compared
    assert not isinstance(model.head.weight, DTensor)


@spmd(ranks=2)
def test_what_does_no_harm_may_come_into_replicas() -> None:
    model, x = _model()
    ignored = [model.scale]
    replicate(model, ignored_params=ignored)
    model(x).sum().backward()
    model.block[0] = Adapter(model.block[0]).to(x.device)
    model.block[0].down.requires_grad_(False)
    model.block[0].up.requires_grad_(False)
    model.head.weight = model.emb.weight  # tied: its gradient is averaged where it was
    model(x).sum().backward()
    model.block[0].up.requires_grad_(True)
    with pytest.raises(
        AnnotationError,
        match=r"^unit '\(root\)' \(replicate\): no unit manages 'block\.0\.up\.weight'",
    ):
        model(x)
    remove(model, replicate)
    replicate(model, ignored_params=())(x).sum().backward()


# --- weights that are tied later ----------------------------------------------------------------

_TIES: Final = {
    "of two units": _tie_units,
    "of one unit": _tie_in_a_unit,
    "of a new layer": _tie_what_is_new,
}


def _train(model: nn.Module, step: int, optimizer: torch.optim.Optimizer) -> None:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    x = torch.randn(3, 4, generator=generator).to(current_device())
    optimizer.zero_grad()
    model(x).square().mean().backward()


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("ties", _TIES)
@spmd(ranks=2)
def test_a_parameter_that_is_tied_between_two_steps_trains_as_a_tied_one(
    ties: str, steps: int
) -> None:
    (plain, _), (model, _) = _model(), _model()
    _in_units(model)
    sgd = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(steps):
        for each, optimizer in zip((plain, model), sgd, strict=True):
            _train(each, step, optimizer)
        assert_mean_gradients(plain, model)
    for each in (plain, model):
        _TIES[ties](each)
    sgd = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    assert len(list(plain.parameters())) == len(list(model.parameters()))
    for step in range(2, 5):
        for each, optimizer in zip((plain, model), sgd, strict=True):
            _train(each, step, optimizer)
        expected = averaged_gradients(plain)
        for name, gradient in full_gradients(model).items():
            torch.testing.assert_close(gradient, expected[name])
        for parameter, name in zip(plain.parameters(), expected, strict=True):
            parameter.grad = expected[name]
        for optimizer in sgd:
            optimizer.step()
    state = model.state_dict()
    model.load_state_dict(state)
    _train(model, 5, sgd[1])
    remove(model.emb, fully_shard)
    remove(model, fully_shard)
    assert len(list(plain.parameters())) == len([*model.parameters()])


@spmd(ranks=2)
def test_a_model_whose_weights_are_tied_and_loaded_on_the_meta_device_trains() -> None:
    """As `from_pretrained` of transformers does with a model that it has sharded."""
    plain, _ = _model()
    values = {name: value.clone() for name, value in plain.state_dict().items()}
    _tie_units(plain)
    with torch.device("meta"):
        model = Model()
    _in_units(model)
    for name, value in values.items():
        place, _, last = name.rpartition(".")
        at_rest = model.get_parameter(name)
        assert isinstance(at_rest, DTensor)
        shard = distribute_tensor(value, at_rest.device_mesh, at_rest.placements)
        setattr(model.get_submodule(place), last, nn.Parameter(shard))
    _tie_units(model)
    for each in (plain, model):
        _train(each, 0, torch.optim.SGD(each.parameters(), lr=0.1))
    expected = averaged_gradients(plain)
    for name, gradient in full_gradients(model).items():
        torch.testing.assert_close(gradient, expected[name])


@spmd(ranks=2)
def test_a_tie_in_the_middle_of_a_step_is_refused_and_taken_after_it() -> None:
    model, x = _model()
    _in_units(model)
    loss = model(x).sum()
    _tie_units(model)
    with pytest.raises(ForeignParameterError) as caught:
        model(x)
    assert str(caught.value) == _tied("parameter 'weight' of unit 'head'", "weight", "emb")
    del loss
    composable.reset(model)
    model(x).sum().backward()
    assert model.head.weight.grad is not None


@spmd(ranks=2)
def test_a_tie_of_units_that_reduce_otherwise_is_refused() -> None:
    model, x = _model()
    fully_shard(model.emb, grad_reduce="sum")
    fully_shard(model.head)
    fully_shard(model)
    _tie_units(model)
    with pytest.raises(ForeignParameterError) as caught:
        model(x)
    assert str(caught.value) == _tied("parameter 'weight' of unit 'head'", "weight", "emb")


@spmd(ranks=2)
def test_what_is_frozen_ignored_or_without_parameters_may_come_and_go() -> None:
    model, x = _model()
    fully_shard(model, policy={nn.Linear}, ignored_params=["scale"])
    model(x).sum().backward()
    model.block.append(nn.Linear(4, 4, device=x.device).requires_grad_(requires_grad=False))
    model.block.append(nn.Dropout(0.0))
    model.scale = nn.Parameter(torch.full((4,), 2.0, device=x.device))
    model(x).sum().backward()
    assert model.scale.grad is not None
    model.block[2].weight.requires_grad_()  # type: ignore[operator, union-attr]
    with pytest.raises(AnnotationError, match=r"no unit manages 'block\.2\.weight'"):
        model(x)
    del model.block[2:]
    model(x).sum().backward()


@spmd(ranks=2)
def test_a_unit_may_come_into_a_model_that_has_run() -> None:
    model, x = _model()
    fully_shard(model, policy={nn.Linear})
    model(x).sum().backward()
    torch.manual_seed(1)
    model.block.append(fully_shard(nn.Linear(4, 4, device=x.device)))
    model.zero_grad()
    model(x).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_one_process_without_a_group_may_change_its_model() -> None:
    model, x = _model()
    fully_shard(model, policy={nn.Linear})
    model(x).sum().backward()
    _adapt_a_layer(model)
    _tie_units(model)
    model(x).sum().backward()
    assert model.block[0].up.weight.grad is not None  # type: ignore[union-attr]
