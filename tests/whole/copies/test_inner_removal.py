"""A unit that is removed while annotations around it stay, and an annotation that is removed from
around a unit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable import fully_shard, no_sync, remove, replicate
from composable.errors import AnnotationError, HooksRemovedError
from tests.helpers.compare import assert_mean_gradients
from tests.helpers.world import current_device, spmd

Verb = Callable[..., Any]


def _around_another(model: Any, **options: Any) -> Any:
    replicate(model.head)
    return replicate(model, **options)


_AROUND: Final[dict[str, Verb]] = {
    "fully_shard": fully_shard,
    "replicate": replicate,
    "replicate, with another one inside": _around_another,
}
_NAMES: Final = "'block.0.weight', 'block.0.bias', 'block.1.0.weight'"
inner = pytest.mark.parametrize("inner", [fully_shard, replicate])
around = pytest.mark.parametrize("around", _AROUND)


class Block(nn.Sequential):
    """It knows its rank, where the buffer does not follow rank 0."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4, bias=False)))
        self.register_buffer("rank", torch.tensor(0.0))


def _plain() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential()
    model.block = Block()
    model.head = nn.Linear(4, 4)
    return model.to(current_device(), torch.float64)


def _model(inner: Verb, around: str) -> Any:
    model = _plain()
    inner(model.block)
    return _AROUND[around](model)


def _verb(around: str) -> Verb:
    return fully_shard if around == "fully_shard" else replicate


def _batch() -> Tensor:
    return torch.full((2, 4), 1.0 + dist.get_rank(), dtype=torch.float64, device=current_device())


def _step(model: nn.Module) -> None:
    model.zero_grad()
    model(_batch()).square().sum().backward()


def _assert_means(model: Any, *, frozen: bool = False) -> None:
    """Also of parts that are frozen, which have no gradients."""
    plain = _plain()
    plain.block.requires_grad_(not frozen)
    for each in (plain, model):
        _step(each)
    assert_mean_gradients(plain, model)


def _assert_refused(model: nn.Module, names: str = _NAMES) -> None:
    for _ in range(2):
        with pytest.raises(
            AnnotationError,
            match=rf"^unit '\(root\)' \(\w+\): no unit manages {names}, added below",
        ):
            _step(model)


@inner
@around
@pytest.mark.parametrize("steps", [0, 1])
@spmd(ranks=2)
def test_parameters_of_a_removed_unit_are_refused_while_they_would_train_apart(
    inner: Verb, around: str, steps: int
) -> None:
    model = _model(inner, around)
    for _ in range(steps):
        _assert_means(model)
    remove(model.block, inner)
    _assert_refused(model)
    model.block.requires_grad_(False)
    for _ in range(2):
        model.block.rank.fill_(dist.get_rank())
        _assert_means(model, frozen=True)
        assert float(model.block.rank) == dist.get_rank(), "nothing of the unit lives on"
    model.block[0].weight.requires_grad_()
    _assert_refused(model, "'block.0.weight'")
    model.block.rank.fill_(0)  # ranks compare what they annotate
    inner(model.block.requires_grad_())
    _assert_means(model)


@inner
@pytest.mark.parametrize("around", ["fully_shard", "replicate"])
@spmd(ranks=2)
def test_parameters_that_no_annotation_is_around_any_more_train_as_users_like(
    inner: Verb, around: str
) -> None:
    verb, plain = _verb(around), _plain()
    _step(plain)
    for first, last in ((0, 1), (1, 0)):
        model = _model(inner, around)
        _step(model)
        removed = [(model.block, inner), (model, verb)]
        remove(*removed[first])
        remove(*removed[last])
        _step(model)
        for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(parameter.grad, expected.grad), "this rank's own"
    _assert_means(verb(model))
    remove(model, verb)
    _step(verb(model, ignored_params=["block.0.weight", "block.0.bias", "block.1.0.weight"]))
    policed = fully_shard(_plain(), policy={nn.Linear})
    _step(policed)
    _step(remove(policed, fully_shard))


@inner
@around
@spmd(ranks=2)
def test_a_forward_that_raises_around_a_unit_that_was_removed_brings_nothing_of_it_back(
    inner: Verb, around: str
) -> None:
    model = _model(inner, around)
    _step(model)
    remove(model.block, inner)
    model.block.requires_grad_(False)

    def refuse(*_: object) -> None:
        raise ValueError

    with (
        model.head.register_forward_hook(refuse),
        pytest.raises(ValueError, match=r"^$"),
        no_sync(model),
    ):
        model(_batch())
    _assert_means(model, frozen=True)


@spmd(ranks=2)
def test_units_inside_go_on_when_what_is_around_them_is_removed_and_know_what_is_annotated_around_them_next() -> None:  # fmt: skip  # noqa: E501
    model, plain = _plain(), _plain()
    # the same on both ranks: the head is on its own
    x = torch.ones(2, 4, dtype=torch.float64, device=current_device())
    fully_shard(model.block)
    for _ in range(2):
        fully_shard(model)
        _step(model)
        remove(model, fully_shard)
        for each in (model, plain):
            each.zero_grad()
            each(x).sum().backward()
        assert_mean_gradients(plain, model)
    fully_shard(model)
    model._forward_pre_hooks.clear()
    with pytest.raises(HooksRemovedError, match=r"unit '\(root\)'"):
        _step(model)


@inner
@around
@spmd(ranks=1)
def test_one_process_trains_what_a_removed_unit_leaves(inner: Verb, around: str) -> None:
    model = _model(inner, around)
    remove(model.block, inner)
    _step(model)
