"""Which stages of one sharded unit's reduction hooks of the user's make, and the reduction that consists of these stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from composable.device.collectives import Communicator
from composable.device.flat_parameters import FlatParameters
from composable.runtime.hooked_reduction import HookedReduction
from composable.runtime.hooked_replicas import HookedReplicas
from composable.runtime.hooked_units import ALL_REDUCE, UnitHook, digest_of
from composable.runtime.reduction import Reduction

Like = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class StageHooks:
    """The hooks of one sharded unit; None for a stage that the library makes.

    Attributes:
        over_shards: in place of the reduce-scatter.
        over_replicas: in place of the all-reduce, on a hybrid mesh.
    """

    over_shards: UnitHook | None = None
    over_replicas: UnitHook | None = None

    def at(self, stage: str) -> UnitHook | None:
        """The one of a stage."""
        return self.over_replicas if stage == ALL_REDUCE else self.over_shards

    def changed(self, stage: str, hook: UnitHook | None) -> StageHooks | None:
        """With another hook for a stage; None if none is left."""
        changed = replace(self, **{"over_replicas" if stage == ALL_REDUCE else "over_shards": hook})
        return None if changed.over_shards is changed.over_replicas is None else changed

    @property
    def each(self) -> list[UnitHook]:
        return [hook for hook in (self.over_shards, self.over_replicas) if hook is not None]

    @property
    def digest(self) -> int:
        """A number for the hooks and their stages that is not zero."""
        return digest_of(self.name)

    @property
    def name(self) -> str:
        """For tables."""
        return ", ".join(f"{hook.name} ({stage})" if (stage := hook.units.stage) else hook.name for hook in self.each)


def hooked_reduction(
    hooks: StageHooks,
    flat: FlatParameters,
    sharded: Sequence[nn.Parameter],
    communicator: Communicator,
    trainable: Sequence[bool],
    source: torch.dtype,
    replicas: Communicator | None,
    like: Like | None,
) -> Reduction | HookedReduction:
    """A reduction, some stages of which hooks make. Where one rank alone reduces nothing, no hook is called.

    Args:
        communicator: of the first hop.
        source, replicas, like: `Reduction`'s.
    """
    by_hook = None
    if hooks.over_replicas is not None and replicas is not None:
        by_hook = HookedReplicas(flat, sharded, trainable, hooks.over_replicas, replicas, communicator)
        replicas = None
    if hooks.over_shards is not None and communicator.size > 1:
        return HookedReduction(flat, sharded, communicator, trainable, hooks.over_shards, replicas, like, by_hook)
    return Reduction(flat, sharded, communicator, trainable, source, replicas, like, by_hook=by_hook)
