"""Whole plain tensors out of parameters at rest, and back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composable.api.scopes import units_in
from composable.compilation import unwrapped
from composable.engine.loading import shard_like
from composable.engine.param import ManagedParam
from composable.engine.unit import Unit
from composable.errors import PhaseError
from composable.memory.torch_private import in_backward, local_of


@torch.no_grad()
def write_whole(whole: Tensor, target: Tensor) -> None:
    """Write this rank's part of a whole tensor, which every rank has, into `target`. No message."""
    if isinstance(target, DTensor):
        local = local_of(target)
        local.copy_(local_of(shard_like(whole, target, local.device)))
    else:
        target.copy_(whole)


@dataclass(frozen=True, slots=True)
class Managed:
    """A parameter of a unit, by its name in the model."""

    fqn: str
    unit: Unit
    param: ManagedParam


def managed_in(verb: str, model: nn.Module) -> Iterator[Managed]:
    """Yield the managed parameters of all units in `model`, each once, in the order of units."""
    names = {
        (id(module), name): f"{prefix}.{name}" if prefix else name
        for prefix, module in unwrapped(model).named_modules()
        for name in module._parameters
    }
    for unit in units_in(verb, model):
        for param in unit.params:
            found = [names[key] for place in param.info.places if (key := (id(place.module), place.name)) in names]
            if found:
                yield Managed(found[0], unit, param)


def require_at_rest(verb: str, units: list[Unit]) -> None:
    """Let modules hold their at-rest parameters; inside of a forward or backward that is an error."""
    for unit in units:
        if unit.depth or in_backward():
            raise PhaseError(f"{verb} was called inside of the forward or backward of unit '{unit.name}'; call it outside")
        unit.swap_out()
