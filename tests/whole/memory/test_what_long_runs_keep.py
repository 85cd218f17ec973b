"""What a program keeps that runs for long: tables that grow, and models that were dropped."""

from __future__ import annotations

import copy
import gc
from typing import Any
from weakref import ref

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import composable
from composable import fully_shard, replicate
from composable.engine.gradients import agreed
from tests.helpers.compare import full_parameters
from tests.helpers.world import current_device, spmd


def _layers(number: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(number))).to(current_device())


def _train(model: nn.Module) -> None:
    model(torch.ones(2, 4, device=current_device())).sum().backward()
    model.zero_grad()


@spmd(ranks=2)
def test_what_is_known_of_frozen_units_does_not_grow_with_what_was_frozen() -> None:
    model = _layers(6)
    fully_shard(model, policy={nn.Linear})
    sizes = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreed, "PATTERNS", 5)
        for step in range(24):
            for index, layer in enumerate(model):
                layer.requires_grad_(bool((step + 1) >> index & 1))
            _train(model)
            unit = fully_shard.state(model)
            assert unit is not None
            (made,) = unit.agreements
            sizes.append(sum(map(len, made.modes.values())))
    assert max(sizes) <= 5 * len(model)
    assert sizes[-1] <= max(sizes[:12])


@pytest.mark.parametrize("verb", [fully_shard, replicate])
@spmd(ranks=2)
def test_backward_steps_with_an_optimizer_that_nobody_holds_until_the_model_is_dropped(
    verb: composable.Verb[..., Any],
) -> None:
    model = _layers(2)
    verb(model)
    before = full_parameters(model)
    composable.apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    gc.collect()
    _train(model)
    assert not torch.equal(full_parameters(model)["0.weight"], before["0.weight"])
    copied = copy.deepcopy(model)
    dead = [ref(model), ref(verb.state(model)), ref(next(model.parameters()))]
    del model
    gc.collect()
    assert [to() for to in dead] == [None] * len(dead)
    _train(copied)


@pytest.mark.parametrize("verb", [fully_shard, replicate])
@spmd(ranks=2)
def test_nothing_keeps_a_model_that_was_stepped_in_backward(
    verb: composable.Verb[..., Any],
) -> None:
    model = _layers(2)
    verb(model)
    optimizer = composable.apply_optimizer_in_backward(torch.optim.AdamW, model.parameters())
    _train(model)
    dead = [ref(model), ref(verb.state(model)), ref(optimizer), ref(next(model.parameters()))]
    del model, optimizer
    gc.collect()
    assert [to() for to in dead] == [None] * len(dead)


def _watched(model: nn.Module, optimizer: torch.optim.Optimizer) -> object:
    watch = composable.watch(model)
    _train(model)
    return watch


def _averaged(model: nn.Module, optimizer: torch.optim.Optimizer) -> object:
    average = composable.EMA(model, decay=0.9)
    average.update()
    return average


def _on_matrices(model: nn.Module, optimizer: torch.optim.Optimizer) -> object:
    composable.step_on_matrices(optimizer)
    model(torch.ones(2, 4, device=current_device())).sum().backward()
    optimizer.step()
    return None


def _on_the_host(model: nn.Module, optimizer: torch.optim.Optimizer) -> object:
    offloaded = composable.offload_to_host(model)
    offloaded.restore()
    return offloaded


def _in_scopes(model: nn.Module, optimizer: torch.optim.Optimizer) -> object:
    with composable.join(model, optimizer):
        _train(model)
    with composable.together(model):
        _train(model)
    with composable.summon_full_params(model):
        next(model.parameters()).data.mul_(2)
    composable.full_state_dict(model)
    return None


@pytest.mark.parametrize("verb", [fully_shard, replicate])
@spmd(ranks=2)
def test_nothing_keeps_a_model_that_was_dropped(verb: composable.Verb[..., Any]) -> None:
    for use in (_watched, _averaged, _on_matrices, _on_the_host, _in_scopes):
        model, mesh = _layers(2), init_device_mesh(current_device().type, (2,))
        verb(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        _train(model)
        held = use(model, optimizer)
        dead = [ref(model), ref(verb.state(model)), ref(next(model.parameters())), ref(optimizer)]
        if use is not _in_scopes:  # what gathers a DTensor: torch's caches keep its mesh
            dead.append(ref(mesh))  # which holds its process groups
        del model, mesh, optimizer, held
        gc.collect()
        assert [to() for to in dead] == [None] * len(dead), use.__name__
