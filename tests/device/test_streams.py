"""Streams wait for each other where memory is shared, and nothing is freed that a stream may still use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from composable import checkpoint, fully_shard, replicate
from composable.device.collectives import (
    AcceleratorCommunicator,
    Communicator,
    GatherPart,
    ReducePart,
    TagSequence,
    Work,
    communicators_wrapped_by,
    world_group,
)
from composable.device.memory import MemoryPool
from composable.device.streams import AcceleratorStreams, HostStreams, streams_of
from composable.runtime import root_backward
from composable.runtime.backward_end import BackwardEnd
from tests.device.races import COMPUTE, ClockedStreams, watched
from tests.helpers.battery import BATTERY
from tests.helpers.compare import assert_same_training
from tests.helpers.schemes import SCHEMES as BATTERY_SCHEMES
from tests.helpers.world import Pool, spmd

CPU = torch.device("cpu")


# --- the watch itself -------------------------------------------------------------------------------------------------


def _races(program: Callable[[ClockedStreams], None], **options: bool) -> list[str]:
    streams = ClockedStreams(**options)
    with watched(streams) as watch:
        program(streams)
    return list(dict.fromkeys(watch.found))


def _in_order(streams: ClockedStreams) -> None:
    a, b = torch.zeros(4), torch.zeros(4)
    with streams.fork("side"):
        torch.add(a, 1, out=b)
        mark = streams.mark()
    mark.join()
    a.add_(b)
    del b
    a.add_(1)


def test_a_program_with_a_fork_and_a_join_has_no_race() -> None:
    assert _races(_in_order) == []


def test_a_missing_join_is_found_as_a_read_an_overwrite_and_a_free() -> None:
    assert _races(_in_order, deaf_joins=True) == [
        "aten.add_.Tensor on compute reads what aten.add.out on side still uses",
        "aten.add_.Tensor on compute overwrites what aten.add.out on side still uses",
        "memory of compute is freed that aten.add.out on side still uses",
    ]


def test_a_missing_fork_is_found() -> None:
    assert _races(_in_order, deaf_forks=True) == [
        "aten.add.out on side reads what aten.zeros.default on compute still uses",
        "aten.add.out on side overwrites what aten.zeros.default on compute still uses",
    ]


def test_memory_that_goes_back_to_its_stream_while_another_reads_it_is_found() -> None:
    def program(streams: ClockedStreams) -> None:
        a = torch.zeros(4)
        with streams.fork("side"):
            b = a + 1
            mark = streams.mark()
        mark.join()
        a.add_(b)
        del b
        a.add_(1)

    assert _races(program) == ["memory of side is freed that aten.add_.Tensor on compute still uses"]


def test_parts_of_one_buffer_are_told_apart() -> None:
    def program(streams: ClockedStreams) -> None:
        a = torch.zeros(4)
        with streams.fork("side"):
            a[:2].add_(1)
            mark = streams.mark()
        a[2:].add_(1)
        mark.join()
        a.add_(1)

    assert _races(program) == []


# --- training with an accelerator's communicator ------------------------------------------------------------------------------

Annotate = Callable[[nn.Module], Any]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(8, 24)
        self.gate = nn.Linear(8, 24)
        self.narrow = nn.Linear(24, 8)
        self.scale = nn.Parameter(torch.ones(()))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.narrow(torch.relu(self.wide(x)) * self.gate(x))


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), Block(), nn.Linear(8, 3))


def _checkpointed(model: nn.Module) -> None:
    checkpoint(model, policy={Block})
    fully_shard(model, policy={Block})


def _mixed(model: nn.Module) -> None:
    replicate(model.get_submodule("1"))
    fully_shard(model, policy={Block})


SCHEMES: Final[dict[str, Annotate]] = {
    "fully_shard": lambda model: fully_shard(model, policy={Block}),
    "fully_shard without resharding": lambda model: fully_shard(model, policy={Block}, reshard_after_forward=False),
    "fully_shard and checkpoint": _checkpointed,
    "fully_shard over two neighbours": lambda model: fully_shard(model, policy={Block}, reshard_after_forward=2),
    "fully_shard with replicas": lambda model: fully_shard(model, policy={Block}, mesh=init_device_mesh("cpu", (2, 2))),
    "replicate in small buckets": lambda model: replicate(model, bucket_cap_mb=0.0005),
    "replicate inside fully_shard": _mixed,
}


class _Forgetful(AcceleratorCommunicator):
    """Keeps nothing alive that its streams still read."""

    def _on_stream(self, *args: Any) -> Work:
        work = super()._on_stream(*args)
        work._kept = None  # type: ignore[attr-defined]
        return work


def _accelerated(streams: ClockedStreams, kind: type[AcceleratorCommunicator]) -> Callable[[Communicator], Communicator]:
    """An accelerator's communicator, over CPU tensors, in place of another one."""

    def accelerated(communicator: Communicator) -> Communicator:
        group = getattr(communicator, "group", None)
        if group is None:
            return communicator
        twin = kind(group, CPU, streams)
        # So that some parameters travel by themselves, and before the others.
        twin.capabilities = replace(twin.capabilities, direct_bytes=256, divided_bytes=256)
        return twin

    return accelerated


