"""Ranks of one host that launch different collectives are notified at the launch, with what each of
them launched, also where messages of different kinds pass each other.
"""

from __future__ import annotations

import logging
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Final
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from composable import fully_shard
from composable.comm import ledger
from composable.comm.backends import comm_of, world_group
from composable.comm.launch import Launch
from composable.comm.ledger import Ledger, SharedLaunches, ledger_of
from tests.helpers.world import TIMEOUT, Pool, RanksFailed, current_device, spmd

CPU: Final = torch.device("cpu")


def _gather(label: str = "all-gather of unit 'a'", numel: int = 2) -> Any:
    comm = comm_of(world_group(), CPU)
    return comm.all_gather([(torch.empty(numel * comm.size), torch.ones(numel))], Launch(label))


def _sum(label: str = "sum of unit 'b'") -> Any:
    return comm_of(world_group(), CPU).all_reduce([torch.ones(4)], Launch(label))


def _failure(pool: Pool, function: Callable[..., None], ranks: int = 2) -> str:
    with pytest.raises(RanksFailed) as failed:
        # another timeout: a group of its own, whose launches count from 0
        pool.run(ranks, function, device="cpu", group_timeout=TIMEOUT - 1)
    return str(failed.value)


# --- faults -------------------------------------------------------------------------------------


def _swapped() -> None:
    both = (_gather, _sum) if dist.get_rank() == 0 else (_sum, _gather)
    for work in [launch() for launch in both]:
        work.wait()


def test_launches_of_different_kinds_in_another_order_are_refused_with_both_sequences(
    pool: Pool,
) -> None:
    text = _failure(pool, _swapped)
    assert (
        "RanksDisagreeError: the ranks launched different collectives in the group of ranks 0, 1."
        " The first difference is in launch 1: rank 0: all-gather of unit 'a' (all_gather, 16"
        " bytes); rank 1: sum of unit 'b' (all_reduce, 16 bytes). All ranks must run the same"
        " modules in the same order, forward and backward.\n"
    ) in text
    assert "Rank 0 launched from 1 on: all-gather of unit 'a' (all_gather, 16 bytes)" in text
    assert "Rank 1 launched from 1 on: sum of unit 'b' (all_reduce, 16 bytes)" in text


@pytest.mark.launches_not_compared("shows that messages of two kinds pass each other on a host")
def test_the_same_program_ends_unseen_where_launches_are_not_compared(pool: Pool) -> None:
    pool.run(2, _swapped, device="cpu", spoils=True)


def _of_other_sizes() -> None:
    _sum()
    _gather(numel=2 + dist.get_rank())


def test_launches_of_different_sizes_are_refused(pool: Pool) -> None:
    text = _failure(pool, _of_other_sizes)
    assert "rank 0: all-gather of unit 'a' (all_gather, 16 bytes); rank 1: all-gather" in text
    assert "(all_gather, 24 bytes). All ranks" in text


def _one_more(then: bool) -> None:
    _sum().wait()
    if dist.get_rank() == 1:
        _gather("all-gather of unit 'c'")
    if then:
        _gather()


def test_a_launch_of_one_rank_alone_is_refused_at_the_next_one_of_the_others(pool: Pool) -> None:
    with pytest.raises(RanksFailed) as failed:
        pool.run(2, _one_more, True, device="cpu")
    text = str(failed.value)
    assert "rank 0: all-gather of unit 'a' (all_gather, 16 bytes); rank 1: all-gather of" in text
    assert "Rank 1 launched from 1 on: sum of unit 'b'" in text


def test_a_launch_of_one_rank_alone_at_the_end_of_a_test_is_found_there(pool: Pool) -> None:
    said = (
        r"different collectives in a group:\nrank 0 2, the last ones .*\nrank 1 3, the last ones "
    )
    with pytest.raises(RanksFailed, match=said):
        pool.run(2, _one_more, False, device="cpu")


def _torchs_own() -> None:
    numbers = torch.ones(2)
    if dist.get_rank() == 0:
        dist.all_reduce(numbers, async_op=True)
    else:
        dist.broadcast(numbers, 0, async_op=True)


def _dtensors() -> None:
    mesh = init_device_mesh("cpu", (2,))
    tensor = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    if dist.get_rank() == 0:
        tensor.full_tensor()
    else:
        _sum()


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (_torchs_own, "rank 0: torch's allreduce, 8 bytes; rank 1: torch's broadcast, 8 bytes."),
        (_dtensors, "rank 1: sum of unit 'b' (all_reduce, 16 bytes)."),
    ],
    ids=["all_reduce and broadcast", "full_tensor and a comm"],
)
def test_collectives_of_torch_are_compared_too(
    pool: Pool, program: Callable[[], None], said: str
) -> None:
    assert said in _failure(pool, program)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.backwards = False

    def forward(self, x: Tensor) -> Tensor:
        for block in reversed(self.blocks) if self.backwards else self.blocks:
            x = x + block(x)
        return x


