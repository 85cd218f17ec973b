"""A process group ends when it is destroyed, though models that were trained over it live on, and with it end its threads."""

from __future__ import annotations

import copy
import gc
import os
import threading
from collections.abc import Callable
from itertools import product
from typing import Any, Final
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composable import describe, fully_shard, replicate
from composable.device.collectives import Communicator, communicators_wrapped_by, world_group
from composable.errors import CommunicationError
from tests.helpers.communicators import all_ordered, all_shared, all_sockets
from tests.helpers.world import Pool, current_device, spmd

_VERBS: Final[dict[str, Callable[..., Any]]] = {"fully_shard": fully_shard, "replicate": replicate}
_WAYS: Final[dict[str, Callable[[Communicator], Communicator]]] = {
    "sockets": all_sockets,
    "ordered": all_ordered,
    "shared": all_shared,
}
_SHARED = pytest.param("shared", marks=pytest.mark.host)


def _trained(verb: str, mesh: DeviceMesh | dist.ProcessGroup | None, way: str) -> nn.Module:
    with communicators_wrapped_by(_WAYS[way]):
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(current_device())
        _VERBS[verb](model[0], mesh=mesh)
        _VERBS[verb](model, mesh=mesh)
    _step(model)
    return model


def _step(model: nn.Module) -> None:
    model(torch.ones(2, 8, device=current_device())).sum().backward()


def _destroyed(groups: list[dist.ProcessGroup]) -> list[dist.ProcessGroup | None]:
    """What is left of groups once they are destroyed and this list of them is empty."""
    watched = [ref(group) for group in groups]
    while groups:
        dist.destroy_process_group(groups.pop())
    gc.collect()
    return [group() for group in watched]


@spmd(ranks=2)
@pytest.mark.parametrize("way", ["sockets", "ordered", _SHARED])
@pytest.mark.parametrize("verb", _VERBS)
def test_a_destroyed_group_ends_though_a_model_was_trained_over_a_mesh_of_it(verb: str, way: str) -> None:
    groups = [dist.new_group()]
    model = _trained(verb, DeviceMesh.from_group(groups[0], current_device().type), way)
    snapshots = [copy.deepcopy(model), copy.deepcopy(model.state_dict())]  # with meshes of their own
    dist.barrier()
    assert _destroyed(groups) == [None]
    assert len(snapshots) == 2
    assert "Linear" in str(describe(model))


def _end_of_everything() -> list[tuple[bool, int]]:
    """For each way and verb: whether the default group has ended, and how many threads are left of it."""
    rank, store, found = dist.get_rank(), dist.distributed_c10d._get_default_store(), []
    for verb, way in product(_VERBS, ("sockets", "shared")):
        dist.destroy_process_group()
        alone = _threads()
        dist.init_process_group("gloo", store=dist.PrefixStore(f"{verb} {way}", store), rank=rank, world_size=2)
        model = _trained(verb, None, way)
        dist.barrier()
        group = ref(world_group())
        dist.destroy_process_group()
        found.append((group() is None, _threads() - alone))
        dist.init_process_group("gloo", store=dist.PrefixStore(f"after {verb} {way}", store), rank=rank, world_size=2)
        dist.barrier()  # the other rank may still be connecting, and this one closes its end next
        del model
    return found


def _threads() -> int:
    return threading.active_count() if not os.path.isdir("/proc/self/task") else len(os.listdir("/proc/self/task"))


@pytest.mark.host
def test_the_default_group_and_its_threads_end_when_it_is_destroyed_though_a_model_lives_on(pool: Pool) -> None:
    for found in pool.run(2, _end_of_everything, spoils=True):
        assert found == [(True, 0)] * 4


@spmd(ranks=4)
@pytest.mark.parametrize("way", ["ordered", _SHARED])
def test_destroyed_groups_of_a_hybrid_mesh_end_though_a_model_was_trained_over_them(way: str) -> None:
    numbers, rank = torch.arange(4).view(2, 2), dist.get_rank()
    made = [dist.new_group(ranks.tolist()) for ranks in (*numbers.unbind(0), *numbers.unbind(1))]
    groups = [made[2 + rank % 2], made[rank // 2]]
    del made
    mesh = DeviceMesh.from_group(groups, current_device().type, mesh=numbers, mesh_dim_names=("replicate", "shard"))
    model = _trained("fully_shard", mesh, way)
    dist.barrier()
    assert _destroyed(groups) == [None, None]
    assert "Linear" in str(describe(model))
    dist.barrier()


@spmd(ranks=2)
@pytest.mark.parametrize("way", ["sockets", "ordered", _SHARED])
def test_a_step_over_a_destroyed_group_says_so(way: str) -> None:
    groups = [dist.new_group()]
    model = _trained("fully_shard", DeviceMesh.from_group(groups[0], current_device().type), way)
    dist.barrier()
    _destroyed(groups)
    with pytest.raises(CommunicationError, match="failed: this rank has destroyed its process group"):
        _step(model)
    dist.barrier()
