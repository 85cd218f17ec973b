"""Parameters that were gathered are gathered again when the shards have changed since."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable import fully_shard, keep_unsharded, reshard, unshard
from composable.comm.backends import comms_wrapped_by
from tests.helpers.communicators import Log, Recording
from tests.helpers.logged import logged
from tests.helpers.world import Pool, current_device, need_devices, spmd

Parameters = Sequence[nn.Parameter]  # those at rest


def _by_an_optimizer(model: nn.Module, parameters: Parameters) -> None:
    torch.optim.SGD(parameters, lr=0.5).step()


def _by_an_optimizer_for_all_at_once(model: nn.Module, parameters: Parameters) -> None:
    torch.optim.AdamW(parameters, lr=0.5, foreach=True).step()


def _by_a_fused_optimizer(model: nn.Module, parameters: Parameters) -> None:
    """Which leaves the version counters of the parameters as they were, those of plain tensors
    too.
    """
    torch.optim.AdamW(parameters, lr=0.5, fused=True).step()


def _by_one_parameter_after_the_other(model: nn.Module, parameters: Parameters) -> None:
    torch.optim.SGD(parameters, lr=0.5, foreach=False).step()


def _in_place(model: nn.Module, parameters: Parameters) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(2.0)


def _in_their_local_part(model: nn.Module, parameters: Parameters) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter.to_local().mul_(2.0)  # type: ignore[attr-defined]


def _through_a_state_dict(model: nn.Module, parameters: Parameters) -> None:
    """As checkpoints are loaded in place."""
    with torch.no_grad():
        for value in model.state_dict().values():
            value.mul_(2.0)


def _by_loading(model: nn.Module, parameters: Parameters) -> None:
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})


CHANGES: Final = {
    change.__name__.strip("_"): change
    for change in (
        _by_an_optimizer,
        _by_an_optimizer_for_all_at_once,
        _by_a_fused_optimizer,
        _by_one_parameter_after_the_other,
        _in_place,
        _in_their_local_part,
        _through_a_state_dict,
        _by_loading,
    )
}


def _model(*, reshard_after_forward: bool = True) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).to(current_device())
    fully_shard(model, policy={nn.Linear}, reshard_after_forward=reshard_after_forward)
    return model, torch.ones(2, 3, device=current_device())


def _expected(model: nn.Module, x: Tensor) -> Tensor:
    """The output by the parameters as they are now, computed without the engine."""
    whole = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}  # type: ignore[operator]
    with torch.no_grad():
        hidden = torch.tanh(x @ whole["0.weight"].t() + whole["0.bias"])
        return hidden @ whole["2.weight"].t() + whole["2.bias"]


Change = Callable[[nn.Module, Parameters], None]


def _change_in_a_scope(change: Change) -> None:
    model, x = _model()
    parameters = list(model.parameters())
    with keep_unsharded(model):
        before = model(x)
        before.sum().backward()
        change(model, parameters)
        after = model(x).detach()
        torch.testing.assert_close(after, _expected(model, x))
    assert not torch.allclose(before, after), "the change must show"
    torch.testing.assert_close(model(x).detach(), after)


def _change_after_unsharding(change: Change) -> None:
    model, x = _model()
    parameters = list(model.parameters())
    model(x).sum().backward()
    unshard(model)
    change(model, parameters)
    torch.testing.assert_close(model(x).detach(), _expected(model, x))


@pytest.mark.parametrize("change", [name for name in CHANGES if name != "in_their_local_part"])
@pytest.mark.parametrize("test", [_change_in_a_scope, _change_after_unsharding])
def test_parameters_changed_while_they_are_unsharded_are_gathered_again(
    pool: Pool, test: Callable[[Change], None], change: str, device: str
) -> None:
    need_devices(device, 2)
    pool.run(2, test, CHANGES[change], device=device)


@spmd(ranks=2, everywhere=True)
def test_writes_to_local_tensors_in_a_scope_are_reported_and_followed_after_reshard() -> None:
    """They may be those of one rank, which must not gather alone."""
    model, x = _model()
    weight: Any = model.get_parameter("0.weight")
    with logged() as lines, keep_unsharded(model), torch.no_grad():
        before = model(x)
        if dist.get_rank() == 0:
            weight.to_local().mul_(2.0)
        torch.testing.assert_close(model(x), before)
        assert [line.split(" Forwards")[0] for line in lines] == (
            [
                "WARNING: unit '0': the shard of 'weight', 'bias' was written to through its local"
                " tensor while the unit is unsharded."
            ]
            if dist.get_rank() == 0
            else []
        )
        reshard(model)
        after = model(x)
    torch.testing.assert_close(after, _expected(model, x))
    assert not torch.allclose(before, after)


class Aliasing(nn.Module):
    """Returns its parameter itself, which so outlives the forward."""

    def __init__(self, unshards: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, 7.0).view(2, 3))
        self.unshards = unshards  # in the middle of a call

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.unshards:
            unshard(self)
        return x @ self.weight.t(), self.weight.view(-1)


def _change_what_outlives_forward(change: Change, unshards: str) -> None:
    model = Aliasing(unshards == "inside").to(current_device())
    fully_shard(model)
    weight = model.weight
    x = torch.ones(2, 3, device=current_device())
    for _ in range(3):
        out, alias = model(x)
        assert torch.equal(alias, weight.full_tensor().view(-1))  # type: ignore[attr-defined]
        out.sum().backward()
        assert torch.equal(weight.grad.full_tensor(), torch.full_like(alias, 2.0).view(2, 3))  # type: ignore[attr-defined, union-attr]
        model(x)  # no backward follows, so that the parameters stay
        change(model, [weight])
        model.zero_grad()
        if unshards == "between":
            unshard(model)


@pytest.mark.parametrize("unshards", ["never", "between", "inside"])
@pytest.mark.parametrize("change", ["in_place", "in_their_local_part", "by_an_optimizer"])
def test_parameters_that_outlive_a_forward_without_backward_are_gathered_again(
    pool: Pool, change: str, unshards: str, device: str
) -> None:
    need_devices(device, 2)
    pool.run(2, _change_what_outlives_forward, CHANGES[change], unshards, device=device)


class Weights(nn.Module):
    """Returns its weight, in some form, beside what it computes."""

    def __init__(self, form: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.form = nn.Linear(8, 8), form

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.up(x), self.form(self.up.weight)


class ReadsLater(nn.Module):
    """Reads the first block's weight after the others have run."""

    def __init__(self, form: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Weights(form) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x, weight = self.blocks[0](x)
        for block in self.blocks[1:]:
            x, _ = block(x)
        return x.sum() + weight.square().sum()


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda weight: weight,
    "a view": lambda weight: weight[:4],
    "detached": lambda weight: weight.detach(),
    "its data": lambda weight: weight.data,
}


