"""Modules and parameters that come into an annotated model afterwards: refused by name, unless they
do no harm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest
import torch
from torch import Tensor, nn

from composable import fully_shard, remove, replicate
from composable.errors import AnnotationError, ForeignParameterError
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
    "weights of two units tied": (
        _tie_units,
        _tied("parameter 'weight' of unit 'head'", "weight", "emb"),
    ),
    "weights of one unit tied": (
        _tie_in_a_unit,
        _tied("parameter 'scale' of unit '(root)'", "block.0.bias", "(root)"),
    ),
    "a new layer tied": (
        _tie_what_is_new,
        _tied("'head.weight' below unit '(root)'", "weight", "emb"),
    ),
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
