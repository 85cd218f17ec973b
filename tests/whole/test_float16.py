"""float16 gradients are divided in two steps, before and after the sum: neither loses what the two together keep."""

from __future__ import annotations

from typing import Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from composable import fully_shard, replicate
from tests.helpers.compare import full_gradients
from tests.helpers.world import Pool, current_device, need_devices

SMALLEST: Final = 2.0**-24  # that float16 knows
LARGEST: Final = 2.0**14  # of which float16 can add up three, but not four


_REPLICAS: Final = {"two replicas": 2, "as many replicas as ranks": 0}


class Weights(nn.Module):
    """Gradients are what it is called with: of a weight that travels by itself, and of one that shares a message."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.zeros(512, 512, dtype=torch.float16))
        self.small = nn.Parameter(torch.zeros(8, 3, dtype=torch.float16))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.large * gradient).sum() + (self.small * gradient).sum()


def _gradients(verb: str, *terms: float) -> dict[str, list[float]]:
    """The values that occur in each gradient, to which each rank contributes its term."""
    model = Weights()
    if verb == "replicate":
        replicate(model)
    elif verb in _REPLICAS:
        ranks = dist.get_world_size()
        replicas = _REPLICAS[verb] or ranks
        mesh = init_device_mesh(current_device().type, (replicas, ranks // replicas))
        fully_shard(model.to(current_device()), mesh=mesh)
    else:
        fully_shard(model)
    model(torch.tensor(terms[dist.get_rank()], dtype=torch.float16)).backward()
    return {name: torch.unique(g).tolist() for name, g in full_gradients(model).items() if g is not None}


@pytest.mark.parametrize("verb", ["fully_shard", *_REPLICAS, "replicate"])
def test_neither_the_smallest_nor_large_gradients_are_lost_and_ranks_round_alike(pool: Pool, verb: str, device: str) -> None:
    need_devices(device, 4)
    # By the square root of four ranks: half of the second smallest number is the smallest, a quarter of it is nothing.
    for value in (2 * SMALLEST, LARGEST):
        for gradients in pool.run(4, _gradients, verb, *[value] * 4, device=device):
            assert gradients == {"large": [value], "small": [value]}
    # An odd number of the smallest, halved, is rounded; whoever does not round it where the other one does ends up apart.
    one, other = pool.run(2, _gradients, verb, SMALLEST, 2 * SMALLEST, device=device)
    assert one == other
