"""Reductions over a communicator of their own, while the root and the unit that ran last stay unsharded for backward."""

from __future__ import annotations

import copy
import os
from unittest import mock

import pytest
import torch.distributed as dist

from composable import fully_shard
from composable.comm.choose import REDUCTIONS_VARIABLE
from tests.helpers.compare import assert_mean_gradients
from tests.helpers.world import Pool, current_device, need_devices
from tests.whole.test_last_units import Layer, batch, layers_and_head, unsharded_units


def _train(after: bool | None) -> tuple[list[str], bool]:
    """What stays unsharded after a forward, and whether reductions have a communicator of their own."""
    plain = layers_and_head().to(current_device())
    model = copy.deepcopy(plain)
    group = dist.new_group()
    with mock.patch.dict(os.environ, {REDUCTIONS_VARIABLE: "1"}):
        fully_shard(model, mesh=group, policy={Layer}, reshard_after_forward=after)
    unit = fully_shard.state(model)
    assert unit is not None
    reductions = getattr(unit.mesh_info.shard, "_reductions", lambda: None)()
    left = []
    for step in range(3):
        x = batch(step).to(current_device())
        for each in (plain, model):
            each.zero_grad()
            loss = each(x).square().sum()
            if each is model:
                left = unsharded_units(model)
            loss.backward()
        assert_mean_gradients(plain, model, step, rtol=1e-5, atol=1e-6)
    return left, reductions is not None and reductions.group_desc == "composable: reduce-scatters"


@pytest.mark.parametrize("after", [None, True, False])
def test_gradients_are_right_whatever_stays_unsharded(pool: Pool, device: str, after: bool | None) -> None:
    need_devices(device, 2)
    stays = {None: ["", "3"], True: [], False: ["", "0", "1", "2", "3"]}[after]
    for left, apart in pool.run(2, _train, after, device=device):
        assert left == stays
        assert apart == (device != "cpu")
