"""Groups that the library makes are like those that they are made of, and need nobody but their own ranks."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable import replicate
from composable.device import private_groups
from composable.device.collectives import (
    backend_of,
    communicator_like,
    communicators_wrapped_by,
    subgroup_of,
    world_group,
)
from composable.device.private_groups import named_group, timeout_of
from tests.helpers.communicators import all_sockets
from tests.helpers.world import Pool, spmd

CPU = torch.device("cpu")


def _total(group: dist.ProcessGroup) -> float:
    number = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(number, group=group)
    return number.item()


def _after_groups_of_some_ranks() -> float:
    """Ranks 0 and 1 know of a group that rank 2 does not; torch names groups by how many a process knows."""
    if dist.get_rank() < 2:
        dist.new_group([0, 1], use_local_synchronization=True)
    return _total(communicator_like(world_group(), CPU))


def test_ranks_that_were_in_different_groups_before_find_each_other(pool: Pool) -> None:
    assert pool.run(3, _after_groups_of_some_ranks, group_timeout=20.0) == [3.0] * 3


@spmd(ranks=2)
def test_a_group_is_made_anew_after_one_like_it_was_destroyed() -> None:
    for _ in range(3):
        group = communicator_like(world_group(), CPU)
        assert _total(group) == 1.0
        dist.destroy_process_group(group)


def _stages() -> tuple[str, list[str]]:
    """The default group is bound to a device, and one of two stages annotates more than the other one."""
    rank, world = dist.get_rank(), world_group()
    stages = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    torch.manual_seed(0)
    stage = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plain = copy.deepcopy(stage)
    split: list[Any] = []
    world.bound_device_id = torch.device("cuda", 0)
    try:
        with (
            mock.patch.object(dist.distributed_c10d, "_get_split_source", split.append),
            communicators_wrapped_by(all_sockets),
        ):
            if rank >= 2:
                subgroup_of(stages[1], 1, CPU)
                for part in stage:
                    replicate(part, mesh=stages[1])
            tied = replicate(nn.Linear(4, 4))
        assert world.bound_device_id == torch.device("cuda", 0)
    finally:
        world.bound_device_id = None
    assert split == [], "to split a communicator off another one takes all ranks of that"
    x = torch.full((1, 4), float(rank))
    for model in (stage, plain, tied):
        model(x).square().sum().backward()
    if rank >= 2:
        for ours, theirs in zip(stage.parameters(), plain.parameters(), strict=True):
            assert theirs.grad is not None
            assert ours.grad is not None
            dist.all_reduce(theirs.grad, group=stages[1])
            torch.testing.assert_close(ours.grad, theirs.grad / 2)
    made = [group.group_desc for group in dist.distributed_c10d._world.pg_names if "composable" in group.group_desc]
    return tied.weight.device.type, made


def test_stages_of_which_some_ranks_only_annotate_need_no_others(pool: Pool) -> None:
    """On a host each replicated unit has a group of its own, on an accelerator there is one for each group of ranks."""
    sums, gathers = "composable sums of replicated modules", "composable gathers of post-forward shards"
    found = pool.run(4, _stages, group_timeout=60.0)
    assert found[:2] == [(where, [sums]) for where, _ in found[:2]]
    assert found[2:] == [(where, [gathers, *[sums] * (3 if where == "cpu" else 2)]) for where, _ in found[2:]]


class _Copied:
    """Options of a backend that can split."""

    def __init__(self, split_from: object) -> None:
        self.is_high_priority_stream = True
        self.split_from = split_from
        self._timeout = private_groups.timedelta(seconds=7)


@spmd(ranks=1)
def test_a_group_has_the_backend_and_the_options_of_what_it_is_made_of() -> None:
    like = dist.new_group([0], backend="fake")
    assert backend_of(world_group(), CPU) == "gloo"
    options, told = _Copied(split_from=None), []
    real = dist.distributed_c10d._new_process_group_helper

    def noted(*args: Any, **kwargs: Any) -> Any:
        told.append(kwargs.pop("backend_options"))
        return real(*args, **kwargs)

    options.split_from = "a parent whose ranks are not all of the group"
    with (
        mock.patch.object(dist.distributed_c10d, "_new_process_group_helper", noted),
        mock.patch.object(dist.ProcessGroup, "_get_backend", return_value=SimpleNamespace(options=options)),
    ):
        made = named_group([0], "composable_test", "composable test", like=like, device=CPU)
    assert made is not None
    assert backend_of(made, CPU) == "fake"
    assert made.group_desc == "composable test"
    assert [each.is_high_priority_stream for each in told] == [True]
    assert told[0] is not options, "making a group changes the options that it is given"
    assert told[0].split_from is None
    assert timeout_of(communicator_like(world_group(), CPU), CPU) == timeout_of(world_group(), CPU)


@pytest.mark.parametrize("missing", ["helper", "none of them in Python"])
@spmd(ranks=2)
def test_where_torch_has_no_such_way_groups_are_made_as_torch_makes_them(missing: str) -> None:
    c10d, world = dist.distributed_c10d, world_group()
    gone = (
        mock.patch.object(c10d, "_new_process_group_helper", None)
        if missing == "helper"
        else mock.patch.object(dist.ProcessGroup, "new_group", None, create=True)
    )
    with gone:
        assert named_group([0, 1], "composable_test", "composable test", like=world, device=CPU) is None


@spmd(ranks=2)
def test_a_group_that_could_not_be_made_on_one_rank_can_be_made_later() -> None:
    if dist.get_rank() == 1:
        refused = mock.patch("composable.device.collectives.process_groups.named_group", side_effect=RuntimeError("refused"))
        with refused, pytest.raises(RuntimeError, match="refused"):
            communicator_like(world_group(), CPU)
    assert _total(communicator_like(world_group(), CPU)) == 1
