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

from composable import checkpoint, describe, fully_shard, keep_unsharded, unshard
from composable.device.collectives import communicators_wrapped_by
from tests.helpers.communicators import Log, Recording
from tests.helpers.compare import averaged_gradients, full_gradients
from tests.helpers.world import Pool

WIDTH: Final = 7  # no number of ranks divides it
LAYERS: Final = 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.before: Callable[[], object] = _nothing

    def forward(self, x: Tensor) -> Tensor:
        self.before()
        result: Tensor = self.linear(x).tanh()
        return result


def _nothing() -> None:
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


def _layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Layer() for _ in range(LAYERS)], nn.Linear(WIDTH, 3))


def _batch(number: int = 0) -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * dist.get_rank() + number))


def _unsharded(model: nn.Module) -> list[str]:
    return [row.unit for row in describe(model).rows if row.state == "UNSHARDED"]


def _recorded(model: nn.Module, **options: Any) -> Log:
    log = Log()
    with communicators_wrapped_by(partial(Recording, log=log)):
        fully_shard(model, policy={Layer, Pair}, **options)
    return log


def _gathers(log: Log) -> list[str]:
    """The units that were gathered since the last look, in order."""
    found = [label.removeprefix("all-gather of unit ").strip("'") for label in log.labels() if "gather" in label]
    log.events.clear()
    return found


# --- what is gathered -------------------------------------------------------------------------------------------------


def _steps(options: dict[str, Any]) -> list[list[str]]:
    model = _layers()
    log = _recorded(model, **options)
    found = []
    for number in range(2):
        loss = model(_batch(number)).sum()
        found.append(_gathers(log))
        loss.backward()
        found.append(_gathers(log))
        assert _unsharded(model) == []
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
    log = _recorded(model)
    loss = model(_batch()).sum()
    _gathers(log)
    left = _unsharded(model)
    loss.backward()
    return left, _gathers(log), _unsharded(model)


def test_with_units_in_units_all_that_are_around_the_last_one_stay(pool: Pool) -> None:
    left, gathered, after = pool.run(2, _nested)[0]
    assert left == ["", "1", "1.layers.1"]
    assert gathered == ["1.layers.0", "0", "0.layers.1", "0.layers.0"]
    assert after == []


def _order_changes() -> list[tuple[list[str], list[str]]]:
    """Which unit runs last is another one in every forward."""
    model = _layers()
    log = _recorded(model)
    found = []
    for order in ([0, 1, 2], [0, 2, 1], [0, 1], [1, 1], [1, 0, 1]):

        def forward(x: Tensor, order: list[int] = order) -> Tensor:
            for each in order:
                x = model[each](x)
            return model[LAYERS](x)  # type: ignore[no-any-return]

        model.forward = forward  # type: ignore[method-assign]
        loss = model(_batch()).sum()
        _gathers(log)
        left = _unsharded(model)
        loss.backward()
        found.append((left, _gathers(log)))
    return found


def test_who_ran_last_is_known_in_the_forward_that_runs_whatever_ran_before(pool: Pool) -> None:
    assert pool.run(2, _order_changes)[0] == [
        (["", "2"], ["1", "0"]),
        (["", "1"], ["2", "0"]),
        (["", "1"], ["0"]),
        (["", "1"], []),
        (["", "1"], ["0", "1"]),
    ]


# --- when they are freed ----------------------------------------------------------------------------------------------


def _memory() -> tuple[list[list[str]], list[str], list[list[str]], list[str]]:
    model = _layers()
    seen: list[list[str]] = []

    def look(*_: object) -> None:
        seen.append([row.unit for row in describe(model).rows if row.state != "SHARDED"])

    for layer in model[:LAYERS]:
        layer.before = look
        layer.linear.register_full_backward_pre_hook(look)
    fully_shard(model, policy={Layer})
    model(_batch().requires_grad_()).sum().backward()
    seen.clear()  # who comes next is known from here on
    loss = model(_batch().requires_grad_()).sum()
    left = _unsharded(model)
    loss.backward()
    return seen[:LAYERS], left, seen[LAYERS:], _unsharded(model)


def test_no_moment_needs_more_memory_than_two_units_and_the_root(pool: Pool) -> None:
    forward, left, backward, after = pool.run(2, _memory)[0]
    assert forward == [["", "0", "1"], ["", "1", "2"], ["", "2", "3"], ["", "3"]]
    assert left == ["", "3"]
    assert backward == [["", "2", "3"], ["", "1", "2"], ["", "0", "1"], ["", "0"]]
    assert after == []


def _another(model: nn.Module) -> Tensor:
    result: Tensor = model(_batch(1)).sum()
    return result


def _of_a_part(model: nn.Module) -> Tensor:
    result: Tensor = model.get_submodule("1")(_batch(1)).sum()
    return result


