"""Models on the host whose ranks communicate on an accelerator: what is sent is there, and who
forgot them is warned.
"""

from __future__ import annotations

from typing import Any, Final
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable import fully_shard
from composable.api import mesh as meshes
from composable.comm.backends import AcceleratorComm, world_group
from composable.comm.launch import Launch
from composable.memory.streams import Streams
from tests.helpers.logged import logged
from tests.helpers.world import Pool, spmd

_CUDA: Final = torch.device("cuda", 0)


@spmd(ranks=2, everywhere=True)
def test_what_is_on_the_host_is_broadcast_where_the_ranks_communicate_and_comes_back() -> None:
    """A backend of an accelerator refuses anything else."""
    comm = AcceleratorComm(world_group(), _CUDA, Streams())
    seen: list[str] = []
    elsewhere: list[Tensor] = []

    def to(tensor: Tensor, device: torch.device) -> Tensor:
        elsewhere.append(tensor.clone())
        seen.append(f"to {device}")
        return elsewhere[-1]

    def broadcast(tensor: Tensor, **options: Any) -> None:
        seen.append(f"broadcast of {tensor.numel()} bytes")
        tensor.copy_(torch.full((2,), 7.0).view(torch.uint8))

    parameter = nn.Parameter(torch.zeros(2))
    with mock.patch.object(Tensor, "to", to), mock.patch.object(dist, "broadcast", broadcast):
        comm.broadcast([parameter], Launch("broadcast of parameters"), src=1 - dist.get_rank())
    assert seen == ["to cuda:0", "broadcast of 8 bytes"]
    assert parameter.tolist() == [7.0, 7.0]


def _reported(backends: dict[str, str]) -> list[str]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with (
        mock.patch.object(torch.accelerator, "is_available", return_value=True),
        mock.patch.object(torch.accelerator, "current_accelerator", return_value=_CUDA),
        mock.patch.object(meshes, "backend_of", lambda group, device: backends[device.type]),
        logged() as messages,
    ):
        fully_shard(model, policy={nn.Linear}, mesh=dist.new_group())
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    return messages


def test_who_forgot_the_model_on_the_host_is_warned_once(pool: Pool) -> None:
    reported = (
        "WARNING: a module that is being annotated is on the host, and so it trains there, though"
        " its process group serves cuda, too; if it should train there, call module.to('cuda')"
        " first, or pass a mesh of that device"
    )
    assert pool.run(2, _reported, {"cpu": "gloo", "cuda": "nccl"}, device="cpu") == [[reported]] * 2


def test_who_made_a_group_for_the_host_gets_no_warning(pool: Pool) -> None:
    """A group of gloo serves tensors of accelerators, too, if it must."""
    assert pool.run(2, _reported, {"cpu": "gloo", "cuda": "gloo"}, device="cpu") == [[], []]
    assert pool.run(2, _reported, {"cpu": "gloo", "cuda": "undefined"}, device="cpu") == [[], []]
