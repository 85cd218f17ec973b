"""Of which dtype each parameter of a replicated unit is, and whether it trains, on this rank and on others; moves nothing.

Note [Kinds on one rank]
Users freeze and cast when they like, and nobody hears of it. Ranks that differ would fill buckets differently. So a digest of
all kinds keeps their messages apart, as it does with what is agreed on, and a rank at which something changed leaves its kinds
in the group's store. Who finds that a backward fails looks there, and says by name what differs.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from torch import nn

from composable.device.collectives import Communicator, TagSequence
from composable.device.parameter_forms import trainability
from composable.errors import RanksDisagreeError

_dtype = attrgetter("dtype")
_device = attrgetter("device")


def _attributes(parameters: Sequence[nn.Parameter]) -> list[Any]:
    """What buckets depend on, and users may change without our hearing of it. Runs in C: it is asked at every forward."""
    return [*map(trainability, parameters), *map(_dtype, parameters), *map(_device, parameters)]


def _words(parameter: nn.Parameter) -> str:
    dtype = str(parameter.dtype).removeprefix("torch.")
    return dtype if parameter.requires_grad else f"{dtype}, frozen"


class Kinds:
    """What the parameters of a unit are like.

    Args:
        before: of the unit, until something changed. The first ones are those of all ranks, since the annotation compared them.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], names: Sequence[str], before: Kinds | None = None) -> None:
        self._attributes = _attributes(parameters)
        self._rows = [[name, _words(parameter)] for name, parameter in zip(names, parameters, strict=False)]
        self._first: list[list[str]] = before._first if before is not None else self._rows
        self._told: bool = before is None or (before._told and self._rows == before._rows == self._first)
        self.digest = zlib.crc32(json.dumps(self._rows).encode()) % TagSequence.DIGESTS

    def hold_for(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether these are still what the parameters are like."""
        return _attributes(parameters) == self._attributes

    def tell(self, communicator: Communicator, place: int) -> None:
        """Leave them where other ranks find them, unless they do not need to.

        Args:
            place: of the unit among those that use the communicator.
        """
        if not self._told:
            communicator.store.publish(json.dumps(self._rows), place, of_rank=True)
            self._told = True

    def refuse_others(self, communicator: Communicator, place: int, unit: str) -> None:
        """Raise if another rank has other ones."""
        for rank in range(communicator.size):
            if rank == communicator.rank:
                continue
            said = communicator.store.published(place, rank)
            theirs = json.loads(said) if said else self._first
            if theirs != self._rows:
                _refuse(unit, {communicator.rank: self._rows, rank: theirs})


def _refuse(unit: str, by_rank: dict[int, list[list[str]]]) -> None:
    (low, ones), (high, others) = sorted(by_rank.items())
    shared = zip(ones, others, strict=False)
    at = next((i for i, (one, other) in enumerate(shared) if one != other), min(len(ones), len(others)))
    name = (ones[at] if at < len(ones) else others[at])[0]
    seen = [f"{rows[at][1] if at < len(rows) else 'not there'} on rank {rank}" for rank, rows in ((low, ones), (high, others))]
    raise RanksDisagreeError(
        f"replicate(unit '{unit}'): parameter '{name}' is {seen[0]}, and {seen[1]}, so gradients cannot be averaged. Freeze, "
        "unfreeze and cast parameters (requires_grad_(), half(), to()) on all ranks alike. Clear the gradients before going on"
    )