def _in_another_order_later() -> None:
    torch.manual_seed(0)
    model = fully_shard(_Model(), policy={nn.Linear})
    for step in range(3):
        model.backwards = step == 2 and dist.get_rank() == 1
        model(torch.ones(2, 5)).sum().backward()


def test_modules_that_a_rank_runs_in_another_order_later_are_named(pool: Pool) -> None:
    text = _failure(pool, _in_another_order_later)
    assert "RanksDisagreeError: the ranks launched different collectives" in text
    assert "rank 0: all-gather of unit 'blocks." in text
    assert "timed out" not in text.lower()


# --- legal programs -----------------------------------------------------------------------------


@spmd(ranks=4)
def test_each_group_has_a_count_of_its_own() -> None:
    mesh = init_device_mesh(current_device().type, (2, 2), mesh_dim_names=("one", "two"))
    for name, times in (("one", 1 + mesh.get_local_rank("two")), ("two", 2), ("one", 1)):
        comm = comm_of(mesh.get_group(name), current_device())
        for _ in range(times):
            comm.min_max([1], Launch(f"of dimension {name}"))
    dist.all_gather_object([None] * 4, "x" * (1 + dist.get_rank()))


@spmd(ranks=2)
def test_blocks_of_different_sizes_go_round() -> None:
    rank = dist.get_rank()
    sent = torch.ones(1 + rank + 2 - rank, device=current_device())
    sizes = [1 + rank, 2 - rank]
    received = sent.new_empty(2 * (1 + rank))
    dist.all_to_all_single(received, sent, [1 + rank, 1 + rank], [1, 2])
    assert sum(sizes) == 3


@spmd(ranks=2)
def test_a_group_that_is_made_again_starts_anew() -> None:
    for _ in range(2):
        group = dist.new_group([0, 1], group_desc="again")
        comm = comm_of(group, current_device())
        comm.min_max([1], Launch("first launch"))
        shared = ledger_of(group).shared
        assert shared is not None
        assert shared.count in (1, 2)  # with the one of torch's that carries it
        dist.destroy_process_group(group)


# --- what ranks share ---------------------------------------------------------------------------


def _seats(ranks: int = 2) -> list[SharedLaunches]:
    memory = mmap.mmap(-1, 1 << 20)
    return [SharedLaunches(memory, rank, ranks) for rank in range(ranks)]


def test_the_second_of_two_ranks_is_notified_and_the_first_at_its_next_launch() -> None:
    one, other = _seats()
    assert [one.write("a"), other.write("a"), one.write("b"), one.write("c")] == [{}] * 4
    assert other.write("x") == {0: (3, ["a", "b", "c"]), 1: (2, ["a", "x"])}
    assert one.write("d") == {0: (4, ["a", "b", "c", "d"]), 1: (2, ["a", "x"])}


def test_a_rank_that_has_not_come_as_far_is_no_part_of_the_report() -> None:
    one, other, third = _seats(3)
    third.write("a")
    for text in ("a", "b"):
        one.write(text)
    other.write("a")
    assert other.write("x").keys() == {0, 1}


@mock.patch.object(ledger, "ENTRIES", 4)
def test_a_rank_further_ahead_than_the_ring_is_reported_and_compared_when_it_is_nearer() -> None:
    one, other = _seats()
    for number in range(6):
        one.write(f"{number}")
    assert not other.write("not 0")
    assert other.ahead == [0]
    assert not other.write("1")
    assert other.write("2") == {0: (6, ["2", "3", "4", "5"]), 1: (3, ["not 0", "1", "2"])}
    assert other.ahead == []


def test_long_texts_that_start_alike_are_not_alike() -> None:
    one, other = _seats()
    one.write("unit " * 100 + "a")
    found = other.write("unit " * 100 + "b")
    assert found[0][1] != found[1][1]


@spmd(ranks=2)
def test_the_distance_is_logged_once() -> None:
    notes = Ledger(dist.new_group([0, 1]))
    with (
        mock.patch.object(ledger, "shared_launches") as made,
        mock.patch.object(logging.getLogger("composable"), "warning") as warned,
    ):
        made.return_value.write.return_value = {}
        made.return_value.ahead = [1]
        for _ in range(2):
            notes.note(Launch("sum"))
    assert warned.call_count == 1


@spmd(ranks=1)
def test_a_group_without_ranks_elsewhere_shares_nothing() -> None:
    assert ledger.shared_launches(world_group()) is None


@pytest.mark.parametrize("setting", ["1", "0"])
def test_users_compare_from_the_first_launch_if_they_debug(setting: str) -> None:
    program = "from composable.comm import ledger; print(ledger._compared)"
    said = {**os.environ, ledger.DEBUG_VARIABLE: setting}
    done = subprocess.run([sys.executable, "-c", program], env=said, stdout=subprocess.PIPE)
    assert done.stdout.decode().strip() == str(setting == "1")
