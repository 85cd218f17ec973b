"""Shards that rest on the host: every wait is needed, the host waits where it must and not
elsewhere, memory is given back.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.tensor import DTensor

from composable import CPUOffloadPolicy, fully_shard, register_comm_hook, reset
from composable.engine.step import root
from composable.memory import offload
from composable.memory.offload import TO_DEVICE_STREAM, TO_HOST_STREAM, ComingShards
from composable.torch_private import local_of
from tests.accelerator import sim, watch
from tests.accelerator.copies import Block, mesh_of, model_of, x_of
from tests.accelerator.faults import COMPUTE, GATHER, _launch, assert_found, fork_without_waiting
from tests.helpers.world import Pool, current_device, spmd

_COMES, _LEAVES = f"stream '{TO_DEVICE_STREAM}'", f"stream '{TO_HOST_STREAM}'"
_TO_DEVICE, _TO_HOST = "copy to device", "copy to host"


def _offloaded(*, hooked: bool = False) -> nn.Module:
    model = fully_shard(
        model_of(),
        policy={Block},
        mesh=mesh_of(),
        reshard_after_forward=True,
        offload_policy=CPUOffloadPolicy(),
    )
    if hooked:
        register_comm_hook(model, None, allreduce_hook)
    return model


def _gather_before_shards_have_come() -> AbstractContextManager[Any]:
    bring, here = ComingShards.bring, ComingShards.here
    bringing = []

    def noted(self: ComingShards, *args: Any) -> None:
        bringing.append(self)
        bring(self, *args)
        bringing.pop()

    patch = mock.patch.multiple(
        ComingShards,
        bring=noted,
        here=lambda self: here(self) if bringing else nullcontext(),
        end=lambda self: None,
    )
    return patch


def _end_without_waiting() -> AbstractContextManager[Any]:
    def hasty(self: ComingShards) -> None:
        self.buffer.free()

    return mock.patch.object(ComingShards, "end", hasty)


def _give_back_without_waiting() -> AbstractContextManager[Any]:
    def hasty(self: Any, keep: int = 0) -> None:
        while len(self._leaving) > keep:
            self._leaving.popleft()[1]()

    return mock.patch.object(offload._Traffic, "free_sent", hasty)


# What is left out, on how many ranks, and what the finding says of the earlier launch and of the
# later one.
_FAULTS: Final[dict[str, tuple[Callable[[], AbstractContextManager[Any]], int, str, str]]] = {
    "shards come to memory that is used": (
        fork_without_waiting(TO_DEVICE_STREAM),
        2,
        _launch("write", "", COMPUTE),
        _launch("write", _TO_DEVICE, _COMES),
    ),
    "a gather does not wait for shards": (
        _gather_before_shards_have_come,
        2,
        _launch("write", _TO_DEVICE, _COMES),
        _launch("read", "all_gather", GATHER),
    ),
    "shards that no message gathers are used before they have come": (
        _end_without_waiting,
        1,
        _launch("write", "", _COMES),
        _launch("read", "", COMPUTE),
    ),
    "sums leave before they are there": (
        fork_without_waiting(TO_HOST_STREAM),
        2,
        _launch("write", "", COMPUTE),
        _launch("read", _TO_HOST, _LEAVES),
    ),
    "the memory of sums is given back while they leave": (
        _give_back_without_waiting,
        2,
        _launch("read", _TO_HOST, _LEAVES),
        _launch("write", "free", COMPUTE),
    ),
}
_OF_SUMS: Final = (
    "sums leave before they are there",
    "the memory of sums is given back while they leave",
)


def _train_with(fault: str | None, hooked: bool) -> list[str]:
    model, x = _offloaded(hooked=hooked), x_of(0)
    for number in range(3):
        with _FAULTS[fault][0]() if fault is not None and number == 2 else nullcontext():
            model(x).square().sum().backward()
        model.zero_grad()
    return watch.take_findings()


@pytest.mark.parametrize(("ranks", "hooked"), [(1, False), (2, False), (2, True)])
def test_without_a_fault_nothing_is_found(pool: Pool, ranks: int, hooked: bool) -> None:
    assert pool.run(ranks, _train_with, None, hooked, device="sim") == [[]] * ranks


@pytest.mark.parametrize(
    ("fault", "hooked"),
    [*((fault, False) for fault in _FAULTS), *((fault, True) for fault in _OF_SUMS)],
)
def test_a_fault_is_found_and_both_launches_are_named(pool: Pool, fault: str, hooked: bool) -> None:
    _, ranks, first, second = _FAULTS[fault]
    assert_found(pool.run(ranks, _train_with, fault, hooked, device="sim"), first, second)


# --- waits of the host --------------------------------------------------------------------------


def _gradients_of_a_slow_device(model: nn.Module, late: float = 0.1) -> list[Tensor]:
    loss = model(x_of(0)).square().sum()
    sim.native.sleep(int(late * 1e6))
    loss.backward()
    return [local_of(p.grad).clone() for p in model.parameters() if isinstance(p.grad, DTensor)]


@spmd(ranks=2)
@pytest.mark.parametrize("hooked", [False, True])
def test_gradients_have_arrived_when_backward_returns(hooked: bool) -> None:
    expected = _gradients_of_a_slow_device(fully_shard(model_of(), policy={Block}, mesh=mesh_of()))
    model = _offloaded(hooked=hooked)
    found = _gradients_of_a_slow_device(model)
    assert all(torch.equal(one, other.cpu()) for one, other in zip(found, expected, strict=True))
    with mock.patch.object(root, "wait_for_traffic"):
        early = _gradients_of_a_slow_device(_offloaded(hooked=hooked), late=1.0)
    assert not all(map(torch.equal, early, found)), "this test notices"
    del model  # its gradients' memory, with these values, could have been that of the early ones
    offload.wait_for_traffic()


@spmd(ranks=2)
def test_gradients_have_arrived_when_a_step_was_reset() -> None:
    model, x = _offloaded(), x_of(0).requires_grad_()

    def fail(_: Tensor) -> None:
        raise MemoryError

    x.register_hook(fail)  # behind the first unit; those after it are reduced
    loss = model(x).square().sum()
    sim.native.sleep(200_000)
    with pytest.raises(MemoryError):
        loss.backward()
    reset(model)
    model.zero_grad(set_to_none=False)
    offload.wait_for_traffic()
    gradients = [p.grad for p in model.parameters() if isinstance(p.grad, DTensor)]
    assert gradients
    assert not any(map(torch.count_nonzero, map(local_of, gradients)))


def _output_of_a_slow_device(model: nn.Module) -> Tensor:
    x = x_of(0)
    with torch.no_grad():
        model(x)  # in the first one ranks compare what they are about to do
        sim.native.sleep(200_000)
        output: Tensor = model(x)
        for parameter in model.parameters():
            local_of(parameter).zero_()  # type: ignore[arg-type]
    return output.cpu()


@spmd(ranks=2)
def test_shards_may_be_written_to_when_forward_returns() -> None:
    with torch.no_grad():
        expected = fully_shard(model_of(), policy={Block}, mesh=mesh_of())(x_of(0)).cpu()
    assert torch.equal(_output_of_a_slow_device(_offloaded()), expected)
    with mock.patch.object(root, "wait_for_traffic"):
        assert not torch.equal(_output_of_a_slow_device(_offloaded()), expected), (
            "this test notices"
        )
    offload.wait_for_traffic()


@spmd(ranks=2)
@pytest.mark.parametrize("hooked", [False, True])
def test_the_host_waits_once_in_forward_and_once_for_each_direction_in_backward(
    hooked: bool,
) -> None:
    model, x = _offloaded(hooked=hooked), x_of(0)

    def step() -> None:
        model(x).square().sum().backward()

    for _ in range(2):
        step()
        model.zero_grad()
    waits = watch.host_waits_of(step)
    assert len(waits) == 3, waits
    assert all("offload.py" in each for each in waits), waits


# --- memory -------------------------------------------------------------------------------------

_WIDE: Final = 256


def _wide() -> nn.Sequential:
    torch.manual_seed(0)
    with torch.device("cpu"):
        return nn.Sequential(*[nn.Linear(_WIDE, _WIDE, bias=False) for _ in range(6)])


@spmd(ranks=[2, 4])
def test_between_steps_the_device_holds_nothing_and_the_whole_model_is_never_there() -> None:
    index, layer = current_device().index, _WIDE * _WIDE * 4
    x = torch.randn(2, _WIDE)
    sim.synchronize()
    sim.native.reset_peak(index)
    before = sim.native.memory(index)[0]
    model = fully_shard(
        _wide(), policy={nn.Linear}, mesh=mesh_of(), offload_policy=CPUOffloadPolicy()
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sim.synchronize()
    assert sim.native.memory(index)[1] - before < layer, "while it is annotated"
    for _ in range(3):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    sim.synchronize()
    held, peak = sim.native.memory(index)
    assert held - before < layer // 8
    # Two units unsharded, one that arrives and one that leaves as gradients, shards of each, and
    # little else.
    shard = layer // dist.get_world_size()
    assert peak - before < 5 * layer + 3 * shard
