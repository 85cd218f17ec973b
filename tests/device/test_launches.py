"""How an accelerator's collectives are launched: many at once, on streams that threads share, with nothing left by an error."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from composable.device.collectives import AcceleratorCommunicator, GatherPart, ReducePart, TagSequence, world_group
from composable.device.collectives.choice import REDUCTIONS_VARIABLE, of_accelerator
from composable.device.memory import MemoryPool
from composable.device.private_groups import launchers
from composable.device.streams import AcceleratorStreams, HostStreams
from composable.errors import CommunicationError
from tests.helpers.interrupts import Interrupter
from tests.helpers.world import Pool, spmd

CPU: Final = torch.device("cpu")


def _communicator() -> AcceleratorCommunicator:
    return AcceleratorCommunicator(world_group(), CPU, HostStreams())


def _gather(communicator: AcceleratorCommunicator, count: int = 3, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    wholes = [torch.zeros(2 * communicator.size, dtype=dtype) for _ in range(count)]
    plan = communicator.prepare([GatherPart(torch.full((2,), i + 1, dtype=dtype), w, w.numel()) for i, w in enumerate(wholes)])
    communicator.all_gather(plan, label="all-gather of unit 'x'", tags=TagSequence(0)).wait()
    return wholes


def _reduce(communicator: AcceleratorCommunicator, count: int = 3, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    outs = [torch.zeros(2, dtype=dtype) for _ in range(count)]
    parts = [ReducePart(torch.full((2 * communicator.size,), i + 1, dtype=dtype), 2, out) for i, out in enumerate(outs)]
    communicator.reduce_scatter(parts, scratch=MemoryPool(), label="reduction of unit 'x'", tags=TagSequence(0)).wait()
    return outs


_LAUNCHES: Final = (_gather, _reduce)


@spmd(ranks=1)
def test_an_interrupt_in_a_launch_leaves_no_collective_that_does_nothing() -> None:
    """Torch's own way to launch several at once leaves the group in it: later collectives return, and move nothing."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    for launch in _LAUNCHES:
        communicator = _communicator()
        lines = Interrupter()
        with lines.at_work():
            launch(communicator)
        assert lines.seen > 10
        for line in range(1, lines.seen + 1):
            with pytest.raises(KeyboardInterrupt), Interrupter(at=line).at_work():
                launch(communicator)
            whole = torch.zeros(2)
            gather(whole, torch.ones(2))
            assert whole.tolist() == [1.0, 1.0], line
            assert [part.tolist() for part in launch(communicator)] == [[1.0] * 2, [2.0] * 2, [3.0] * 2]


@spmd(ranks=2)
def test_a_backend_without_a_launch_of_several_is_asked_for_one_after_the_other() -> None:
    refused = []

    def refuse(*_: Any) -> None:
        refused.append(None)
        raise RuntimeError("Backend plain does not support all_gather_single_coalesced")

    gather, scatter, _ = launchers(world_group(), asynchronous=False)
    communicator = _communicator()
    with (
        mock.patch.object(dist.ProcessGroup, gather.coalesced, refuse),
        mock.patch.object(dist.ProcessGroup, scatter.coalesced, refuse),
    ):
        for _ in range(2):
            assert [part.tolist() for part in _gather(communicator)] == [[1.0] * 4, [2.0] * 4, [3.0] * 4]
            assert [part.tolist() for part in _reduce(communicator)] == [[2.0] * 2, [4.0] * 2, [6.0] * 2]
    assert len(refused) == 1, "it is asked once"


