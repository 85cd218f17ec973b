"""Replicated units on an accelerator: one communicator for all of them, whatever order their gradients come in."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable import replicate
from composable.model.traversal import get_replicated_states
from tests.helpers.compare import averaged_gradients
from tests.helpers.world import current_device, spmd


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, short: bool) -> Tensor:
        y = self.one(x).tanh()
        return x + (y if short else self.two(y))


class Sides(nn.Module):
    """Parts of which each rank runs all, in an order of its own, and leaves a layer of one out."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part() for _ in range(3))

    def forward(self, x: Tensor, step: int) -> Tensor:
        for turn in range(3):
            index = (dist.get_rank() + step + turn) % 3
            x = self.parts[index](x, short=turn == 1)
        return x


@spmd(ranks=2)
def test_units_side_by_side_get_the_means_over_one_communicator_that_says_what_it_is_for() -> None:
    torch.manual_seed(0)
    plain = Sides()
    model = Sides()
    model.load_state_dict(plain.state_dict())
    plain, model = plain.to(current_device()), model.to(current_device())
    before = len(dist.distributed_c10d._world.pg_names)
    for part in model.parts:
        replicate(part, bucket_cap_mb=100 / (1 << 20))
    assert len(dist.distributed_c10d._world.pg_names) <= before + 1, "there may be one from before"
    found = {id(unit.averaging.communicator): unit.averaging.communicator for unit in get_replicated_states(model)}
    assert [each.group.group_desc for each in found.values()] == ["composable sums of replicated modules"]
    for step in range(3):
        for each in (plain, model):
            each.zero_grad()
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * step + dist.get_rank())).to(current_device())
            each(x, step).square().sum().backward()
        for name, mean in averaged_gradients(plain).items():
            gradient = model.get_parameter(name).grad
            assert (gradient is None) == (mean is None), (step, name)
            if gradient is not None and mean is not None:
                torch.testing.assert_close(gradient, mean, rtol=1e-5, atol=1e-6)
