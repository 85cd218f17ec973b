"""Each group gets the communicator that serves it best, and groups made of a group are like it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable import fully_shard
from composable.device.collectives import (
    Communicator,
    GatherPart,
    LocalCommunicator,
    PointToPointCommunicator,
    ReducePart,
    TagSequence,
    backend_of,
    communicator_like,
    communicator_of,
    communicators_wrapped_by,
    process_groups,
    subgroup_of,
    world_group,
)
from composable.device.memory import MemoryPool
from composable.device.private_groups import timeout_of
from tests.helpers.communicators import all_shared
from tests.helpers.world import Pool, spmd

CPU = torch.device("cpu")


def test_without_a_group_a_communicator_talks_to_nobody() -> None:
    communicator = communicator_of(None, CPU)
    assert isinstance(communicator, LocalCommunicator)
    assert (communicator.rank, communicator.size) == (0, 1)
    shard, whole, out = torch.arange(3.0), torch.zeros(3), torch.zeros(3)
    communicator.all_gather(communicator.prepare([GatherPart(shard, whole, 3)]), label="", tags=TagSequence(0)).wait()
    communicator.reduce_scatter([ReducePart(shard, 3, out)], scratch=MemoryPool(), label="", tags=TagSequence(0)).wait()
    assert whole.tolist() == out.tolist() == [0.0, 1.0, 2.0]
    tensor = torch.ones(2)
    communicator.all_reduce(tensor, label="").wait()
    communicator.broadcast(tensor, label="")
    assert tensor.tolist() == [1.0, 1.0]
    assert communicator.all_gather_ints([4, 5], label="") == [[4, 5]]
    assert communicator.min_max([4, 5], label="") == ([4, 5], [4, 5])
    assert communicator.tags.open().next_tag() >= 0


@pytest.mark.host
@spmd(ranks=2)
def test_gloo_groups_on_one_host_use_its_memory_and_a_rank_alone_uses_nothing() -> None:
    assert backend_of(world_group(), CPU) == "gloo"
    for device in (CPU, torch.device("meta")):
        all_shared(communicator_of(world_group(), device))
    alone = [dist.new_group([0]), dist.new_group([1])][dist.get_rank()]
    assert isinstance(communicator_of(alone, CPU), LocalCommunicator)


@spmd(ranks=2)
def test_wrappers_apply_in_their_scope_only_the_first_one_innermost() -> None:
    wraps: list[str] = []

    def wrapper(name: str) -> Callable[[Communicator], Communicator]:
        def wrap(communicator: Communicator) -> Communicator:
            wraps.append(name)
            return communicator

        return wrap

    with communicators_wrapped_by(wrapper("one")), communicators_wrapped_by(wrapper("other")):
        communicator_of(world_group(), CPU)
    communicator_of(world_group(), CPU)
    assert wraps == ["one", "other"]
    with pytest.raises(ZeroDivisionError), communicators_wrapped_by(wrapper("one")):
        raise ZeroDivisionError
    communicator_of(world_group(), CPU)
    assert wraps == ["one", "other"]


@spmd(ranks=4)
def test_neighbours_are_the_ranks_next_to_each_other() -> None:
    rank = dist.get_rank()
    pair = subgroup_of(world_group(), 2, CPU)
    assert dist.get_process_group_ranks(pair) == [[0, 1], [2, 3]][rank // 2]
    assert subgroup_of(world_group(), 2, CPU) is pair, "made once"
    assert dist.get_process_group_ranks(subgroup_of(world_group(), 4, CPU)) == [0, 1, 2, 3]
    communicator = communicator_of(pair, CPU)
    assert (communicator.size, communicator.rank) == (2, rank % 2)
    assert communicator.all_gather_ints([rank], label="") == [[rank // 2 * 2], [rank // 2 * 2 + 1]]


def _timeouts() -> list[float]:
    groups = [world_group(), subgroup_of(world_group(), 2, CPU), communicator_like(world_group(), CPU)]
    found = [timeout_of(group, CPU) for group in groups]
    return [timeout.total_seconds() for timeout in found if timeout is not None]


def test_groups_made_of_a_group_give_up_when_it_does(pool: Pool) -> None:
    assert pool.run(2, _timeouts, group_timeout=45.0) == [[45.0] * 3] * 2


@spmd(ranks=2)
def test_a_second_communicator_has_the_same_ranks_and_its_own_order() -> None:
    """One rank uses the first then the second, the other the other way round; one communicator would mix them up."""
    twin = communicator_like(world_group(), CPU)
    assert twin is not world_group()
    assert dist.get_process_group_ranks(twin) == dist.get_process_group_ranks(world_group())
    communicators = [PointToPointCommunicator(world_group(), CPU), PointToPointCommunicator(twin, CPU)]
    tensors = [torch.tensor([1.0]), torch.tensor([10.0])]
    order = [0, 1] if dist.get_rank() == 0 else [1, 0]
    works = [communicators[i].all_reduce(tensors[i], label="") for i in order]
    for work in works:
        work.wait()
    assert [t.item() for t in tensors] == [2.0, 20.0]


def _use_in_any_order(backend: str) -> list[float]:
    group = world_group()
    switches = {}
    if backend == "sockets":
        group = dist.new_group()
        switches["COMPOSABLE_SHARED_MEMORY"] = "0"
    with mock.patch.dict(os.environ, switches):
        communicators = [communicator_of(group, CPU, dedicated=True) for _ in range(2)]
    assert [isinstance(communicator, PointToPointCommunicator) for communicator in communicators] == [backend == "sockets"] * 2
    tensors = [torch.tensor([1.0]), torch.tensor([10.0])]
    order = [0, 1] if dist.get_rank() == 0 else [1, 0]
    works = {i: communicators[i].all_reduce(tensors[i], label="") for i in order}
    for i in range(2):
        works[i].wait()
        assert communicators[i].all_gather_ints([i], label="") == [[i], [i]]
    return [tensor.item() for tensor in tensors]


@pytest.mark.parametrize("backend", [pytest.param("shared memory", marks=pytest.mark.host), "sockets"])
def test_communicators_that_are_apart_may_be_used_in_any_order(pool: Pool, backend: str) -> None:
    assert pool.run(2, _use_in_any_order, backend) == [[2.0, 20.0]] * 2


@pytest.mark.host
def test_ranks_of_one_host_need_no_second_communicator(pool: Pool) -> None:
    assert pool.run(2, _groups_made_for_a_dedicated_communicator) == [0, 0]


def _groups_made_for_a_dedicated_communicator() -> int:
    communicator_of(world_group(), CPU)
    with mock.patch.object(process_groups, "named_group", side_effect=AssertionError) as made:
        communicator_of(world_group(), CPU, dedicated=True)
    return made.call_count


# --- groups written in Python -------------------------------------------------------------------------------------------

_CALLS: list[str] = []


class _Wrapped(dist.ProcessGroup):
    """What torch lets backends return in place of one of its own: all calls go on to another group."""

    group_name = group_desc = "wrapped"

    def __init__(self, inner: Any) -> None:
        super().__init__(inner.rank(), inner.size())
        self.inner = inner

    def getBackendName(self) -> str:
        return "wrapped"

    def _set_group_name(self, name: str) -> None:
        self.group_name = name

    def _set_group_desc(self, description: str) -> None:
        self.group_desc = description


def _passed_on(name: str) -> Callable[..., Any]:
    def call(self: _Wrapped, *args: Any, **kwargs: Any) -> Any:
        _CALLS.append(name)
        return getattr(self.inner, name)(*args, **kwargs)

    return call


for _name in (
    "all_gather_single",
    "_allgather_base",
    "reduce_scatter_single",
    "_reduce_scatter_base",
    "allreduce",
    "allgather",
):
    if hasattr(dist.ProcessGroup, _name):
        setattr(_Wrapped, _name, _passed_on(_name))


def _train_over_a_group_in_python() -> tuple[list[float], bool]:
    def wrap(store: object, rank: int, size: int, timeout: object) -> _Wrapped:
        return _Wrapped(world_group())

    dist.Backend.register_backend("wrapped", wrap, devices=["cpu"])  # type: ignore[arg-type]
    model = nn.Linear(3, 2, bias=False)
    nn.init.ones_(model.weight)
    fully_shard(model, mesh=dist.new_group([0, 1], backend="wrapped"))
    model(torch.ones(1, 3)).sum().backward()
    assert model.weight.grad is not None
    own: Any = model.weight.grad
    return own.to_local().flatten().tolist(), all(any(kind in name for name in _CALLS) for kind in ("gather", "scatter"))


def test_a_group_written_in_python_is_asked_for_every_collective(pool: Pool) -> None:
    assert pool.run(2, _train_over_a_group_in_python, spoils=True) == [([1.0, 1.0, 1.0], True)] * 2
