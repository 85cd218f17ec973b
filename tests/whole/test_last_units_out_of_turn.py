"""What stays unsharded for a backward is nobody else's: who comes out of turn gathers anew, as all other ranks do.

Each program runs with the units freed after forward, too: it must end the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recomputed

from composable import fully_shard, keep_unsharded, remove, unshard
from tests.helpers.compare import assert_mean_gradients, full
from tests.helpers.world import Pool
from tests.whole.test_last_units import WIDTH, Layer

Reshard = bool | None


def _layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Layer() for _ in range(3)], nn.Linear(WIDTH, 3))


def _pair(reshard: Reshard) -> tuple[nn.Sequential, nn.Sequential]:
    """A sharded model, and the same one as it was."""
    model = _layers()
    plain = copy.deepcopy(model)
    fully_shard(model, policy={Layer}, reshard_after_forward=reshard)
    return model, plain


def _batch(number: int = 0) -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * dist.get_rank() + number))


def _same_outputs(model: nn.Module, plain: nn.Module) -> None:
    torch.testing.assert_close(model(_batch(7)), plain(_batch(7)))


def _same_parameters(model: nn.Module, plain: nn.Module) -> None:
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(one), other)


def _same_gradients(model: nn.Module, plain: nn.Module) -> None:
    assert_mean_gradients(plain, model, rtol=1.3e-6, atol=1e-5)


def _double(*models: nn.Module, traceless: bool = False) -> None:
    for model in models:
        for parameter in model.parameters():
            (parameter.data if traceless else parameter.detach()).mul_(2)


# --- values that have changed since ------------------------------------------------------------------------------------


def _removed_after_a_write(reshard: Reshard) -> None:
    model, plain = _pair(reshard)
    model(_batch())
    _double(model, plain)
    remove(model, fully_shard)
    _same_parameters(model, plain)


def _removed_after_a_step(reshard: Reshard) -> None:
    model, _ = _pair(reshard)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(_batch()).sum().backward()
    model(_batch()).detach().sum().item()  # somebody looks at the loss once more
    optimizer.step()
    stepped = [full(parameter).detach().clone() for parameter in model.parameters()]
    remove(model, fully_shard)
    for one, other in zip(model.parameters(), stepped, strict=True):
        assert torch.equal(one, other)


def _kept_by_a_scope(reshard: Reshard) -> None:
    model, plain = _pair(reshard)
    model(_batch())
    _double(model, plain, traceless=True)
    with keep_unsharded(model), torch.no_grad():
        _same_outputs(model, plain)


def _computed_with(reshard: Reshard) -> None:
    """Written in a way that leaves no trace, after a forward to which no backward comes."""
    model, plain = _pair(reshard)
    model(_batch())
    _double(model, plain, traceless=True)
    _same_outputs(model, plain)


def _unsharded_by_the_user(reshard: Reshard) -> None:
    model, plain = _pair(reshard)
    model(_batch())
    _double(model, plain, traceless=True)
    unshard(model)
    _same_outputs(model, plain)


def _recomputed(reshard: Reshard) -> None:
    model, plain = _pair(reshard)
    for each in (model, plain):
        loss = recomputed(each, _batch(), use_reentrant=False).sum()
        with torch.no_grad():
            _double(each)
        loss.backward()
    _same_gradients(model, plain)


# --- ranks of which one alone comes by ----------------------------------------------------------------------------------


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
        model.zero_grad()
        plain.zero_grad()
        model(_batch(number)).sum().backward()
        plain(_batch(number)).sum().backward()
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
    gate(_batch())
    for _ in range(2):
        model.zero_grad()
        loss = model(_batch()).sum()
        if dist.get_rank() == 0:
            gate(_batch(1))
        loss.backward()
    plain(_batch()).sum().backward()
    _same_gradients(model, plain)


def _teacher_looked_at(reshard: Reshard) -> None:
    student, plain = _pair(reshard)
    teacher, _ = _pair(False)
    teacher.requires_grad_(False)
    for model in (student, teacher):
        model(_batch())
    unshard(teacher)
    loss = student(_batch()).sum()
    if dist.get_rank() == 0:
        teacher[0](_batch(1).requires_grad_())
    loss.backward()
    plain(_batch()).sum().backward()
    _same_gradients(student, plain)


def _teacher_looked_at_in_a_scope(reshard: Reshard) -> None:
    student, plain = _pair(reshard)
    teacher, _ = _pair(reshard)
    teacher.requires_grad_(False)
    student(_batch())
    teacher(_batch())
    with keep_unsharded(teacher):
        teacher(_batch())
        loss = student(_batch()).sum()
        if dist.get_rank() == 0:
            teacher(_batch(1))
        loss.backward()
    plain(_batch()).sum().backward()
    _same_gradients(student, plain)


def _with_grad_on_one_rank(reshard: Reshard) -> None:
    model, plain = _pair(reshard)
    with torch.set_grad_enabled(dist.get_rank() == 0):
        model(_batch())
    unshard(model)
    _same_outputs(model, plain)


_PROGRAMS: Final[dict[str, Callable[[Reshard], None]]] = {
    "removed after a write": _removed_after_a_write,
    "removed after a step": _removed_after_a_step,
    "kept by a scope": _kept_by_a_scope,
    "computed with after a write": _computed_with,
    "unsharded by the user": _unsharded_by_the_user,
    "recomputed after a write": _recomputed,
    "a unit that stays, looked at by one rank": _kept_one_looked_at,
    "a unit without parameters, looked at by one rank": _one_without_parameters_looked_at,
    "a unit that each rank has whole, looked at by one rank": _one_that_each_rank_has_whole_looked_at,
    "another model that is unsharded, looked at by one rank": _teacher_looked_at,
    "another model in a scope, looked at by one rank": _teacher_looked_at_in_a_scope,
    "unsharded after a forward with grad on one rank": _with_grad_on_one_rank,
}


def _run(name: str, reshard: Reshard) -> None:
    _PROGRAMS[name](reshard)


_ALL: Final = [(name, reshard) for name in _PROGRAMS for reshard in (True, None)]
_REMOVED: Final = [(name, False) for name in ("removed after a write", "removed after a step")]


@pytest.mark.parametrize(("name", "reshard"), _ALL + _REMOVED)
def test_whoever_comes_out_of_turn_computes_as_in_one_process_and_keeps_no_rank_waiting(
    pool: Pool, name: str, reshard: Reshard
) -> None:
    pool.run(2, _run, name, reshard)


def _planned_anew_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer())
    plain = copy.deepcopy(model)
    for each, written in ((model, True), (plain, False)):
        fully_shard(each[0], mp_policy="bf16")
        if written:
            each[0](_batch())
        fully_shard(each, mp_policy="bf16")
    _double(model, plain, traceless=True)
    assert torch.equal(model(_batch()), plain(_batch()))


def test_what_is_left_of_a_root_is_freed_when_units_are_planned_anew(pool: Pool) -> None:
    pool.run(1, _planned_anew_alone)
