"""What an optimizer steps as one tensor is no longer than what stays in a host's caches."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from composable import ShardStepping, fully_shard, step_on_shards
from composable.optim import spans
from composable.optim.spans import LONGEST
from tests.helpers.world import Pool, current_device, need_devices
from tests.optim.twins import OPTIMIZERS, Twins, flags_of, make_twins, run_lengths, stepped_by_torch, torch_steps_dtensors


class _Many(nn.Module):
    """One unit: on two ranks five of its matrices are nearly as long as a run may be, and the last one alone is longer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        rows = 2 * LONGEST // 5 // 1024 // 2 * 2
        self.weights = nn.ParameterList([*(torch.randn(rows, 256) for _ in range(7)), torch.randn(6 * rows, 256)])

    def forward(self) -> Tensor:
        return torch.stack([weight.square().sum() for weight in self.weights]).sum()


def _most_slices(handle: ShardStepping) -> int:
    """Tensors that were stepped last in place of one parameter."""
    plan = handle._plan
    assert plan is not None
    return max(len(span.stepped) for span in plan._spans)


def _lengths(flag: str) -> tuple[list[int], int]:
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
    return sorted(run_lengths(twins.handle)), _most_slices(twins.handle)


@pytest.mark.beyond_sim("on accelerators runs are as long as they can be")
@pytest.mark.parametrize("flag", ["", "foreach", "fused"])
def test_runs_end_before_they_are_too_long_and_change_no_bit(pool: Pool, flag: str, device: str) -> None:
    need_devices(device, 2)
    assert pool.run(2, _lengths, flag, device=device) == [([1, 2, 5], 1 if flag else 2)] * 2


def _train_in_slices(name: str) -> int:
    slices = 1
    kind = OPTIMIZERS[name][0]
    with mock.patch.object(spans, "LONGEST", 256):
        for flag in flags_of(kind):
            if not torch_steps_dtensors(kind, flag):
                continue
            twins = make_twins(name, flag)
            for step in range(3):
                twins.step(step)
            twins.step(3, skipped=2)
            twins.step(4, keep=True)
            twins.both(lambda _, optimizer: optimizer.load_state_dict(optimizer.state_dict()))
            twins.step(5)
            slices = max(slices, _most_slices(twins.handle))
            twins.handle.remove()
            twins.step(6)  # state is where the parameters' own code looks for it
    return slices


@pytest.mark.beyond_sim("on accelerators runs are as long as they can be")
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "Rprop"])  # which torch cannot step on DTensors
def test_no_bit_depends_on_whether_a_parameter_is_stepped_in_slices(pool: Pool, name: str, device: str) -> None:
    need_devices(device, 2)
    assert min(pool.run(2, _train_in_slices, name, device=device)) > 1, "no parameter was stepped in slices"
