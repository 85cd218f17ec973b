"""Models on the host whose ranks communicate on an accelerator: what is sent is there, and who forgot them is told."""

from __future__ import annotations

import logging
from typing import Any, Final
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable import fully_shard
from composable.api import meshes
from composable.api.sync_module_states import synchronise
from composable.device.collectives import AcceleratorCommunicator, world_group
from composable.device.streams import HostStreams
from composable.model.traversal import ManagedParameter, NamedPlace
from tests.helpers.world import Pool

_CUDA: Final = torch.device("cuda", 0)


def _broadcasts() -> tuple[list[str], list[float]]:
    communicator = AcceleratorCommunicator(world_group(), _CUDA, HostStreams())
    seen: list[str] = []
    elsewhere: list[Tensor] = []

    def to(tensor: Tensor, device: torch.device) -> Tensor:
        elsewhere.append(tensor.clone())
        seen.append(f"to {device}")
        return elsewhere[-1]

    def broadcast(tensor: Tensor, **options: Any) -> None:
        seen.append("broadcast" if tensor is elsewhere[-1] else "broadcast from where it is")
        tensor.fill_(7.0)

    parameter = nn.Parameter(torch.zeros(2))
    managed = ManagedParameter(parameter, (NamedPlace(nn.Module(), "w", "w"),))
    with (
        mock.patch.object(communicator, "min_max", lambda values, **_: (values, values)),
        mock.patch.object(Tensor, "to", to),
        mock.patch.object(dist, "broadcast", broadcast),
    ):
        synchronise("fully_shard", [managed], communicator, "broadcast", ["alike"])
    return seen, parameter.tolist()


def test_what_is_on_the_host_is_broadcast_where_the_ranks_communicate_and_comes_back(pool: Pool) -> None:
    """A backend of an accelerator refuses anything else."""
    assert pool.run(2, _broadcasts) == [(["to cuda:0", "broadcast"], [7.0, 7.0])] * 2


def _told(backends: dict[str, str]) -> list[str]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("composable")
    logger.addHandler(handler)
    with (
        mock.patch.object(torch.accelerator, "is_available", return_value=True),
        mock.patch.object(torch.accelerator, "current_accelerator", return_value=_CUDA),
        mock.patch.object(meshes, "backend_of", lambda group, device: backends[device.type]),
    ):
        try:
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            fully_shard(model, policy={nn.Linear}, mesh=dist.new_group())
        finally:
            logger.removeHandler(handler)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    return messages


def test_who_forgot_the_model_on_the_host_is_told_once(pool: Pool) -> None:
    told = (
        "a module that is being annotated is on the host, and so it trains there, though its process group serves cuda, too; "
        "if it should train there, call module.to('cuda') first, or pass a mesh of that device"
    )
    assert pool.run(2, _told, {"cpu": "gloo", "cuda": "nccl"}, device="cpu") == [[told]] * 2


def test_who_made_a_group_for_the_host_is_told_nothing(pool: Pool) -> None:
    """A group of gloo serves tensors of accelerators, too, if it must."""
    assert pool.run(2, _told, {"cpu": "gloo", "cuda": "gloo"}, device="cpu") == [[], []]
    assert pool.run(2, _told, {"cpu": "gloo", "cuda": "undefined"}, device="cpu") == [[], []]
