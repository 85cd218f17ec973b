"""A model of parts that ranks use as they like, and means of gradients to compare with; knows no
test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable import replicate
from tests.helpers.world import current_device

WIDTH: Final = 4


class Parts(nn.Module):
    """Linear layers that run in the order in which they are asked for."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def forward(self, x: Tensor, order: Sequence[int]) -> Tensor:
        for index in order:
            x = self.layers[index](x).tanh()
        return x


def copies(
    make: Callable[[], Any], annotate: Callable[..., object] = replicate, **options: Any
) -> tuple[Any, Any]:
    """A plain model and the same one annotated."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(make().to(current_device(), torch.float64))
    annotate(models[1], **options)
    return models[0], models[1]


def batch_of(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(3, WIDTH, generator=generator, dtype=torch.float64).to(current_device())
