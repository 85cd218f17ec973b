"""Blocks of shared memory: filled by one rank, read by others, filled again only when everybody has finished."""

from __future__ import annotations

import errno
import os
import tempfile
from dataclasses import astuple, replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from composable.device.collectives import GatherPart, PointToPointCommunicator, ReducePart, Steps, communicator_of, world_group
from composable.device.collectives.host.communicator import HostCommunicator, host_communicator
from composable.device.collectives.host.shared_memory import GRAIN, SPARE_BLOCKS, Arena, Block, Identity, Outbox, Window
from composable.device.memory import MemoryPool
from tests.helpers.world import Pool, spmd

CPU = torch.device("cpu")

pytestmark = pytest.mark.host


# --- arenas, blocks and windows ---------------------------------------------------------------------------------------


def test_a_window_shows_what_a_block_holds_also_after_it_grew() -> None:
    arena = Arena()
    block, window = Block(arena, 10), Window(arena.identity)
    assert block.nbytes == GRAIN, "whole huge pages"
    block.memory[:3] = torch.tensor([1, 2, 3], dtype=torch.uint8)
    assert window.view(block.start, block.nbytes)[:3].tolist() == [1, 2, 3]
    block.memory[1] = 7
    assert window.view(block.start, block.nbytes)[:3].tolist() == [1, 7, 3], "the same memory, not a copy"
    block.make_room(GRAIN + 1)
    assert block.nbytes == 2 * GRAIN
    block.memory[GRAIN] = 9
    assert window.view(block.start, block.nbytes)[GRAIN].item() == 9


def test_blocks_of_one_arena_never_overlap_and_what_was_given_back_is_used_again() -> None:
    arena = Arena()
    blocks = [Block(arena, nbytes) for nbytes in (1, GRAIN, 3 * GRAIN, GRAIN + 1)]
    ends = [block.start + block.nbytes for block in blocks]
    assert [block.start for block in blocks] == [GRAIN, *ends[:-1]]
    blocks[0].make_room(2 * GRAIN)
    assert blocks[0].start == ends[-1]
    assert Block(arena, 1).start == GRAIN


def test_nobody_can_write_to_another_ranks_memory() -> None:
    arena = Arena()
    block, window = Block(arena, 10), Window(arena.identity)
    address = window.view(block.start, block.nbytes).data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access, *_ = line.split()
        start, end = (int(half, 16) for half in span.split("-"))
        if start <= address < end:
            assert access == "r--s"
            return
    pytest.fail("the window is not mapped")


def test_a_window_outlives_the_arena() -> None:
    arena = Arena()
    block, window = Block(arena, 10), Window(arena.identity)
    block.memory[0] = 5
    start, nbytes = block.start, block.nbytes
    del arena, block
    assert window.view(start, nbytes)[0].item() == 5


def test_memory_that_is_missing_is_an_error_and_the_block_comes_back() -> None:
    outbox = Outbox(Arena())
    block = _lent(outbox, 100, _Readers(finished=True))
    with (
        mock.patch.object(os, "posix_fallocate", side_effect=OSError(errno.ENOSPC, "No space left on device")),
        pytest.raises(OSError, match="No space left"),
    ):
        outbox.take(10 * GRAIN)
    assert outbox.take(10 * GRAIN) is block


def test_an_arena_is_recognised_and_no_other_is_taken_for_it() -> None:
    arena = Arena()
    identity = arena.identity
    Window(identity)
    with pytest.raises(OSError, match="somebody else's"):
        Window(replace(identity, mark=identity.mark + 1))
    with pytest.raises(OSError, match="No such file"):
        Window(replace(identity, descriptor=1 << 20))
    with pytest.raises(OSError, match="another host's numbers"):
        Window(replace(identity, host=identity.host + 1))
    with tempfile.TemporaryFile() as file, pytest.raises(OSError, match="no arena"):
        Window(replace(identity, descriptor=file.fileno()))
    assert Identity(*astuple(identity)) == identity, "travels as integers"


# --- the outbox -------------------------------------------------------------------------------------------------------


class _Readers:
    def __init__(self, *, finished: bool = False) -> None:
        self.waited = 0
        self.are_finished = finished

    def finished(self) -> bool:
        return self.are_finished

    def wait(self) -> None:
        self.waited += 1


