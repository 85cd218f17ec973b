"""Each group gets the comm that serves it best, always the same one; groups made of a group are
like it.
"""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable
from copy import deepcopy
from typing import Any
from unittest import mock
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from composable.comm import backends
from composable.comm.backends import (
    GenericComm,
    LocalComm,
    PointToPointComm,
    comm_of,
    comms_wrapped_by,
    group_of_all,
    subgroup_of,
    world_group,
)
from composable.comm.base import Comm, backend_of
from composable.comm.launch import Launch
from composable.comm.mesh_info import mesh_info_of_replicas, mesh_info_of_shards
from composable.errors import AnnotationError
from composable.torch_private import timeout_of
from tests.helpers.communicators import Around
from tests.helpers.world import Pool, spmd

CPU = torch.device("cpu")


@spmd(ranks=2)
def test_a_group_has_one_comm_and_a_rank_alone_has_one_that_calls_nothing() -> None:
    assert backend_of(world_group(), CPU) == "gloo"
    comm = comm_of(world_group(), CPU)
    assert isinstance(comm, PointToPointComm)
    assert comm.group is world_group()
    assert comm_of(world_group(), torch.device("meta")) is comm
    alone = [dist.new_group([0]), dist.new_group([1])][dist.get_rank()]
    assert isinstance(comm_of(alone, CPU), LocalComm)
    assert comm_of(alone, CPU) is comm_of(None, CPU)
    with mock.patch.object(backends, "PAIRS_UP_TO", 1):
        assert type(comm_of(dist.new_group([0, 1]), CPU)) is GenericComm


@spmd(ranks=2)
def test_a_comm_does_not_keep_its_group() -> None:
    group = dist.new_group([0, 1])
    comm = comm_of(group, CPU)
    comm.min_max([1], Launch(""))
    watched = ref(group)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert watched() is None
    with pytest.raises(RuntimeError, match="destroyed its process group"):
        assert comm.group


@spmd(ranks=2)
def test_wrappers_apply_in_their_scope_only_the_first_one_innermost() -> None:
    wraps: list[str] = []

    def wrapper(name: str) -> Callable[[Comm], Comm]:
        def wrap(comm: Comm) -> Comm:
            wraps.append(name)
            return Around(comm)

        return wrap

    with comms_wrapped_by(wrapper("one")), comms_wrapped_by(wrapper("other")):
        comm = comm_of(world_group(), CPU)
        assert comm_of(world_group(), CPU) is comm
        assert isinstance(comm, Around)
    assert isinstance(comm_of(world_group(), CPU), PointToPointComm)
    assert wraps == ["one", "other"]
    with pytest.raises(ZeroDivisionError), comms_wrapped_by(wrapper("one")):
        raise ZeroDivisionError
    assert isinstance(comm_of(world_group(), CPU), PointToPointComm)


# --- groups made of groups ----------------------------------------------------------------------


