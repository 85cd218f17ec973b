"""Shards and gradients at rest on the host: copies are ordered with the computation, and device memory is freed after them."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor

from composable.memory import offload
from composable.memory.offload import TO_DEVICE_STREAM, TO_HOST_STREAM, ComingShards, HostHome, wait_for_traffic
from tests.memory.races import COMPUTE, ClockedStreams, watched

CPU = torch.device("cpu")


def _home(streams: ClockedStreams) -> HostHome:
    with mock.patch.object(offload, "_TRAFFIC", {}), mock.patch.object(offload, "streams_of", return_value=streams):
        return HostHome(CPU, pin_memory=False)


def _gather(home: HostHome, streams: ClockedStreams) -> Tensor:
    """Reads the shards and a cast of some of them where an all-gather would be launched."""
    shard, cast, total = home.zeros(4, torch.float32), torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    shard.add_(3)
    coming = ComingShards(shard, home)
    for _ in range(2):
        coming.bring([cast], [coming.buffer.stretch(1, 2).data])
        with coming.here():
            torch.add(coming.buffer.tensor[:2], cast, out=total)
            mark = streams.mark()
        mark.join()
        coming.end()
        coming.end()
        assert not coming.buffer.held
        home.traffic.wait()
        shard.add_(0)  # a step of an optimizer
    return total.sum()


def _send(home: HostHome, streams: ClockedStreams) -> Tensor:
    sent = []
    for value in range(4):
        gradient = torch.full((3,), float(value))
        sent += home.take([gradient])
        del gradient
    home.traffic.wait()
    return torch.stack(sent).sum()


@pytest.mark.parametrize(("program", "expected"), [(_gather, 12.0), (_send, 18.0)])
def test_copies_are_ordered_with_the_computation(
    program: Callable[[HostHome, ClockedStreams], Tensor], expected: float
) -> None:
    streams = ClockedStreams()
    with watched(streams) as watch:
        assert program(_home(streams), streams).item() == expected
    assert watch.found == []
    assert streams.current == COMPUTE


@pytest.mark.parametrize("missing", ["deaf_forks", "deaf_joins"])
@pytest.mark.parametrize(("program", "stream"), [(_gather, TO_DEVICE_STREAM), (_send, TO_HOST_STREAM)])
def test_a_missing_wait_is_found(program: Callable[[HostHome, ClockedStreams], Tensor], stream: str, missing: str) -> None:
    streams = ClockedStreams(**{missing: True})
    with watched(streams) as watch:
        program(_home(streams), streams)
    assert any(stream in race for race in watch.found), watch.found


def test_one_reduction_is_held_on_the_device_while_it_leaves() -> None:
    home = _home(ClockedStreams())
    freed: list[int] = []
    for number in range(4):
        home.traffic.send([], [], lambda number=number: freed.append(number))  # type: ignore[misc]
    assert freed == [0, 1, 2]
    home.traffic.wait()
    assert freed == [0, 1, 2, 3]


def test_wait_for_traffic_waits_for_all_devices() -> None:
    home = HostHome(CPU, pin_memory=False)
    assert home.traffic is HostHome(CPU, pin_memory=True).traffic, "one per device"
    freed: list[bool] = []
    home.traffic.send([], [], lambda: freed.append(True))
    wait_for_traffic()
    assert freed


def test_host_tensors_are_made_on_the_host_whatever_the_default_device() -> None:
    home = HostHome(CPU, pin_memory=False)
    with torch.device("meta"), torch.inference_mode():
        made = [home.zeros(3, torch.float16), *home.take([torch.ones(2, device="cpu")])]
    assert [(str(each.device), each.dtype, each.is_inference()) for each in made] == [
        ("cpu", torch.float16, False),
        ("cpu", torch.float32, False),
    ]
    wait_for_traffic()
