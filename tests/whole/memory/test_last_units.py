"""By default only those units stay unsharded after forward that backward needs first: who ran last,
and the units around it.

What stays is nobody else's: who comes out of turn gathers anew, as all other ranks do.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recomputed

from composable import checkpoint, describe, fully_shard, keep_unsharded, remove, unshard
from composable.comm.backends import comms_wrapped_by
from tests.helpers.communicators import Log, Recording
from tests.helpers.compare import assert_mean_gradients, full
from tests.helpers.world import spmd

WIDTH: Final = 7  # no number of ranks divides it
LAYERS: Final = 4
FORWARD: Final = ["(root)", "0", "1", "2", "3"]


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
    return torch.randn(
        2, WIDTH, generator=torch.Generator().manual_seed(10 * dist.get_rank() + number)
    )


def unsharded_units(model: nn.Module) -> list[str]:
    return [row.unit for row in describe(model).rows if row.state == "UNSHARDED"]


def recorded(model: nn.Module, **options: Any) -> Log:
    log = Log()
    with comms_wrapped_by(partial(Recording, log=log)):
        fully_shard(model, policy={Layer, Pair}, **options)
    return log


def gathers(log: Log) -> list[str]:
    """The units that were gathered since the last look, in order."""
    found = [
        label.removeprefix("all-gather of unit ").strip("'")
        for label in log.labels()
        if "gather" in label
    ]
    log.events.clear()
    return found


# --- what is gathered ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "after", "checkpoints", "backward"),
    [
        (2, None, "", ["2", "1", "0"]),
        (4, None, "", ["2", "1", "0"]),
        (2, True, "", ["(root)", "3", "2", "1", "0"]),
        (2, True, "first", ["(root)", "3", "2", "1", "0"]),
        (2, True, "last", ["(root)", "3", "2", "1", "0"]),
        (2, False, "", []),
    ],
)
@spmd(everywhere=True)
def test_each_unit_is_gathered_once_in_forward_and_once_in_backward_if_it_did_not_stay(
    after: bool | None, checkpoints: str, backward: list[str]
) -> None:
    model = layers_and_head()
    if checkpoints == "first":
        checkpoint(model, policy={Layer})
    log = recorded(model, reshard_after_forward=after)
    if checkpoints == "last":
        checkpoint(model, policy={Layer})
    for number in range(2):
        loss = model(batch(number)).sum()
        assert gathers(log) == FORWARD
        loss.backward()
        assert gathers(log) == backward
        assert unsharded_units(model) == []


@spmd(ranks=2, everywhere=True)
def test_with_units_in_units_all_that_are_around_the_last_one_stay() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Pair(), Pair(), nn.Linear(WIDTH, 3))
    log = recorded(model)
    loss = model(batch()).sum()
    gathers(log)
    assert unsharded_units(model) == ["", "1", "1.layers.1"]
    loss.backward()
    assert gathers(log) == ["1.layers.0", "0", "0.layers.1", "0.layers.0"]
    assert unsharded_units(model) == []


@spmd(ranks=2, everywhere=True)
def test_who_ran_last_is_known_in_the_forward_that_runs_whatever_ran_before() -> None:
    model = layers_and_head()
    log = recorded(model)
    for order, last, backward in (
        ([0, 1, 2], "2", ["1", "0"]),
        ([0, 2, 1], "1", ["2", "0"]),
        ([0, 1], "1", ["0"]),
        ([1, 1], "1", []),
        ([1, 0, 1], "1", ["0", "1"]),
    ):

        def forward(x: Tensor, order: list[int] = order) -> Tensor:
            for each in order:
                x = model[each](x)
            return model[LAYERS](x)  # type: ignore[no-any-return]

        model.forward = forward  # type: ignore[method-assign]
        loss = model(batch()).sum()
        gathers(log)
        assert unsharded_units(model) == ["", last]
        loss.backward()
        assert gathers(log) == backward


# --- when they are freed ------------------------------------------------------------------------


@spmd(ranks=2, everywhere=True)
def test_no_moment_needs_more_memory_than_two_units_and_the_root() -> None:
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
    assert unsharded_units(model) == ["", "3"]
    loss.backward()
    assert seen[:LAYERS] == [["", "0", "1"], ["", "1", "2"], ["", "2", "3"], ["", "3"]]
    assert seen[LAYERS:] == [["", "2", "3"], ["", "1", "2"], ["", "0", "1"], ["", "0"]]


@torch.no_grad()
def _evaluation(model: nn.Module) -> None:
    model(batch(1))


def _evaluation_in_a_scope(model: nn.Module) -> None:
    with keep_unsharded(model), torch.no_grad():
        model(batch(1))
        model(batch(2))


# What follows a forward, what it gathers and leaves unsharded, and what the backward of both
# gathers.
_FOLLOWING: Final[dict[str, tuple[Callable[[Any], object], list[str], list[str], list[str]]]] = {
    "another": (
        lambda model: model(batch(1)).sum(),
        FORWARD,
        ["", "3"],
        ["2", "1", "0", "3", "2", "1", "0"],
    ),
    "one of a part": (
        lambda model: model[1](batch(1)).sum(),
        ["1", "2"],
        ["1"],
        ["(root)", "3", "2", "1", "0"],
    ),
    "an evaluation": (_evaluation, FORWARD, [], ["(root)", "3", "2", "1", "0"]),
    "an evaluation in a scope": (
        _evaluation_in_a_scope,
        FORWARD,
        [],
        ["(root)", "3", "2", "1", "0"],
    ),
    "none, but all are unsharded": (unshard, FORWARD, ["", "0", "1", "2", "3"], []),
}


@pytest.mark.parametrize("following", _FOLLOWING)
@spmd(ranks=2, everywhere=True)
def test_a_forward_that_follows_frees_them_before_it_gathers(following: str) -> None:
    follow, gathered, left, backward = _FOLLOWING[following]
    model = layers_and_head()
    log = recorded(model)
    loss = model(batch()).sum()
    gathers(log)
    other = follow(model)
    assert (gathers(log), unsharded_units(model)) == (gathered, left)
    (loss + other if isinstance(other, Tensor) else loss).backward()
    assert gathers(log) == backward
    assert unsharded_units(model) == []


@spmd(ranks=2, everywhere=True)
def test_where_a_hook_raises_after_the_outermost_forward_the_next_one_frees_them() -> None:
    model = layers_and_head()
    log = recorded(model)
    with model.register_forward_hook(lambda *_: 1 / 0), pytest.raises(ZeroDivisionError):
        model(batch())
    gathers(log)
    assert unsharded_units(model) == ["", "3"]
    model(batch()).sum().backward()
    assert gathers(log) == [*FORWARD, "2", "1", "0"]


@spmd(ranks=2, everywhere=True)
def test_nothing_stays_where_no_backward_can_come() -> None:
    model = layers_and_head().requires_grad_(False)
    fully_shard(model, policy={Layer})
    model(batch())
    assert unsharded_units(model) == []
    model(batch().requires_grad_()).sum().backward()  # asks for the gradients of inputs
    model(batch())
    assert unsharded_units(model) == []


class Routed(nn.Module):
    """What runs last is an expert over a few ranks, and on the first of these groups only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()
        self.expert = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return self.expert(x) if dist.get_rank() < 2 else x + 0 * x.sum()


