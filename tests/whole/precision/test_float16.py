"""float16 gradients are divided in two steps, before and after the sum: neither loses what the two
together keep.
"""

from __future__ import annotations

from itertools import product
from typing import Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh

from composable import fully_shard, no_sync, register_comm_hook, replicate
from tests.helpers.compare import full_gradients
from tests.helpers.world import Pool, current_device, need_devices, spmd

SMALLEST: Final = 2.0**-24  # that float16 knows
LARGEST: Final = 2.0**14  # of which float16 can add up three, but not four


class Weights(nn.Module):
    """Gradients are what it is called with: of a weight that travels by itself, and of one that
    shares a message.
    """

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.zeros(512, 512, dtype=torch.float16))
        self.small = nn.Parameter(torch.zeros(8, 3, dtype=torch.float16))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.large * gradient).sum() + (self.small * gradient).sum()


def _gradients(how: str, grad_reduce: str | float, *terms: float) -> dict[str, list[float]]:
    """The values that occur in each gradient, to which each rank contributes its term."""
    model = Weights().to(current_device())
    if how == "replicate":
        replicate(model, grad_reduce=grad_reduce)
    else:
        replicas = {
            "fully_shard": 0,
            "two replicas": 2,
            "as many replicas as ranks": dist.get_world_size(),
        }[how]
        mesh = (
            init_device_mesh(current_device().type, (replicas, dist.get_world_size() // replicas))
            if replicas
            else None
        )
        fully_shard(model, mesh=mesh, grad_reduce=grad_reduce)
    model(torch.tensor(terms[dist.get_rank()], dtype=torch.float16)).backward()
    return {
        name: torch.unique(g).tolist() for name, g in full_gradients(model).items() if g is not None
    }


@pytest.mark.parametrize("grad_reduce", ["mean", 4.0])
@pytest.mark.parametrize(
    "how", ["fully_shard", "two replicas", "as many replicas as ranks", "replicate"]
)
def test_neither_the_smallest_nor_large_gradients_are_lost_and_ranks_round_alike(
    pool: Pool, how: str, grad_reduce: str | float, device: str
) -> None:
    need_devices(device, 4)
    # By the square root of four ranks: half of the second smallest number is the smallest, a
    # quarter of it is nothing.
    for value in (2 * SMALLEST, LARGEST):
        for gradients in pool.run(4, _gradients, how, grad_reduce, *[value] * 4, device=device):
            assert gradients == {"large": [value], "small": [value]}
    summed = pool.run(4, _gradients, how, "sum", *[SMALLEST] * 4, device=device)
    assert summed == [{"large": [4 * SMALLEST], "small": [4 * SMALLEST]}] * 4
    # An odd number of the smallest, halved, is rounded; whoever does not round it where the other
    # one does ends up apart.
    one, other = pool.run(2, _gradients, how, grad_reduce, SMALLEST, 2 * SMALLEST, device=device)
    assert one == other


@pytest.mark.parametrize("views", [False, True])
@spmd(ranks=2)
def test_gradients_add_up_wherever_they_live_between_backwards(views: bool) -> None:
    for between, grad_reduce, hook in product(
        ("zeros", "none", "nothing", "no_sync"), ("mean", "sum"), (False, True)
    ):
        model = Weights().to(current_device())
        replicate(model, gradient_as_bucket_view=views, grad_reduce=grad_reduce)
        if hook:
            register_comm_hook(model, None, default_hooks.allreduce_hook)
        expected = 0.0
        for step in range(6):
            waits = between == "no_sync" and step % 2 == 0
            with no_sync(model, enabled=waits):
                term = 2.0**-step * (1 + 2 * dist.get_rank())  # two ranks have an exact mean
                model(torch.tensor(term, dtype=torch.float16)).backward()
            expected += 2.0**-step * (4 if grad_reduce == "sum" else 2)
            if waits:
                continue
            for name, gradient in full_gradients(model).items():
                assert gradient is not None
                assert (gradient == expected).all(), (between, grad_reduce, hook, name, step)
            if between in ("zeros", "none"):
                model.zero_grad(set_to_none=between == "none")
                expected = 0.0
