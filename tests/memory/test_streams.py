"""Streams of a device by name, and labels for profilers. That each wait is needed:
tests/accelerator/test_faults.py.
"""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from composable.memory.streams import (
    LABEL_PREFIX,
    AcceleratorStreams,
    Streams,
    has_streams,
    range_label,
    streams_of,
)

CPU = torch.device("cpu")


def test_on_a_host_work_runs_where_it_is_called() -> None:
    streams = streams_of(CPU)
    assert type(streams) is Streams
    assert streams_of(torch.device("meta")) is streams, "one per process, so that roots share it"
    done = []
    with streams.fork("all_gather"):
        done.append("inside")
    streams.mark().join()
    assert done == ["inside"]


def test_on_an_accelerator_a_join_orders_the_compute_stream_after_the_fork(device: str) -> None:
    if device != "cuda":
        pytest.skip("needs an accelerator")
    place = torch.device(device, 0)
    streams = streams_of(place)
    assert isinstance(streams, AcceleratorStreams)
    assert streams_of(place) is streams
    assert streams.stream("all_gather") is streams.stream("all_gather")
    assert streams.stream("all_gather") != streams.stream("reduce_scatter")
    x = torch.zeros(1 << 22, device=place)
    for _ in range(50):
        x.add_(1)
    with streams.fork("all_gather"):
        assert torch.accelerator.current_stream(place) == streams.stream("all_gather")
        for _ in range(50):
            x.add_(1)
        mark = streams.mark()
    mark.join()
    assert bool((x * 2 == 200).all())


def test_labels_are_recorded_while_a_profiler_runs_and_cost_nothing_else() -> None:
    assert range_label("all-gather") is range_label("reduce-scatter")
    with (
        profile(activities=[ProfilerActivity.CPU]) as profiler,
        range_label("all-gather of 'layers.0'"),
    ):
        torch.ones(1)
    assert LABEL_PREFIX + "all-gather of 'layers.0'" in [event.name for event in profiler.events()]


@pytest.mark.parametrize(
    ("name", "expected"), [("cpu", False), ("meta", False), ("cuda", True), ("xpu", True)]
)
def test_devices_beside_the_host_have_streams(name: str, expected: bool) -> None:
    assert has_streams(torch.device(name)) == expected
