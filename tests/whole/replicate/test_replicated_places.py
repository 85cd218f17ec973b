"""`replicate`: buffers that ranks keep for themselves, and devices that do not fit."""

# Messages are compared word for word, each on one line.
# ruff: noqa: E501

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from expecttest import assert_expected_inline as assert_text
from torch import Tensor, nn

from composable import NamePolicy, replicate
from composable.api.arguments import move_buffers, refuse_elsewhere
from composable.contract.tree import Managed, managed_buffers, managed_parameters
from tests.helpers.refusals import refusal
from tests.helpers.world import Pool, current_device


class Counting(nn.Module):
    """Two modules that each count their rank into a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("rank", torch.tensor(float(dist.get_rank())))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x))


def _after_a_forward(broadcast: object) -> tuple[float, bool]:
    """This rank's own buffer, and whether a running mean was shared."""
    torch.manual_seed(0)
    model = Counting().to(current_device())
    model.norm.momentum = 0.0
    if broadcast == "norm":
        replicate(
            model, broadcast_buffers=False, policy=NamePolicy({"norm": {"broadcast_buffers": True}})
        )
    elif isinstance(broadcast, list):
        replicate(model, ignored_params=broadcast)
        assert float(model.rank) == dist.get_rank()  # type: ignore[arg-type]
    else:
        replicate(model, broadcast_buffers=broadcast)  # type: ignore[arg-type]
    for buffer in (model.rank, model.norm.running_mean):
        buffer.fill_(float(dist.get_rank()))  # type: ignore[union-attr,operator]
    model(torch.ones(2, 3, device=current_device())).sum().backward()
    mean = model.norm.running_mean
    assert isinstance(mean, Tensor)
    return float(model.rank), bool((mean == 0).all())  # type: ignore[arg-type]


def test_buffers_are_left_to_each_rank_on_demand_and_module_by_module(pool: Pool) -> None:
    assert pool.run(2, _after_a_forward, True) == [(0.0, True), (0.0, True)]
    assert pool.run(2, _after_a_forward, False) == [(0.0, True), (1.0, False)]
    assert pool.run(2, _after_a_forward, "norm") == [(0.0, True), (1.0, True)]
    # names that DDP takes to ignore are of parameters and buffers
    assert pool.run(2, _after_a_forward, ["layer.bias", "rank"]) == [(0.0, True), (1.0, True)]
    assert pool.run(2, _after_a_forward, ["r*k", "norm.*_mean"]) == [(0.0, True), (1.0, False)]


def _one_buffer_at_two_places() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3)).to(current_device())
    model[0].running_mean.fill_(float(dist.get_rank()))  # type: ignore[operator,union-attr]
    model[1].register_buffer("running_mean", model[0].running_mean)
    replicate(model)
    model(torch.ones(2, 3, device=current_device()))
    assert model[1].running_mean is model[0].running_mean


def test_a_buffer_that_modules_share_stays_one_when_it_follows_rank_0(pool: Pool) -> None:
    pool.run(2, _one_buffer_at_two_places)


class Following(nn.Module):
    """Computes with a buffer that it replaces, which autograd therefore saves."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.line = nn.Linear(3, 3)
        self.register_buffer("mean", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean * 0.9 + x.mean(0)
        return self.line(x) * self.mean


def _two_forwards() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    batches = torch.randn(2, ranks, 4, 3, generator=torch.Generator().manual_seed(1)).to(
        current_device()
    )
    model = replicate(Following().to(current_device()))
    losses = [model(batch[rank]).square().mean() for batch in batches]
    sum(losses).backward()  # type: ignore[union-attr]
    alone = Following().to(current_device())
    for place in range(ranks):
        mean = torch.ones(3, device=current_device())
        for batch in batches:
            alone.mean = mean
            (alone(batch[place]).square().mean() / ranks).backward()
            mean = mean * 0.9 + batch[0].mean(0)  # rank 0's
    for one, other in zip(alone.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad)


def test_a_second_forward_leaves_the_buffers_alone_that_the_first_one_saved(pool: Pool) -> None:
    pool.run(2, _two_forwards)


# --- devices ------------------------------------------------------------------------------------


def test_tensors_on_another_device_than_the_ranks_communicate_on_are_refused_by_name() -> None:
    model = nn.BatchNorm1d(3)
    tensors: list[Managed[Any]] = [*managed_parameters([model]), *managed_buffers([model])]
    elsewhere = torch.device("cuda", 0)
    assert_text(
        refusal(lambda: refuse_elsewhere("replicate", tensors, elsewhere)),
        """AnnotationError: replicate: 'weight' is on cpu, and the ranks of the mesh communicate on cuda:0; call module.to('cuda:0') before annotating it""",
    )
    assert_text(
        refusal(lambda: refuse_elsewhere("replicate", tensors[2:], elsewhere)),
        """AnnotationError: replicate: 'running_mean' is on cpu, and the ranks of the mesh communicate on cuda:0; call module.to('cuda:0') before annotating it""",
    )
    refuse_elsewhere("replicate", tensors, torch.device("cpu"))
    model.to("meta")
    refuse_elsewhere("replicate", managed_buffers([model]), elsewhere)


def test_buffers_go_where_the_parameters_of_a_sharded_module_go() -> None:
    model = nn.BatchNorm1d(3)
    counter = model.num_batches_tracked
    move_buffers([model], torch.device("cpu"))
    assert model.num_batches_tracked is counter
    move_buffers([model], torch.device("meta"))
    assert {buffer.device.type for buffer in model.buffers()} == {"meta"}


def test_a_buffer_that_modules_share_moves_at_all_of_its_places() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    model[1].register_buffer("running_mean", model[0].running_mean)
    move_buffers([model], torch.device("meta"))
    assert model[1].running_mean is model[0].running_mean
    assert {buffer.device.type for buffer in model.buffers()} == {"meta"}