class _Kinds(TorchDispatchMode):
    """The dtypes that torch's collectives are given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            flat = torch.utils._pytree.tree_leaves((args, kwargs))
            self.seen += [leaf.dtype for leaf in flat if isinstance(leaf, Tensor)]
        return func(*args, **(kwargs or {}))


@spmd(ranks=2)
def test_complex_numbers_travel_as_pairs_of_real_ones() -> None:
    communicator = _communicator()
    for count in (1, 3):
        with _Kinds() as kinds:
            reduced, gathered = _reduce(communicator, count, torch.complex64), _gather(communicator, count, torch.complex64)
            total = torch.full((2,), 1 + 2j, dtype=torch.complex64)
            communicator.all_reduce(total, label="sum").wait()
        assert kinds.seen
        assert all(dtype == torch.float32 for dtype in kinds.seen), kinds.seen
        assert reduced[0].tolist() == [2 + 0j] * 2
        assert gathered[0].tolist() == [1 + 0j] * 4
        assert total.tolist() == [2 + 4j] * 2


@contextmanager
def _every_launch_raises(error: Exception) -> Iterator[None]:
    names = [name for each in launchers(world_group(), asynchronous=False) for name in (each.single, each.coalesced)]
    with mock.patch.multiple(dist.ProcessGroup, **{name: mock.Mock(side_effect=error) for name in dict.fromkeys(names)}):
        yield


@spmd(ranks=1)
def test_memory_that_runs_out_in_a_launch_is_no_other_ranks_fault() -> None:
    for launch in _LAUNCHES:
        for count in (1, 3):
            with _every_launch_raises(torch.OutOfMemoryError("on purpose")), pytest.raises(torch.OutOfMemoryError) as caught:
                launch(_communicator(), count)
            assert str(caught.value) == "on purpose"


def _told(launch: Callable[..., Any], error: Exception) -> str:
    with _every_launch_raises(error), pytest.raises(CommunicationError) as caught:
        launch(_communicator())
    assert caught.value.__cause__ is error
    return str(caught.value)


@spmd(ranks=1)
def test_what_failed_is_said_with_what_to_do_about_it() -> None:
    assert _told(_gather, RuntimeError("connection reset\nand more")) == (
        "rank 0: the all-gather of unit 'x' failed: connection reset\n"
        "Another rank raised, ended or took another path through the model; look for the first error among all ranks."
    )
    assert _told(_reduce, dist.DistBackendError("NCCL error in: x.cpp:7, invalid usage\nmore")) == (
        "rank 0: the reduction of unit 'x' failed: NCCL error in: x.cpp:7, invalid usage\n"
        "This is an error of the process group's backend. Look for the first error among all ranks; if they have this one "
        "only, NCCL_DEBUG=WARN in the environment lets NCCL say more."
    )
    assert _told(_gather, RuntimeError("this rank has destroyed its process group")) == (
        "rank 0: the all-gather of unit 'x' failed: this rank has destroyed its process group\n"
        "destroy_process_group() ends the training of all models over the group; call it after the last step."
    )


# --- a group for reductions -------------------------------------------------------------------------------------------


def _reductions_apart(asking: list[int]) -> tuple[bool, list[str]]:
    group, rank = dist.new_group(), dist.get_rank()
    with mock.patch.dict(os.environ, {REDUCTIONS_VARIABLE: str(int(rank in asking))}):
        communicators = [of_accelerator(group, CPU, dedicated=False) for _ in range(2)]
    assert isinstance(communicators[0], AcceleratorCommunicator)
    assert isinstance(communicators[1], AcceleratorCommunicator)
    found = communicators[0].reductions()
    assert communicators[1].reductions() is found, "made once"
    assert found is not None
    used: list[str] = []
    real, (gather, scatter, _) = {}, launchers(group, asynchronous=False)

    def noting(name: str) -> Callable[..., Any]:
        def note(group: dist.ProcessGroup, *args: Any) -> Any:
            used.append(group.group_desc)
            return real[name](group, *args)

        return note

    for name in (gather.coalesced, scatter.coalesced):
        real[name] = getattr(dist.ProcessGroup, name)
    with mock.patch.multiple(dist.ProcessGroup, **{name: noting(name) for name in real}):
        assert [part.tolist() for part in _gather(communicators[0])] == [[1.0] * 4, [2.0] * 4, [3.0] * 4]
        assert [part.tolist() for part in _reduce(communicators[0])] == [[2.0] * 2, [4.0] * 2, [6.0] * 2]
    return found is group, used


def test_reductions_have_a_group_of_their_own_if_all_ranks_ask_for_it(pool: Pool) -> None:
    assert pool.run(2, _reductions_apart, [0, 1]) == [(False, ["undefined", "composable reduce-scatters"])] * 2
    for asking in ([], [1]):
        assert pool.run(2, _reductions_apart, asking) == [(True, ["undefined"] * 2)] * 2


# --- streams ----------------------------------------------------------------------------------------------------------


class _Stream:
    """A stream in place of torch's, that refuses to be entered as a context twice, as torch 2.11 does."""

    def __init__(self, device: object = None, priority: int = 0, name: str = "") -> None:
        self.device_index = 1
        self.name = name
        self.waits: list[_Stream] = []
        self._entered = False

    def wait_stream(self, other: _Stream) -> None:
        self.waits.append(other)

    def __enter__(self) -> None:
        assert not self._entered, "Stream's context should not be initialized."
        self._entered = True

    def __exit__(self, *_: object) -> None:
        self._entered = False


class _Accelerator(threading.local):
    """Each thread's current device, and its current stream on device 1."""

    def __init__(self) -> None:
        self.device = 0
        self.current = _Stream(name="compute")

    def current_stream(self, device: object = None) -> _Stream:
        return self.current

    def current_device_index(self) -> int:
        return self.device

    def set_device_index(self, index: int) -> None:
        self.device = index

    def set_stream(self, stream: _Stream) -> None:
        self.device, self.current = stream.device_index, stream


@pytest.fixture
def accelerator() -> Iterator[_Accelerator]:
    found = _Accelerator()
    with mock.patch.multiple(torch, accelerator=found, Stream=_Stream):
        yield found


def test_a_fork_gives_back_the_stream_and_the_device_that_it_took(accelerator: _Accelerator) -> None:
    streams = AcceleratorStreams(torch.device("cuda", 1))
    compute, side = accelerator.current, streams.stream("side")
    with suppress(ZeroDivisionError), streams.fork("side"):
        assert (accelerator.current, accelerator.device) == (side, 1)
        raise ZeroDivisionError
    assert (accelerator.current, accelerator.device) == (compute, 0)
    with streams.fork("side"), streams.fork("other"), streams.fork("side"):
        assert accelerator.current is side
    assert (accelerator.current, accelerator.device) == (compute, 0)
    assert side.waits == [compute, compute, streams.stream("other")]  # type: ignore[attr-defined]


def test_threads_that_fork_to_one_stream_each_return_to_their_own(accelerator: _Accelerator) -> None:
    streams = AcceleratorStreams(torch.device("cuda", 1))
    inside, left = threading.Event(), threading.Event()
    found: list[bool] = []

    def other() -> None:
        mine = accelerator.current
        with streams.fork("side"):
            inside.set()
            left.wait(60)
            found.append(accelerator.current is streams.stream("side"))
        found.append(accelerator.current is mine)

    mine, thread = accelerator.current, threading.Thread(target=other)
    with streams.fork("side"):
        thread.start()
        inside.wait(60)
    assert accelerator.current is mine
    left.set()
    thread.join(60)
    assert found == [True, True]
