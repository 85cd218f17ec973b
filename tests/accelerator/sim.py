"""The simulated accelerator as torch sees it: the device `sim` and the backend `simccl`; knows no
test and no library.
"""

from __future__ import annotations

import atexit
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.dlpack import DLDeviceType

NAME = "sim"
BACKEND = "simccl"

native: Any = None  # the extension module, once it is loaded
_initialized = True  # what checkpointing asks before it keeps states of random numbers


def load(extension: Path) -> ModuleType:
    """Register the device and the backend in this process, before any tensor is made there. Twice
    is once.
    """
    global native
    if native is None:
        spec = importlib.util.spec_from_file_location("_sim", extension)
        assert spec is not None
        assert spec.loader is not None
        native = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(native)
        torch.utils.rename_privateuse1_backend(NAME)
        torch._register_device_module(NAME, sys.modules[__name__])
        torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
        torch.Tensor.__dlpack_device__ = _dlpack_device  # type: ignore[method-assign]
        dist.Backend.register_backend(BACKEND, _make_group, extended_api=True, devices=[NAME])
        atexit.register(_end)
    return sys.modules[__name__]


_dlpack_device_of_torch = torch.Tensor.__dlpack_device__


def _dlpack_device(tensor: torch.Tensor) -> tuple[Any, int]:
    """torch exports tensors of foreign devices, but looks here for the name that they have before
    they are given one.
    """
    if tensor.device.type == NAME:
        return DLDeviceType.kDLExtDev, tensor.device.index
    return _dlpack_device_of_torch(tensor)


def _make_group(options: Any, backend_options: object = None) -> Any:
    store = dist.PrefixStore(BACKEND, options.store)
    gloo = dist.ProcessGroupGloo(store, options.group_rank, options.group_size, options.timeout)
    return native.over_gloo(gloo, options.group_rank, options.group_size)


def _end() -> None:
    for index in range(device_count()):
        native.synchronize(index, "")
    native.shut_down()


# --- what torch asks of a device's module -------------------------------------------------------

Stream, Event = torch.Stream, torch.Event


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return False


def _lazy_init() -> None:
    return None


def device_count() -> int:
    return int(native.device_count())


def current_device() -> int:
    return int(native.current_device())


def _index(device: torch.device | int | str | None) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return current_device() if index is None else index


def set_device(device: torch.device | int | str) -> None:
    native.set_device(_index(device))


def synchronize(device: torch.device | int | str | None = None) -> None:
    native.synchronize(_index(device), "device.synchronize")


def current_stream(device: torch.device | int | str | None = None) -> torch.Stream:
    return torch.accelerator.current_stream(torch.device(NAME, _index(device)))


def stream(stream: torch.Stream) -> torch.Stream:
    return stream  # it is a context already


class device:
    """The current device, for a while."""

    def __init__(self, device: torch.device | int | str) -> None:
        self._index = _index(device)

    def __enter__(self) -> None:
        self._before = current_device()
        native.set_device(self._index)

    def __exit__(self, *_: object) -> None:
        native.set_device(self._before)


def _generator(device: torch.device | int | str | None = None) -> torch.Generator:
    return native.default_generator(_index(device))


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        _generator(index).manual_seed(seed)


def manual_seed(seed: int) -> None:
    _generator().manual_seed(seed)


def initial_seed() -> int:
    return _generator().initial_seed()


def get_rng_state(device: torch.device | int | str = NAME) -> torch.Tensor:
    return _generator(device).get_state()


def set_rng_state(state: torch.Tensor, device: torch.device | int | str = NAME) -> None:
    _generator(device).set_state(state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]
