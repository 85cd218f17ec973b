"""Outputs that cannot be looked into, and tensors that take another way, train or are refused, and
never lose gradients.
"""

from __future__ import annotations

import copy
import re
from contextlib import nullcontext
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable import fully_shard
from composable.errors import OutputError
from tests.helpers.battery import BATTERY, Case
from tests.helpers.compare import assert_same_gradients, full
from tests.helpers.world import Pool, current_device, spmd


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


_HIDDEN = {
    "opaque": lambda: Unboxing(Opaque),
    "sealed": lambda: Unboxing(Sealed),
    "escaping": Escaping,
}
_SEALED = re.escape(
    "unit 'hiding': forward returned Sealed, in which no tensor that requires grad was found, so"
    " backward cannot be followed to the unit. Return tensors, containers, dataclasses or objects"
    " with attributes"
)
_ABSENT = (
    r"modified by an inplace operation: \[[\w.]+ \[6, 6\]\].* is at version 2147483647; expected"
    r" version"
)


@pytest.mark.parametrize(
    ("kind", "reshard", "refused"),
    [
        ("opaque", True, ""),
        ("opaque", False, ""),
        ("sealed", True, _SEALED),
        ("sealed", False, _SEALED),
        ("escaping", False, ""),  # the unit stays unsharded
        ("escaping", True, _ABSENT),  # parameters that were freed are not read
    ],
)
@spmd(ranks=2, everywhere=True)
def test_outputs_that_cannot_be_looked_into_are_refused_or_train_but_never_lose_gradients(
    kind: str, reshard: bool, refused: str
) -> None:
    case = Case(
        kind, _HIDDEN[kind], BATTERY["nested"].batch, BATTERY["nested"].loss, (Hiding, Stashing)
    )

    def annotate(model: nn.Module, case: Case) -> None:
        fully_shard(model, policy=set(case.units), reshard_after_forward=reshard)

    def program(model: nn.Module, x: Tensor) -> None:
        model(x).square().mean().backward()

    with (
        pytest.raises(OutputError if kind == "sealed" else RuntimeError, match=refused)
        if refused
        else nullcontext()
    ):
        assert_same_gradients(case, annotate, program)


class Penalised(nn.Module):
    """Leaves a penalty on its parameters on itself, which backward comes to before the output if it
    is made after that.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.late = False
        self.penalty = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        early = self.linear.weight.square().sum()
        hidden = torch.tanh(self.linear(x))
        self.penalty = self.linear.weight.square().sum() if self.late else early
        return hidden


def _loss_with_penalties(model: nn.Module) -> Tensor:
    return model(torch.linspace(-1, 1, 12).view(2, 6)).sum() + sum(each.penalty for each in model)


@pytest.mark.parametrize("reshard", [None, True])
@spmd(ranks=[2, 4], everywhere=True)
def test_a_penalty_that_is_made_after_the_output_is_refused_and_one_before_it_trains(
    reshard: bool | None,
) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*[Penalised() for _ in range(4)])
    model = fully_shard(copy.deepcopy(plain), policy={Penalised}, reshard_after_forward=reshard)
    for late in (True, False):
        for each in (*plain, *model):
            each.late = late
        plain.zero_grad()
        model.zero_grad()
        _loss_with_penalties(plain).backward()
        if late:
            with pytest.raises(RuntimeError, match=_ABSENT):
                _loss_with_penalties(model).backward()
            continue
        _loss_with_penalties(model).backward()
        for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(full(parameter.grad), expected.grad)


class _Detaching(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y.detach() if dist.get_rank() == 1 else y


def _detached_on_one_rank() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(_Detaching(4, 4), nn.Linear(4, 4)).double().to(current_device())
    fully_shard(model, policy={nn.Linear, _Detaching})
    x = torch.ones(2, 4, device=current_device(), dtype=torch.float64)
    for _ in range(3):
        # what the first forward has kept on one rank is gathered again
        first, second = model(x), model(2 * x)
        (first.sum() + second.sum()).backward()
        model.zero_grad()


def test_outputs_that_one_rank_detaches_leave_the_ranks_alike(pool: Pool) -> None:
    pool.run(2, _detached_on_one_rank)