@spmd(ranks=4, everywhere=True)
def test_units_over_other_ranks_which_not_all_ranks_run_free_nothing() -> None:
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
    assert_mean_gradients(plain.layer, model.layer, rtol=0.0, atol=1e-6)


# --- who comes out of turn ----------------------------------------------------------------------

Reshard = bool | None


def _pair(reshard: Reshard) -> tuple[nn.Sequential, nn.Sequential]:
    """A sharded model, and the same one as it was."""
    model = layers_and_head()
    plain = copy.deepcopy(model)
    fully_shard(model, policy={Layer}, reshard_after_forward=reshard)
    return model, plain


def _same_outputs(model: nn.Module, plain: nn.Module) -> None:
    torch.testing.assert_close(model(batch(7)), plain(batch(7)))


def _same_gradients(model: nn.Module, plain: nn.Module) -> None:
    assert_mean_gradients(plain, model, rtol=1.3e-6, atol=1e-5)


def _double(*models: nn.Module, traceless: bool = False) -> None:
    for model in models:
        for parameter in model.parameters():
            (parameter.data if traceless else parameter.detach()).mul_(2)


def _removed_after_a_write(reshard: Reshard) -> None:
    model, plain = _pair(reshard)
    model(batch())
    _double(model, plain)
    remove(model, fully_shard)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(one), other)


def _written_to(reshard: Reshard) -> tuple[nn.Sequential, nn.Sequential]:
    """In a way that leaves no trace, after a forward to which no backward comes."""
    model, plain = _pair(reshard)
    model(batch())
    _double(model, plain, traceless=True)
    return model, plain


def _kept_by_a_scope(reshard: Reshard) -> None:
    model, plain = _written_to(reshard)
    with keep_unsharded(model), torch.no_grad():
        _same_outputs(model, plain)


def _computed_with(reshard: Reshard) -> None:
    _same_outputs(*_written_to(reshard))


def _unsharded_by_the_user(reshard: Reshard) -> None:
    model, plain = _written_to(reshard)
    unshard(model)
    _same_outputs(model, plain)


