"""A sharded unit that is removed while an annotation around it stays, and an annotation that is removed from around a unit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composable import fully_shard, remove, replicate
from composable.errors import AnnotationError, HooksRemovedError
from tests.helpers.world import current_device, spmd

_AROUND: Final[dict[str, Callable[..., Any]]] = {"fully_shard": fully_shard, "replicate": replicate}
around = pytest.mark.parametrize("around", _AROUND)


def _plain() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential()
    model.block = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4, bias=False)))
    model.head = nn.Linear(4, 4)
    return model.to(current_device())


def _model(around: str) -> Any:
    model = _plain()
    fully_shard(model.block)
    return _AROUND[around](model)


def _step(model: nn.Module) -> None:
    model(torch.ones(2, 4, device=current_device())).sum().backward()


def _assert_refused(model: nn.Module, names: str) -> None:
    for _ in range(2):
        with pytest.raises(AnnotationError, match=rf"^unit '\(root\)' \(\w+\): no unit manages {names}, added below"):
            _step(model)


@around
@pytest.mark.parametrize("steps", [0, 1])
@spmd(ranks=2)
def test_parameters_of_a_removed_unit_are_refused_while_they_would_train_apart(around: str, steps: int) -> None:
    model = _model(around)
    for _ in range(steps):
        _step(model)
    remove(model.block, fully_shard)
    _assert_refused(model, "'block.0.weight', 'block.0.bias', 'block.1.0.weight'")
    model.block.requires_grad_(False)
    _step(model)
    model.block[0].weight.requires_grad_()
    _assert_refused(model, "'block.0.weight'")
    fully_shard(model.block.requires_grad_())
    _step(model)


@around
@spmd(ranks=2)
def test_a_removed_unit_that_is_annotated_again_trains(around: str) -> None:
    model = _model(around)
    _step(model)
    remove(model.block, fully_shard)
    fully_shard(model.block)
    _step(model)
    remove(model.block, fully_shard)
    fully_shard(model.block[0])
    fully_shard(model.block[1])
    _step(model)
    remove(model.block[1], fully_shard)
    _assert_refused(model, r"'block\.1\.0\.weight'")


@around
@spmd(ranks=2)
def test_parameters_that_no_annotation_is_around_any_more_train_as_users_like(around: str) -> None:
    verb = _AROUND[around]
    for first, last in ((0, 1), (1, 0)):
        model = _model(around)
        _step(model)
        removed = [(model.block, fully_shard), (model, verb)]
        remove(*removed[first])
        remove(*removed[last])
        _step(model)
        assert all(type(parameter.grad) is Tensor for parameter in model.parameters())
    _step(verb(model, ignored_params=["block.0.weight", "block.0.bias", "block.1.0.weight"]))
    policed = fully_shard(_plain(), policy={nn.Linear})
    _step(policed)
    _step(remove(policed, fully_shard))


@spmd(ranks=2)
def test_units_inside_go_on_when_what_is_around_them_is_removed_and_know_what_is_annotated_around_them_next() -> None:
    model, plain = _plain(), _plain()
    fully_shard(model.block)
    for _ in range(2):
        fully_shard(model)
        _step(model)
        remove(model, fully_shard)
        for each in (model, plain):
            each.zero_grad()
            _step(each)
        for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
            gradient = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
            torch.testing.assert_close(gradient, expected.grad)
    fully_shard(model)
    model._forward_pre_hooks.clear()
    with pytest.raises(HooksRemovedError, match=r"unit '\(root\)'"):
        _step(model)


@around
@spmd(ranks=1)
def test_one_process_trains_what_a_removed_unit_leaves(around: str) -> None:
    model = _model(around)
    remove(model.block, fully_shard)
    _step(model)