@spmd(ranks=4)
def test_subgroups_hold_the_ranks_next_to_each_other() -> None:
    rank = dist.get_rank()
    pair = subgroup_of(world_group(), 2, CPU)
    assert dist.get_process_group_ranks(pair) == [[0, 1], [2, 3]][rank // 2]
    assert subgroup_of(world_group(), 2, CPU) is pair, "made once"
    assert dist.get_process_group_ranks(subgroup_of(world_group(), 4, CPU)) == [0, 1, 2, 3]
    assert comm_of(pair, CPU).all_gather_ints([rank], Launch("")) == [
        [rank // 2 * 2],
        [rank // 2 * 2 + 1],
    ]


def _made_of_groups() -> list[float]:
    world = world_group()
    world.bound_device_id = torch.device("cuda", 0)  # as `init_process_group(device_id=...)` does
    split: list[Any] = []
    try:
        with mock.patch.object(dist.distributed_c10d, "_get_split_source", split.append):
            made = subgroup_of(world, 2, CPU)
        assert world.bound_device_id == torch.device("cuda", 0)
    finally:
        world.bound_device_id = None
    assert split in (
        [],
        [world],
    ), "asked for, and answered with None, as the default group is bound to no device then"
    assert made.bound_device_id is None
    assert made.group_desc == "composable: all-gathers of post-forward shards"
    found = [timeout_of(group, CPU) for group in (world, made)]
    return [timeout.total_seconds() for timeout in found if timeout is not None]


def test_groups_made_of_a_group_have_its_timeout_and_need_no_other_ranks(pool: Pool) -> None:
    assert pool.run(4, _made_of_groups, group_timeout=45.0) == [[45.0] * 2] * 4


@spmd(ranks=2)
def test_a_group_has_the_backend_of_the_one_that_it_is_made_of() -> None:
    import torch.testing._internal.distributed.fake_pg  # noqa: F401, PLC0415 - registers the backend

    like = dist.new_group([0, 1], backend="fake")
    assert backend_of(subgroup_of(like, 1, CPU), CPU) == "fake"


# --- meshes -------------------------------------------------------------------------------------


@spmd(ranks=4)
def test_a_mesh_info_has_a_comm_for_each_role() -> None:
    world = comm_of(world_group(), CPU)
    flat = init_device_mesh("cpu", (4,))
    sharded, replicated = (
        mesh_info_of_shards(flat, CPU, post_forward_ranks=2),
        mesh_info_of_replicas(flat, CPU),
    )
    assert (sharded.shard, sharded.all, sharded.replicate) == (world, world, None)
    assert sharded.post_forward is not None
    assert sharded.post_forward.size == 2
    assert sharded.replicas == []
    assert isinstance(replicated.shard, LocalComm)
    assert replicated.all is replicated.replicate is world
    hybrid = mesh_info_of_shards(init_device_mesh("cpu", (2, 2)), CPU, shard_dim=1)
    rank = dist.get_rank()
    assert hybrid.replicate is not None
    assert hybrid.all is world
    assert hybrid.shard.all_gather_ints([rank], Launch("")) == [
        [rank // 2 * 2],
        [rank // 2 * 2 + 1],
    ]
    assert hybrid.replicate.all_gather_ints([rank], Launch("")) == [[rank % 2], [rank % 2 + 2]]
    assert hybrid.replicas == [[0, 1], [2, 3]]
    one_row = mesh_info_of_shards(init_device_mesh("cpu", (4, 1)), CPU, shard_dim=1)
    assert isinstance(one_row.shard, LocalComm)
    assert one_row.all is one_row.replicate is world


@spmd(ranks=3)
def test_all_ranks_of_a_mesh_that_are_not_all_of_the_job_get_a_group() -> None:
    if dist.get_rank() < 2:
        one, other = (
            dist.new_group([dist.get_rank()], use_local_synchronization=True) for _ in range(2)
        )
        both = group_of_all([one, other], [1, 0], CPU)
        assert dist.get_process_group_ranks(both) == [0, 1]
        assert comm_of(both, CPU).min_max([dist.get_rank()], Launch("")) == ([0], [1])


@spmd(ranks=2)
def test_a_mesh_info_over_ranks_can_be_neither_copied_nor_pickled() -> None:
    alone, among_all = (
        mesh_info_of_replicas(None, CPU),
        mesh_info_of_shards(init_device_mesh("cpu", (2,)), CPU),
    )
    assert pickle.loads(pickle.dumps(alone)).all.size == 1
    assert deepcopy(among_all) is among_all
    with pytest.raises(
        AnnotationError, match="holds process groups and cannot be pickled; save its state_dict"
    ):
        pickle.dumps(among_all)


# --- groups written in Python -------------------------------------------------------------------

_CALLS: list[str] = []


class _Wrapped(dist.ProcessGroup):
    """What torch lets backends return in place of one of its own: all calls go on to another
    group.
    """

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


def _over_a_group_in_python() -> tuple[list[float], list[str]]:
    def wrap(store: object, rank: int, size: int, timeout: object) -> _Wrapped:
        return _Wrapped(world_group())

    dist.Backend.register_backend("wrapped", wrap, devices=["cpu"])  # type: ignore[arg-type]
    comm = comm_of(dist.new_group([0, 1], backend="wrapped"), CPU)
    whole, out = torch.zeros(2), torch.zeros(1)
    comm.all_gather([(whole, torch.ones(1))], Launch("")).wait()
    comm.reduce_scatter([(out, whole)], Launch("")).wait()
    comm.all_reduce([out], Launch("")).wait()
    return out.tolist(), _CALLS


def test_a_group_written_in_python_is_asked_for_every_collective(pool: Pool) -> None:
    names = ["all_gather_single", "reduce_scatter_single"]
    if not hasattr(dist.ProcessGroup, "all_gather_single"):
        names = ["_allgather_base", "_reduce_scatter_base"]
    assert pool.run(2, _over_a_group_in_python, spoils=True) == [([4.0], [*names, "allreduce"])] * 2
