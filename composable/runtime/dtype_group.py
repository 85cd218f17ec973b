"""The parameters of one unit, precision and device, which are gathered together and kept; knows no phase and no gradient.

Note [Absent parameters]
Backward comes to a unit by what its forward returned, and gathers its parameters there. By another way, a penalty that forward
left on a module, it would read memory that is gone, or that others use. So parameters have a version of their own while they
are not there: autograd finds that what it saved has another one, and raises before anything is read.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import compress
from operator import add, and_, attrgetter, gt, ne
from typing import Final

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from composable.device.collectives import Communicator, GatherPart, TagSequence, Work
from composable.device.elastic_buffer import ElasticBuffer
from composable.device.flat_parameters import FlatParameters
from composable.device.parameter_swap import ShardedParam
from composable.device.private import innermost, outside_transforms, set_versions
from composable.plan.precision import resolve
from composable.runtime.mesh_info import MeshInfo

version_of: Final = attrgetter(Tensor._version.__name__)  # type: ignore[attr-defined]  # quicker than any other way to ask many
_address: Final = Tensor.data_ptr
_next: Final = (1).__add__

# A version that no parameter comes to. docs/errors.md has it, since users read it in torch's error.
_ABSENT: Final = 2**31 - 1
_REMEMBERED: Final = 8  # places of buffers: units take turns in few
_DIGESTS: Final = 61
_REGATHERS: Final = 16  # more than a step gathers a unit anew: tags count both in one number


def digest_of_dtypes(groups: Sequence[DtypeGroup]) -> int:
    """A number for the dtypes of a unit: who has cast a model alone, or evaluates alone, must not take another rank's bytes for
    values of his."""
    dtypes = ", ".join(f"{group.flat.dtype}, {group.flat.compute_dtype}" for group in groups)
    return zlib.crc32(dtypes.encode()) % _DIGESTS * _REGATHERS


class DtypeGroup:
    """The parameters of one precision on one device: their buffers, and the post-forward shard kept after forward."""

    __slots__ = (
        "_absent", "_addresses", "_aliased", "_all_come", "_coarse_of_whole", "_comes", "_coming", "_communicator",
        "_for_user", "_full", "_gathered", "_names", "_places", "_post_forward", "_post_forward_plan", "_post_forward_shard",
        "_shards_coming", "_tensors", "_there", "_versions", "_watched", "counted", "flat", "sharded", "unsharded"
    )  # fmt: skip

    def __init__(self, flat: FlatParameters, members: Sequence[ShardedParam], mesh_info: MeshInfo) -> None:
        self.flat = flat
        self.sharded = tuple([member.sharded for member in members])
        self.unsharded = tuple([member.unsharded for member in members])
        # Whose memory comes and goes; what every rank holds whole is the shard itself.
        self._comes = [not slot.aliased for slot in flat.layout.slots]
        self._coming = tuple(compress(self.unsharded, self._comes))
        self._all_come = all(self._comes)
        self._names = list(compress([slot.name for slot in flat.layout.slots], self._comes))
        # To which of these nobody should write. An embedding with a largest norm does so whenever it is used.
        normed = [
            any(getattr(place.module, "max_norm", None) is not None for place in member.info.places) for member in members
        ]
        self._watched = [not each for each in compress(normed, self._comes)]
        self._there = False
        self._versions = tuple(map(version_of, self._coming))  # while they are there; see Note [Absent parameters]
        self._absent = (_ABSENT,) * len(self._coming)
        self._for_user = False  # whether what is gathered is the user's to write to
        # Whose version counters tell of writes to shards: to each parameter, and to local tensors, which count with the buffer.
        self.counted = (*self.sharded, flat.shard)
        self._communicator = mesh_info.shard
        self._full = flat.full
        # Where the unsharded parameters lie: in which buffer, and how far from its start, which moves; what every rank holds
        # whole stays.
        self._tensors = tuple([buffer.tensor for buffer in flat.unsharded])
        self._places: list[tuple[int, int]] = []
        for slot, parameter in zip(flat.layout.slots, self.unsharded, strict=True):
            if slot.aliased or not slot.numel:
                self._places.append((-1, _address(parameter)))
                continue
            buffer, start = flat.place_of(slot)
            self._places.append((flat.unsharded.index(buffer), start * flat.compute_dtype.itemsize))
        self._addresses: dict[tuple[int, ...], list[int]] = {}  # by those of the buffers
        self._gathered = flat.layout.gathered
        self._aliased = flat.layout.aliased
        self._shards_coming = flat.coming
        self._post_forward = mesh_info.post_forward
        self._post_forward_shard: ElasticBuffer | None = None
        if self._post_forward is not None and self._gathered:
            self._plan_post_forward(self._post_forward)

    def _plan_post_forward(self, post_forward: Communicator) -> None:
        flat = self.flat
        self._post_forward_shard = ElasticBuffer(
            flat.layout.full_numel // post_forward.size, flat.compute_dtype, flat.device, flat.pool
        )
        flat.full.allocate()
        self._post_forward_shard.allocate()
        whole = flat.full.tensor
        start = post_forward.rank * self._post_forward_shard.tensor.numel()
        self._coarse_of_whole = whole[start : start + self._post_forward_shard.tensor.numel()]
        self._post_forward_plan = post_forward.prepare([GatherPart(self._post_forward_shard.tensor, whole, whole.numel())])
        flat.full.free()
        self._post_forward_shard.free()

    def gather(self, tags: TagSequence, label: str, *, for_user: bool) -> Work | None:
        """Launch the all-gather from everybody's shards; None if every rank holds everything anyway.

        Args:
            for_user: the user asked for it, and may do with the unsharded parameters as he likes.
        """
        if self._aliased:
            return None
        self._for_user = for_user
        self.flat.begin_gather()
        if not self._gathered:
            return None
        if self._shards_coming is not None:
            with self._shards_coming.here():
                return self._communicator.all_gather(self.flat.gather_plan, label=label, tags=tags)
        return self._communicator.all_gather(self.flat.gather_plan, label=label, tags=tags)

    def gather_post_forward(self, tags: TagSequence, label: str) -> Work | None:
        """Launch the all-gather from the post-forward shards."""
        if self._post_forward is None or not self._gathered:
            return None
        self._full.allocate()
        return self._post_forward.all_gather(self._post_forward_plan, label=label, tags=tags)

    def wait_for_unshard(self, *, post_forward: bool) -> None:
        """What was gathered has arrived: put it where modules read it."""
        if not post_forward:
            self.flat.copy_out()
            self.flat.end_gather()
        elif self._post_forward_shard is not None:
            self._post_forward_shard.free()
        if not self._there:
            set_versions(self._coming, self._versions)
            self._there = True  # last, and first below: after an interrupt in between they count as absent

    def gather_exact(self, tags: TagSequence, label: str) -> Sequence[Tensor]:
        """Gather all of every parameter in the dtype that it rests in, beside what modules compute with."""
        flat, precision = self.flat, resolve(self.flat.precision.original)
        communicator = self._communicator
        exact = FlatParameters(
            flat.layout, precision=precision, device=flat.device, communicator=communicator, pool=flat.pool, shard=flat.shard,
            home=flat.home,
        )  # fmt: skip
        exact.begin_gather()
        if exact.gather_plan is not None:
            with nullcontext() if exact.coming is None else exact.coming.here():
                work = communicator.all_gather(exact.gather_plan, label=label, tags=tags)
            work.wait()
        exact.copy_out()
        exact.end_gather()
        return exact.full_views

    def moved(self) -> bool:
        """Whether somebody gave an unsharded parameter other memory: what is gathered would never reach it again."""
        starts = tuple(map(_address, self._tensors))
        addresses = self._addresses.get(starts)
        if addresses is None:
            if len(self._addresses) == _REMEMBERED:
                self._addresses.clear()
            moving = [*starts, 0]  # the last one: what stays
            addresses = self._addresses[starts] = [moving[which] + place for which, place in self._places]
        return list(map(_address, self.unsharded)) != addresses

    def move_back(self) -> list[tuple[str, torch.dtype]]:
        """Give the unsharded parameters their memory again; names those that had other, with the dtype that they had."""
        found = []
        for slot, parameter, view in zip(self.flat.layout.slots, self.unsharded, self.flat.full_views, strict=True):
            if _address(parameter) != _address(view):
                found.append((slot.name, parameter.dtype))
                parameter.grad = None  # of the other dtype
                parameter.data = view.data
        return found

    def outdate(self, before: Sequence[int], now: Sequence[int]) -> None:
        """Where `counted` was written to, the unsharded parameters were: what autograd saved of them is out of date."""
        all_come = self._all_come
        if before[-1] != now[-1] and all_come and not self._there:  # an optimizer has stepped: nearly always it is this
            self._versions = tuple(map(_next, self._versions))
            return
        written = _written(before, now)
        if self._there:
            increment_version(list(compress(self.unsharded, written)))
        elif not all_come:
            increment_version(list(compress(self.unsharded, map(gt, written, self._comes))))
        self._versions = tuple(map(add, self._versions, compress(written, self._comes)))

    def written_since(self, before: Sequence[int], now: Sequence[int]) -> list[str]:
        """The names of the parameters that `outdate` would outdate."""
        return list(compress([slot.name for slot in self.flat.layout.slots], _written(before, now)))

    def look_for_writes(self) -> Sequence[str]:
        """The names of the parameters whose unsharded ones were written to in place since the last look."""
        if not self._there:
            return ()
        before, now = self._versions, tuple(map(version_of, self._coming))
        if now == before:
            return ()
        self._versions = now
        if self._for_user:
            return ()
        return list(compress(self._names, map(and_, self._watched, map(ne, before, now))))

    def free(self) -> Sequence[str]:
        """Only the shards remain. Names the parameters whose unsharded ones were written to in place: that is lost."""
        written: Sequence[str] = ()
        if self._there:
            if tuple(map(version_of, self._coming)) != self._versions:
                written = self.look_for_writes()
        else:
            self.flat.end_gather()  # of what has not landed
        self._there = False
        set_versions(self._coming, self._absent)  # also where they count as absent: an interrupt may have come in between
        for buffer in self.flat.unsharded:
            buffer.free()
        if self._post_forward_shard is not None:
            self._post_forward_shard.free()
        return written

    @outside_transforms
    def reshard_post_forward(self) -> Sequence[str]:
        """Only the shards and the post-forward shard remain. Names what `free` names."""
        written = self.look_for_writes()
        if self._post_forward_shard is not None:
            self._there = False
            set_versions(self._coming, self._absent)
            self._post_forward_shard.allocate()
            self._post_forward_shard.tensor.data.copy_(self._coarse_of_whole.data)
            self._full.free()
        return written

    def holds(self, tensor: Tensor) -> bool:
        """Whether `tensor` lies in the unsharded buffer."""
        start = innermost(tensor).untyped_storage().data_ptr()
        return any(buffer.untyped_storage().data_ptr() == start for buffer in self._tensors)


def _written(before: Sequence[int], now: Sequence[int]) -> list[bool]:
    """For each parameter, whether its version counter, or that of all shards, has changed."""
    *changed, of_all = map(ne, before, now)
    return [True] * len(changed) if of_all else changed