def _lent(outbox: Outbox, nbytes: int, readers: _Readers, *, received: bool = True, in_step: bool = True) -> Block:
    block = outbox.take(nbytes)
    outbox.lend(block, readers, in_step=in_step)
    block.received = received
    return block


def test_a_block_is_filled_again_only_after_its_readers_were_waited_for() -> None:
    outbox, readers = Outbox(Arena()), [_Readers() for _ in range(SPARE_BLOCKS + 1)]
    blocks = [_lent(outbox, 100, each) for each in readers]
    assert len({id(block) for block in blocks}) == SPARE_BLOCKS + 1, "none is taken away from its readers"
    assert [each.waited for each in readers] == [0] * (SPARE_BLOCKS + 1)
    assert outbox.take(100) is blocks[0]
    assert [each.waited for each in readers] == [1] + [0] * SPARE_BLOCKS


def test_a_block_that_nobody_reads_any_more_is_filled_again_at_once() -> None:
    outbox, readers = Outbox(Arena()), _Readers()
    first = _lent(outbox, 100, readers)
    second = _lent(outbox, 100, _Readers(finished=True))
    assert second is not first
    assert _lent(outbox, 100, _Readers()) is second
    readers.are_finished = True
    assert outbox.take(100) is first
    assert readers.waited == 0
    assert outbox.nbytes == GRAIN, "what was taken is not the outbox's; what is read is"


def test_nobody_waits_for_readers_of_a_collective_that_it_has_not_finished_itself() -> None:
    """They may wait for this very rank: a new block is made instead."""
    outbox, readers = Outbox(Arena()), _Readers()
    blocks = [_lent(outbox, 100, readers, received=False) for _ in range(SPARE_BLOCKS + 3)]
    assert len({id(block) for block in blocks}) == SPARE_BLOCKS + 3
    assert readers.waited == 0


def test_nobody_waits_for_readers_who_may_read_at_another_point_of_their_program() -> None:
    """What they do before that may wait for this very rank."""
    outbox, readers = Outbox(Arena()), _Readers()
    blocks = [_lent(outbox, 100, readers, in_step=False) for _ in range(SPARE_BLOCKS + 3)]
    assert len({id(block) for block in blocks}) == SPARE_BLOCKS + 3
    assert readers.waited == 0
    readers.are_finished = True
    assert outbox.take(100) in blocks, "they come back all the same"


def test_a_collective_that_nobody_finishes_does_not_keep_later_blocks_from_coming_back() -> None:
    outbox = Outbox(Arena())
    _lent(outbox, 100, _Readers(finished=True), received=False)
    later = [_lent(outbox, 100, _Readers()) for _ in range(SPARE_BLOCKS)]
    assert outbox.take(100) is later[0]


def test_idle_blocks_are_used_again_the_smallest_that_fits_or_else_the_largest_grown() -> None:
    arena = Arena()
    outbox = Outbox(arena)
    small, large = Block(arena, GRAIN), Block(arena, 3 * GRAIN)
    for block in (small, large):
        outbox.lend(block, _Readers(finished=True), in_step=True)
        block.received = True
    taken = outbox.take(GRAIN)
    assert taken is small
    outbox.lend(taken, _Readers(finished=True), in_step=True)
    taken.received = True
    assert outbox.take(4 * GRAIN) is large
    assert large.nbytes == 4 * GRAIN
    assert outbox.take(2 * GRAIN) is small
    assert small.nbytes == 2 * GRAIN


def _bytes_in(arena: Arena) -> int:
    """Of memory, not of addresses."""
    return os.fstat(arena.identity.descriptor).st_blocks * 512


def test_memory_that_nobody_reads_goes_back_on_request_and_is_there_again_for_the_next_message() -> None:
    arena = Arena()
    outbox = Outbox(arena)
    read = _lent(outbox, GRAIN, _Readers())
    idle = _lent(outbox, 4 * GRAIN, _Readers(finished=True))
    read.memory.fill_(7)
    idle.memory.fill_(8)
    before = _bytes_in(arena)
    outbox.release()
    assert _bytes_in(arena) == before - 4 * GRAIN
    assert read.memory.eq(7).all(), "what is being read stays"
    missing = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch.object(os, "posix_fallocate", side_effect=missing), pytest.raises(OSError, match="No space left"):
        outbox.take(3 * GRAIN)
    assert outbox.take(3 * GRAIN) is idle
    assert _bytes_in(arena) == before - GRAIN


