"""What a case of the battery is; knows no model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.helpers.placed import placed

DTYPE = torch.float64  # so that a wrong factor or a lost term cannot hide in rounding


def _unprepared(model: nn.Module) -> None:
    return None


def _is_float(tensor: Tensor) -> bool:
    return tensor.is_floating_point()


@dataclass(frozen=True)
class Case:
    """A model, its batches and its loss, all functions of seeds.

    Attributes:
        build: makes the model on the CPU; the same one for the same seed of torch's default
            generator.
        batch: makes one rank's inputs, batch first, all ranks equally many rows.
        loss: runs forward and gives the mean loss over the rows.
        units: classes whose modules become units of their own.
        personalize: changes the model of one rank, before annotation.
        prepare: annotates what no scheme may touch, before the scheme; collective.
        own: prefixes of FQNs of parameters that each rank trains by itself.
        joined: whether one process on all ranks' batches computes the same; False where forward
            mixes rows (batch statistics) or ranks differ. Then the reference simulates one replica
            per rank.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple[Tensor, ...]]
    loss: Callable[..., Tensor]
    units: tuple[type[nn.Module], ...]
    personalize: Callable[[nn.Module, int], None] = field(default=lambda model, rank: None)
    prepare: Callable[[nn.Module], None] = _unprepared
    own: tuple[str, ...] = ()
    joined: bool = True

    def model(self, seed: int, rank: int, device: torch.device | str = "cpu") -> nn.Module:
        torch.manual_seed(seed)
        model = self.build().to(DTYPE)
        self.personalize(model, rank)
        return placed(model, device)

    def inputs(
        self, seed: int, step: int, rank: int, device: torch.device | str = "cpu"
    ) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step * 1009 + rank)
        made = self.batch(generator)
        return tuple([t.to(device, DTYPE) if _is_float(t) else t.to(device) for t in made])

    def is_own(self, name: str) -> bool:
        return name.startswith(self.own) if self.own else False


def rows(*shape: int) -> Callable[[torch.Generator], tuple[Tensor, ...]]:
    """A maker of batches of one normal tensor."""
    return lambda generator: (torch.randn(*shape, generator=generator),)


def words(vocabulary: int, *shape: int) -> Callable[[torch.Generator], tuple[Tensor, ...]]:
    """A maker of batches of one tensor of token numbers."""
    return lambda generator: (torch.randint(vocabulary, shape, generator=generator),)


def mean_square(model: nn.Module, *inputs: Any) -> Tensor:
    output = model(*inputs)
    assert isinstance(output, Tensor)
    return output.square().mean()
