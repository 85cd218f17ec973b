"""Numbers of a rank, each cut over groups of its own, added up over all ranks; knows neither parameters nor modules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from composable.device.collectives import reduce_numbers


def groups_cut_over(mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[dist.ProcessGroup, ...]:
    """Those among which the parts of a DTensor must be added up; none on ranks outside of its mesh: these have nothing."""
    if mesh.get_coordinate() is None:
        return ()
    cut = [dim for dim, placement in enumerate(placements) if mesh.size(dim) > 1 and not placement.is_replicate()]
    return tuple(map(mesh.get_group, cut))


@dataclass(frozen=True, slots=True)
class Share:
    """What this rank adds to a sum over all ranks.

    Attributes:
        number: without dimensions, on the device that the ranks communicate on.
        groups: those that what is counted is cut over.
        enclosing: of all ranks that hold other parts of the model; None where there are none.
        copies: how many ranks hold this part once it has been added up over `groups`.
    """

    number: Tensor
    groups: tuple[dist.ProcessGroup, ...]
    enclosing: dist.ProcessGroup | None = None
    copies: int = 1


def over_all_ranks(shares: Sequence[Share], *, largest: bool, label: str) -> list[Tensor]:
    """The sums, or the largest, of shares over all ranks, which add up to the one of all of them: one message per group.

    Those that end with one group, cut over it or enclosed in it, travel as one number, which is also what a rank sends that
    has no gradient in its part.
    """
    numbers = [share.number for share in shares]
    last = dict.fromkeys(share.enclosing for share in shares if share.enclosing is not None)
    first = dict.fromkeys(group for share in shares for group in share.groups if group not in last)
    for group in (*first, *sorted(last, key=dist.get_world_size)):
        ending: dict[int, Tensor] = {}
        if group in last:
            ending = {i: numbers[i] for i, share in enumerate(shares) if share.enclosing is None and share.groups == (group,)}
            enclosed = [i for i, share in enumerate(shares) if share.enclosing is group]
            ending |= {i: numbers[i] if largest else numbers[i] / shares[i].copies for i in enclosed}
        through = [i for i, share in enumerate(shares) if group in share.groups and i not in ending]
        sent = [_joined(ending.values(), largest=largest)] if ending else []
        sent += [numbers[i] for i in through]
        found = reduce_numbers(torch.stack([n.to(sent[0].device) for n in sent]), group, largest=largest, label=label).unbind()
        for i, number in zip(through, found[len(sent) - len(through) :], strict=True):
            numbers[i] = number
        for position, i in enumerate(ending):
            numbers[i] = torch.zeros_like(found[0]) if position else found[0]
    return numbers


def _joined(numbers: Iterable[Tensor], *, largest: bool) -> Tensor:
    first, *others = numbers
    together = torch.stack([first, *(number.to(first.device) for number in others)])
    return together.amax() if largest else together.sum()
