"""How the parameters of a unit are distributed over the ranks."""

from __future__ import annotations

import enum


class UnitKind(enum.Enum):
    """How the parameters of a unit lie over the ranks, and when their gradients are reduced.

    Those of BESIDE rest as `DTensor(Replicate)`, as optimizers and clipping expect next to shards,
    if the unit has the ranks of the shards around it (`choose_rest`). Otherwise, and if they are
    distributed by users or have sparse gradients, they rest as users made them.
    """

    SHARDED = "each rank has a shard: gathered, and reduce-scattered where backward leaves the unit"
    BESIDE = "replicated in a tree with shards: all-reduced before the next unit with shards"
    ARRIVAL = "replicated: all-reduced in buckets of the root, as autograd accumulates gradients"
    LOCAL = "one rank: autograd does everything, but for casts"