def _read_after_others(form: str, grad: bool) -> None:
    torch.manual_seed(0)
    model = ReadsLater(FORMS[form]).to(current_device())
    x = torch.ones(2, 8, device=current_device())
    with torch.set_grad_enabled(grad):
        expected = model(x)
        fully_shard(model, policy={Weights})
        for _ in range(2):
            found = model(x)
            torch.testing.assert_close(found, expected)
            if grad:
                found.backward()


@pytest.mark.unsampled
@pytest.mark.parametrize("grad", [True, False], ids=["training", "no_grad"])
@pytest.mark.parametrize("form", FORMS)
def test_a_parameter_that_a_unit_returns_can_be_read_until_the_forward_ends(
    pool: Pool, form: str, grad: bool, device: str
) -> None:
    need_devices(device, 2)
    pool.run(2, _read_after_others, form, grad, device=device)


class TwoPaths(nn.Module):
    """The loss reaches `kept` by an attribute, or by a view of its weight that a later forward
    multiplies with.
    """

    def __init__(self, way: str) -> None:
        super().__init__()
        # Of one size: whatever is freed too early is overwritten by the other.
        self.plain, self.kept, self.way = nn.Linear(4, 4, bias=False), Kept(way), way

    def forward(self, x: Tensor, *, first: bool) -> Tensor:
        y: Tensor = self.plain(x)
        if first:
            self.kept(y)
        elif self.way == "view":
            y = y @ self.kept.result
        return y