# --- between ranks ----------------------------------------------------------------------------------------------------


@spmd(ranks=[2, 3])
def test_messages_of_changing_sizes_arrive_whole_for_many_rounds() -> None:
    """Blocks are used again, grow, and serve gathers, reductions and all-reduces in turns."""
    communicator = host_communicator(world_group(), CPU)
    assert communicator is not None
    size, rank, tags, scratch = communicator.size, communicator.rank, communicator.tags.open(), MemoryPool()
    for step, numel in enumerate([10, 100_000, 7, 1_000_000, 3, 700_001, 1_000_000, 50]):
        shard = torch.full((numel,), float(rank + step))
        whole = torch.empty(size * numel)
        gather = communicator.all_gather(communicator.prepare([GatherPart(shard, whole, whole.numel())]), label="", tags=tags)
        source = torch.arange(size, dtype=torch.float64).repeat_interleave(numel) * (rank + 1)
        out = torch.empty(numel, dtype=torch.float64)
        reduction = communicator.reduce_scatter([ReducePart(source, numel, out)], scratch=scratch, label="", tags=tags)
        message = torch.full((numel,), 2.0**rank)
        everything = communicator.all_reduce(message, label="")
        shard.fill_(-1.0)  # what was sent is no longer the sender's: an optimizer may write now
        gather.wait()
        reduction.wait()
        everything.wait()
        assert torch.equal(whole, torch.arange(size, dtype=torch.float32).repeat_interleave(numel) + step)
        assert torch.equal(out, torch.full_like(out, rank * size * (size + 1) / 2))
        assert torch.equal(message, torch.full_like(message, 2.0**size - 1))


@spmd(ranks=2)
def test_messages_arrive_whole_after_memory_was_given_back() -> None:
    group = dist.new_group()
    communicator = communicator_of(group, CPU)
    tags, shard, whole = communicator.tags.open(), torch.empty(100_000), torch.empty(200_000)
    plan = communicator.prepare([GatherPart(shard, whole, 200_000)])
    for step in range(4):
        shard.fill_(step + 10.0 * communicator.rank)
        work = communicator.all_gather(plan, label="", tags=tags)
        communicator.release()  # with the message in flight
        work.wait()
        assert torch.equal(whole, torch.tensor([step, step + 10.0]).repeat_interleave(100_000))
        dist.barrier()  # the block has come back
        communicator.release()


@spmd(ranks=2)
def test_a_gather_may_be_used_in_inference_mode_first_and_outside_of_it_later() -> None:
    communicator = host_communicator(dist.new_group(), CPU)
    assert communicator is not None
    tags, whole = communicator.tags.open(), torch.empty(200)
    plan = communicator.prepare([GatherPart(torch.ones(100), whole, 200)])
    for mode in (True, False):
        with torch.inference_mode(mode):
            communicator.all_gather(plan, label="", tags=tags).wait()
        dist.barrier()  # the first block has come back: the second gather takes the same one
        assert torch.equal(whole, torch.ones(200))


@spmd(ranks=3)
def test_an_all_reduce_adds_in_the_order_of_ranks_and_gives_everybody_the_same() -> None:
    communicator = host_communicator(world_group(), CPU)
    assert communicator is not None
    values = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0)) * torch.tensor([[1.0], [1e4], [1e-4]])
    message = values[communicator.rank].clone()
    communicator.all_reduce(message, label="").wait()
    assert torch.equal(message, (values[0] + values[1]) + values[2])


@spmd(ranks=[2, 3])
def test_readers_of_a_communicator_that_is_gone_still_say_that_they_have_finished() -> None:
    """A model may be dropped right after its last step; the next one on the same group uses its blocks."""
    for step in range(40):
        communicator = host_communicator(world_group(), CPU)
        assert communicator is not None
        message = torch.full((100_000,), float(step))
        communicator.all_reduce(message, label="").wait()
        assert message[-1] == step * communicator.size
        del communicator


