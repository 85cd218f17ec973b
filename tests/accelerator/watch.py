"""What a rank does around each task on the simulated accelerator: streams lag, and what was not
ordered is an error.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any, Final

import torch

from composable.memory import streams as library_streams
from composable.memory.streams import AcceleratorStreams
from tests.accelerator import sim

LAGS_ONE_IN: Final = 3  # tasks; the others find out what is computed without
LAG_OF_DEFAULT, LAG_OF_OTHERS = 300, 1000  # microseconds, at most
LAG_PROBABILITY: Final = 0.15
SHOWN: Final = 12


class Unordered(AssertionError):
    """Launches on several streams touch the same memory in no order, or poison reached the host;
    the message names them.
    """


def start(extension: Path, rank: int) -> torch.device:
    """Make the simulated accelerator this process's, and one of its devices this rank's."""
    sim.load(extension)
    device = torch.device(sim.NAME, rank % sim.device_count())
    sim.set_device(device)
    return device


def begin(what: str) -> None:
    """A task begins. `what` it is decides whether streams lag, and how: the same in every run."""
    seed = zlib.crc32(what.encode())
    lags = seed % LAGS_ONE_IN == 0
    sim.native.set_lag(LAG_OF_DEFAULT * lags, LAG_OF_OTHERS * lags, LAG_PROBABILITY, seed)
    sim.native.clear_findings()
    sim.native.clear_host_waits()


def take_findings() -> list[str]:
    """What has been found since the task began, or since this was asked last; all streams are
    done.
    """
    for index in range(sim.device_count()):
        sim.native.synchronize(index, "")
    for streams in library_streams._STREAMS.values():
        if isinstance(streams, AcceleratorStreams):
            for name, stream in streams._streams.items():
                sim.native.name_stream(stream.stream_id, f"stream '{name}'")
    found: list[str] = sim.native.findings()
    sim.native.clear_findings()
    return found


def end() -> None:
    """A task has ended.

    Raises:
        Unordered: something was found.
    """
    found = take_findings()
    if found:
        raise Unordered(
            f"{len(found)} findings of the simulated accelerator:\n" + "\n".join(found[:SHOWN])
        )


def host_waits_of(function: Any) -> list[str]:
    """What `function` made the host wait for, and where."""
    sim.native.clear_host_waits()
    function()
    found: list[str] = sim.native.places_of_host_waits()
    return found
