"""Optimizers whose results are the same step on shards without being asked, and can be asked not
to.
"""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from composable import fully_shard, replicate, step_on_shards
from composable.optim.shard_steps import ShardStepping
from composable.torch_private import step_hooks
from tests.helpers.compiled import fresh_compiler
from tests.helpers.world import current_device, spmd
from tests.optim.copies import OPTIMIZERS, Copies, groups_of, local, sharded_model, stepped_by_torch


def _stepping_of(optimizer: Optimizer) -> ShardStepping | None:
    owners = [getattr(hook, "__self__", None) for hook in step_hooks(optimizer)[0].values()]
    found = [owner for owner in owners if isinstance(owner, ShardStepping)]
    assert len(found) < 2
    return found[0] if found else None


@spmd(ranks=2)
@pytest.mark.parametrize("name", ["AdamW", "SGD with momentum", "Adagrad"])
def test_every_bit_is_what_torch_would_have_made_of_it(name: str) -> None:
    """No implementation is said: both take the one that torch takes for DTensors."""
    kind, options = OPTIMIZERS[name]
    models = sharded_model(), sharded_model()
    one, other = (kind(groups_of(model, options["lr"], apart=True), **options) for model in models)  # type: ignore[call-arg]
    assert _stepping_of(other) is None
    copies = Copies(models, (stepped_by_torch(one), other))
    for number in range(4):
        copies.step(number)
        copies.check(f"step {number}")
    stepping = _stepping_of(other)
    assert stepping is not None
    assert _stepping_of(one) is None


class _Halving(optim.AdamW):
    """Steps in a way of its own."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.5)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 4, bias=False)).to(
        current_device()
    )
    fully_shard(model, policy={nn.Linear})
    return model


def _step(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 4, device=current_device())).square().mean().backward()
    optimizer.step()


@spmd(ranks=2)
def test_those_that_nobody_vouches_for_are_left_alone() -> None:
    for make in (
        lambda parameters: _Halving(parameters),
        lambda parameters: optim.Muon(parameters, lr=0.1),
        lambda parameters: optim.Adam(parameters, lr=0.1, differentiable=True),
    ):
        model = _model()
        optimizer = make(model.parameters())
        try:
            _step(model, optimizer)
        except RuntimeError:
            assert optimizer.defaults.get("differentiable")  # torch refuses to write to leaves
        assert _stepping_of(optimizer) is None


@spmd(ranks=2)
def test_models_without_shards_are_none_of_its_business() -> None:
    for model in (
        nn.Linear(4, 4).to(current_device()),
        replicate(nn.Linear(4, 4).to(current_device())),
    ):
        optimizer = optim.AdamW(model.parameters())
        _step(model, optimizer)
        assert _stepping_of(optimizer) is None


@spmd(ranks=2)
def test_a_refusal_holds_until_it_is_asked_for() -> None:
    for steps_before in (0, 2):
        model = _model()
        optimizer = optim.AdamW(model.parameters())
        for _ in range(steps_before):
            _step(model, optimizer)
        assert (_stepping_of(optimizer) is not None) is (steps_before > 0)
        step_on_shards(optimizer, enabled=False)
        step_on_shards(optimizer, enabled=False)
        for _ in range(2):
            _step(model, optimizer)
            assert _stepping_of(optimizer) is None
        step_on_shards(optimizer)
        step_on_shards(optimizer)
        handle = _stepping_of(optimizer)
        assert handle is not None
        _step(model, optimizer)
        assert _stepping_of(optimizer) is handle


@spmd(ranks=2)
def test_a_compiled_step_trains_as_an_eager_one() -> None:
    with fresh_compiler():
        models = _model(), _model()
        optimizers = [optim.SGD(model.parameters(), lr=0.1) for model in models]
        compiled = torch.compile(optimizers[1].step, backend="eager")
        for _ in range(3):
            for model, optimizer, step in zip(
                models, optimizers, (optimizers[0].step, compiled), strict=True
            ):
                optimizer.zero_grad()
                model(torch.ones(2, 4, device=current_device())).square().mean().backward()
                step()
        for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
            torch.testing.assert_close(local(one), local(other))


def _memory_of_state(optimizer: Optimizer) -> list[weakref.ref[Tensor]]:
    """The tensors that the state lives in."""
    found: dict[int, weakref.ref[Tensor]] = {}
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, DTensor):
                part = local(value)
                whole = part if part._base is None else part._base
                found[id(whole)] = weakref.ref(whole)
    return list(found.values())


@pytest.mark.parametrize("how", ["moved", "cleared", "loaded"])
@spmd(ranks=2)
def test_state_that_somebody_moves_or_drops_is_gone(how: str) -> None:
    model = _model()
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        _step(model, optimizer)
    before = _memory_of_state(optimizer)
    assert before
    saved = copy.deepcopy(optimizer.state_dict())
    if how == "loaded":
        optimizer.load_state_dict(copy.deepcopy(saved))
    elif how == "cleared":
        optimizer.state.clear()
    else:
        for state in optimizer.state.values():
            state.update({key: value.clone() for key, value in state.items()})
    gc.collect()
    assert [memory() for memory in before if memory() is not None] == []
    clone = _model()
    clone.load_state_dict(model.state_dict())
    other = stepped_by_torch(optim.AdamW(clone.parameters(), lr=0.1))
    if how != "cleared":
        other.load_state_dict(saved)
    for each in ((model, optimizer), (clone, other)):
        for _ in range(2):
            _step(*each)
    for one, another in zip(model.parameters(), clone.parameters(), strict=True):
        assert torch.equal(local(one), local(another))


@spmd(ranks=2)
def test_steps_in_inference_mode_come_and_go() -> None:
    models = _model(), _model()
    optimizers = [optim.AdamW(model.parameters(), lr=0.1) for model in models]
    stepped_by_torch(optimizers[0])
    for step in range(5):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(torch.ones(2, 4, device=current_device())).square().mean().backward()
            with torch.inference_mode(step in (1, 2, 4)):
                optimizer.step()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(local(one), local(other))
