"""By default only those units stay unsharded after forward that backward needs first: who ran last, and the units around it.

Note: batches and gradients of ranks differ, so numbers tell when one computes with what another has not gathered.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable import checkpoint, describe, fully_shard
from composable.comm import comms_wrapped_by
from tests.helpers.communicators import Log, Recording
from tests.helpers.compare import averaged_gradients, full_gradients
from tests.helpers.world import Pool

WIDTH: Final = 7  # no number of ranks divides it
LAYERS: Final = 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.before: Callable[[], object] = nothing

    def forward(self, x: Tensor) -> Tensor:
        self.before()
        result: Tensor = self.linear(x).tanh()
        return result


def nothing() -> None:
    return None


class Pair(nn.Module):
    """Two units, and a layer of its own before them."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.Sequential(Layer(), Layer())

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(self.own(x))
        return result


def layers_and_head() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Layer() for _ in range(LAYERS)], nn.Linear(WIDTH, 3))


def batch(number: int = 0) -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * dist.get_rank() + number))


def unsharded_units(model: nn.Module) -> list[str]:
    return [row.unit for row in describe(model).rows if row.state == "UNSHARDED"]


def recorded(model: nn.Module, **options: Any) -> Log:
    log = Log()
    with comms_wrapped_by(partial(Recording, log=log)):
        fully_shard(model, policy={Layer, Pair}, **options)
    return log


def gathers(log: Log) -> list[str]:
    """The units that were gathered since the last look, in order."""
    found = [label.removeprefix("all-gather of unit ").strip("'") for label in log.labels() if "gather" in label]
    log.events.clear()
    return found


# --- what is gathered -------------------------------------------------------------------------------------------------


def _steps(options: dict[str, Any]) -> list[list[str]]:
    model = layers_and_head()
    log = recorded(model, **options)
    found = []
    for number in range(2):
        loss = model(batch(number)).sum()
        found.append(gathers(log))
        loss.backward()
        found.append(gathers(log))
        assert unsharded_units(model) == []
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_root_and_the_unit_that_ran_last_are_gathered_once_a_step_from_the_first_one_on(pool: Pool, ranks: int) -> None:
    forward = ["(root)", "0", "1", "2", "3"]
    assert pool.run(ranks, _steps, {}) == [[forward, ["2", "1", "0"], forward, ["2", "1", "0"]]] * ranks


def test_with_true_they_are_gathered_again(pool: Pool) -> None:
    forward = ["(root)", "0", "1", "2", "3"]
    options = {"reshard_after_forward": True}
    assert pool.run(2, _steps, options) == [[forward, ["(root)", "3", "2", "1", "0"]] * 2] * 2


def _nested() -> tuple[list[str], list[str], list[str]]:
    torch.manual_seed(0)
    model = nn.Sequential(Pair(), Pair(), nn.Linear(WIDTH, 3))
    log = recorded(model)
    loss = model(batch()).sum()
    gathers(log)
    left = unsharded_units(model)
    loss.backward()
    return left, gathers(log), unsharded_units(model)


def test_with_units_in_units_all_that_are_around_the_last_one_stay(pool: Pool) -> None:
    left, gathered, after = pool.run(2, _nested)[0]
    assert left == ["", "1", "1.layers.1"]
    assert gathered == ["1.layers.0", "0", "0.layers.1", "0.layers.0"]
    assert after == []


def _order_changes() -> list[tuple[list[str], list[str]]]:
    """Which unit runs last is another one in every forward."""
    model = layers_and_head()
    log = recorded(model)
    found = []
    for order in ([0, 1, 2], [0, 2, 1], [0, 1], [1, 1], [1, 0, 1]):

        def forward(x: Tensor, order: list[int] = order) -> Tensor:
            for each in order:
                x = model[each](x)
            return model[LAYERS](x)  # type: ignore[no-any-return]

        model.forward = forward  # type: ignore[method-assign]
        loss = model(batch()).sum()
        gathers(log)
        left = unsharded_units(model)
        loss.backward()
        found.append((left, gathers(log)))
    return found


def test_who_ran_last_is_known_in_the_forward_that_runs_whatever_ran_before(pool: Pool) -> None:
    assert pool.run(2, _order_changes)[0] == [
        (["", "2"], ["1", "0"]),
        (["", "1"], ["2", "0"]),
        (["", "1"], ["0"]),
        (["", "1"], []),
        (["", "1"], ["0", "1"]),
    ]


# --- numbers ----------------------------------------------------------------------------------------------------------


def _train(program: str) -> float:
    """The largest difference of a gradient to those of one process."""
    model = layers_and_head()
    plain = copy.deepcopy(model)
    if program == "checkpointed":
        checkpoint(model, policy={Layer})
    fully_shard(model, policy={Layer})
    worst = 0.0
    for step in range(3):
        for each in (plain, model):
            each.zero_grad()
            if program == "raises" and each is model:
                for layer in (model[2], model[LAYERS - 1]):
                    layer.before = lambda: 1 / 0
                    with pytest.raises(ZeroDivisionError):
                        each(batch(step))
                    assert unsharded_units(model) == []
                    layer.before = nothing
                each(batch(step))  # which nobody uses
            loss = each(batch(step)).square().sum()
            if program == "accumulates":
                loss = loss + each(batch(step + 5)).square().sum()
            loss.backward()
        for name, gradient in averaged_gradients(plain).items():
            actual = full_gradients(model)[name]
            assert actual is not None
            worst = max(worst, float((actual - gradient).abs().max()))
    return worst


@pytest.mark.parametrize("program", ["plainly", "accumulates", "checkpointed", "raises"])
def test_numbers_are_those_of_one_process(pool: Pool, program: str) -> None:
    for difference in pool.run(4, _train, program):
        assert difference < 1e-5