def _train(scheme: str, forgetful: bool, **options: bool) -> tuple[list[str], dict[str, int]]:
    """The races of two training steps, and how many operations ran on each stream."""
    streams = ClockedStreams(**options)
    model = _model()
    with watched(streams) as watch:
        with communicators_wrapped_by(_accelerated(streams, _Forgetful if forgetful else AcceleratorCommunicator)):
            SCHEMES[scheme](model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(3):
            model(torch.randn(4, 8, generator=generator)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return list(dict.fromkeys(watch.found)), watch.operations


_STREAMS_OF: Final = {"fully_shard": ["all_gather", "reduce_scatter"], "replicate": ["all_reduce"]}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_training_on_streams_has_no_race(pool: Pool, scheme: str) -> None:
    ranks = 4 if scheme.endswith(("neighbours", "replicas")) else 2
    for found, operations in pool.run(ranks, _train, scheme, False):
        assert found == []
        assert operations[COMPUTE] > 0
        for stream in [*_STREAMS_OF[scheme.split()[0]], *(["all_reduce"] if scheme.endswith("replicas") else [])]:
            assert operations[stream] > 0, "the collectives run on a stream of their own"


def _train_the_battery(names: Sequence[str], scheme: str) -> None:
    how = BATTERY_SCHEMES[scheme]
    for name in names:
        with communicators_wrapped_by(_accelerated(ClockedStreams(), AcceleratorCommunicator)):
            assert_same_training(BATTERY[name], how.annotate, replicated=how.replicated)


@pytest.mark.parametrize(("ranks", "scheme"), [(2, "fully_shard by policy"), (4, "fully_shard over two neighbours")])
def test_an_accelerators_ways_compute_what_one_process_does(pool: Pool, ranks: int, scheme: str) -> None:
    """Messages land in memory of their own, and one reduction is over before the next one is launched."""
    pool.run(ranks, _train_the_battery, ["transformer with tied embedding", "recurrent", "parameter containers"], scheme)


@pytest.mark.parametrize("scheme", ["fully_shard", "replicate in small buckets"])
def test_results_that_are_not_waited_for_would_be_found(pool: Pool, scheme: str) -> None:
    kind = "reads" if scheme == "fully_shard" else "overwrites"  # what is reduced in place is divided in place
    for found, _ in pool.run(2, _train, scheme, False, deaf_joins=True):
        assert any(f"on compute {kind} what c10d" in race for race in found), found


def test_a_gather_that_overwrites_what_is_still_read_would_be_found(pool: Pool) -> None:
    for found, _ in pool.run(2, _train, "fully_shard", False, deaf_forks=True):
        assert any("on all_gather overwrites what its allocation on compute" in race for race in found), found


def test_gradients_that_are_freed_while_they_are_reduced_would_be_found(pool: Pool) -> None:
    for found, _ in pool.run(2, _train, "fully_shard", True):
        assert found
        assert all(race.startswith("memory of compute is freed that c10d") for race in found), found


def _train_with_an_end_elsewhere(scheme: str, deaf: bool) -> list[str]:
    """The races of training where autograd ends each backward on a stream of its own, and orders nothing before or after."""
    streams = ClockedStreams()
    streams.clocks["elsewhere"] = {}
    real, model = BackwardEnd.run, _model()

    def run(end: BackwardEnd) -> None:
        streams.current = "elsewhere"
        try:
            real(end)
        finally:
            streams.current = COMPUTE

    with (
        mock.patch.object(BackwardEnd, "run", run),
        mock.patch.object(root_backward, "streams_of", return_value=HostStreams() if deaf else streams),
        watched(streams) as watch,
    ):
        with communicators_wrapped_by(_accelerated(streams, AcceleratorCommunicator)):
            SCHEMES[scheme](model)
        for _ in range(2):
            model(torch.ones(4, 8)).square().sum().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.add_(parameter.grad, alpha=-0.1)
                        parameter.grad = None
    return list(dict.fromkeys(watch.found))


def test_a_backward_that_ends_on_another_stream_than_forwards_waits_for_that_and_has_it_wait(pool: Pool) -> None:
    assert pool.run(2, _train_with_an_end_elsewhere, "fully_shard", False) == [[], []]
    for found in pool.run(2, _train_with_an_end_elsewhere, "fully_shard", True):
        assert any("on elsewhere" in race for race in found), found
        assert any(race.split(" on ")[1].startswith("compute") for race in found), found


# --- the communicator ---------------------------------------------------------------------------------------------------------


@spmd(ranks=[2, 3])
def test_one_tensor_and_many_in_one_launch_arrive_alike() -> None:
    communicator = AcceleratorCommunicator(world_group(), CPU, ClockedStreams())
    size, rank = communicator.size, communicator.rank
    for count in (1, 3):
        shards = [torch.full((2,), 10.0 * index + rank) for index in range(count)]
        wholes = [torch.zeros(2 * size) for _ in shards]
        plan = communicator.prepare([GatherPart(s, w, 2 * size) for s, w in zip(shards, wholes, strict=True)])
        communicator.all_gather(plan, label="", tags=TagSequence(0)).wait()
        for index, whole in enumerate(wholes):
            assert whole.tolist() == [10.0 * index + r for r in range(size) for _ in range(2)]
        outs = [torch.zeros(2) for _ in shards]
        parts = [ReducePart(whole.clone(), 2, out) for whole, out in zip(wholes, outs, strict=True)]
        communicator.reduce_scatter(parts, scratch=MemoryPool(), label="", tags=TagSequence(0)).wait()
        for index, out in enumerate(outs):
            assert out.tolist() == [size * (10.0 * index + rank)] * 2


@spmd(ranks=2)
def test_each_kind_of_collective_has_a_stream_of_its_own() -> None:
    streams = ClockedStreams()
    communicator = AcceleratorCommunicator(world_group(), CPU, streams)
    communicator.all_gather(
        communicator.prepare([GatherPart(torch.ones(1), torch.ones(2), 2)]), label="", tags=TagSequence(0)
    ).wait()
    communicator.reduce_scatter(
        [ReducePart(torch.ones(2), 1, torch.ones(1))], scratch=MemoryPool(), label="", tags=TagSequence(0)
    ).wait()
    communicator.all_reduce(torch.ones(1), label="").wait()
    assert list(streams.used) == ["all_gather", "reduce_scatter", "all_reduce"]


# --- streams ----------------------------------------------------------------------------------------------------------


def test_on_a_host_work_runs_where_it_is_called() -> None:
    streams = streams_of(CPU)
    assert isinstance(streams, HostStreams)
    assert streams_of(torch.device("meta")) is streams, "one per process, so that roots share it"
    done = []
    with streams.fork("all_gather"):
        done.append("inside")
    streams.mark().join()
    assert done == ["inside"]


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_on_an_accelerator_a_join_orders_the_compute_stream_after_the_fork() -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    device = torch.device(device.type, 0)
    streams = streams_of(device)
    assert isinstance(streams, AcceleratorStreams)
    assert streams_of(device) is streams
    assert streams.stream("all_gather") is streams.stream("all_gather")
    assert streams.stream("all_gather") != streams.stream("reduce_scatter")
    x = torch.zeros(1 << 22, device=device)
    for _ in range(50):
        x.add_(1)
    with streams.fork("all_gather"):
        assert torch.accelerator.current_stream(device) == streams.stream("all_gather")
        for _ in range(50):
            x.add_(1)
        mark = streams.mark()
    mark.join()
    assert bool((x * 2 == 200).all())