def _evaluation(model: nn.Module) -> None:
    with torch.no_grad():
        model(_batch(1))


def _evaluation_in_a_scope(model: nn.Module) -> None:
    with keep_unsharded(model), torch.no_grad():
        model(_batch(1))
        model(_batch(2))


def _all_unsharded(model: nn.Module) -> None:
    unshard(model)


def _then(follow: Callable[[nn.Module], Tensor | None]) -> tuple[list[str], list[str], list[str]]:
    """What follows a forward gathers and leaves unsharded, and what the backward of both gathers."""
    model = _layers()
    log = _recorded(model)
    loss = model(_batch()).sum()
    _gathers(log)
    other = follow(model)
    gathered, left = _gathers(log), _unsharded(model)
    (loss if other is None else loss + other).backward()
    assert _unsharded(model) == []
    return gathered, left, _gathers(log)


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
    model = _layers()
    log = _recorded(model)
    with model.register_forward_hook(lambda *_: 1 / 0), pytest.raises(ZeroDivisionError):
        model(_batch())
    _gathers(log)
    left = _unsharded(model)
    model(_batch()).sum().backward()
    return left, _gathers(log)


def test_where_a_hook_raises_after_the_outermost_forward_the_next_one_frees_them(pool: Pool) -> None:
    assert pool.run(2, _hook_raises) == [(["", "3"], [*FORWARD, "2", "1", "0"])] * 2


def _write_between() -> Tensor:
    """Written in a way that leaves no trace, after a forward to which no backward comes."""
    model = _layers()
    plain = copy.deepcopy(model)
    fully_shard(model, policy={Layer})
    model(_batch())
    for parameter in model.parameters():
        parameter.data.mul_(2)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(2)
    return (model(_batch()) - plain(_batch())).abs().max()


def test_the_next_forward_computes_with_what_was_written_to_shards_without_a_trace(pool: Pool) -> None:
    for difference in pool.run(2, _write_between):
        assert difference < 1e-6


def _frozen() -> tuple[list[str], list[str]]:
    model = _layers().requires_grad_(False)
    fully_shard(model, policy={Layer})
    model(_batch())
    first = _unsharded(model)
    model(_batch().requires_grad_()).sum().backward()  # asks for the gradients of inputs
    model(_batch())
    return first, _unsharded(model)


def test_nothing_stays_where_no_backward_can_come(pool: Pool) -> None:
    assert pool.run(2, _frozen) == [([], [])] * 2


def _roots() -> tuple[list[list[str]], list[str], list[bool]]:
    """Layers that were annotated one by one, without the module around them, and a second model over the same ranks."""
    model, other = _layers(), _layers()
    plain = copy.deepcopy(model)
    log = Log()
    with communicators_wrapped_by(partial(Recording, log=log)):
        for layer in model:
            fully_shard(layer)
        fully_shard(other, policy={Layer})
    seen = []
    losses = [plain(_batch()).sum(), model(_batch()).sum()]
    seen.append([row.unit for row in describe(model).rows if row.state == "UNSHARDED"])
    second = other(_batch()).sum()
    seen.append([row.unit for row in describe(model).rows if row.state == "UNSHARDED"])
    log.events.clear()
    for loss in (*losses, second):
        loss.backward()
    expected, actual = averaged_gradients(plain), full_gradients(model)
    equal = [torch.allclose(expected[name], actual[name]) for name in expected]  # type: ignore[arg-type]
    return seen, _gathers(log), equal


def test_of_several_models_over_the_same_ranks_only_the_one_that_ran_last_keeps_some(pool: Pool) -> None:
    seen, gathered, equal = pool.run(2, _roots)[0]
    assert seen == [["4"], []]
    assert gathered == ["(root)"] * (LAYERS + 1) + ["2", "1", "0"]
    assert all(equal)


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
        model(_batch()).sum().backward()
    plain(_batch()).sum().backward()
    expected = plain.layer.linear.weight.grad
    actual = model.layer.linear.weight.grad
    assert expected is not None
    assert actual is not None
    dist.all_reduce(expected)
    return float((expected / dist.get_world_size() - actual.full_tensor()).abs().max())  # type: ignore[attr-defined]


def test_units_over_other_ranks_which_not_all_ranks_run_free_nothing(pool: Pool) -> None:
    for difference in pool.run(4, _experts):
        assert difference < 1e-6


# --- numbers ----------------------------------------------------------------------------------------------------------


def _train(program: str) -> float:
    """The largest difference of a gradient to those of one process."""
    model = _layers()
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
                        each(_batch(step))
                    assert _unsharded(model) == []
                    layer.before = _nothing
                each(_batch(step))  # which nobody uses
            loss = each(_batch(step)).square().sum()
            if program == "accumulates":
                loss = loss + each(_batch(step + 5)).square().sum()
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
