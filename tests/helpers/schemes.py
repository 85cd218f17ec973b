"""Ways to annotate a model of the battery; knows the verbs, and cases only by their unit
classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

from composable import checkpoint, fully_shard, replicate
from tests.helpers.battery import Case
from tests.helpers.compare import Replicated, nothing_replicated


@dataclass(frozen=True)
class Scheme:
    """One way to annotate.

    Attributes:
        annotate: does it.
        ranks: world sizes that it is tested on.
        replicated: the modules whose buffers become rank 0's at every forward.
        recomputes: whether forward runs twice.
    """

    annotate: Callable[[nn.Module, Case], None]
    ranks: tuple[int, ...] = (1, 2, 3, 4)
    replicated: Replicated = nothing_replicated
    recomputes: bool = False


def units_of(model: nn.Module, case: Case) -> list[nn.Module]:
    """The modules that become units, in `.modules()` order, without the model itself."""
    return [
        module
        for module in model.modules()
        if isinstance(module, case.units) and module is not model
    ]


def outermost_units_of(model: nn.Module, case: Case) -> list[nn.Module]:
    """Units that are in no other unit."""
    units = units_of(model, case)
    inside = {id(child) for unit in units for child in unit.modules() if child is not unit}
    return [unit for unit in units if id(unit) not in inside]


def _everything(model: nn.Module, case: Case) -> list[nn.Module]:
    return list(model.modules())


def _outside_units(model: nn.Module, case: Case) -> list[nn.Module]:
    inside = {id(module) for unit in outermost_units_of(model, case) for module in unit.modules()}
    return [module for module in model.modules() if id(module) not in inside]


def _every_other_unit(model: nn.Module, case: Case) -> list[nn.Module]:
    return [module for unit in outermost_units_of(model, case)[::2] for module in unit.modules()]


def _by_policy(**options: Any) -> Callable[[nn.Module, Case], None]:
    def annotate(model: nn.Module, case: Case) -> None:
        fully_shard(model, policy=set(case.units), **options)

    return annotate


def _by_hand(model: nn.Module, case: Case) -> None:
    for unit in reversed(units_of(model, case)):
        fully_shard(unit, reshard_after_forward=True)
    fully_shard(model, reshard_after_forward=True)


def _whole(model: nn.Module, case: Case) -> None:
    fully_shard(model, reshard_after_forward=True)


def _replicate(model: nn.Module, case: Case) -> None:
    replicate(model)


def _replicate_in_small_buckets(model: nn.Module, case: Case) -> None:
    replicate(model, bucket_cap_mb=0.0002)


def _sharded_inside_replicated(model: nn.Module, case: Case) -> None:
    for unit in outermost_units_of(model, case):
        fully_shard(unit)
    replicate(model)


def _replicated_inside_sharded(model: nn.Module, case: Case) -> None:
    for unit in outermost_units_of(model, case)[::2]:
        replicate(unit)
    fully_shard(model)


def _checkpoint_then_shard(model: nn.Module, case: Case) -> None:
    for unit in units_of(model, case):
        checkpoint(unit)
    fully_shard(model, policy=set(case.units))


def _shard_then_checkpoint(model: nn.Module, case: Case) -> None:
    fully_shard(model, policy=set(case.units))
    for unit in units_of(model, case):
        checkpoint(unit)


def _checkpoint_around_shards(model: nn.Module, case: Case) -> None:
    fully_shard(model, policy=set(case.units))
    checkpoint(model)


SCHEMES: Final[dict[str, Scheme]] = {
    "fully_shard by policy": Scheme(_by_policy()),
    "fully_shard by hand": Scheme(_by_hand, ranks=(2,)),
    "fully_shard as one unit": Scheme(_whole, ranks=(2,)),
    "fully_shard without resharding": Scheme(_by_policy(reshard_after_forward=False), ranks=(2,)),
    "fully_shard over two neighbours": Scheme(_by_policy(reshard_after_forward=2), ranks=(4,)),
    "replicate": Scheme(_replicate, replicated=_everything),
    "replicate in small buckets": Scheme(
        _replicate_in_small_buckets, ranks=(2,), replicated=_everything
    ),
    "fully_shard inside replicate": Scheme(
        _sharded_inside_replicated, ranks=(2,), replicated=_outside_units
    ),
    "replicate inside fully_shard": Scheme(
        _replicated_inside_sharded, ranks=(2, 3), replicated=_every_other_unit
    ),
    "checkpoint, then fully_shard": Scheme(_checkpoint_then_shard, ranks=(2, 4), recomputes=True),
    "fully_shard, then checkpoint": Scheme(_shard_then_checkpoint, ranks=(2,), recomputes=True),
    "checkpoint around fully_shard": Scheme(_checkpoint_around_shards, ranks=(2,), recomputes=True),
}

SHARDED: Final = (
    "fully_shard by policy",
    "fully_shard as one unit",
    "fully_shard without resharding",
)
