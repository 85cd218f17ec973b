"""What does not go together with steps in backward is refused by name; and what a backward that raised has stepped."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.utils.checkpoint import checkpoint as checkpoint_of_torch

from composable import (
    OptimizerInBackward,
    apply_optimizer_in_backward,
    clip_grad_norm_,
    fully_shard,
    no_sync,
    remove,
    replicate,
    weighted_gradients,
)
from composable.errors import AnnotationError, ClippingError, CommunicationError, OptimizerError, PhaseError
from tests.helpers.compare import full
from tests.helpers.world import current_device, spmd


def _sharded(model: nn.Module) -> None:
    fully_shard(model, policy={nn.Linear})


def _replicated(model: nn.Module) -> None:
    replicate(model, bucket_cap_mb=0.0001)


VERBS: Final = (_sharded, _replicated)


def _model(annotate: Callable[[nn.Module], None] | None = _sharded) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).to(current_device())
    if annotate is not None:
        annotate(model)
    return model


def _x() -> Tensor:
    return torch.ones(2, 4, device=current_device())


def _early(model: nn.Module, kind: Any = torch.optim.SGD, **options: Any) -> OptimizerInBackward:
    return apply_optimizer_in_backward(kind, model.named_parameters(), {"lr": 0.1} | options)


def _values(model: nn.Module) -> list[Tensor]:
    return [full(parameter) for parameter in model.parameters()]


def _same(one: list[Tensor], other: list[Tensor]) -> list[bool]:
    return [torch.equal(a, b) for a, b in zip(one, other, strict=True)]


@spmd(ranks=[1, 2])
def test_another_optimizer_clipping_and_removal_are_refused_by_name() -> None:
    for annotate in VERBS:
        model = _model(annotate)
        before = _values(model)
        optimizer = _early(model)
        usual = torch.optim.SGD(model.parameters(), lr=0.1)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        with pytest.raises(OptimizerError, match=r"SGD.step: parameter '.*weight' of unit '.*' is stepped in backward already"):
            usual.step()
        with pytest.raises(ClippingError, match=r"parameter '.*weight' of unit '.*' is stepped in backward"):
            clip_grad_norm_(model, 1.0)
        with pytest.raises(OptimizerError, match=r"weight' of unit '.*' is stepped in backward already. Call remove"):
            _early(model)
        with pytest.raises(OptimizerError, match="takes no second parameter group"):
            optimizer.add_param_group({"params": [nn.Parameter(_x())]})
        with pytest.raises(OptimizerError, match="given a closure"):
            optimizer.step(lambda: 0.0)
        with pytest.raises(OptimizerError, match="cannot be copied or pickled"):
            copy.deepcopy(optimizer)
        if dist.get_world_size() > 1:
            with pytest.raises(PhaseError, match=r"cannot be removed while apply_optimizer_in_backward steps its parameters"):
                remove(model, fully_shard if annotate is _sharded else replicate)
        assert all(_same(before, _values(model))), "nothing was changed"
        optimizer.zero_grad()
        optimizer.remove()
        optimizer.remove()
        model(_x()).sum().backward()
        assert all(_same(before, _values(model))), "backward steps nothing any more"
        usual.step()
        assert not any(_same(before, _values(model)))
        remove(model, fully_shard if annotate is _sharded else replicate)


@spmd(ranks=2)
def test_arguments_that_cannot_be_are_refused_by_name() -> None:
    model = _model(None)
    original = next(model.parameters())
    _sharded(model)
    for bad, message in (
        (
            lambda: apply_optimizer_in_backward(torch.optim.SGD, model),
            "takes parameters, e.g. model.parameters(), not a Sequential",
        ),
        (lambda: apply_optimizer_in_backward(torch.optim.SGD, []), "was given no parameter"),
        (lambda: apply_optimizer_in_backward(torch.optim.SGD, [{"params": []}]), "call it once for each parameter group"),
        (
            lambda: apply_optimizer_in_backward(torch.optim.SGD, [original]),
            "was replaced by a sharded one when fully_shard was",
        ),
        (lambda: apply_optimizer_in_backward(torch.optim.LBFGS, model.parameters()), "LBFGS takes inner products"),
        (lambda: apply_optimizer_in_backward(nn.Linear, model.parameters()), "takes a class of optimizers first"),
    ):
        with pytest.raises(OptimizerError, match=re.escape(message)):
            bad()
    plain = _model(None)
    optimizer = _early(plain)
    for annotate in VERBS:
        with pytest.raises(AnnotationError, match=r"parameter '(0\.)?weight' is stepped in backward since"):
            annotate(plain)
    optimizer.remove()
    _sharded(plain)


class _Counting(torch.optim.SGD):
    """As some do that adapt themselves: one number for all parameters."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1


