"""Shards and gradients at rest on the host. That each wait is needed:
tests/accelerator/test_offload_streams.py.
"""

from __future__ import annotations

import torch

from composable.memory.offload import HostHome, wait_for_traffic

CPU = torch.device("cpu")


def test_one_reduction_is_held_on_the_device_while_it_leaves() -> None:
    home = HostHome(CPU, pin_memory=False)
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
