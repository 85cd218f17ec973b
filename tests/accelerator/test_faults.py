"""Each wait on the accelerator's path is needed: what goes wrong without it is found, and both launches are named."""

from __future__ import annotations

import os
import re
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

from composable import fully_shard, replicate
from composable.device.collectives import AcceleratorCommunicator, Communicator, communicators_wrapped_by
from composable.device.collectives.choice import REDUCTIONS_VARIABLE
from composable.runtime.hop import Hop
from tests.accelerator import watch
from tests.accelerator.faults import FAULTS
from tests.helpers.world import Pool, current_device


class Block(nn.Module):
    """Has parameters that travel by themselves, with others, and, not cut, not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(8, 24)
        self.gate = nn.Linear(8, 24)
        self.narrow = nn.Linear(24, 8)
        self.scale = nn.Parameter(torch.ones(()))
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise RuntimeError("as asked")
        return x + self.scale * self.narrow(torch.relu(self.wide(x)) * self.gate(x))


def _hybrid(model: nn.Module) -> None:
    fully_shard(model, policy={Block}, mesh=init_device_mesh("sim", (2, 2), mesh_dim_names=("replicate", "shard")))


def _with_reductions_apart(model: nn.Module) -> None:
    made: list[Communicator] = []

    def noted(communicator: Communicator) -> Communicator:
        made.append(communicator)
        return communicator

    with mock.patch.dict(os.environ, {REDUCTIONS_VARIABLE: "1"}), communicators_wrapped_by(noted):
        fully_shard(model, policy={Block}, mesh=dist.new_group())  # of a group that is there, ranks have agreed before
    assert any(isinstance(each, AcceleratorCommunicator) and each.reductions is not each._group for each in made)


def _in_two_parts(model: nn.Module) -> None:
    def divided(communicator: Communicator) -> Communicator:
        if isinstance(communicator, AcceleratorCommunicator):
            communicator.capabilities = replace(communicator.capabilities, direct_bytes=256, divided_bytes=256)
        return communicator

    with communicators_wrapped_by(divided):
        fully_shard(model, policy={Block}, mesh=dist.new_group())


def _in_two_parts_apart(model: nn.Module) -> None:
    with mock.patch.dict(os.environ, {REDUCTIONS_VARIABLE: "1"}):
        _in_two_parts(model)


_SCHEMES: Final[dict[str, Callable[[nn.Module], Any]]] = {
    "fully_shard": lambda model: fully_shard(model, policy={Block}),
    "bfloat16": lambda model: fully_shard(model, policy={Block}, mp_policy="bf16"),
    "hybrid": _hybrid,
    "resharded to two": lambda model: fully_shard(model, policy={Block}, reshard_after_forward=2),
    "reductions apart": _with_reductions_apart,
    "in two parts": _in_two_parts,
    "in two parts, reductions apart": _in_two_parts_apart,
    "replicate": lambda model: replicate(model, bucket_cap_mb=0.0005),
}


def _some_by_themselves(communicator: Communicator) -> Communicator:
    if isinstance(communicator, AcceleratorCommunicator):
        communicator.capabilities = replace(communicator.capabilities, direct_bytes=256)
    return communicator


def _train(scheme: str, name: str | None) -> list[str]:
    torch.manual_seed(0)
    device = current_device()
    model = nn.Sequential(Block(), Block(), Block(), nn.Linear(8, 3)).to(device)
    with communicators_wrapped_by(_some_by_themselves):
        _SCHEMES[scheme](model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 8, device=device)
    fault = FAULTS[name] if name is not None else None

    def step() -> None:
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    with mock.patch.object(Hop, "wait_for_first", autospec=True, side_effect=Hop.wait_for_first) as landed:
        step()
    unit = fully_shard.state(model.get_submodule("1"))
    reductions = [] if unit is None else [r for group in unit.handle.gradients.groups for r in group.reductions.values()]
    assert [reduction.divided for reduction in reductions] == [scheme.startswith("in two parts")] * len(reductions)
    assert (landed.call_count > 0) == (scheme != "replicate"), "gradients of the next block arrive"
    for _ in range(2):  # what ranks agree on in the first ones would come out differently, and nobody find the others
        step()
    with nullcontext() if fault is None else fault.put():
        if fault is not None and fault.fails:
            model[1].fails = True  # type: ignore[assignment]
            with pytest.raises(RuntimeError, match="as asked"):
                step()
            model[1].fails = False  # type: ignore[assignment]
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
    pattern = re.compile(f"{fault.first} is not ordered before {fault.second}")
    for found in pool.run(_ranks(fault.scheme), _train, fault.scheme, name, device="sim"):
        assert any(pattern.match(each) for each in found), "\n".join([pattern.pattern, *found])
