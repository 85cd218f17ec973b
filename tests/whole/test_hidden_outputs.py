"""Outputs that cannot be looked into, and tensors that take another way, train or are refused, and never lose gradients."""

# Messages are compared word for word, each on one line.
# ruff: noqa: E501

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from expecttest import assert_expected_inline as assert_text
from torch import Tensor, nn

from composable import fully_shard
from composable.errors import ComposableError
from tests.helpers.battery import BATTERY, Case
from tests.helpers.compare import assert_same_gradients
from tests.helpers.world import Pool


class Opaque:
    """Nothing in it can be found by looking."""

    __slots__ = ("_get",)

    def __init__(self, tensor: Tensor) -> None:
        self._get = lambda: tensor

    def open(self) -> Tensor:
        return self._get()


class Sealed:
    """Not even attributes."""

    __slots__ = ("__weakref__",)
    kept: ClassVar[dict[int, Tensor]] = {}

    def __init__(self, tensor: Tensor) -> None:
        Sealed.kept[id(self)] = tensor

    def open(self) -> Tensor:
        return Sealed.kept.pop(id(self))


class Hiding(nn.Module):
    def __init__(self, box: type[Opaque] | type[Sealed]) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.box = box

    def forward(self, x: Tensor) -> Any:
        return self.box(torch.tanh(self.linear(x)))


class Stashing(nn.Module):
    """Leaves a tensor on itself that the loss uses, and returns another."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.stashed: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        self.stashed = [torch.sin(self.second(hidden))]
        return hidden


class Unboxing(nn.Module):
    def __init__(self, box: type[Opaque] | type[Sealed]) -> None:
        super().__init__()
        self.hiding = Hiding(box)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hiding(x).open())


class Escaping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stashing = Stashing()
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.stashing(x)
        (stashed,) = self.stashing.stashed
        self.stashing.stashed = []
        return self.head(hidden.detach()) * stashed.sum()


_HIDDEN = {"opaque": lambda: Unboxing(Opaque), "sealed": lambda: Unboxing(Sealed), "escaping": Escaping}


def _train_hidden(kind: str, reshard: bool) -> str:
    case = Case(kind, _HIDDEN[kind], BATTERY["nested"].batch, BATTERY["nested"].loss, (Hiding, Stashing))

    def annotate(model: nn.Module, case: Case) -> None:
        fully_shard(model, policy=set(case.units), reshard_after_forward=reshard)

    def program(model: nn.Module, x: Tensor) -> None:
        model(x).square().mean().backward()

    try:
        assert_same_gradients(case, annotate, program)
    except ComposableError as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


@pytest.mark.parametrize("reshard", [True, False])
def test_outputs_that_cannot_be_looked_into_are_refused_or_train_but_never_lose_gradients(pool: Pool, reshard: bool) -> None:
    assert_text(pool.run(2, _train_hidden, "opaque", reshard)[0], """trained""")
    assert_text(
        pool.run(2, _train_hidden, "sealed", reshard)[0],
        """OutputError: fully_shard(unit 'hiding'): forward returned Sealed, in which no tensor that requires grad was found; its backward cannot be tracked. Return tensors, containers, dataclasses or objects with attributes.""",
    )


def test_tensors_that_reach_the_loss_by_another_way_train_while_the_unit_stays_unsharded(pool: Pool) -> None:
    assert_text(pool.run(2, _train_hidden, "escaping", False)[0], """trained""")


@pytest.mark.beyond_sim("torch says first that memory is gone, as on all accelerators")
def test_tensors_that_reach_the_loss_by_another_way_are_refused_where_parameters_are_freed_after_forward(pool: Pool) -> None:
    """What was in their memory before may be there still, or not."""
    assert_text(
        pool.run(2, _train_hidden, "escaping", True)[0],
        """OutputError: fully_shard(unit 'stashing'): backward came to its parameters by a tensor that its forward left elsewhere, past all that it returned, and they were not gathered: its gradients would be wrong. Return that tensor, too, and use what is returned; or keep the unit unsharded after forward, reshard_after_forward=False""",
    )
