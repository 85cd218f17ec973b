"""Tensor-parallel parameters at an annotation: what is asked of the ranks of the user's meshes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from composable.api.mesh import Spread, joint_mesh
from composable.api.selection import ids_of_ignored
from composable.comm import Comm, comm_of
from composable.contract.tree import Managed, managed_parameters
from composable.engine.param import ParamInfo
from composable.engine.tensor_parallel import ModelSpec, model_like
from composable.errors import RanksDisagreeError, first_line


@contextmanager
def told_across(
    verb: str,
    modules: Sequence[nn.Module],
    ignored_params: Iterable[Any] | None,
    device: torch.device,
) -> Iterator[None]:
    """Around what the ranks of a unit agree on: a failure here is told across parameters' meshes.

    It fails on all ranks over which parameters are tensor parallel, too.
    """
    meshes: list[DeviceMesh] = []
    ignored: Mapping[int, None] = {}
    with suppress(Exception):  # of which the validation tells
        ignored = ids_of_ignored(modules, ignored_params)
    for managed in managed_parameters(modules, ignored=ignored):
        tensor = managed.tensor
        if isinstance(tensor, DTensor) and tensor.device_mesh not in meshes:
            meshes.append(tensor.device_mesh)
    comms = [
        comm_of(mesh.get_group(dim), device)
        for mesh in meshes
        if mesh.get_coordinate() is not None
        for dim in range(mesh.ndim)
    ]
    with told_to(verb, comms, "tensor-parallel rank"):
        yield


@contextmanager
def told_to(verb: str, comms: Sequence[Comm], whom: str) -> Iterator[None]:
    """Around what all ranks of `comms` do: a failure here is raised on all of them."""
    label = f"agreement of {verb}() with each other {whom}"
    try:
        yield
    except Exception as error:
        for comm in comms:
            comm.all_gather_objects(f"{type(error).__name__}: {first_line(error)}", label)
        raise
    failed = ""
    for comm in comms:
        said = comm.all_gather_objects(failed, label)
        failed = failed or next(filter(None, said), "")
    if failed:
        raise RanksDisagreeError(
            f"{verb}: another {whom} failed, so no rank annotates the module: {failed}"
        )


def with_models(
    verb: str,
    infos: Sequence[ParamInfo],
    parameters: Sequence[Managed[nn.Parameter]],
    spreads: Sequence[Spread | None],
    device: torch.device,
) -> tuple[ParamInfo, ...]:
    """Note how tensor-parallel parameters are spread, each over its own mesh and `spreads`.

    All parameters of one pair of meshes share one joint mesh.
    """
    meshes: list[tuple[DeviceMesh, Spread, DeviceMesh]] = []
    found = []
    for info, managed, spread in zip(infos, parameters, spreads, strict=True):
        tensor = managed.tensor
        if not isinstance(tensor, DTensor) or spread is None:
            found.append(info)
            continue
        own = tensor.device_mesh
        joint = next((each[2] for each in meshes if each[:2] == (own, spread)), None)
        if joint is None:
            joint = joint_mesh(verb, own, spread, device)
            meshes.append((own, spread, joint))
        found.append(replace(info, model=ModelSpec(model_like(tensor), joint)))
    return tuple(found)
