"""By default only those units stay unsharded after forward that backward needs first: who ran last, and the units around it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable import describe, fully_shard, keep_unsharded, unshard
from composable.comm import comms_wrapped_by
from tests.helpers.communicators import Log, Recording
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


# --- when they are freed ------------------------------------------------------------------------------------------------


def _memory() -> tuple[list[list[str]], list[str], list[list[str]], list[str]]:
    model = layers_and_head()
    seen: list[list[str]] = []

    def look(*_: object) -> None:
        seen.append([row.unit for row in describe(model).rows if row.state != "SHARDED"])

    for layer in model[:LAYERS]:
        layer.before = look
        layer.linear.register_full_backward_pre_hook(look)
    fully_shard(model, policy={Layer})
    model(batch().requires_grad_()).sum().backward()
    seen.clear()  # who comes next is known from here on
    loss = model(batch().requires_grad_()).sum()
    left = unsharded_units(model)
    loss.backward()
    return seen[:LAYERS], left, seen[LAYERS:], unsharded_units(model)


def test_no_moment_needs_more_memory_than_two_units_and_the_root(pool: Pool) -> None:
    forward, left, backward, after = pool.run(2, _memory)[0]
    assert forward == [["", "0", "1"], ["", "1", "2"], ["", "2", "3"], ["", "3"]]
    assert left == ["", "3"]
    assert backward == [["", "2", "3"], ["", "1", "2"], ["", "0", "1"], ["", "0"]]
    assert after == []


def _another(model: nn.Module) -> Tensor:
    result: Tensor = model(batch(1)).sum()
    return result


def _of_a_part(model: nn.Module) -> Tensor:
    result: Tensor = model.get_submodule("1")(batch(1)).sum()
    return result


def _evaluation(model: nn.Module) -> None:
    with torch.no_grad():
        model(batch(1))


def _evaluation_in_a_scope(model: nn.Module) -> None:
    with keep_unsharded(model), torch.no_grad():
        model(batch(1))
        model(batch(2))


def _all_unsharded(model: nn.Module) -> None:
    unshard(model)


def _then(follow: Callable[[nn.Module], Tensor | None]) -> tuple[list[str], list[str], list[str]]:
    """What follows a forward gathers and leaves unsharded, and what the backward of both gathers."""
    model = layers_and_head()
    log = recorded(model)
    loss = model(batch()).sum()
    gathers(log)
    other = follow(model)
    gathered, left = gathers(log), unsharded_units(model)
    (loss if other is None else loss + other).backward()
    assert unsharded_units(model) == []
    return gathered, left, gathers(log)


FORWARD: Final = ["(root)", "0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("follow", "gathered", "left", "backward"),
    [
        (_another, FORWARD, ["", "3"], ["2", "1", "0", "3", "2", "1", "0"]),
        (_of_a_part, ["1", "2"], ["1"], ["(root)", "3", "2", "1", "0"]),
        (_evaluation, FORWARD, [], ["(root)", "3", "2", "1", "0"]),
        (_evaluation_in_a_scope, FORWARD, [], ["(root)", "3", "2", "1", "0"]),
        (_all_unsharded, FORWARD, ["", "0", "1", "2", "3"], []),
    ],
)
def test_a_forward_that_follows_frees_them_before_it_gathers(
    pool: Pool,
    follow: Callable[[nn.Module], Tensor | None],
    gathered: list[str],
    left: list[str],
    backward: list[str],
) -> None:
    assert pool.run(2, _then, follow) == [(gathered, left, backward)] * 2


def _hook_raises() -> tuple[list[str], list[str]]:
    """A hook of the user that is called after the root's forward."""
    model = layers_and_head()
    log = recorded(model)
    with model.register_forward_hook(lambda *_: 1 / 0), pytest.raises(ZeroDivisionError):
        model(batch())
    gathers(log)
    left = unsharded_units(model)
    model(batch()).sum().backward()
    return left, gathers(log)


def test_where_a_hook_raises_after_the_outermost_forward_the_next_one_frees_them(pool: Pool) -> None:
    assert pool.run(2, _hook_raises) == [(["", "3"], [*FORWARD, "2", "1", "0"])] * 2


def _frozen() -> tuple[list[str], list[str]]:
    model = layers_and_head().requires_grad_(False)
    fully_shard(model, policy={Layer})
    model(batch())
    first = unsharded_units(model)
    model(batch().requires_grad_()).sum().backward()  # asks for the gradients of inputs
    model(batch())
    return first, unsharded_units(model)


def test_nothing_stays_where_no_backward_can_come(pool: Pool) -> None:
    assert pool.run(2, _frozen) == [([], [])] * 2


class Routed(nn.Module):
    """What runs last is an expert over a few ranks, and on the first of these groups only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()
        self.expert = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return self.expert(x) if dist.get_rank() < 2 else x + 0 * x.sum()


def _experts() -> float:
    torch.manual_seed(0)
    model = Routed()
    plain = copy.deepcopy(model)
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    fully_shard(model.expert, mesh=groups[dist.get_rank() // 2])
    fully_shard(model, policy={Layer})
    for _ in range(2):
        model.zero_grad()
        model(batch()).sum().backward()
    plain(batch()).sum().backward()
    expected = plain.layer.linear.weight.grad
    actual = model.layer.linear.weight.grad
    assert expected is not None
    assert actual is not None
    dist.all_reduce(expected)
    return float((expected / dist.get_world_size() - actual.full_tensor()).abs().max())  # type: ignore[attr-defined]


def test_units_over_other_ranks_which_not_all_ranks_run_free_nothing(pool: Pool) -> None:
    for difference in pool.run(4, _experts):
        assert difference < 1e-6
