"""Runs of parameters that an optimizer steps as one tensor are no longer than what stays in a host's caches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from composable import fully_shard, step_on_shards
from composable.optim.spans import LONGEST
from tests.helpers.world import Pool, current_device, need_devices
from tests.optim.twins import Twins, run_lengths, stepped_by_torch


class _Many(nn.Module):
    """One unit: on two ranks five of its matrices are nearly as long as a run may be, and the last one alone is longer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        rows = 2 * LONGEST // 5 // 1024 // 2 * 2
        self.weights = nn.ParameterList([*(torch.randn(rows, 256) for _ in range(7)), torch.randn(6 * rows, 256)])

    def forward(self) -> Tensor:
        return torch.stack([weight.square().sum() for weight in self.weights]).sum()


def _lengths(flag: str) -> list[int]:
    models = _Many().to(current_device()), _Many().to(current_device())
    for model in models:
        fully_shard(model)
    flags = {flag: True} if flag else {}
    one, other = (torch.optim.AdamW(model.parameters(), lr=1e-3, **flags) for model in models)  # type: ignore[arg-type]
    twins = Twins(models, (stepped_by_torch(one), other), step_on_shards(other))
    for _ in range(2):
        for model in models:
            model().backward()
        for optimizer in twins.optimizers:
            optimizer.step()
            optimizer.zero_grad()
    twins.check("after two steps")
    return sorted(run_lengths(twins.handle))


@pytest.mark.beyond_sim("on accelerators runs are as long as they can be")
@pytest.mark.parametrize("flag", ["", "foreach", "fused"])
def test_runs_end_before_they_are_too_long_and_change_no_bit(pool: Pool, flag: str, device: str) -> None:
    need_devices(device, 2)
    assert pool.run(2, _lengths, flag, device=device) == [[1, 2, 5]] * 2
