"""What ends, fails or is missing on one rank of a host: the others are told, and keep what they were shown."""

from __future__ import annotations

import copy
import errno
import gc
import mmap
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable import fully_shard, replicate
from composable.device.collectives import GatherPart, PointToPointCommunicator, base, communicator_of, world_group
from composable.device.collectives.host import host_communicator
from composable.device.collectives.host.communicator import HostCommunicator
from composable.device.collectives.host.host_group import HostGroup
from composable.device.collectives.host.pipes import PipeWriter, Process
from composable.errors import CommunicationError
from tests.helpers.world import Pool, RanksFailed, set_timeout, spmd

CPU = torch.device("cpu")

pytestmark = pytest.mark.host

_VERBS: Final[dict[str, Callable[..., Any]]] = {"fully_shard": fully_shard, "replicate": replicate}


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))


def _train(model: nn.Module, seed: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 64, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _gather(group: dist.ProcessGroup) -> tuple[Any, Tensor]:
    """A gather of each rank's number, launched."""
    communicator = host_communicator(group, CPU)
    assert communicator is not None
    whole = torch.empty(100 * communicator.size)
    plan = communicator.prepare([GatherPart(torch.full((100,), float(communicator.rank)), whole, whole.numel())])
    return communicator.all_gather(plan, label="gather", tags=communicator.tags.open()), whole


# --- what failed ------------------------------------------------------------------------------------------------------


@spmd(ranks=2)
@pytest.mark.parametrize("failing", _VERBS)
@pytest.mark.parametrize("later", _VERBS)
def test_a_model_after_a_collective_that_failed_computes_what_one_process_computes(failing: str, later: str) -> None:
    group = dist.new_group()
    torch.manual_seed(0)
    first = _VERBS[failing](_model(), mesh=group)
    _train(first, 1)
    set_timeout(group, 0.3)
    if dist.get_rank() == 0:
        with pytest.raises(CommunicationError, match="no message from rank 1 within"):
            _train(first, 2)
    dist.barrier()
    set_timeout(group, 60.0)
    plain = _model()
    model = _VERBS[later](copy.deepcopy(plain), mesh=group)
    assert _train(model, 3) == pytest.approx(_train(plain, 3), rel=1e-5)


def _send(group: HostGroup, messages: int) -> None:
    for _ in range(messages):
        group.acknowledge(8)


@spmd(ranks=2)
def test_messages_that_nobody_reads_end_with_an_error_when_the_pipe_is_full() -> None:
    group = dist.new_group()
    communicator = host_communicator(group, CPU)
    assert communicator is not None
    set_timeout(group, 0.3)
    dist.barrier()
    if dist.get_rank() == 0:
        with pytest.raises(TimeoutError, match=r"^rank 1 has read no message within 0:00:00\.300000$"):
            _send(communicator.host_group, 1 << 20)
    dist.barrier()


@spmd(ranks=2)
def test_ranks_that_fill_each_others_pipes_read_what_is_in_their_own() -> None:
    communicator = host_communicator(world_group(), CPU)
    assert communicator is not None
    _send(communicator.host_group, 10_000)
    message = torch.ones(10)
    communicator.all_reduce(message, label="").wait()
    assert message[0].item() == 2.0


# --- what is missing --------------------------------------------------------------------------------------------------


def _without(what: str) -> AbstractContextManager[object]:
    full = OSError(errno.EMFILE, "Too many open files")
    if what == "descriptors for memory":
        return mock.patch.object(os, "memfd_create", side_effect=full)
    if what == "memory":
        return mock.patch.object(os, "posix_fallocate", side_effect=OSError(errno.ENOSPC, "No space left on device"))
    if what == "descriptors for pipes":
        return mock.patch.object(os, "pipe", side_effect=full)
    if what == "descriptors of others":
        return mock.patch.object(PipeWriter, "__init__", side_effect=full)
    return mock.patch.object(Path, "readlink", side_effect=OSError(errno.EACCES, "Permission denied"))


@spmd(ranks=2)
@pytest.mark.parametrize(
    "what", ["descriptors for memory", "memory", "descriptors for pipes", "descriptors of others", "a number of the host"]
)
def test_what_one_rank_lacks_while_ranks_meet_makes_all_of_them_use_sockets(what: str) -> None:
    for lacking in ([1], [0, 1]):
        group = dist.new_group()
        with _without(what) if dist.get_rank() in lacking else nullcontext():
            assert isinstance(communicator_of(group, CPU), PointToPointCommunicator)
    plain = _model()
    model = fully_shard(copy.deepcopy(plain), mesh=group)
    assert _train(model, 3) == pytest.approx(_train(plain, 3), rel=1e-5)


@contextmanager
def _at_limit(kind: int, value: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


def _limits() -> Iterator[tuple[int, int]]:
    """Real ones, each reached at another point of meeting."""
    gc.collect()  # what earlier tests have left open would give room
    unused = os.dup(0)  # descriptors are given out from the lowest, and the limit is about their numbers
    os.close(unused)
    yield from ((resource.RLIMIT_NOFILE, unused + more) for more in range(6))
    addresses = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    yield from ((resource.RLIMIT_AS, addresses + (gibibytes << 30)) for gibibytes in (1, 65))
    yield resource.RLIMIT_FSIZE, 1 << 30


@spmd(ranks=2)
def test_ranks_use_sockets_if_one_of_them_reaches_a_limit_of_its_process_while_they_meet() -> None:
    held = []
    for kind, value in _limits():
        group = dist.new_group()
        dist.barrier(group)
        with _at_limit(kind, value) if dist.get_rank() == 1 else nullcontext():
            communicator = communicator_of(group, CPU)
        assert isinstance(communicator, PointToPointCommunicator), f"limit {kind} of {value}"
        message = torch.ones(10)
        communicator.all_reduce(message, label="").wait()
        assert message[0] == 2.0
        del communicator
        dist.destroy_process_group(group)
        del group
        held.append(_holdings()["descriptors"])
    assert held[-1] <= held[0], "nothing that was opened on the way is left open"


@spmd(ranks=2)
def test_with_room_for_any_number_of_descriptors_ranks_agree_on_how_they_communicate() -> None:
    """From none to more than it takes: a rank that has just too few must not leave the others with the fast path."""
    kinds: list[type] = []
    for more in range(16):
        group = dist.new_group()
        dist.barrier(group)
        gc.collect()
        unused = os.dup(0)
        os.close(unused)
        with _at_limit(resource.RLIMIT_NOFILE, unused + more) if dist.get_rank() == 1 else nullcontext():
            communicator = communicator_of(group, CPU)
        for numel in (10, 100_000):
            message = torch.ones(numel)
            communicator.all_reduce(message, label="").wait()
            assert message.eq(2).all(), more
        of_all: list[type] = [object, object]
        dist.all_gather_object(of_all, type(communicator), group=group)
        assert of_all[0] is of_all[1], more
        kinds.append(of_all[0])
        del communicator
        dist.destroy_process_group(group)
        del group
    assert kinds[0] is PointToPointCommunicator
    assert kinds[-1] is HostCommunicator


@spmd(ranks=2)
@pytest.mark.parametrize("seen", ["nothing", "another process"])
def test_ranks_that_do_not_see_each_others_processes_use_sockets(seen: str) -> None:
    """As in containers that share a kernel but not /proc: a number means nothing, or somebody else."""
    number = 1 << 22 if seen == "nothing" else os.getppid()
    group = dist.new_group()
    with mock.patch.object(os, "getpid", return_value=number) if dist.get_rank() == 1 else nullcontext():
        assert isinstance(communicator_of(group, CPU), PointToPointCommunicator)


@spmd(ranks=2)
@pytest.mark.parametrize("verb", _VERBS)
def test_memory_that_one_rank_lacks_later_is_an_error_at_once_on_all_ranks(verb: str) -> None:
    group = dist.new_group()
    model = _VERBS[verb](nn.Linear(64, 64), mesh=group)
    x = torch.ones(4, 64)
    model(x).sum().backward()
    dist.barrier()
    communicator_of(group, CPU).release()  # so that the next message needs memory
    with _without("memory") if dist.get_rank() == 1 else nullcontext(), pytest.raises(CommunicationError) as failed:
        model(x).sum().backward()
    if dist.get_rank() == 1:
        assert "[Errno 28] No space left on device" in str(failed.value)
    else:
        assert "failed: rank 1 has left this step: " in str(failed.value)
    dist.barrier()
    model(x).sum().backward()  # though the error, and what its traceback holds, is kept


def _without_memory_for_more_than_a_page() -> AbstractContextManager[object]:
    provide = os.posix_fallocate

    def fill(descriptor: int, start: int, nbytes: int) -> None:
        if nbytes > mmap.PAGESIZE:
            raise OSError(errno.ENOSPC, "No space left on device")
        provide(descriptor, start, nbytes)

    return mock.patch.object(os, "posix_fallocate", fill)


@spmd(ranks=2)
def test_memory_that_is_missing_later_is_an_error_that_names_the_unit() -> None:
    group = dist.new_group()
    model = fully_shard(_model(), mesh=group)
    with _without_memory_for_more_than_a_page(), pytest.raises(CommunicationError) as failed:
        model(torch.ones(4, 64))  # whose check of the order needs less
    assert "the all-gather of unit '(root)' failed: [Errno 28] No space left on device" in str(failed.value)


# --- what ends --------------------------------------------------------------------------------------------------------


def _leave_right_after_a_collective() -> None:
    process = torch.tensor([os.getpid()])
    dist.broadcast(process, 0)
    work, whole = _gather(world_group())
    if dist.get_rank() == 0:
        work.wait()
        os._exit(0)
    rank_0 = Process(int(process.item()))
    while not rank_0.has_ended():
        time.sleep(0.01)
    work.wait()
    assert torch.equal(whole, torch.tensor([0.0, 1.0]).repeat_interleave(100))


def test_what_a_rank_has_shown_is_there_when_it_has_ended(pool: Pool) -> None:
    with pytest.raises(RanksFailed, match="1 of 2 ranks failed\n--- rank 0:\ndied with exit code 0"):
        pool.run(2, _leave_right_after_a_collective)


def _die_and_leave_a_child() -> None:
    work, _ = _gather(world_group())
    work.wait()
    if dist.get_rank() == 1:
        if os.fork() == 0:
            time.sleep(30)  # it holds rank 1's ends of all pipes for as long
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    _gather(world_group())[0].wait()


def test_the_end_of_a_rank_is_noticed_while_a_child_of_it_lives_on(pool: Pool) -> None:
    with pytest.raises(RanksFailed, match=r"the gather failed: rank 1 has ended, or has destroyed its process group"):
        pool.run(2, _die_and_leave_a_child, group_timeout=3600.0)


@spmd(ranks=2)
@pytest.mark.parametrize("verb", _VERBS)
def test_ranks_are_told_of_one_that_has_destroyed_the_group_and_lives_on(verb: str) -> None:
    group = dist.new_group()
    model = _VERBS[verb](_model(), mesh=group)
    _train(model, 1)
    dist.barrier()
    if dist.get_rank() == 1:
        dist.destroy_process_group(group)
    dist.barrier()
    told = "this rank has" if dist.get_rank() == 1 else "rank 1 has ended, or has"
    with pytest.raises(CommunicationError, match=f"{told} destroyed its process group"):
        _train(model, 2)
    dist.barrier()


def _holdings() -> dict[str, int]:
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "mappings": Path("/proc/self/maps").read_text().count("memfd:composable"),
        "MiB": resident >> 20,
    }


WIDTH: Final = 1024  # a weight takes 4 MiB


def _use_the_group() -> None:
    sharded = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    fully_shard(sharded[0], reshard_after_forward=2)
    fully_shard(sharded)
    replicated = replicate(nn.Linear(WIDTH, WIDTH))
    for model in (sharded, replicated):
        model(torch.ones(2, WIDTH)).sum().backward()


@spmd(ranks=2)
def test_a_group_that_was_destroyed_gives_its_memory_back_though_a_model_still_holds_it() -> None:
    group = dist.new_group()
    communicator = communicator_of(group, CPU)
    for work in [communicator.all_reduce(torch.ones(4_000_000), label="") for _ in range(3)]:
        work.wait()
    dist.barrier()
    communicator.all_reduce(torch.ones(1), label="").wait()
    arena = communicator.host_group.presence._arena  # type: ignore[attr-defined]
    held = os.fstat(arena.identity.descriptor).st_blocks * 512
    dist.destroy_process_group(group)
    assert os.fstat(arena.identity.descriptor).st_blocks * 512 <= held - 2 * 16_000_000, "the last message may be read still"
    dist.barrier()


def _come_and_go() -> list[dict[str, int]]:
    """What this process holds after each of several process groups has been used and destroyed."""
    rank, held = dist.get_rank(), []
    store = dist.distributed_c10d._get_default_store()
    for cycle in range(14):
        dist.destroy_process_group()
        gc.collect()
        held.append(_holdings())
        fresh = dist.PrefixStore(f"cycle{cycle}", store)
        dist.init_process_group("gloo", store=fresh, rank=rank, world_size=2)
        _use_the_group()
    return held


def test_groups_that_were_destroyed_leave_nothing_behind(pool: Pool) -> None:
    for held in pool.run(2, _come_and_go, spoils=True):
        # What a cycle leaves behind adds up, so even the least of the last ones has more than all before: six times as much as
        # one leaves. Threads of a backend may take a moment to end, and the allocator keeps some MiB more or less.
        before, after = held[2:5], held[10:]
        for what, slack in (("descriptors", 0), ("threads", 0), ("mappings", 0), ("MiB", 5 * WIDTH * WIDTH >> 18)):
            assert min(row[what] for row in after) <= max(row[what] for row in before) + slack, held


# --- others who use the group -----------------------------------------------------------------------------------------


class _NotInvited(AssertionError):
    pass


@spmd(ranks=2)
@pytest.mark.parametrize("verb", _VERBS)
def test_training_leaves_the_backends_order_of_collectives_to_others(verb: str) -> None:
    """`dcp.async_save` runs collectives of the same group in a thread, while the first step is taken."""
    group = dist.new_group()
    plain = _model()
    model = _VERBS[verb](copy.deepcopy(plain), mesh=group)
    names = ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor")
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(dist, name, side_effect=_NotInvited))
        stack.enter_context(mock.patch.object(base, "all_gather_single", side_effect=_NotInvited))
        losses = _train(model, 3)
    assert losses == pytest.approx(_train(plain, 3), rel=1e-5)
