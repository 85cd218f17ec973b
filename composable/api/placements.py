"""What the user may return from `shard_placement_fn`, and what it becomes: the dimension that each parameter is cut along."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn
from torch.distributed.tensor import Shard

from composable.errors import AnnotationError
from composable.model.traversal import ManagedParameter

Placement = Callable[[nn.Parameter], Shard | None]
Placements = tuple[int | None, ...]  # the dimension that each parameter of a unit is cut along; None: it is not cut


def placements_of(parameters: Sequence[ManagedParameter], choose: Placement | None) -> Placements:
    return tuple(_placement(managed, choose) for managed in parameters)


def _placement(managed: ManagedParameter, choose: Placement | None) -> int | None:
    parameter = managed.parameter
    if parameter.ndim == 0:
        return None
    placement = choose(parameter) if choose is not None else None
    if placement is None:
        return 0
    if not isinstance(placement, Shard):
        raise AnnotationError(
            f"shard_placement_fn must return Shard or None, got {type(placement).__name__} for '{managed.fqn}'"
        )
    dim = placement.dim + parameter.ndim if placement.dim < 0 else placement.dim
    if not 0 <= dim < parameter.ndim:
        raise AnnotationError(
            f"shard_placement_fn returned {placement} for '{managed.fqn}', which has {parameter.ndim} dimensions"
        )
    return dim
