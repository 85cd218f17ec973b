"""What users do first on an accelerator, and what it once tripped over; on two ranks, against one
process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from composable import fully_shard, remove, replicate
from composable.errors import AnnotationError, ForeignParameterError
from composable.memory.streams import streams_of
from tests.helpers.compare import full
from tests.helpers.world import current_device, spmd


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 24)
        self.down = nn.Linear(24, 8)
        self.register_buffer("offset", torch.full((8,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x))) + self.offset


def _model(*, head: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), Block(), *([nn.Linear(8, 8)] if head else []))


def _inputs(rank: int, step: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def _adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, **options)


def _expected(model: nn.Module) -> dict[str, Tensor]:
    """The parameters after three steps of one process on all ranks' inputs."""
    optimizer = _adamw(model)
    for step in range(3):
        x = torch.cat([_inputs(rank, step) for rank in range(dist.get_world_size())])
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _train(model: nn.Module, **options: Any) -> None:
    """Three steps with inputs that are where data loaders leave them, and the same numbers as one
    process.
    """
    expected = _expected(_model(head=len(model) == 4))  # type: ignore[arg-type]
    optimizer = _adamw(model, **options)
    for step in range(3):
        x = _inputs(dist.get_rank(), step)
        model(
            x if options.get("foreach") is None else x.to(current_device())
        ).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        assert parameter.device.type == "sim", name
        torch.testing.assert_close(full(parameter).cpu(), expected[name], rtol=2e-4, atol=2e-5)


def _annotate_by_policy(model: nn.Module) -> None:
    fully_shard(model, policy={Block})


def _annotate_as_one(model: nn.Module) -> None:
    fully_shard(model)


@spmd(ranks=2)
@pytest.mark.parametrize("annotate", [_annotate_by_policy, _annotate_as_one])
def test_inputs_of_a_root_are_moved_whether_it_has_parameters_or_not(
    annotate: Callable[[nn.Module], None],
) -> None:
    model = _model().to(current_device())
    annotate(model)
    _train(model)


@spmd(ranks=2)
@pytest.mark.parametrize("foreach", [None, True, False])
def test_one_optimizer_steps_over_replicated_and_sharded_parameters(foreach: bool | None) -> None:
    model = _model(head=True).to(current_device())
    replicate(model[0])
    fully_shard(model, policy={Block})
    _train(model, foreach=foreach)


@spmd(ranks=2)
@pytest.mark.parametrize("sync", ["broadcast", "check"])
def test_a_model_on_the_host_is_sharded_over_a_group_that_serves_the_accelerator_alone(
    sync: str,
) -> None:
    group = dist.new_group(backend="simccl")
    model = _model()
    if sync == "broadcast" and dist.get_rank() == 1:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
    fully_shard(model, policy={Block}, mesh=group, sync_module_states=sync)
    assert {buffer.device.type for buffer in model.buffers()} == {"sim"}, (
        "buffers go where the parameters go"
    )
    _train(model)


@spmd(ranks=2)
def test_a_model_on_the_host_is_not_replicated_over_a_group_that_serves_the_accelerator_alone() -> (
    None
):
    group = dist.new_group(backend="simccl")
    with pytest.raises(
        AnnotationError,
        match=r"replicate: '0.up.weight' is on cpu, and the ranks of the mesh communicate on sim",
    ):
        replicate(_model(), mesh=group)


@spmd(ranks=2)
def test_a_model_that_was_sharded_over_hosts_is_not_trained_there_once_it_is_moved() -> None:
    device = current_device()
    model = _model()
    fully_shard(model, policy={Block})
    model.to(device)
    with pytest.raises(ForeignParameterError) as caught:
        model(_inputs(0, 0).to(device))
    assert (
        str(caught.value)
        == f"parameter 'up.weight' of unit '0' was moved to {device}, and the ranks of its mesh"
        " communicate on cpu. Call module.to('sim') before fully_shard, or pass it a mesh"
        " of sim"
    )
    model.to("cpu")
    model(_inputs(0, 0)).sum().backward()


@spmd(ranks=2)
def test_a_model_that_a_mesh_of_accelerators_moved_there_may_be_moved_there_again() -> None:
    model = _model()
    fully_shard(model, policy={Block}, mesh=init_device_mesh("sim", (2,)))
    model.to(current_device())
    _train(model)


@spmd(ranks=2)
@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("buffers", [True, False])
def test_removal_brings_what_was_trained_whatever_of_the_host_was_kept(
    keeps: bool, buffers: bool
) -> None:
    torch.manual_seed(0)
    model = _model() if buffers else nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    kept = list(model.parameters()) if keeps else []
    fully_shard(
        model, policy={Block} if buffers else {nn.Linear}, mesh=init_device_mesh("sim", (2,))
    )
    before = [full(parameter).cpu() for parameter in model.parameters()]
    optimizer = _adamw(model)
    for _ in range(3):
        model(torch.ones(2, 8, device=current_device())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = [full(parameter).cpu() for parameter in model.parameters()]
    remove(model, fully_shard)
    for parameter, first, last in zip(model.parameters(), before, trained, strict=True):
        assert parameter.device.type == "sim"
        assert torch.equal(parameter.detach().cpu(), last)
        assert not torch.equal(first, last)
    for own, parameter, last in zip(kept, model.parameters(), trained, strict=False):
        assert own is parameter or not torch.equal(own.detach().cpu(), last), "from before training"


@spmd(ranks=1)
def test_threads_that_fork_to_one_stream_return_each_to_its_own() -> None:
    device = current_device()
    streams = streams_of(device)
    mine, others = torch.Stream(device), torch.Stream(device)
    inside, left, found = threading.Event(), threading.Event(), []

    def train() -> None:
        torch.accelerator.set_stream(others)
        with streams.fork("side"):
            inside.set()
            left.wait(20)
        found.append(torch.accelerator.current_stream() == others)

    before = torch.accelerator.current_stream()
    torch.accelerator.set_stream(mine)
    thread = threading.Thread(target=train)
    try:
        with streams.fork("side"):
            thread.start()
            inside.wait(20)
        found.append(torch.accelerator.current_stream() == mine)
    finally:
        left.set()
        thread.join(20)
        torch.accelerator.set_stream(before)
    assert found == [True, True]
