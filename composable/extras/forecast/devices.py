"""Figures of devices and links: the makers' figures, and the fractions that training programs
reach.

Every figure has its source beside it. `calibrate` measures this machine's device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from time import perf_counter
from types import MappingProxyType
from typing import Final

import torch

from composable.checked import checked

GIB: Final = 1 << 30
GB: Final = 10**9


def unit_for(nbytes: float) -> tuple[int, str]:
    """The unit in which an amount of memory is printed: bytes, and its name."""
    for unit, name in ((GIB, "GiB"), (1 << 20, "MiB")):
        if nbytes >= unit / 10:
            return unit, name
    return 1 << 10, "KiB"


def amount(nbytes: float, unit: tuple[int, str] | None = None) -> str:
    """E.g. "0.50 GiB", "50.0 MiB"."""
    size, name = unit or unit_for(nbytes)
    return f"{nbytes / size:.{2 if size == GIB else 1}f} {name}"


@dataclass(frozen=True)
class Device:
    """A device and its links, in bytes, seconds, and operations per second.

    Attributes:
        name: e.g. "H100".
        capacity: bytes of its memory that programs get.
        flops: of matrix products per second, by dtype, at the peak.
        reached: the part of `flops` that training programs reach.
        memory: bytes per second that are read and written, at the peak.
        memory_reached: the part of `memory` that programs reach.
        launch: seconds of the smallest kernel.
        host: seconds of an operation on the host, until the device may begin.
        links: bytes per second that a rank gives and gets in collectives inside one node, as
            reached ("bus bandwidth").
        network: bytes per second of one device's share of its node's network, as reached.
        latency: seconds of one launch of collectives.
        part: seconds of each further tensor in it.
        per_node: devices that `links` join.
        to_host: bytes per second between its memory and the host's, each way, as reached.
        accelerator: whether it has streams; a host computes and waits.
        margin: the largest part of a forecast's peak that programs used beyond the peak, for
            workspaces of kernels, and for blocks of the allocator that are larger than requested.

    Example:
        >>> small = dataclasses.replace(DEVICES["h100"], name="4 of a node", per_node=4)
        >>> forecast(make_model, annotate, make_batch, ranks=8, device=small)
    """

    name: str
    capacity: int
    flops: Mapping[torch.dtype, float] = field(hash=False)
    memory: float
    links: float
    network: float
    reached: float = 0.6
    memory_reached: float = 0.8
    launch: float = 2e-6
    host: float = 5e-6
    latency: float = 50e-6
    part: float = 2e-6
    per_node: int = 8
    to_host: float = 50 * GB
    accelerator: bool = True
    # of seven rows of benchmarks/results/gpu.md, an H200's, the one with most beyond the forecast:
    # 4.6 %, 141 MB in backward of blocks of width 4096 with 2048 tokens
    margin: float = 0.05

    @property
    def usable(self) -> int:
        """Bytes of the largest peak that fits: `capacity` without the margin."""
        return int(self.capacity / (1 + self.margin))

    def flops_of(self, dtype: torch.dtype) -> float:
        """Of matrix products of `dtype` per second, as reached."""
        return self.reached * self.flops.get(dtype, self.flops[torch.float32])

    def bandwidth(self, ranks: list[int]) -> float:
        """Bytes per second that a rank gives and gets in collectives among `ranks`.

        Inside one node its links. Across nodes a ring enters and leaves each node once for every
        rank that it has there, over that rank's share of the network; links inside bound the rest.
        """
        nodes = {rank // self.per_node: None for rank in ranks}
        if len(nodes) == 1:
            return self.links
        return min(self.links, self.network * len(ranks) / len(nodes))


def _tensor_cores(half: float, single: float) -> Mapping[torch.dtype, float]:
    """Matrix products of 16 bits, and of float32 as torch computes them by default."""
    return MappingProxyType(
        {torch.bfloat16: half, torch.float16: half, torch.float32: single, torch.float64: single}
    )


DEVICES: Final[Mapping[str, Device]] = MappingProxyType(
    {
        # A100 80 GB SXM: nvidia.com/en-us/data-center/a100 (312 and 19.5 TFLOPS, 2,039 GB/s, NVLink
        # 600 GB/s and PCIe 4 64 GB/s in both directions); DGX A100: a 200 Gb/s adapter for each
        "a100": Device(
            "A100", 79 * GIB, _tensor_cores(312e12, 19.5e12), 2039 * GB, 230 * GB, 22 * GB,
            to_host=25 * GB,
        ),
        # H100 SXM: nvidia.com/en-us/data-center/h100 (989 TFLOPS without sparsity and 67, 3.35
        # TB/s, NVLink 900 GB/s, PCIe 5 128 GB/s); DGX H100: a 400 Gb/s adapter for each device
        "h100": Device(
            "H100", 79 * GIB, _tensor_cores(989e12, 67e12), 3350 * GB, 350 * GB, 45 * GB
        ),
        # H200: nvidia.com/en-us/data-center/h200 (as the H100, with 141 GB at 4.8 TB/s)
        "h200": Device(
            "H200", 139 * GIB, _tensor_cores(989e12, 67e12), 4800 * GB, 350 * GB, 45 * GB
        ),
        # B200: nvidia.com/en-us/data-center/dgx-b200 (for eight: 1,440 GB at 64 TB/s, 36 PFLOPS of
        # 8 bits without sparsity; NVLink 1.8 TB/s); a 400 Gb/s adapter for each device
        "b200": Device(
            "B200", 178 * GIB, _tensor_cores(2250e12, 75e12), 8000 * GB, 700 * GB, 45 * GB
        ),
        # A core of a host of today, ranks over gloo on one host: measured by `calibrate`
        "cpu": Device(
            "CPU core", 16 * GIB, MappingProxyType({torch.float32: 50e9}), 12 * GB, 2 * GB, 1 * GB,
            reached=1.0, memory_reached=1.0, launch=1e-6, host=0.0, latency=200e-6, part=20e-6,
            accelerator=False,
        ),
    }
)  # fmt: skip


def device_of(device: str | Device) -> Device:
    """Look up a name in `DEVICES`; a `Device` is returned as it is.

    Raises:
        ValueError: no device is known by that name.
    """
    if isinstance(device, Device):
        return device
    if (found := DEVICES.get(device.lower())) is None:
        raise ValueError(
            f"forecast: no device '{device}' is known, only {', '.join(DEVICES)}. Describe it by"
            " composable.extras.forecast.Device(...), or measure the one at hand by calibrate()"
        )
    return found


@checked
def calibrate(device: str | torch.device = "cpu", like: str | Device | None = None) -> Device:
    """Measure the device at hand: products of matrices, and how fast memory is read and written.

    This takes some seconds. It does not measure links, because a single process has none.

    Args:
        device: where to measure, e.g. "cuda".
        like: the device to copy the other figures from. None: "cpu" on a host, "h100" on an
            accelerator.

    Returns:
        A device whose `reached` figures are 1, for `forecast(device=...)`.

    Example:
        >>> forecast(make_model, annotate, make_batch, ranks=8, device=calibrate("cuda"))
    """
    place = torch.device(device)
    base = device_of(like or ("cpu" if place.type == "cpu" else "h100"))
    size = 512 if place.type == "cpu" else 8192
    flops: dict[torch.dtype, float] = {}
    for dtype in base.flops:
        if dtype is torch.float64:
            continue
        a = torch.randn(size, size, device=place).to(dtype)
        flops[dtype] = 2.0 * size**3 / _seconds(lambda a=a: a @ a, place)  # type: ignore[misc]
    flops.setdefault(torch.float64, flops[torch.float32])
    source = torch.zeros(16 << 20 if place.type == "cpu" else 256 << 20, device=place)
    target = torch.empty_like(source)
    memory = 2 * source.nbytes / _seconds(lambda: target.copy_(source), place)
    capacity = base.capacity
    if place.type == "cuda":
        capacity = torch.cuda.get_device_properties(place).total_memory
    return replace(
        base, name=f"{place.type}, as measured", capacity=capacity, reached=1.0,
        flops=MappingProxyType(flops), memory=memory, memory_reached=1.0,
    )  # fmt: skip


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Take the best of some runs, after one that does not count."""
    best = float("inf")
    for attempt in range(8):
        start = perf_counter()
        run()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        if attempt:
            best = min(best, perf_counter() - start)
    return best


def milliseconds(seconds: float, step: float) -> str:
    """A part of a step, e.g. "12.3", in milliseconds; of short steps with more digits."""
    return f"{seconds * 1e3:.{1 if step >= 1e-3 else 3}f}"
