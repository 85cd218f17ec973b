"""Training with an accelerator's comm on streams with clocks: no race, and every wait that is left out is found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from composable import checkpoint, fully_shard, replicate
from composable.comm import AcceleratorComm, Comm, comms_wrapped_by, world_group
from tests.helpers.battery import BATTERY
from tests.helpers.compare import assert_same_training
from tests.helpers.schemes import SCHEMES as BATTERY_SCHEMES
from tests.helpers.world import Pool, spmd
from tests.memory.races import COMPUTE, ClockedStreams, watched

CPU = torch.device("cpu")

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


class _Forgetful(AcceleratorComm):
    """Keeps no tensor alive that its streams still read."""

    def _reduce_scatter(self, *args: Any) -> Any:
        work: Any = super()._reduce_scatter(*args)
        work._kept = None
        return work


def _accelerated(streams: ClockedStreams, kind: type[AcceleratorComm]) -> Callable[[Comm], Comm]:
    """An accelerator's comm over CPU tensors in place of another one."""

    def accelerated(comm: Comm) -> Comm:
        if comm.group is None:
            return comm
        twin = kind(comm.group, CPU, streams)
        # So that some parameters have messages of their own.
        twin.traits = replace(twin.traits, direct_bytes=256)
        return twin

    return accelerated


def _train(scheme: str, forgetful: bool, **options: bool) -> tuple[list[str], dict[str, int]]:
    """The races of three training steps, and the number of operations on each stream."""
    streams = ClockedStreams(**options)
    model = _model()
    with watched(streams) as watch:
        with comms_wrapped_by(_accelerated(streams, _Forgetful if forgetful else AcceleratorComm)):
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
        with comms_wrapped_by(_accelerated(ClockedStreams(), AcceleratorComm)):
            assert_same_training(BATTERY[name], how.annotate, replicated=how.replicated)


@pytest.mark.parametrize(("ranks", "scheme"), [(2, "fully_shard by policy"), (4, "fully_shard over two neighbours")])
def test_training_on_streams_computes_what_one_process_does(pool: Pool, ranks: int, scheme: str) -> None:
    pool.run(ranks, _train_the_battery, ["transformer with tied embedding", "recurrent", "parameter containers"], scheme)


@pytest.mark.parametrize("scheme", ["fully_shard", "replicate in small buckets"])
def test_a_missing_wait_for_a_result_is_found(pool: Pool, scheme: str) -> None:
    launched = "c10d" if scheme == "fully_shard" else "aten._foreach_mul_"  # sums are divided on their own stream
    for found, _ in pool.run(2, _train, scheme, False, deaf_joins=True):
        assert any(f"on compute reads what {launched}" in race for race in found), found


def test_an_all_gather_that_does_not_wait_for_readers_is_found(pool: Pool) -> None:
    for found, _ in pool.run(2, _train, "fully_shard", False, deaf_forks=True):
        assert any("on all_gather overwrites what its allocation on compute" in race for race in found), found


def test_gradients_that_are_freed_while_they_are_reduced_are_found(pool: Pool) -> None:
    for found, _ in pool.run(2, _train, "fully_shard", True):
        assert found
        assert all(race.startswith("memory of compute is freed that c10d") for race in found), found


@spmd(ranks=2)
def test_each_kind_of_collective_has_a_stream_of_its_own() -> None:
    streams = ClockedStreams()
    comm = AcceleratorComm(world_group(), CPU, streams)
    comm.all_gather([(torch.ones(2), torch.ones(1))], "").wait()
    comm.reduce_scatter([(torch.ones(1), torch.ones(2))], "").wait()
    comm.all_reduce([torch.ones(1)], "").wait()
    assert list(streams.used) == ["all_gather", "reduce_scatter", "all_reduce"]