@spmd(ranks=2)
def test_an_optimizer_with_numbers_for_all_parameters_together_is_refused() -> None:
    model = _model()
    _early(model, _Counting)
    with pytest.raises(OptimizerError, match="_Counting wrote 'k' to its parameter group"):
        model(_x()).sum().backward()


@spmd(ranks=2)
def test_a_gradient_scaler_is_refused_where_it_steps() -> None:
    for annotate in VERBS:
        model = _model(annotate)
        optimizer = _early(model)
        scaler = torch.amp.GradScaler(current_device().type, init_scale=4.0)
        scaler.scale(model(_x()).sum()).backward()
        with pytest.raises(OptimizerError, match="a GradScaler came to step this optimizer, but backward has stepped already"):
            scaler.step(optimizer)
        off = torch.amp.GradScaler(current_device().type, enabled=False)
        off.scale(model(_x()).sum()).backward()
        off.step(optimizer)  # one that does nothing may


class _Reentrant(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.other = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint_of_torch(self.block, x, use_reentrant=True)
            x = self.other(x)
        return x


@spmd(ranks=2)
def test_backward_may_not_come_back_to_what_has_been_stepped() -> None:
    for whole in (True, False):
        torch.manual_seed(0)
        model = _Reentrant(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))).to(current_device())
        part = model if whole else model.block  # of which alone each backward inside is a whole one
        fully_shard(part, policy={nn.Linear})
        _early(part)
        with pytest.raises(PhaseError, match="Reentrant checkpointing does this") as caught:
            model(_x().requires_grad_()).sum().backward()
        assert ("backward came to it again" if whole else "a backward ended inside another one") in str(caught.value)


class _Failing(torch.autograd.Function):
    broken = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if _Failing.broken:
            raise ValueError("broken")
        return gradient


class _Ear(logging.Handler):
    def __init__(self, heard: list[str]) -> None:
        super().__init__()
        self._heard = heard

    def emit(self, record: logging.LogRecord) -> None:
        self._heard.append(record.getMessage())


@pytest.mark.host  # over sockets a sum has not landed for certain when the next barrier is over
@spmd(ranks=2)
def test_a_backward_that_raises_tells_what_it_has_stepped() -> None:
    for annotate in VERBS:
        _Failing.broken = False
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(6)]).to(current_device())
        model[0].register_forward_hook(lambda module, args, output: _Failing.apply(output))
        for layer in model:  # ranks go together, so that what has been launched has been summed
            layer.register_full_backward_hook(lambda *_: dist.barrier())
        annotate(model)
        optimizer = _early(model)
        before = _values(model)
        _Failing.broken = True
        heard: list[str] = []
        handler = _Ear(heard)
        logging.getLogger("composable").addHandler(handler)
        with pytest.raises(ValueError, match="broken"):
            model(_x().requires_grad_()).sum().backward()
        _Failing.broken = False
        model.zero_grad()
        stepped = [not same for same in _same(before, _values(model))]
        model(_x().requires_grad_()).sum()  # it starts anew
        logging.getLogger("composable").removeHandler(handler)
        names = [re.sub(r".*'(.*weight)' of unit '(.*)'", r"\2.\1", name).replace("(root).", "") for name in optimizer.lost]
        expected = [f"{index}.weight" for index in range(6) if stepped[index]]
        if current_device().type == "cpu" or annotate is _sharded:
            assert expected, "some had been stepped"
        assert sorted(names) == expected
        assert any("a backward raised. Stepped in it already" in line for line in heard) == bool(expected)
        after = _values(model)
        if expected:
            for _ in range(2):
                with pytest.raises(PhaseError, match="a backward raised before this one when it had stepped") as refused:
                    model(_x().requires_grad_()).sum().backward()
                assert "resume()" in str(refused.value)
                model.zero_grad()
            assert all(_same(after, _values(model)))
        optimizer.resume()
        model(_x().requires_grad_()).sum().backward()
        assert not any(_same(before, _values(model)))
        assert optimizer.lost == ()


@pytest.mark.host
@pytest.mark.beyond_sim("groups of accelerators do not tell of a rank that left a step: the other one waits for the timeout")
@pytest.mark.parametrize("how", ["loads", "resumes"])
@spmd(ranks=2)
def test_one_rank_that_raises_stops_all_until_a_checkpoint_is_loaded(how: str) -> None:
    """Replicas that were stepped by halves would go on differing without a word."""
    _Failing.broken = False
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(6)]).to(current_device())
    model[0].register_forward_hook(lambda module, args, output: _Failing.apply(output))
    for layer in model[1:]:  # ranks go together, so that what has been launched has been summed
        layer.register_full_backward_hook(lambda *_: dist.barrier())
    replicate(model, bucket_cap_mb=1e-4)
    optimizer = _early(model)
    model(_x().requires_grad_()).sum().backward()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    _Failing.broken = dist.get_rank() == 1
    with pytest.raises((ValueError, CommunicationError)):
        model(_x().requires_grad_()).sum().backward()
    _Failing.broken = False
    before = _values(model)
    for _ in range(2):
        model.zero_grad()
        with pytest.raises((PhaseError, CommunicationError)):
            model(_x().requires_grad_()).sum().backward()
    assert all(_same(before, _values(model)))
    if how == "loads":
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        before = _values(model)
    else:
        optimizer.resume()
    model.zero_grad()
    model(_x().requires_grad_()).sum().backward()
    assert not any(_same(before, _values(model)))
    if how == "loads":
        for parameter in model.parameters():
            both = [torch.empty_like(parameter) for _ in range(2)]
            dist.all_gather(both, parameter.detach())
            assert torch.equal(*both)


