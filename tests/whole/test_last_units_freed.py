"""When those units are freed that stay unsharded for a backward, and by whom."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable import describe, fully_shard, keep_unsharded, unshard
from tests.helpers.world import Pool
from tests.whole.test_last_units import LAYERS, WIDTH, Layer, batch, gathers, layers_and_head, recorded, unsharded_units


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


def _write_between() -> Tensor:
    """Written in a way that leaves no trace, after a forward to which no backward comes."""
    model = layers_and_head()
    plain = copy.deepcopy(model)
    fully_shard(model, policy={Layer})
    model(batch())
    for parameter in model.parameters():
        parameter.data.mul_(2)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(2)
    return (model(batch()) - plain(batch())).abs().max()


def test_the_next_forward_computes_with_what_was_written_to_shards_without_a_trace(pool: Pool) -> None:
    for difference in pool.run(2, _write_between):
        assert difference < 1e-6


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
