"""A replicated unit that is removed while annotations around it stay: nothing of it lives on in them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composable import fully_shard, no_sync, remove, replicate
from composable.errors import AnnotationError
from tests.helpers.compare import averaged_gradients
from tests.helpers.world import current_device, spmd


class Inner(nn.Linear):
    """It knows its rank, and scales with it."""

    def __init__(self) -> None:
        super().__init__(4, 4, dtype=torch.float64)
        self.register_buffer("rank", torch.tensor(float(dist.get_rank()), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.rank)  # type: ignore[operator]


class Outer(nn.Sequential):
    """A part that is removed, and a rest that is not."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(Inner(), nn.Linear(4, 4, dtype=torch.float64))
        self.to(current_device())


def _both_replicated(model: Outer) -> None:
    replicate(model[0])
    replicate(model)


def _in_two(model: Outer) -> None:
    replicate(model[0])
    replicate(model[1])
    replicate(model)


def _inside_shards(model: Outer) -> None:
    replicate(model[0])
    fully_shard(model)


_AROUND: Final[dict[str, Callable[[Outer], None]]] = {
    "replicate": _both_replicated,
    "replicate, with another one inside": _in_two,
    "fully_shard": _inside_shards,
}


def _train(plain: Outer, ours: Outer, step: int, *, apart: bool) -> None:
    """One step; the gradients must be means; of the first part there are none if it is on its own."""
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    x = torch.randn(3, 4, generator=generator, dtype=torch.float64).to(current_device())
    ours[0].rank.fill_(dist.get_rank())  # type: ignore[operator, union-attr]
    plain[0].rank.fill_(dist.get_rank() if apart else 0)  # type: ignore[operator, union-attr]
    for model in (plain, ours):
        model.zero_grad()
        model(x).square().sum().backward()
    means = averaged_gradients(plain)
    assert float(ours[0].rank) == (dist.get_rank() if apart else 0)  # type: ignore[arg-type]
    for name, parameter in ours.named_parameters():
        gradient = parameter.grad
        if apart and name.startswith("0."):
            assert gradient is None, name
            continue
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        torch.testing.assert_close(whole, means[name], msg=lambda text, n=name: f"{n}: {text}")


def _freeze(*models: Outer) -> None:
    for model in models:
        model[0].requires_grad_(False)


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("around", _AROUND)
@spmd(ranks=2)
def test_what_a_removed_unit_leaves_is_refused_while_it_would_train_apart(around: str, steps: int) -> None:
    plain, ours = Outer(), Outer()
    _AROUND[around](ours)
    for step in range(steps):
        _train(plain, ours, step, apart=False)
    remove(ours[0], replicate)
    with pytest.raises(AnnotationError, match=r"^unit '\(root\)' \(\w+\): no unit manages '0\.weight', '0\.bias'"):
        ours(torch.ones(3, 4, dtype=torch.float64, device=current_device()))
    _freeze(plain, ours)
    _train(plain, ours, 2, apart=True)
    _train(plain, ours, 3, apart=True)


@pytest.mark.parametrize("verb", [replicate, fully_shard])
@spmd(ranks=2)
def test_what_a_removed_unit_leaves_trains_again_when_what_is_around_it_is_annotated_anew(verb: Callable[..., Outer]) -> None:
    plain, ours = Outer(), Outer()
    (_both_replicated if verb is replicate else _inside_shards)(ours)
    remove(ours[0], replicate)
    remove(ours, verb)  # type: ignore[arg-type]
    verb(ours)
    for model in (plain, ours):
        model[0].rank.fill_(0)  # type: ignore[operator, union-attr]
        model(torch.full((3, 4), 1.0 + dist.get_rank(), dtype=torch.float64, device=current_device())).sum().backward()
    means = averaged_gradients(plain)
    for name, parameter in ours.named_parameters():
        gradient = parameter.grad
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        torch.testing.assert_close(whole, means[name], msg=lambda text, n=name: f"{n}: {text}")


@spmd(ranks=2)
def test_a_unit_that_was_removed_stays_so_when_what_is_around_it_is_removed_too() -> None:
    for verb, annotate in ((replicate, _both_replicated), (fully_shard, _inside_shards)):
        _, ours = Outer(), Outer()
        annotate(ours)
        remove(ours[0], replicate)
        remove(ours, verb)
        plain = copy.deepcopy(ours)
        x = torch.full((3, 4), 1.0 + dist.get_rank(), dtype=torch.float64, device=current_device())
        for model in (plain, ours):
            model(x).square().sum().backward()
        for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("around", _AROUND)
@spmd(ranks=2)
def test_a_forward_that_raises_around_a_unit_that_was_removed_brings_nothing_of_it_back(around: str) -> None:
    plain, ours = Outer(), Outer()
    _AROUND[around](ours)
    _train(plain, ours, 0, apart=False)
    remove(ours[0], replicate)
    _freeze(plain, ours)

    def refuse(*_: object) -> None:
        raise ValueError

    hook = ours[1].register_forward_hook(refuse)
    with pytest.raises(ValueError, match=r"^$"), no_sync(ours):
        ours(torch.ones(3, 4, dtype=torch.float64, device=current_device()))
    hook.remove()
    _train(plain, ours, 1, apart=True)