class _Impatient(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        self[0](x).sum().backward()
        return super().forward(x)  # type: ignore[no-any-return]


@spmd(ranks=2)
def test_a_backward_inside_a_forward_is_refused() -> None:
    model = _Impatient(nn.Linear(4, 4), nn.Linear(4, 4)).to(current_device())
    fully_shard(model, policy={nn.Linear})
    _early(model)
    with pytest.raises(PhaseError, match="a backward ended inside a forward"):
        model(_x())


@spmd(ranks=2)
def test_a_replaced_parameter_is_missed_by_name() -> None:
    for annotate in VERBS:
        model = _model(annotate)
        _early(model)
        model[2].weight = nn.Parameter(model[2].weight.detach() * 2)
        with pytest.raises(PhaseError, match=r"parameter '.*weight' of unit '.*' was replaced on its module since"):
            model(_x()).sum().backward()


@spmd(ranks=[1, 2])
def test_state_is_saved_loaded_and_scheduled_as_that_of_any_optimizer() -> None:
    for annotate in VERBS:
        models = [_model(annotate) for _ in range(2)]
        optimizers = [_early(model, torch.optim.AdamW) for model in models]
        schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in optimizers]
        for _ in range(2):
            models[0](_x()).sum().backward()
            optimizers[0].step()  # nothing to do
            optimizers[0].zero_grad()
            schedulers[0].step()
        assert optimizers[0].param_groups[0]["lr"] == 0.025
        saved = get_optimizer_state_dict(models[0], optimizers[0])
        assert "2.weight" in saved["state"], "by FQN"
        set_optimizer_state_dict(models[1], optimizers[1], copy.deepcopy(saved))
        models[1].load_state_dict(copy.deepcopy(models[0].state_dict()))
        for model in models:
            model(_x()).sum().backward()
        assert all(_same(*map(_values, models)))
        optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
        for model in models:
            model(_x()).sum().backward()
        assert all(_same(*map(_values, models)))


@spmd(ranks=2)
def test_two_of_them_share_a_unit_and_others_have_the_rest() -> None:
    for annotate in VERBS:
        models = [_model(annotate) for _ in range(2)]
        weights, biases, rest = [], [], []
        for model in models:
            named = list(model.named_parameters())
            weights.append([p for n, p in named if n.endswith("weight") and n[0] != "0"])
            biases.append([p for n, p in named if n.endswith("bias")])
            rest.append([p for n, p in named if n == "0.weight"])
        apply_optimizer_in_backward(torch.optim.SGD, weights[0], {"lr": 0.3})
        apply_optimizer_in_backward(torch.optim.AdamW, biases[0], {"lr": 0.1})
        last = torch.optim.SGD(rest[0], lr=0.2)
        usual = [torch.optim.SGD(weights[1], lr=0.3), torch.optim.AdamW(biases[1], lr=0.1), torch.optim.SGD(rest[1], lr=0.2)]
        for _ in range(2):
            for model in models:
                model(_x()).sum().backward()
            for each in (last, *usual):
                each.step()
                each.zero_grad()
            assert all(_same(*map(_values, models)))


@spmd(ranks=2)
def test_hooks_of_users_meet_the_gradient_before_the_step_and_unfrozen_parameters_are_stepped() -> None:
    model = _model()
    before = _values(model)
    model[0].requires_grad_(False)
    _early(model)
    seen: list[bool] = []
    model[2].weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad is not None))
    model(_x()).sum().backward()
    assert seen == [True]
    assert _same(before, _values(model)) == [True, True, False, False, False, False]
    model[0].requires_grad_(True)
    model(_x()).sum().backward()
    assert not any(_same(before, _values(model)))


@spmd(ranks=2)
def test_a_step_by_hand_in_the_middle_of_a_window_is_refused() -> None:
    for annotate in VERBS:
        model = _model(annotate)
        optimizer = _early(model)
        with no_sync(model):
            model(_x()).sum().backward()
        with pytest.raises((OptimizerError, PhaseError), match="this rank's alone"):
            optimizer.step()
        model(_x()).sum().backward()
        with weighted_gradients(model, weight=1, more=True):
            model(_x()).sum().backward()
        with pytest.raises(OptimizerError, match="is not complete"):
            optimizer.step()
