"""The way tests run on several ranks: that it reports, ends and recovers; knows no part of the
library.
"""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.helpers.meshes import shared_mesh
from tests.helpers.world import Pool, RanksFailed, current_device, spmd


@spmd(ranks=[1, 2, 3, 4])
def test_every_rank_of_a_world_of_that_size_runs_the_body() -> None:
    total = torch.full((1,), float(dist.get_rank() + 1), device=current_device())
    dist.all_reduce(total)
    size = dist.get_world_size()
    assert total.item() == size * (size + 1) / 2


@spmd(ranks=2)
@pytest.mark.parametrize("word", ["one", "two"])
def test_parameters_reach_the_body(word: str) -> None:
    assert word in ("one", "two")


def _identity(offset: int = 0) -> tuple[int, int, int]:
    return os.getpid(), dist.get_rank() + offset, torch.get_num_threads()


def test_workers_live_on_between_calls_and_values_come_back_by_rank(pool: Pool) -> None:
    first, second = pool.run(3, _identity), pool.run(3, _identity, offset=10)
    assert [pid for pid, _, _ in first] == [pid for pid, _, _ in second]
    assert [rank for _, rank, _ in second] == [10, 11, 12]
    assert [threads for _, _, threads in first] == [1, 1, 1]


def _hash() -> int:
    return hash("a word")


@pytest.mark.skipif("PYTHONHASHSEED" in os.environ, reason="hashes are asked to be alike")
def test_no_two_ranks_have_the_same_hashes_also_when_they_are_new(pool: Pool) -> None:
    for hashes in (pool.run(3, _hash, spoils=True), pool.run(3, _hash)):
        assert len(set(hashes)) == 3


def _raise_on(rank: int) -> None:
    left, right = dist.get_rank(), rank
    assert left != right, "as asked"


def test_a_failing_rank_is_reported_with_its_values_and_the_next_call_starts_clean(
    pool: Pool,
) -> None:
    with pytest.raises(RanksFailed) as caught:
        pool.run(2, _raise_on, 1)
    text = str(caught.value)
    assert text.startswith("1 of 2 ranks failed\n--- rank 1:\n")
    assert "AssertionError: as asked\nassert 1 != 1" in text
    assert [rank for _, rank, _ in pool.run(2, _identity)] == [0, 1]


def _raise_everywhere() -> None:
    raise ValueError("the same for all")


def test_ranks_that_fail_alike_share_one_report(pool: Pool) -> None:
    with pytest.raises(RanksFailed, match=r"2 of 2 ranks failed\n--- rank 0, 1:\n") as caught:
        pool.run(2, _raise_everywhere)
    assert str(caught.value).count("the same for all") == 2  # the source line and the message


def _wait_for_nobody(rank: int) -> None:
    if dist.get_rank() != rank:
        dist.all_reduce(torch.zeros(1))


def test_a_rank_that_hangs_is_stopped_and_says_where_it_stands(pool: Pool) -> None:
    with pytest.raises(RanksFailed) as caught:
        pool.run(2, _wait_for_nobody, 0, timeout=3.0)
    text = str(caught.value)
    assert "--- rank 1:" in text
    assert "it stands at" in text
    assert "in _wait_for_nobody" in text
    assert "--- rank 0:" not in text


def _raise_while_others_wait() -> None:
    if dist.get_rank() == 0:
        raise ValueError("left early")
    threading.Event().wait()


def test_a_rank_left_waiting_by_a_failed_one_is_stopped_too(pool: Pool) -> None:
    # Ends long before the call's own limit, which is beyond the session's.
    with pytest.raises(RanksFailed) as caught:
        pool.run(2, _raise_while_others_wait, timeout=600.0)
    text = str(caught.value)
    assert "ValueError: left early" in text
    assert "still running after another rank had failed" in text


def _die() -> None:
    print("last words", flush=True)
    os._exit(7)


def test_a_worker_that_dies_is_reported_with_its_last_words_and_replaced(pool: Pool) -> None:
    with pytest.raises(RanksFailed, match="died with exit code 7\nlast words"):
        pool.run(1, _die)
    assert [rank for _, rank, _ in pool.run(1, _identity)] == [0]


def _warn() -> None:
    warnings.warn("old habits", DeprecationWarning, stacklevel=1)


def test_a_warning_on_a_rank_is_an_error(pool: Pool) -> None:
    with pytest.raises(RanksFailed, match="DeprecationWarning: old habits"):
        pool.run(1, _warn)


def _skip() -> None:
    pytest.skip("nothing to see")


def test_a_skip_on_the_ranks_skips_the_test(pool: Pool) -> None:
    with pytest.raises(pytest.skip.Exception, match="nothing to see"):
        pool.run(2, _skip)


def _unpicklable() -> object:
    return threading.Lock()


def test_a_value_that_cannot_travel_is_reported_not_lost(pool: Pool) -> None:
    with pytest.raises(RanksFailed, match=r"cannot pickle '_thread\.lock'"):
        pool.run(1, _unpicklable)


def test_a_call_that_spoils_the_group_gets_workers_of_its_own(pool: Pool) -> None:
    before = [pid for pid, _, _ in pool.run(1, _identity, spoils=True)]
    after = [pid for pid, _, _ in pool.run(1, _identity)]
    assert before != after


_GROUPS: list[weakref.ref[Any]] = []  # what a rank has used


def _use_dtensors() -> None:
    mesh = shared_mesh("cpu", (dist.get_world_size(),), ("kept in caches",))
    _GROUPS.append(weakref.ref(mesh.get_group()))
    rows = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    assert (rows @ rows).redistribute(mesh, [Replicate()]).sum().item() == 64


def _groups_left() -> list[bool]:
    return [group() is not None for group in _GROUPS]


def test_groups_end_when_ranks_get_others_also_where_dtensors_were_redistributed(
    pool: Pool,
) -> None:
    pool.run(2, _use_dtensors, device="cpu")
    assert pool.run(2, _groups_left, device="cpu")[0][-1]
    assert not pool.run(3, _groups_left, device="cpu")[0][-1]
