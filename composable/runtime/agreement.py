"""What ranks tell each other once about the gradients of a replicated unit: their order and strides; knows no buckets."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from composable.device.buckets import Strides
from composable.device.collectives import Wire


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks have told each other about a unit's gradients.

    Attributes:
        order: parameters by number, as their gradients become ready.
        strides: of gradients that are not contiguous, and that all ranks lay out alike.
    """

    order: tuple[int, ...] = ()
    strides: Mapping[int, Strides] = field(default_factory=dict)


def agree(
    before: Agreement,
    arrivals: Sequence[int],
    default: Sequence[int],
    strides: Mapping[int, Strides | None],
    wire: Wire,
    name: str,
) -> Agreement:
    """Find out in which order gradients become ready.

    Args:
        before: what was agreed so far.
        arrivals: parameters by number, as their gradients came here.
        default: all of them, in the order that holds if no rank saw every gradient once.
        strides: of the gradients, by number; None means contiguous.
        name: of the unit.
    """
    unit, complete = f"of unit '{name}'", sorted(arrivals) == sorted(default)
    prints = [zlib.crc32(repr(found).encode()) for found in strides.values()]
    # The first rank that saw every gradient decides about the order.
    lowest, highest = wire.extremes(
        [wire.rank if complete else wire.ways, *prints], label=f"search for a rank that saw every gradient {unit}"
    )
    first, alike = lowest[0], [low == high for low, high in zip(lowest[1:], highest[1:], strict=True)]
    # (None did if gradients came twice on all of them; then the order stays what it was.)
    mine = {wire.rank: arrivals, wire.ways: default}.get(first, [-1] * len(default))
    _, order = wire.extremes(mine, label=f"exchange of the order of gradients {unit}")
    agreed = {i: found for i, same in zip(strides, alike, strict=True) if same and (found := strides[i])}
    # A parameter that is frozen now keeps what was agreed about it before.
    others = [i for i in before.order if i not in order]
    return Agreement((*order, *others), {**before.strides, **agreed})
