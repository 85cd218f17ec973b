"""Averages of parameters over replicas: at once, periodic and hierarchical, on shards, with or
without gradients.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import SGD

from composable import (
    CPUOffloadPolicy,
    HierarchicalAverager,
    PeriodicAverager,
    average_parameters,
    fully_shard,
    replicate,
)
from composable.comm.backends import comms_wrapped_by
from tests.algorithms.replicas import (
    PLANS,
    WORLDS,
    annotated,
    assert_same_parameters,
    average_by_hand,
    backward,
    by_hand,
    grid,
    keep_gradients_local,
    local,
)
from tests.helpers.communicators import Log, Recording
from tests.helpers.world import Pool, current_device, need_devices, spmd
from tests.state.models import Block, plain

_sgd = partial(SGD, lr=0.1, momentum=0.5)


@torch.no_grad()
def _drift(model: nn.Module, replica: int) -> None:
    for parameter in model.parameters():
        local(parameter).mul_(1 + replica)


# --- at once ------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", PLANS)
@spmd(ranks=[2, 4])
def test_averages_are_means_over_the_replicas(plan: str) -> None:
    model, replica = annotated(plan, 2)
    before = [local(parameter).clone() for parameter in model.parameters()]
    alone = plan in ("replicate", "views")
    replicas = dist.get_world_size() if alone else 2
    _drift(model, dist.get_rank() if alone else replica)
    average_parameters(model)
    for parameter, value in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(local(parameter).detach(), value * (1 + replicas) / 2)


@pytest.mark.parametrize("spelled", ["name", "role", "mesh", "group"])
@spmd(ranks=4)
def test_the_ranks_are_spelled_as_a_name_a_mesh_or_a_group(spelled: str) -> None:
    mesh = init_device_mesh(
        current_device().type, (2, 2), mesh_dim_names=("dp_replicate", "dp_shard")
    )
    over: Any = {
        "name": "dp_replicate",
        "role": "replicate",
        "mesh": mesh["dp_replicate"],
        "group": mesh.get_group(0),
    }[spelled]
    model = fully_shard(plain(), mesh=mesh, policy={Block})
    expected = [local(parameter) * 1.5 for parameter in model.parameters()]
    _drift(model, mesh.get_local_rank(0))
    average_parameters(model, over=over)
    for parameter, value in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(local(parameter), value)


@spmd(ranks=4)
def test_islands_that_train_apart_are_averaged_over_ranks_outside_of_their_meshes() -> None:
    mesh = init_device_mesh(current_device().type, (2, 2), mesh_dim_names=("island", "shard"))
    model, island = (
        fully_shard(plain(), mesh=mesh["shard"], policy={Block}),
        mesh.get_local_rank("island"),
    )
    optimizer = _sgd(model.parameters())
    for step in range(4):
        backward(model, step, island)
        optimizer.step()
        optimizer.zero_grad()
        average_parameters(model, over=mesh["island"])
    assert_same_parameters(model, by_hand(2, 4, _sgd, lambda _, models: average_by_hand(models))[0])


@spmd(ranks=2)
def test_parameters_are_averaged_with_and_without_gradients_trained_or_frozen() -> None:
    model = replicate(plain())
    model.blocks[0].scale.requires_grad_(False)
    model.blocks[1].scale.grad = torch.ones_like(model.blocks[1].scale)
    _drift(model, dist.get_rank())
    expected = [
        parameter.detach() * 1.5 / (1 + dist.get_rank()) for parameter in model.parameters()
    ]
    average_parameters(model)
    for parameter, value in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.detach(), value)


@spmd(ranks=4)
def test_bfloat16_parameters_are_averaged_in_bfloat16() -> None:
    model = fully_shard(plain().to(torch.bfloat16), mesh=grid(2), policy={Block})
    expected = [local(parameter) * 1.5 for parameter in model.parameters()]
    _drift(model, dist.get_rank() // 2)
    average_parameters(model)
    for parameter, value in zip(model.parameters(), expected, strict=True):
        assert local(parameter).dtype is torch.bfloat16
        torch.testing.assert_close(local(parameter), value)


@spmd(ranks=4)
def test_parameters_on_the_host_are_averaged_there() -> None:
    model = fully_shard(plain(), mesh=grid(2), policy={Block}, offload_policy=CPUOffloadPolicy())
    expected = [local(parameter) * 1.5 for parameter in model.parameters()]
    _drift(model, dist.get_rank() // 2)
    average_parameters(model)
    for parameter, value in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(local(parameter), value)


@spmd(ranks=2)
def test_floating_point_buffers_are_averaged_and_counters_stay() -> None:
    model = replicate(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to(current_device()))
    norm = model[1]
    norm.running_mean.fill_(dist.get_rank())  # type: ignore[operator,union-attr]
    norm.num_batches_tracked.fill_(10 * dist.get_rank())  # type: ignore[operator,union-attr]
    average_parameters(model)
    assert norm.running_mean.tolist() == [0.5] * 3  # type: ignore[operator,union-attr]
    assert norm.num_batches_tracked.item() == 10 * dist.get_rank()  # type: ignore[operator,union-attr]


@spmd(ranks=4)
def test_a_unit_computes_with_the_averages_in_its_next_forward() -> None:
    model, replica = annotated("hybrid", 2)
    inputs = torch.arange(6, device=current_device())
    with torch.no_grad():
        model(inputs)
        _drift(model, replica)
        average_parameters(model)
        expected = plain()
        for parameter in expected.parameters():
            parameter.mul_(1.5)
        torch.testing.assert_close(model(inputs), expected(inputs))


@spmd(ranks=4)
def test_one_message_per_unit_and_dtype() -> None:
    log = Log()
    with comms_wrapped_by(partial(Recording, log=log)):
        model, _ = annotated("hybrid", 2)
        log.events.clear()
        average_parameters(model)
    assert log.labels() == [
        f"average of unit '{name}'" for name in ("(root)", "blocks.0", "blocks.1", "blocks.2")
    ]


# --- periodic -----------------------------------------------------------------------------------


def _periodic(plan: str, replicas: int) -> None:
    """Synchronous steps first, then local ones: post-local SGD."""
    model, replica = annotated(plan, replicas)
    averager = PeriodicAverager(model, period=3, warmup_steps=2)
    optimizer = _sgd(model.parameters())
    keep_gradients_local(model, plan)
    for step in range(9):
        backward(model, step, replica)
        optimizer.step()
        optimizer.zero_grad()
        averager.average_parameters()

    def average(step: int, models: list[Any]) -> None:
        if step in (2, 5, 8):
            average_by_hand(models)

    assert_same_parameters(model, by_hand(replicas, 9, _sgd, average)[0])


@pytest.mark.parametrize(("plan", "ranks", "replicas"), WORLDS)
def test_periodic_averages_are_those_of_loops_over_replicas(
    pool: Pool, plan: str, ranks: int, replicas: int, device: str
) -> None:
    need_devices(device, ranks)
    pool.run(ranks, _periodic, plan, replicas, device=device)


@spmd(ranks=2)
def test_an_averager_resumes_where_it_was_saved() -> None:
    model = replicate(plain())
    averager = PeriodicAverager(model, period=2)
    averager.average_parameters()
    again = PeriodicAverager(model, period=2)
    again.load_state_dict(copy.deepcopy(averager.state_dict()))
    _drift(model, dist.get_rank())
    before = [parameter.detach().clone() for parameter in model.parameters()]
    again.average_parameters()
    assert all(
        torch.equal(p, value) for p, value in zip(model.parameters(), before, strict=True)
    ), "it is not due"
    again.average_parameters()
    assert not all(
        torch.equal(p, value) for p, value in zip(model.parameters(), before, strict=True)
    )


# --- hierarchical -------------------------------------------------------------------------------


@spmd(ranks=4)
def test_hierarchical_averages_are_those_of_loops_over_replicas() -> None:
    """Pairs every two steps, everyone every four: where both are due, everyone."""
    model, replica = annotated("replicate", 4)
    averager = HierarchicalAverager(model, periods={2: 2, 4: 4}, warmup_steps=1)
    optimizer = _sgd(model.parameters())
    keep_gradients_local(model, "replicate")
    for step in range(7):
        backward(model, step, replica)
        optimizer.step()
        optimizer.zero_grad()
        averager.average_parameters()

    def average(step: int, models: list[Any]) -> None:
        if step == 4:
            average_by_hand(models)
        elif step in (2, 6):
            average_by_hand(models[:2])
            average_by_hand(models[2:])

    assert_same_parameters(model, by_hand(4, 7, _sgd, average)[replica])


@spmd(ranks=4)
def test_shards_are_averaged_in_groups_of_the_replicate_dimension() -> None:
    """One rank per replica: a hierarchy of the replicate dimension alone."""
    model, replica = annotated("hybrid", 4)
    _drift(model, replica)
    expected = [local(parameter) / (1 + replica) for parameter in model.parameters()]
    averager = HierarchicalAverager(model, periods={2: 1, 4: 2})
    averager.step = 1
    averager.average_parameters()
    for parameter, value in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(local(parameter), value * (1.5 if replica < 2 else 3.5))
    averager.average_parameters()
    for parameter, value in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(local(parameter), value * 2.5)
