"""A sharded unit that is removed while an annotation around it stays: its parameters train apart, and users are told once."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Final

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composable import fully_shard, remove, replicate
from composable.errors import HooksRemovedError
from tests.helpers.world import current_device, spmd


class _Log(logging.Handler):
    """What the library warns of within a `with`."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> list[str]:
        logging.getLogger("composable").addHandler(self)
        return self.lines

    def __exit__(self, *_: object) -> None:
        logging.getLogger("composable").removeHandler(self)


Verb = Callable[..., nn.Module]

_AROUND: Final[dict[str, Verb]] = {"fully_shard": fully_shard, "replicate": replicate}
around = pytest.mark.parametrize("around", _AROUND)


def _said(around: str, name: str = "block", params: str = "'block.0.weight', 'block.0.bias', 'block.1.0.weight'") -> str:
    return (
        f"unit '{name}' was removed from under {around} on unit '(root)', which does not take its parameters over: nothing "
        f"averages the gradients of {params}, and every rank trains its own. Annotate it again, or freeze it; or, if that is "
        "meant, remove the annotation around it, too, and name them in ignored_params when you annotate that again"
    )


def _plain() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential()
    model.block = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4, bias=False)))
    model.head = nn.Linear(4, 4)
    return model.to(current_device())


def _model(around: str, **options: object) -> nn.Module:
    model = _plain()
    fully_shard(model.block)
    return _AROUND[around](model, **options)


def _forward(model: nn.Module) -> Tensor:
    return model(torch.ones(2, 4, device=current_device())).sum()  # type: ignore[no-any-return]


def _step(model: nn.Module) -> None:
    _forward(model).backward()


def _warnings(model: nn.Module) -> list[str]:
    """Of three steps."""
    with _Log() as lines:
        for _ in range(3):
            _step(model)
    return lines


@around
@pytest.mark.parametrize("steps", [0, 1])
@spmd(ranks=2)
def test_what_trains_apart_from_here_on_is_told_once_and_in_each_copy_once(around: str, steps: int) -> None:
    model = _model(around)
    for _ in range(steps):
        _step(model)
    remove(model.block, fully_shard)
    twin = copy.deepcopy(model)
    assert _warnings(model) == [_said(around)]
    assert _warnings(twin) == [_said(around)]
    assert _warnings(copy.deepcopy(model)) == []
    assert type(model.block[0].weight.grad) is Tensor  # type: ignore[index, union-attr]


@around
@spmd(ranks=2)
def test_each_removal_is_told_of_and_only_when_what_was_removed_trains(around: str) -> None:
    model = _model(around)
    remove(model.block, fully_shard)
    model.block.requires_grad_(False)
    assert _warnings(model) == []
    model.block[0].weight.requires_grad_()  # type: ignore[index, operator, union-attr]
    with torch.no_grad(), _Log() as lines:
        _forward(model)
    assert lines == []
    assert _warnings(model) == [_said(around, params="'block.0.weight'")]
    fully_shard(model.block.requires_grad_())
    assert _warnings(model) == []
    remove(model.block, fully_shard)
    assert _warnings(model) == [_said(around)]


@around
@spmd(ranks=2)
def test_what_is_annotated_again_before_the_next_forward_is_not_told_of(around: str) -> None:
    model = _model(around)
    _step(model)
    remove(model.block, fully_shard)
    fully_shard(model.block)
    assert _warnings(model) == []
    remove(model.block, fully_shard)
    fully_shard(model.block[0])  # type: ignore[index, arg-type]
    fully_shard(model.block[1])  # type: ignore[index, arg-type]
    assert _warnings(model) == []
    remove(model.block[1], fully_shard)  # type: ignore[index, arg-type]
    assert _warnings(model) == [_said(around, "block.1", "'block.1.0.weight'")]


@around
@spmd(ranks=2)
def test_what_is_no_longer_inside_an_annotation_is_not_told_of(around: str) -> None:
    verb = _AROUND[around]
    for first, last in ((0, 1), (1, 0)):
        model = _model(around)
        _step(model)
        removed = [(model.block, fully_shard), (model, verb)]
        remove(*removed[first])  # type: ignore[arg-type]
        remove(*removed[last])  # type: ignore[arg-type]
        assert _warnings(model) == []
    names = ["block.0.weight", "block.0.bias", "block.1.0.weight"]
    assert _warnings(verb(model, ignored_params=names)) == []
    policed = fully_shard(_plain(), policy={nn.Linear})
    _step(policed)
    assert _warnings(remove(policed, fully_shard)) == []


@spmd(ranks=2)
def test_units_inside_each_other_are_told_of_one_by_one_in_whatever_order_they_go() -> None:
    for outside_in in (False, True):
        model = _plain()
        fully_shard(model.block[1])  # type: ignore[index, arg-type]
        fully_shard(model.block, ignored_params=["0.bias"])
        fully_shard(model)
        _step(model)
        modules = [model.block[1], model.block]  # type: ignore[index]
        for each in reversed(modules) if outside_in else modules:
            remove(each, fully_shard)  # type: ignore[arg-type]
        said = {"block": "'block.0.weight'", "block.1": "'block.1.0.weight'"}
        assert _warnings(model) == [_said("fully_shard", name, params) for name, params in said.items()]


@spmd(ranks=2)
def test_what_a_part_that_was_called_by_itself_has_told_the_whole_does_not_repeat() -> None:
    model = _plain()
    fully_shard(model.block[1])  # type: ignore[index, arg-type]
    fully_shard(model.block)
    fully_shard(model)
    remove(model.block[1], fully_shard)  # type: ignore[index, arg-type]
    assert _warnings(model.block) == [_said("fully_shard", "1", "'1.0.weight'")]  # type: ignore[arg-type]
    assert _warnings(model) == []


@spmd(ranks=2)
def test_units_inside_go_on_when_what_is_around_them_is_removed_and_know_what_is_annotated_around_them_next() -> None:
    model, plain = _plain(), _plain()
    fully_shard(model.block)  # type: ignore[arg-type]
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
        _forward(model)


@around
@spmd(ranks=1)
def test_one_process_has_nothing_to_be_told(around: str) -> None:
    model = _model(around)
    remove(model.block, fully_shard)
    assert _warnings(model) == []