def _recomputed(reshard: Reshard) -> None:
    model, plain = _pair(reshard)
    for each in (model, plain):
        loss = recomputed(each, batch(), use_reentrant=False).sum()
        with torch.no_grad():
            _double(each)
        loss.backward()
    _same_gradients(model, plain)


# Ranks of which one alone comes by.


class _Looking(nn.Module):
    """Looks once more at what `eye` says, on some ranks."""

    def __init__(self, eye: nn.Module) -> None:
        super().__init__()
        self.eye, self.trunk, self.looks = eye, Layer(), False

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.trunk(self.eye(x))
        if self.looks:
            with torch.no_grad():
                self.eye(y)
        return y


class _WithoutParameters(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def _looked_at(reshard: Reshard, eye: nn.Module, **options: Any) -> None:
    torch.manual_seed(0)
    model = _Looking(eye)
    plain = copy.deepcopy(model)
    fully_shard(model.eye, **options)
    fully_shard(model, policy={Layer}, reshard_after_forward=reshard)
    for number in range(3):
        model.looks = number > 0 and dist.get_rank() == 0
        for each in (model, plain):
            each.zero_grad()
            each(batch(number)).sum().backward()
    _same_gradients(model, plain)


def _kept_one_looked_at(reshard: Reshard) -> None:
    _looked_at(reshard, Layer(), reshard_after_forward=False)


def _one_without_parameters_looked_at(reshard: Reshard) -> None:
    _looked_at(reshard, _WithoutParameters(), reshard_after_forward=reshard)


class _Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def _one_that_each_rank_has_whole_looked_at(reshard: Reshard) -> None:
    model, plain = _pair(reshard)
    gate = fully_shard(_Gate())
    gate(batch())
    for _ in range(2):
        model.zero_grad()
        loss = model(batch()).sum()
        if dist.get_rank() == 0:
            gate(batch(1))
        loss.backward()
    plain(batch()).sum().backward()
    _same_gradients(model, plain)


def _teacher_looked_at(reshard: Reshard, *, in_a_scope: bool = False) -> None:
    student, plain = _pair(reshard)
    teacher, _ = _pair(reshard if in_a_scope else False)
    teacher.requires_grad_(False)
    for model in (student, teacher):
        model(batch())
    with keep_unsharded(teacher) if in_a_scope else nullcontext():
        if in_a_scope:
            teacher(batch())
        else:
            unshard(teacher)
        loss = student(batch()).sum()
        if dist.get_rank() == 0:
            (teacher if in_a_scope else teacher[0])(batch(1).requires_grad_())
        loss.backward()
    plain(batch()).sum().backward()
    _same_gradients(student, plain)


def _with_grad_on_one_rank(reshard: Reshard) -> None:
    model, plain = _pair(reshard)
    with torch.set_grad_enabled(dist.get_rank() == 0):
        model(batch())
    unshard(model)
    _same_outputs(model, plain)


_PROGRAMS: Final[dict[str, Callable[[Reshard], None]]] = {
    "removed after a write": _removed_after_a_write,
    "kept by a scope after a write": _kept_by_a_scope,
    "computed with after a write": _computed_with,
    "unsharded by the user after a write": _unsharded_by_the_user,
    "recomputed after a write": _recomputed,
    "a unit that stays, looked at by one rank": _kept_one_looked_at,
    "a unit without parameters, looked at by one rank": _one_without_parameters_looked_at,
    "a unit that each rank has whole, looked at by one rank": (
        _one_that_each_rank_has_whole_looked_at
    ),
    "another model that is unsharded, looked at by one rank": _teacher_looked_at,
    "another model in a scope, looked at by one rank": partial(_teacher_looked_at, in_a_scope=True),
    "unsharded after a forward with grad on one rank": _with_grad_on_one_rank,
}
_ALL: Final = [
    *((name, reshard) for name in _PROGRAMS for reshard in (True, None)),
    ("removed after a write", False),
]


@pytest.mark.parametrize(("name", "reshard"), _ALL)
@spmd(ranks=2, everywhere=True)
def test_whoever_comes_out_of_turn_computes_as_in_one_process_and_keeps_no_rank_waiting(
    name: str, reshard: Reshard
) -> None:
    _PROGRAMS[name](reshard)


@spmd(ranks=1, everywhere=True)
def test_what_is_left_of_a_root_is_freed_when_units_are_planned_anew() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer())
    plain = copy.deepcopy(model)
    for each, written in ((model, True), (plain, False)):
        fully_shard(each[0], mp_policy="bf16")
        if written:
            each[0](batch())
        fully_shard(each, mp_policy="bf16")
    _double(model, plain, traceless=True)
    assert torch.equal(model(batch()), plain(batch()))
