"""Counts of offloaded tensors, and offload on a CPU.

On a CPU `offload_activations` copies nothing. Inside of `offloading` it does, with host memory at
both ends, so that its effect on values and graphs can be tested everywhere. Its effect on streams
is tested on the simulated accelerator.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from composable import offload_activations
from composable.features import activations
from composable.features.activations import HostCopy, copies_of
from tests.helpers.world import current_device


@dataclass
class Seen:
    """The tensors that left the device, and those that came back.

    Attributes:
        left: elements of each copy to the host.
        options: keywords for `offload_activations`.
    """

    left: list[int] = field(default_factory=list)
    brought: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def alive(self) -> int:
        """The number of copies that a graph still holds."""
        return copies_of(current_device()).alive


@contextmanager
def offloading() -> Iterator[Seen]:
    """Tensors of any size leave this rank's device, even a CPU."""
    seen = Seen(options={"min_bytes": 0, "pin_memory": current_device().type != "cpu"})
    make, bring_back = HostCopy.__init__, HostCopy.bring_back

    def noted(self: HostCopy, flat: Tensor, *args: Any, **options: Any) -> None:
        seen.left.append(flat.numel())
        make(self, flat, *args, **options)

    def noted_return(self: HostCopy) -> Any:
        seen.brought += self.near is None
        return bring_back(self)

    with ExitStack() as patches:
        if current_device().type == "cpu":
            patches.enter_context(mock.patch.object(activations, "has_streams", return_value=True))
            patches.enter_context(
                mock.patch.object(activations, "any_has_streams", return_value=True)
            )
        patches.enter_context(mock.patch.object(HostCopy, "__init__", noted))
        patches.enter_context(mock.patch.object(HostCopy, "bring_back", noted_return))
        yield seen


class Line(nn.Module):
    """Saves its input, and what its ReLU returns."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def line(**options: Any) -> Line:
    """Offloaded; with the same parameters each time."""
    torch.manual_seed(0)
    return offload_activations(Line().to(current_device()), **options)


def inputs_of(*shape: int) -> Tensor:
    """The same each time; by default for a `Line`."""
    shape = shape or (4, 8)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(current_device())