@spmd(ranks=2)
def test_an_all_reduce_of_a_tensor_that_is_not_contiguous_changes_it_in_place() -> None:
    communicator = host_communicator(world_group(), CPU)
    assert communicator is not None
    message = torch.arange(6.0).view(2, 3).t()
    communicator.all_reduce(message, label="").wait()
    assert torch.equal(message, 2 * torch.arange(6.0).view(2, 3).t())


@spmd(ranks=3)
def test_a_later_step_in_one_group_does_not_give_back_a_block_that_another_group_has_yet_to_read() -> None:
    """Rank 0 gives a sum with rank 2 up, which comes to it only after rank 0 has gone on with rank 1 in another group."""
    rank, world = dist.get_rank(), world_group()
    columns = dist.new_group([0, 2])
    both, across = host_communicator(dist.new_group([0, 1]), CPU) if rank < 2 else None, None
    if rank != 1:
        across = host_communicator(columns, CPU)
    steps = Steps(1)
    tags = [None if c is None else c.tags.open() for c in (both, across)]
    for each in tags:
        if each is not None:
            each.steps = steps
    old, new = torch.full((1000,), 1.0), torch.full((1000,), 7.0)
    if rank == 0:
        across.all_reduce(old, label="given up", tags=tags[1]).abort()
    steps.open()
    if both is not None:
        both.all_reduce(torch.ones(1000), label="of the next step", tags=tags[0]).wait()
    if rank == 0:
        later = across.all_reduce(new, label="of the next step", tags=tags[1])
    dist.barrier(world)
    if rank == 2:
        steps.number -= 1
        mine = torch.full((1000,), 1.0)
        across.all_reduce(mine, label="of the step before", tags=tags[1]).wait()
        assert torch.equal(mine, torch.full((1000,), 2.0)), "what rank 0 showed for this step, and nothing of a later one"
        steps.number += 1
        across.all_reduce(new, label="of the next step", tags=tags[1]).wait()
    if rank == 0:
        later.wait()
    if rank != 1:
        assert torch.equal(new, torch.full((1000,), 14.0))


def _wires_when_switched_off_on(rank: int) -> str:
    group = dist.new_group()
    if dist.get_rank() == rank:
        os.environ["COMPOSABLE_SHARED_MEMORY"] = "0"
    try:
        return type(communicator_of(group, CPU)).__name__
    finally:
        os.environ.pop("COMPOSABLE_SHARED_MEMORY", None)


def test_one_rank_without_shared_memory_makes_all_of_them_use_sockets(pool: Pool) -> None:
    assert pool.run(2, _wires_when_switched_off_on, 1) == [PointToPointCommunicator.__name__] * 2
    assert pool.run(2, _wires_when_switched_off_on, -1) == [HostCommunicator.__name__] * 2


def _use_and_leave() -> None:
    """A group that is used and destroyed at once: what its ranks had yet to tell each other is never told."""
    group = dist.new_group()
    communicator = host_communicator(group, CPU)
    assert communicator is not None
    tags = communicator.tags.open()
    for _ in range(SPARE_BLOCKS + 3):
        whole = torch.empty(2 * 100)
        plan = communicator.prepare([GatherPart(torch.ones(100), whole, 200)])
        communicator.all_gather(plan, label="", tags=tags).wait()
        assert torch.equal(whole, torch.ones(200))
    dist.barrier()
    dist.destroy_process_group(group)


@spmd(ranks=2)
def test_a_new_group_does_not_wait_for_readers_in_an_old_one() -> None:
    for _ in range(5):
        _use_and_leave()


def test_tensors_in_an_arena_own_no_more_than_their_block() -> None:
    """An arena is addresses for 64 GiB; whoever adds up the storages of a process must not find them there."""
    arena = Arena()
    block = Block(arena, 100)
    assert block.memory.untyped_storage().nbytes() == block.nbytes == GRAIN
    block.memory[:3] = torch.tensor([1, 2, 3], dtype=torch.uint8)
    shown = Window(arena.identity).view(block.start, 3)
    assert shown.tolist() == [1, 2, 3]
    assert shown.untyped_storage().nbytes() == 3
