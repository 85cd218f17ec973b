"""Reductions over a communicator of their own, while the root and the unit that ran last stay unsharded for backward."""

from __future__ import annotations

import copy
import os
from typing import Final
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable import describe, fully_shard
from composable.device.collectives.choice import REDUCTIONS_VARIABLE
from tests.helpers.compare import averaged_gradients, full_gradients
from tests.helpers.world import Pool, current_device, need_devices

WIDTH: Final = 7  # no number of ranks divides it
LAYERS: Final = 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x).tanh()
        return result


def _train(separate: bool, after: bool | None) -> tuple[list[str], bool]:
    """What stays unsharded after a forward, and whether reductions have a communicator of their own."""
    torch.manual_seed(0)
    plain = nn.Sequential(*[Layer() for _ in range(LAYERS)], nn.Linear(WIDTH, 3)).to(current_device())
    model = copy.deepcopy(plain)
    group = dist.new_group()
    with mock.patch.dict(os.environ, {REDUCTIONS_VARIABLE: str(int(separate))}):
        fully_shard(model, mesh=group, policy={Layer}, reshard_after_forward=after)
    unit = fully_shard.state(model)
    assert unit is not None
    reductions = getattr(unit.handle.mesh_info.shard, "reductions", lambda: None)()
    left = []
    for step in range(3):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        x = torch.randn(2, WIDTH, generator=generator).to(current_device())
        for each in (plain, model):
            each.zero_grad()
            loss = each(x).square().sum()
            if each is model:
                left = [row.unit for row in describe(model).rows if row.state == "UNSHARDED"]
            loss.backward()
        actual = full_gradients(model)
        for name, mean in averaged_gradients(plain).items():
            gradient = actual[name]
            assert gradient is not None
            assert mean is not None
            torch.testing.assert_close(
                gradient, mean, rtol=1e-5, atol=1e-6, msg=lambda text, n=name, s=step: f"{s} {n}: {text}"
            )
    return left, reductions is not None and reductions.group_desc == "composable reduce-scatters"


@pytest.mark.parametrize("after", [None, True, False])
def test_gradients_are_right_whatever_stays_unsharded(pool: Pool, device: str, after: bool | None) -> None:
    need_devices(device, 2)
    stays = {None: ["", "3"], True: [], False: ["", "0", "1", "2", "3"]}[after]
    for left, apart in pool.run(2, _train, True, after, device=device):
        assert left == stays
        assert apart == (device != "cpu")