class Kept(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.weight, self.way = nn.Parameter(torch.arange(16.0).view(4, 4) / 8), way

    def forward(self, x: Tensor) -> Tensor | None:
        self.result = self.weight.t() if self.way == "view" else x @ self.weight
        return self.result if self.way == "view" else None


@pytest.mark.parametrize("way", ["attribute", "view", "unit"])
@spmd(ranks=2)
def test_what_a_backward_still_needs_outlives_another_forward(way: str) -> None:
    torch.manual_seed(0)
    plain, model = TwoPaths(way), TwoPaths(way)
    model.load_state_dict(plain.state_dict())
    plain.to(current_device())
    model.to(current_device())
    fully_shard(model, policy={Kept, nn.Linear})
    x = torch.ones(2, 4, device=current_device())
    for _ in range(2):
        for each in (plain, model):
            each.zero_grad()
            y = each(x, first=True)
            if way == "unit":
                each.plain(x)
            z = each(2 * x, first=False)
            (
                y.sum() + z.square().sum() + (each.kept.result.sum() if way != "view" else 0.0)
            ).backward()
        for expected, actual in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(actual.grad.full_tensor(), expected.grad)  # type: ignore[union-attr]


def _trains_after_a_move(how: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(current_device())
    model = copy.deepcopy(plain)
    fully_shard(model, policy={nn.Linear})
    steps = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    with keep_unsharded(model) if how == "keep_unsharded" else nullcontext():
        if how != "keep_unsharded":
            unshard(model)
        # on one rank: what it does alone needs no message
        if dist.get_rank() == 0 and how == "_apply":  # as `model.to(...)` calls it
            model._apply(lambda tensor: tensor.clone())
        elif dist.get_rank() == 0:
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()
    for _ in range(3):
        losses = [each(torch.ones(2, 4, device=current_device())).sum() for each in (plain, model)]
        torch.testing.assert_close(losses[1], losses[0])
        for loss, optimizer in zip(losses, steps, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("how", ["unshard", "_apply", "keep_unsharded"])
def test_whole_parameters_whose_memory_was_moved_are_gathered_into_what_modules_read(
    pool: Pool, how: str, ranks: int
) -> None:
    pool.run(ranks, _trains_after_a_move, how)


@spmd(ranks=2)
def test_parameters_cast_while_they_are_kept_are_gathered_again() -> None:
    model, x = _model()
    with keep_unsharded(model), torch.no_grad():
        model(x)
        model.double()
        after = model(x.double())
        assert after.dtype is torch.float64
    torch.testing.assert_close(after, _expected(model, x.double()))


def _labels_after_a_step(whose: str) -> list[str]:
    log = Log()
    with comms_wrapped_by(partial(Recording, log=log)):
        model, x = _model()
    held = {"nobody's": nn.Identity(), "another's": nn.Linear(2, 2), "a unit's": model[2]}[whose]  # type: ignore[index]
    for parameter in held.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with keep_unsharded(model), torch.no_grad():
        model(x)
        assert log.labels()
        log.events.clear()
        if whose != "nobody's":  # which gathers again at once
            torch.optim.SGD(held.parameters(), lr=0.1).step()
        model(x)
    return log.labels()


@pytest.mark.parametrize("whose", ["nobody's", "another's", "a unit's"])
def test_a_step_makes_stale_what_its_optimizer_holds_and_nothing_else_is_gathered_again(
    pool: Pool, whose: str, device: str
) -> None:
    need_devices(device, 2)
    expected = ["all-gather of unit '2'"] if whose == "a unit's" else []
    assert pool.run(2, _labels_after_a_step, whose, device=device) == [expected, expected]


def _by_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(2.0)


def _by_data_of_their_local_part(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.to_local().data.mul_(2.0)  # type: ignore[operator]


UNSEEN: Final = {"data": _by_data, "data of the local part": _by_data_of_their_local_part}


@pytest.mark.parametrize("how", UNSEEN)
@spmd(ranks=2)
def test_after_writes_that_no_version_counter_records_resharding_lets_them_be_seen(
    how: str,
) -> None:
    model, x = _model()
    with keep_unsharded(model):
        model(x)
        UNSEEN[how](model)
        reshard(model)
        torch.testing.assert_close(model(x).detach(), _expected(model, x))
