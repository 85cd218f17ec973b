"""Which ranks hold one part of a model whose other parts are on other ranks, and sums over all of them; knows no module.

Note [Parts of a model]
Experts lie on slices of a mesh: the ranks of a slice share one, and those of the next slice another one, while a router or an
attention layer is all ranks'. A DTensor knows the ranks of its own slice only. That there are others tells a larger group: one
that contains these ranks and more, and whose parameters are in the same model or in the same list. What lies on a mesh of
which one *dimension* is meant is no part: beside tensor parallel weights, a layer that is sharded over `mesh["dp"]` is the same
on all ranks of "tp", and no group of that model contains these of "dp" and more. What is noted is
said of a mesh, because a gradient tells no more of itself, and holds as long as the part lives.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from composable.device.collectives import reduce_numbers, reference_to


@dataclass(frozen=True, slots=True)
class _Note:
    owner: ref[object]
    mesh: ref[DeviceMesh]
    group: ref[dist.ProcessGroup]


_notes: list[_Note] = []


def note_part(owner: object, mesh: DeviceMesh, group: dist.ProcessGroup) -> None:
    """As long as `owner` lives, the ranks of `mesh` hold one part of a model that those of `group` train; nothing if these are
    the same."""
    global _notes
    if _contains(group, mesh):
        living = [each for each in _notes if each.owner() is not None and each.group() is not None]
        _notes = [*living, _Note(ref(owner), ref(mesh), reference_to(group))]


def _noted() -> Iterator[tuple[DeviceMesh, dist.ProcessGroup]]:
    for note in _notes:
        mesh, group = note.mesh(), note.group()
        if mesh is not None and group is not None and note.owner() is not None:
            yield mesh, group


def enclosing_group(mesh: DeviceMesh, groups: Iterable[dist.ProcessGroup] = ()) -> dist.ProcessGroup | None:
    """The largest group, of those noted and of `groups`, that contains all ranks of `mesh` and others.

    See Note [Parts of a model].
    """
    noted = (group for part, group in _noted() if part == mesh)
    return max((*noted, *(group for group in groups if _contains(group, mesh))), key=dist.get_world_size, default=None)


def has_parts(group: dist.ProcessGroup) -> bool:
    """Whether fewer ranks than those of `group` were noted to hold a part of a model that all of these train."""
    return any(noted is group for _, noted in _noted())


def _contains(group: dist.ProcessGroup, mesh: DeviceMesh) -> bool:
    larger = dist.get_process_group_ranks(group)
    return len(larger) > mesh.size() and set(mesh.mesh.flatten().tolist()) <= set(larger)


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
