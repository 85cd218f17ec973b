"""Meshes over all ranks, made once for all tests in a default process group: each new one makes
groups, and new default groups make torch forget how it distributes operations of DTensors, which
takes longer than most tests.
"""

from __future__ import annotations

from typing import Final

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

_MESHES: Final[dict[tuple[str, tuple[int, ...], tuple[str, ...]], DeviceMesh]] = {}


def shared_mesh(device: str, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    key = device, shape, names
    if key not in _MESHES:
        _MESHES[key] = init_device_mesh(device, shape, mesh_dim_names=names)
    return _MESHES[key]


def forget_shared_meshes() -> None:
    """The default group ends, or has ended."""
    _MESHES.clear()
