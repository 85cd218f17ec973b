"""Where memory is saved, messages of gradients are given back while the next unit's arrive, unless backward ends with them."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable import fully_shard
from composable.device.collectives import Communicator, communicators_wrapped_by
from composable.runtime.reduction import Reduction
from tests.helpers.communicators import all_accelerators
from tests.helpers.compare import full_gradients
from tests.helpers.world import Pool, current_device, need_devices


def _accelerators(communicator: Communicator, *, divided: bool) -> Communicator:
    twin: Any = all_accelerators(communicator) if current_device().type == "cpu" else communicator
    twin.capabilities = replace(twin.capabilities, direct_bytes=64, divided_bytes=64 if divided else 1 << 30)
    return twin


class _Layers(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*[nn.Linear(8, 8) for _ in range(4)])


def _train(after: bool | None, divided: bool) -> list[str]:
    """The units whose messages are given back early in a backward."""
    torch.manual_seed(0)
    model = nn.Sequential(*[_Layers() for _ in range(4)]).to(current_device())
    alone = copy.deepcopy(model)
    with communicators_wrapped_by(partial(_accelerators, divided=divided)):
        fully_shard(model, policy={_Layers}, reshard_after_forward=after)
    units = {name: fully_shard.state(module) for name, module in model.named_children()}
    found: list[str] = []
    give_back = Reduction.give_back

    def noted(reduction: Reduction) -> None:
        for name, unit in units.items():
            assert unit is not None
            found.extend(name for group in unit.handle.gradients.groups if reduction in group.reductions.values())
        give_back(reduction)

    batches = torch.randn(2, dist.get_world_size(), 2, 8).to(current_device())
    for batch in batches:
        found.clear()
        with mock.patch.object(Reduction, "give_back", noted):
            model(batch[dist.get_rank()]).square().mean().backward()
        for share in batch:
            (alone(share).square().mean() / len(batch)).backward()
    for name, gradient in full_gradients(model).items():
        torch.testing.assert_close(gradient, alone.get_parameter(name).grad, msg=lambda text, n=name: f"{n}: {text}")
    return found


@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("after", [None, False])
def test_beside_the_last_unit_of_a_backward_nobody_waits(pool: Pool, after: bool | None, divided: bool, device: str) -> None:
    """Nothing is gathered there, so there is room; a wait would keep the rest of that unit from hiding the message."""
    need_devices(device, 2)
    assert pool.run(2, _train, after, divided, device=device) == [["3", "2"]] * 2
