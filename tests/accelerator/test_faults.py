"""Each wait on the accelerator's path is needed: what goes wrong without it is found, and both
launches are named.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Final
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from composable import checkpoint, fully_shard, replicate
from composable.comm.backends import REDUCTIONS_VARIABLE, AcceleratorComm, comms_wrapped_by
from composable.comm.base import Comm
from tests.accelerator import sim, watch
from tests.accelerator.faults import FAULTS, assert_found
from tests.helpers.world import Pool, current_device


class Block(nn.Module):
    """Has parameters that travel by themselves, with others, and, not cut, not at all, and one that
    is not used.
    """

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(8, 24)
        self.gate = nn.Linear(8, 24)
        self.narrow = nn.Linear(24, 8)
        self.scale = nn.Parameter(torch.ones(()))
        self.unused = nn.Parameter(torch.ones(3))
        self.fails = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.fails == "forward":
            fail()
        if self.fails == "backward":
            x.register_hook(fail)
        return x + self.scale * self.narrow(torch.relu(self.wide(x)) * self.gate(x))


def fail(*_: object) -> None:
    raise RuntimeError("as asked")


def _hybrid(model: nn.Module) -> None:
    fully_shard(
        model,
        policy={Block},
        mesh=init_device_mesh("sim", (2, 2), mesh_dim_names=("replicate", "shard")),
    )


def _checkpointed(model: nn.Module) -> None:
    checkpoint(model, policy={Block})
    fully_shard(model, policy={Block})


def _mixed(model: nn.Module) -> None:
    replicate(model.get_submodule("1"))
    fully_shard(model, policy={Block})


def _with_reductions_apart(model: nn.Module) -> None:
    with mock.patch.dict(os.environ, {REDUCTIONS_VARIABLE: "1"}):
        fully_shard(model, policy={Block}, mesh=dist.new_group())
    comm = fully_shard.state(model).mesh_info.shard
    assert isinstance(comm, AcceleratorComm)
    assert comm._reductions() is not comm.group


_SCHEMES: Final[dict[str, Callable[[nn.Module], Any]]] = {
    "fully_shard": lambda model: fully_shard(model, policy={Block}),
    "without resharding": lambda model: fully_shard(
        model, policy={Block}, reshard_after_forward=False
    ),
    "fully_shard and checkpoint": _checkpointed,
    "replicate inside fully_shard": _mixed,
    "bfloat16": lambda model: fully_shard(model, policy={Block}, mp_policy="bf16"),
    "hybrid": _hybrid,
    "resharded to two": lambda model: fully_shard(model, policy={Block}, reshard_after_forward=2),
    "reductions apart": _with_reductions_apart,
    "forward on a stream of its own": lambda model: fully_shard(model, policy={Block}),
    "replicate": lambda model: replicate(model, bucket_cap_mb=0.0005),
}


def _some_by_themselves(comm: Comm) -> Comm:
    comm.traits = replace(comm.traits, direct_bytes=256)
    return comm


def _train(scheme: str, name: str | None) -> list[str]:
    torch.manual_seed(0)
    device = current_device()
    model = nn.Sequential(Block(), Block(), Block(), nn.Linear(8, 3)).to(device)
    with comms_wrapped_by(_some_by_themselves):
        _SCHEMES[scheme](model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 8, device=device)
    fault = FAULTS[name] if name is not None else None

    side = torch.Stream(device)
    sim.native.name_stream(side.stream_id, "the user's stream")

    def differentiate() -> None:
        """A forward on another stream than its backward, which ends while a gather is in flight and
        gives no leaf a gradient.
        """
        seen: list[Tensor] = []
        hook = model[1].register_forward_hook(lambda module, args, output: seen.append(output))
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            loss = model(x).square().sum()
        hook.remove()
        torch.autograd.grad(loss, seen)
        torch.accelerator.current_stream().wait_stream(side)

    def step() -> None:
        if "stream of its own" in scheme:
            differentiate()
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):  # ranks agree on what they do in the first one
        step()
    with nullcontext() if fault is None else fault.put():
        if fault is not None and fault.fails:
            model[1].fails = fault.fails  # type: ignore[assignment]
            with pytest.raises(RuntimeError, match="as asked"):
                step()
            model[1].fails = ""  # type: ignore[assignment]
        for _ in range(2):
            step()
    return watch.take_findings()


def _ranks(scheme: str) -> int:
    return 4 if scheme in ("hybrid", "resharded to two") else 2


@pytest.mark.parametrize("scheme", _SCHEMES)
def test_without_a_fault_nothing_is_found(pool: Pool, scheme: str) -> None:
    assert pool.run(_ranks(scheme), _train, scheme, None, device="sim") == [[]] * _ranks(scheme)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_both_launches_are_named(pool: Pool, name: str) -> None:
    fault = FAULTS[name]
    assert_found(
        pool.run(_ranks(fault.scheme), _train, fault.scheme, name, device="sim"),
        fault.first,
        fault.second,
    )
