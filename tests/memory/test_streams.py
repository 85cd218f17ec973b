"""Streams: waits order work where memory is shared, and the watch of `races.py` finds a wait that is missing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from composable.memory.elastic import ElasticBuffer
from composable.memory.streams import LABEL_PREFIX, AcceleratorStreams, Streams, has_streams, range_label, streams_of
from tests.memory.races import ClockedStreams, watched

CPU = torch.device("cpu")


# --- the watch itself -------------------------------------------------------------------------------------------------


def _races(program: Callable[[ClockedStreams], None], **options: bool) -> list[str]:
    streams = ClockedStreams(**options)
    with watched(streams) as watch:
        program(streams)
    return list(dict.fromkeys(watch.found))


def _in_order(streams: ClockedStreams) -> None:
    a, b = torch.zeros(4), torch.zeros(4)
    with streams.fork("side"):
        torch.add(a, 1, out=b)
        mark = streams.mark()
    mark.join()
    a.add_(b)
    del b
    a.add_(1)


def test_a_program_with_a_fork_and_a_join_has_no_race() -> None:
    assert _races(_in_order) == []


def test_a_missing_join_is_found_as_a_read_an_overwrite_and_a_free() -> None:
    assert _races(_in_order, deaf_joins=True) == [
        "aten.add_.Tensor on compute reads what aten.add.out on side still uses",
        "aten.add_.Tensor on compute overwrites what aten.add.out on side still uses",
        "memory of compute is freed that aten.add.out on side still uses",
    ]


def test_a_missing_fork_is_found() -> None:
    assert _races(_in_order, deaf_forks=True) == [
        "aten.add.out on side reads what aten.zeros.default on compute still uses",
        "aten.add.out on side overwrites what aten.zeros.default on compute still uses",
    ]


def test_memory_that_goes_back_to_its_stream_while_another_reads_it_is_found() -> None:
    def program(streams: ClockedStreams) -> None:
        a = torch.zeros(4)
        with streams.fork("side"):
            b = a + 1
            mark = streams.mark()
        mark.join()
        a.add_(b)
        del b
        a.add_(1)

    assert _races(program) == ["memory of side is freed that aten.add_.Tensor on compute still uses"]


def test_parts_of_one_buffer_are_told_apart() -> None:
    def program(streams: ClockedStreams) -> None:
        a = torch.zeros(4)
        with streams.fork("side"):
            a[:2].add_(1)
            mark = streams.mark()
        a[2:].add_(1)
        mark.join()
        a.add_(1)

    assert _races(program) == []


def test_a_buffer_that_is_freed_while_another_stream_reads_it_is_found() -> None:
    def program(streams: ClockedStreams) -> None:
        buffer = ElasticBuffer(4, torch.float32, CPU)
        buffer.allocate()
        buffer.tensor.zero_()
        with streams.fork("side"):
            buffer.tensor + 1
            mark = streams.mark()
        buffer.free()
        mark.join()

    assert _races(program) == ["memory of compute is freed that aten.add.Tensor on side still uses"]


# --- streams ----------------------------------------------------------------------------------------------------------


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
    with profile(activities=[ProfilerActivity.CPU]) as profiler, range_label("all-gather of 'layers.0'"):
        torch.ones(1)
    assert LABEL_PREFIX + "all-gather of 'layers.0'" in [event.name for event in profiler.events()]


@pytest.mark.parametrize(("name", "expected"), [("cpu", False), ("meta", False), ("cuda", True), ("xpu", True)])
def test_devices_beside_the_host_have_streams(name: str, expected: bool) -> None:
    assert has_streams(torch.device(name)) == expected
