"""How an accelerator's collectives are launched: several at once, over one group or two."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from composable.comm import backends
from composable.comm.backends import AcceleratorComm, comm_of, world_group
from composable.comm.launch import Launch
from composable.errors import CommunicationError
from composable.memory.streams import Streams
from composable.torch_private import launchers
from tests.helpers.world import Pool, spmd

CPU: Final = torch.device("cpu")


def _comm() -> AcceleratorComm:
    return AcceleratorComm(world_group(), CPU, Streams())


def _gather(
    comm: AcceleratorComm, count: int = 3, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    pairs = [
        (torch.zeros(2 * comm.size, dtype=dtype), torch.full((2,), i + 1, dtype=dtype))
        for i in range(count)
    ]
    comm.all_gather(pairs, Launch("all-gather of unit 'x'")).wait()
    return [whole for whole, _ in pairs]


def _reduce(
    comm: AcceleratorComm, count: int = 3, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    pairs = [
        (torch.zeros(2, dtype=dtype), torch.full((2 * comm.size,), i + 1, dtype=dtype))
        for i in range(count)
    ]
    comm.reduce_scatter(pairs, Launch("reduction of unit 'x'")).wait()
    return [out for out, _ in pairs]


def _all_reduce(
    comm: AcceleratorComm, count: int = 3, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    tensors = [torch.full((2,), i + 1, dtype=dtype) for i in range(count)]
    comm.all_reduce(tensors, Launch("sum of unit 'x'")).wait()
    return tensors


_LAUNCHES: Final = (_gather, _reduce, _all_reduce)


@spmd(ranks=2)
def test_a_backend_without_a_launch_of_several_is_asked_for_one_after_the_other() -> None:
    refused = []

    def refuse(*_: Any) -> None:
        refused.append(None)
        raise RuntimeError("Backend plain does not support all_gather_single_coalesced")

    names = dict.fromkeys(
        each.coalesced for each in launchers(world_group(), asynchronous=False).values()
    )
    comm = _comm()
    with mock.patch.multiple(dist.ProcessGroup, **dict.fromkeys(names, refuse)):
        for _ in range(2):
            assert [part.tolist() for part in _gather(comm)] == [[1.0] * 4, [2.0] * 4, [3.0] * 4]
            assert [part.tolist() for part in _reduce(comm)] == [[2.0] * 2, [4.0] * 2, [6.0] * 2]
            assert [part.tolist() for part in _all_reduce(comm)] == [
                [2.0] * 2,
                [4.0] * 2,
                [6.0] * 2,
            ]
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
    comm = _comm()
    for count in (1, 3):
        with _Kinds() as kinds:
            found = [launch(comm, count, torch.complex64) for launch in _LAUNCHES]
        assert kinds.seen
        assert all(dtype == torch.float32 for dtype in kinds.seen), kinds.seen
        assert [tensors[0].tolist() for tensors in found] == [
            [1 + 0j] * 4,
            [2 + 0j] * 2,
            [2 + 0j] * 2,
        ]


@contextmanager
def _every_launch_raises(error: Exception) -> Iterator[None]:
    names = [
        name
        for each in launchers(world_group(), asynchronous=False).values()
        for name in (each.single, each.coalesced)
    ]
    with mock.patch.multiple(
        dist.ProcessGroup, **{name: mock.Mock(side_effect=error) for name in dict.fromkeys(names)}
    ):
        yield


@spmd(ranks=1)
def test_memory_that_runs_out_in_a_launch_is_no_other_ranks_fault() -> None:
    for launch in _LAUNCHES:
        for count in (1, 3):
            with (
                _every_launch_raises(torch.OutOfMemoryError("on purpose")),
                pytest.raises(torch.OutOfMemoryError) as caught,
            ):
                launch(_comm(), count)
            assert str(caught.value) == "on purpose"


def _reported(launch: Callable[..., Any], error: Exception) -> list[str]:
    with _every_launch_raises(error), pytest.raises(CommunicationError) as caught:
        launch(_comm())
    assert caught.value.__cause__ is error
    # without the step that ran in this process before
    return re.sub(r" failed [^:]*: ", " failed: ", str(caught.value)).splitlines()[:2]


@spmd(ranks=1)
def test_what_failed_is_said_with_what_to_do_about_it() -> None:
    assert _reported(_gather, RuntimeError("connection reset\nand more")) == [
        "rank 0: the all-gather of unit 'x' failed: connection reset",
        (
            "Another rank raised, ended or took another path through the model; look for the first"
            " error among all ranks."
        ),
    ]
    assert _reported(
        _reduce, dist.DistBackendError("NCCL error in: x.cpp:7, invalid usage\nmore")
    ) == [
        "rank 0: the reduction of unit 'x' failed: NCCL error in: x.cpp:7, invalid usage",
        (
            "This is an error of the process group's backend. Look for the first error among all"
            " ranks; if all have this one only, NCCL_DEBUG=WARN in the environment lets NCCL say"
            " more."
        ),
    ]
    assert _reported(_all_reduce, RuntimeError("this rank has destroyed its process group")) == [
        "rank 0: the sum of unit 'x' failed: this rank has destroyed its process group",
        (
            "destroy_process_group() ends the training of all models over the group; call it after"
            " the last step."
        ),
    ]


# --- a group for reductions ---------------------------------------------------------------------


def _reductions_apart(setting: str) -> list[str]:
    group = dist.new_group()
    with (
        mock.patch.dict(os.environ, {backends.REDUCTIONS_VARIABLE: setting}),
        mock.patch.object(backends, "has_streams", return_value=True),
        mock.patch.object(backends, "streams_of", return_value=Streams()),
    ):
        comm = comm_of(group, CPU)
    assert isinstance(comm, AcceleratorComm)
    used: list[str] = []
    real, names = {}, launchers(group, asynchronous=False)

    def noting(name: str) -> Callable[..., Any]:
        def note(group: dist.ProcessGroup, *args: Any) -> Any:
            used.append(group.group_desc)
            return real[name](group, *args)

        return note

    for name in (names["all_gather"].coalesced, names["reduce_scatter"].coalesced):
        real[name] = getattr(dist.ProcessGroup, name)
    with mock.patch.multiple(dist.ProcessGroup, **{name: noting(name) for name in real}):
        assert [part.tolist() for part in _gather(comm)] == [[1.0] * 4, [2.0] * 4, [3.0] * 4]
        assert [part.tolist() for part in _reduce(comm)] == [[2.0] * 2, [4.0] * 2, [6.0] * 2]
    return used


def test_reductions_have_a_group_of_their_own_if_the_environment_asks_for_it(pool: Pool) -> None:
    assert pool.run(2, _reductions_apart, "1") == [["undefined", "composable: reduce-scatters"]] * 2
    assert pool.run(2, _reductions_apart, "0") == [["undefined", "undefined"]] * 2
