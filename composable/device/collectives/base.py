"""What every communicator over a process group does the same way; knows no algorithm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor

from composable.device.collectives.communicator import DESTROYED_HERE, Capabilities, ReducePart, raise_failed
from composable.device.collectives.process_groups import backend_of
from composable.device.collectives.tags import NoPresence, Presence, Steps, TagSequence
from composable.device.private_groups import read_from_store, write_to_store

# torch 2.13 renamed it; both names mean the same collective.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

PIECE_BYTES: Final = 64 << 20  # of one broadcast

_AVERAGING: Final = ("nccl", "fake")  # backends that divide sums by the number of ranks at no price, if asked to


class _Opened:
    """The tag sequences that this rank has opened in a group."""

    def __init__(self) -> None:
        self.opened = 0
        self.backwards = Steps(by_backward=True)
        self.by_number: WeakValueDictionary[int, TagSequence] = WeakValueDictionary()


_TAGS: WeakKeyDictionary[dist.ProcessGroup, _Opened] = WeakKeyDictionary()


def tags_of(group: dist.ProcessGroup, tag: int) -> TagSequence | None:
    """The sequence that a tag is of, if this rank has opened it and still uses it."""
    known = _TAGS.get(group)
    return known.by_number.get(TagSequence.number_in(tag)) if known is not None else None


def backwards_of(group: dist.ProcessGroup) -> Steps:
    """What counts the backwards of all that sums over `group`, or over its like."""
    return _TAGS.setdefault(group, _Opened()).backwards


class GroupTags:
    """The tag sequences of a group, and those of one communicator that count by the same steps.

    Attributes:
        counted: of sums, and of checks that belong to them.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._known = _TAGS.setdefault(group, _Opened())
        self.counted: list[TagSequence] = []

    def open(self) -> TagSequence:
        known = self._known
        tags = TagSequence(known.opened)
        known.opened += 1
        known.by_number[tags.number] = tags
        return tags

    @property
    def opened(self) -> int:
        return self._known.opened

    def open_up_to(self, count: int) -> None:
        self._known.opened = count

    def count_by(self, steps: Steps) -> None:
        for tags in self.counted:
            tags.steps = steps


class GroupStore:
    """What the ranks of a group found each other through, which keeps texts, too.

    Args:
        number: of the communicator in its group.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, number: int) -> None:
        self._group = ref(group)
        self._rank = rank
        self._number = number

    def publish(self, text: str, place: int, *, of_rank: bool = False) -> None:
        group = self._group()
        if group is not None:
            write_to_store(group, self._key(place, self._rank if of_rank else None), text)

    def published(self, place: int, rank: int | None = None) -> str:
        group = self._group()
        return read_from_store(group, self._key(place, rank)) if group is not None else ""

    def _key(self, place: int, rank: int | None) -> str:
        return f"composable/{self._number}/{place}/{'all' if rank is None else rank}"


def alive(reference: ref[dist.ProcessGroup]) -> dist.ProcessGroup:
    group = reference()
    if group is None:
        raise RuntimeError(DESTROYED_HERE)
    return group


class GroupCommunicator:
    """What every real process group does the same way. It does not keep the group: that ends when it is destroyed."""

    capabilities = Capabilities()

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = ref(group)
        self.device = device
        self.rank = dist.get_rank(group)
        self.names = tuple(dist.get_process_group_ranks(group))  # what messages call the ranks: by their number among all
        self.size = dist.get_world_size(group)
        self._averaging = backend_of(group, device) in _AVERAGING
        self._share = 1.0 / self.size
        self.tags = GroupTags(group)
        self.sums = self.tags.open()
        self.tags.counted.append(self.sums)
        self.presence: Presence = NoPresence()
        self.store = GroupStore(group, self.rank, self.sums.number)

    @property
    def group(self) -> dist.ProcessGroup:
        return alive(self._group)

    def release(self) -> None:
        """Backends keep what they keep."""

    def _is_mean(self, parts: Sequence[ReducePart]) -> bool:
        """Whether the backend can scale the sums, too."""
        if not self._averaging:
            return False
        for part in parts:  # noqa: SIM110 - a generator would cost more than the comparison
            if part.scale != self._share:
                return False
        return True

    def _launch(self, label: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:
            raise_failed(label, self.names[self.rank], error)

    def broadcast(self, tensor: Tensor, *, label: str) -> None:
        flat = tensor.contiguous().view(-1)
        # In pieces, as large on all ranks: of what is elsewhere, no more than one comes to where backends take it.
        for piece in flat.split(max(1, PIECE_BYTES // tensor.element_size())):
            message = piece.to(self.device)
            self._launch(label, partial(dist.broadcast, message, group=self.group, group_src=0))
            if message is not piece:
                piece.copy_(message)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view(tensor.shape))

    def min_max(self, values: Sequence[int], *, label: str, tags: TagSequence | None = None) -> tuple[list[int], list[int]]:
        both = torch.tensor([*values, *(-value for value in values)], dtype=torch.int64, device=self.device)
        self._launch(label, lambda: dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self.group))
        found: list[int] = both.tolist()
        return [-value for value in found[len(values) :]], found[: len(values)]

    def all_gather_ints(self, values: Sequence[int], *, label: str, tags: TagSequence | None = None) -> list[list[int]]:
        mine = torch.tensor(list(values), dtype=torch.int64, device=self.device)
        everybody = torch.empty(self.size * len(values), dtype=torch.int64, device=self.device)
        self._launch(label, lambda: all_gather_single(everybody, mine, group=self.group))
        rows: list[list[int]] = everybody.view(self.size, len(values)).tolist()
        return rows
