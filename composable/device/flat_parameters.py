"""The flat buffers of one unit and precision, and their views; knows layouts and tensors, not modules, units or order.

Note [Version counters]
Autograd refuses to use a saved tensor that was written to since. Gathering the same values again is not such a write, so
all our writes go through tensors made from `.data`, whose version counters are their own.

Note [A storage per shard]
What torch saves is storages, and a `DTensor` whose local tensor starts inside its storage can neither be detached and copied
nor saved. So a sharded parameter does not hold a view of the shard buffer, but a tensor over the same memory with a storage
of its own, as DLPack makes it: a saved shard is as large as the shard. Its version counter is the buffer's.

Note [Late memory]
Packed parameters have an unsharded buffer of their own, which gets its memory when their message has landed: until then nobody
reads it, and a gather that is launched ahead takes no more than its message. On a host it is, more often than not, memory that
the unit before has just given back, and that is still in the caches.

Note [What is sent]
Where modules compute in another dtype than parameters rest in, shards are cast before they are sent, into a buffer that lives
as long as the message: whoever receives it need not know of any cast. Where the dtypes are the same, the shard buffer is sent.
Shards that rest on the host come to the device before, and whatever says shard buffer here is their copy there then.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Final
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from composable.device.collectives import Communicator, GatherPart
from composable.device.elastic_buffer import ElasticBuffer
from composable.device.host_home import ComingShards, HostHome
from composable.device.memory import MemoryPool
from composable.device.row_pairs import pair_rows, stack, widened
from composable.plan.layout import Layout, Slot
from composable.plan.precision import Precision
from composable.plan.routes import Route

_STARTS: Final = "_composable_starts"


def note_starts(buffer: Tensor, starts: Iterable[int]) -> None:
    """Note on a buffer where, in elements, its tensors start; what lies between one's end and the next start is padding."""
    setattr(buffer, _STARTS, tuple(sorted(dict.fromkeys(starts))))


def starts_in(buffer: Tensor) -> tuple[int, ...]:
    """What `note_starts` noted; nothing for a buffer that is not ours, about whose gaps nobody knows anything."""
    found: tuple[int, ...] = getattr(buffer, _STARTS, ())
    return found


def note_shards(buffer: Tensor, layout: Layout, rank: int) -> None:
    """Note where the shards start in a shard buffer, or in a buffer that is laid out like one."""
    note_starts(buffer, [slot.shard_start for slot in layout.slots if slot.local_numel(rank)])


_BUFFERS: Final[WeakValueDictionary[int, Tensor]] = WeakValueDictionary()  # where shards are: by the address of each


def with_own_storage(view: Tensor, buffer: Tensor) -> Tensor:
    """Another tensor over the memory of `view`, a stretch of `buffer`; see Note [A storage per shard].

    The view itself where that cannot be had: some devices do not speak DLPack.
    """
    if view.device.type == "meta":
        return torch.empty_like(view)
    try:
        octets = from_dlpack(view.detach().view(torch.uint8))
    except (BufferError, RuntimeError, TypeError, ValueError):
        return view
    if view.numel():
        _BUFFERS[view.data_ptr()] = buffer
    return octets.view(view.dtype)


def in_buffer(local: Tensor) -> Tensor:
    """The view of a shard buffer that `with_own_storage` was given; `local` itself if that is not where it comes from."""
    buffer = _BUFFERS.get(local.data_ptr()) if local.numel() else None
    if buffer is None or buffer.dtype != local.dtype or buffer.device != local.device:
        return local
    start = (local.data_ptr() - buffer.data_ptr()) // local.element_size()
    return buffer.as_strided(local.shape, local.stride(), start)


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """The dimensions of a dense tensor from the outermost in memory to the innermost; nothing if that is how they are."""
    if tensor.is_contiguous():
        return ()
    # As torch lays out a tensor like this one: what is not dense becomes so.
    bare = torch.empty_strided(tensor.shape, tensor.stride(), device="meta")
    strides = torch.empty_like(bare).stride()
    order = tuple(sorted(range(tensor.ndim), key=lambda dim: -strides[dim]))
    return () if order == tuple(range(tensor.ndim)) else order


def as_parameter(tensor: Tensor, slot: Slot) -> Tensor:
    """A tensor whose dimensions are in the order of memory, seen as the parameter is."""
    if not slot.order:
        return tensor
    return tensor.permute(sorted(range(tensor.ndim), key=slot.order.__getitem__))


def shape_like_rows(flat: Tensor, slot: Slot, rank: int) -> Tensor:
    """The shard of `slot` inside its chunk of a shard buffer."""
    shard = flat[slot.shard_start : slot.shard_start + slot.local_numel(rank)]
    return as_parameter(shard.view(slot.local_shape(rank)), slot)


def dtype_named(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class FlatParameters:
    """All parameters of one unit and precision: the shard buffer, what is sent of it, the unsharded buffer, and the copies
    that packed messages need.

    Args:
        shard: the shard buffer, if there is one already.
        own: tensors that stay where they are in place of a shard buffer; one rank, which holds all of them.
        in_one: all unsharded parameters lie in one buffer, see Note [Late memory].
        home: where shards rest, if that is not the device; the layout must say that nothing is computed with where it rests.

    Attributes:
        unsharded: the buffers of what modules compute with.
        coming: brings shards to the device, if they rest elsewhere.
    """

    __slots__ = (
        "_at_launch", "_casts", "_columns", "_late", "_messages", "_own",
        "_packed_copies", "_sent", "_staging", "coming", "compute_dtype", "device",
        "dtype", "full", "full_views", "gather_plan", "gradient_dtype", "home", "layout", "pool", "precision", "rank",
        "reduce_dtype", "shard", "unsharded"
    )  # fmt: skip

    def __init__(
        self,
        layout: Layout,
        *,
        precision: Precision,
        device: torch.device,
        communicator: Communicator,
        pool: MemoryPool,
        shard: Tensor | None = None,
        own: Sequence[Tensor] = (),
        in_one: bool = False,
        home: HostHome | None = None,
    ) -> None:
        self.layout = layout
        self.precision = precision
        self.dtype = dtype_named(precision.original)  # at rest
        self.compute_dtype = dtype_named(precision.compute)
        self.reduce_dtype = dtype_named(precision.reduce)
        self.gradient_dtype = dtype_named(precision.gradient)
        self.device = device
        self.rank = communicator.rank
        self.pool = pool
        self._own = own
        with torch.inference_mode(False):
            numel = 0 if own else layout.shard_numel
            if shard is None:
                shard = torch.zeros(numel, dtype=self.dtype, device=device) if home is None else home.zeros(numel, self.dtype)
            self.shard = shard
        note_shards(self.shard, layout, self.rank)
        self.home = home
        self.coming = None if home is None else ComingShards(self.shard, home, pool)
        self._late: ElasticBuffer | None = None
        late_numel = 0
        if layout.packed_numel and not in_one:
            start, end = layout.landing
            late_numel = end - start
            self._late = ElasticBuffer(late_numel, self.compute_dtype, device, pool)
        self.full = ElasticBuffer(0 if layout.aliased else layout.full_numel - late_numel, self.compute_dtype, device, pool)
        buffers = (self.full,) if self._late is None else (self.full, self._late)
        self.unsharded = tuple([buffer for buffer in buffers if buffer.nbytes]) or (self.full,)
        # See Note [What is sent].
        self._sent: ElasticBuffer | None = None
        if layout.gathered and self.compute_dtype != self.dtype:
            self._sent = ElasticBuffer(layout.cut_numel, self.compute_dtype, device, pool)
        self._staging: ElasticBuffer | None = None
        if layout.packed_numel:
            self._staging = ElasticBuffer(layout.num_shards * layout.packed_numel, self.compute_dtype, device, pool)
        self._messages = tuple([buffer for buffer in (self._staging, self._sent) if buffer is not None])
        self._at_launch = (self.full, *self._messages) if self.full.nbytes else self._messages
        wide = communicator.capabilities.wide_copies
        self._columns: tuple[list[int], list[Tensor]] | None = None if wide else self._plan_columns()
        if wide or (self._columns is None and layout.packed_numel):
            # Most views, and what a host's communicator plans, can only be made while the memory is there.
            near = None if self.coming is None else self.coming.buffer
            for buffer in (*self.unsharded, self._sent, self._staging, near):
                if buffer is not None:
                    buffer.allocate()
        self._packed_copies = self._plan_copies(wide=wide) if self._columns is None else ([], [])
        self.gather_plan = communicator.prepare(self._gather_parts()) if layout.gathered else None
        self.full_views = [self._full_view(index) for index in range(len(layout.slots))]
        self._casts = self._plan_casts()
        self.end_gather()
        for buffer in self.unsharded:
            buffer.free()

    def shard_view(self, index: int) -> Tensor:
        """The shard of parameter `index`, as a view: it shares the buffer's version counter."""
        if self._own:
            return self._own[index].detach()
        return shape_like_rows(self.shard, self.layout.slots[index], self.rank)

    def local(self, index: int) -> Tensor:
        """The shard of parameter `index` as the sharded parameter holds it: the same memory, a storage of its own, and the
        buffer's version counter, so that one look tells whether any of them was written to."""
        with torch.inference_mode(False):
            slot = self.layout.slots[index]
            shard = self.shard[slot.shard_start : slot.shard_start + slot.local_numel(self.rank)]
            local = shard.detach()
            local.data = as_parameter(with_own_storage(shard, self.shard).view(slot.local_shape(self.rank)), slot)
            return local

    def _full_view(self, index: int) -> Tensor:
        slot = self.layout.slots[index]
        if slot.aliased:
            return self.shard_view(index).data
        buffer, start = self.place_of(slot)
        shape = as_parameter(torch.empty(slot.shape, device="meta"), slot)
        return buffer.part(start, shape.shape, shape.stride()).data

    def place_of(self, slot: Slot) -> tuple[ElasticBuffer, int]:
        """The buffer that a parameter lies in while it is unsharded, and where it starts."""
        if self._late is None:
            return self.full, slot.full_start
        start, end = self.layout.landing
        if slot.route is Route.PACKED:
            return self._late, slot.full_start - start
        return self.full, slot.full_start - (end - start if slot.full_start >= end else 0)

    def _gather_parts(self) -> list[GatherPart]:
        layout, sent = self.layout, self._sent

        def mine(start: int, numel: int) -> Tensor:
            return _read_by_device(self, start, numel) if sent is None else sent.stretch(start, numel).data

        parts = []
        if layout.packed_numel:
            staging = self._staging_area
            parts.append(GatherPart(mine(layout.packed_start, layout.packed_numel), staging, staging.numel()))
        for slot in layout.of(Route.DIRECT):
            parts.append(GatherPart(mine(slot.shard_start, slot.chunk_numel), self._room_of(slot), slot.numel))
        return parts

    def _room_of(self, slot: Slot) -> Tensor:
        """What is reserved for a parameter among the unsharded ones."""
        buffer, start = self.place_of(slot)
        return buffer.stretch(start, slot.full_numel).data

    @property
    def _staging_area(self) -> Tensor:
        """Where packed messages land, one row per rank."""
        assert self._staging is not None
        return self._staging.tensor.data

    def _plan_columns(self) -> tuple[list[int], list[Tensor]] | None:
        """How wide the columns of the staging area are, and where each belongs; None if it takes more than to split rows.

        What lies between parameters has columns, too, that nobody reads.
        """
        layout = self.layout
        packed = sorted((slot for slot in layout.of(Route.PACKED) if slot.chunk_numel), key=lambda slot: slot.shard_start)
        if not packed or any(slot.dim != 0 for slot in packed):
            return None
        numels, targets, cursor = [], [], layout.packed_start
        with torch.inference_mode(False):
            for slot in (*packed, None):
                start = layout.packed_start + layout.packed_numel if slot is None else slot.shard_start
                if start > cursor:
                    numels.append(start - cursor)
                    targets.append(torch.empty(layout.num_shards, start - cursor, dtype=self.compute_dtype, device=self.device))
                if slot is not None:
                    numels.append(slot.chunk_numel)
                    targets.append(self._room_of(slot).view(layout.num_shards, slot.chunk_numel))
                    cursor = start + slot.chunk_numel
        return numels, targets

    def _plan_copies(self, *, wide: bool) -> tuple[list[Tensor], list[Tensor]]:
        layout = self.layout
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        if not layout.packed_numel:
            return targets, sources
        staging = self._staging_area
        rows = staging.view(layout.num_shards, layout.packed_numel)
        packed = sorted((slot for slot in layout.of(Route.PACKED) if slot.numel), key=lambda slot: slot.shard_start)
        for chunk_numel, group in groupby(packed, key=lambda slot: slot.chunk_numel if slot.dim == 0 else 0):
            alike = list(group)
            if chunk_numel and len(alike) > 1:
                buffer, _ = self.place_of(alike[0])
                starts = [self.place_of(slot)[1] for slot in alike]
                targets.append(stack(buffer.tensor.data, starts, layout.num_shards, chunk_numel, chunk_numel))
                starts = [slot.shard_start - layout.packed_start for slot in alike]
                sources.append(stack(staging, starts, layout.num_shards, layout.packed_numel, chunk_numel))
                continue
            for slot in alike:
                start = slot.shard_start - layout.packed_start
                whole = self._room_of(slot)
                for target, source in pair_rows(slot, whole, rows[:, start : start + slot.chunk_numel]):
                    targets.append(target)
                    sources.append(source)
        if not wide:
            return targets, sources
        with torch.inference_mode(False):  # inside, views of another dtype could only be written to there
            pairs = [widened(target, source) for target, source in zip(targets, sources, strict=True)]
        return [target for target, _ in pairs], [source for _, source in pairs]

    def _plan_casts(self) -> tuple[list[Tensor], list[Tensor]]:
        """Targets and sources: of what is sent, and of what every rank has whole."""
        copied = [index for index, slot in enumerate(self.layout.slots) if slot.copied]
        if self.coming is None:
            targets = [self.full_views[index] for index in copied]
            sources = [self.shard_view(index).data for index in copied]
        else:
            whole = [self.layout.slots[index] for index in copied]
            targets = [self._room_of(slot) for slot in whole]
            sources = [_read_by_device(self, slot.shard_start, slot.numel) for slot in whole]
        if self._sent is not None:
            targets.append(self._sent.tensor.data)
            sources.append(_read_by_device(self, 0, self.layout.cut_numel))
        return targets, sources

    def begin_gather(self) -> None:
        """Make what a gather needs: memory for what it writes to, and casts of the shards."""
        for buffer in self._at_launch:
            buffer.allocate()
        targets, sources = self._casts
        if self.coming is not None:
            self.coming.bring(targets, sources)
        elif targets:
            torch._foreach_copy_(targets, sources)

    def end_gather(self) -> None:
        """What was sent has arrived and was copied out, or will not be. Done twice is done once."""
        if self.coming is not None:
            self.coming.end()
        for buffer in self._messages:
            buffer.free()

    def copy_out(self) -> None:
        """Copy the packed parameters from where their message landed to where modules read them."""
        targets, sources = self._packed_copies
        if self._late is not None:
            self._late.allocate()
        if self._columns is not None:
            numels, wholes = self._columns
            rows = self._staging_area.view(self.layout.num_shards, -1)
            torch.split_with_sizes_copy(rows, numels, dim=1, out=wholes)
        elif targets:
            torch._foreach_copy_(targets, sources)


def _read_by_device(flat: FlatParameters, start: int, numel: int) -> Tensor:
    """A stretch of the shards, where a gather reads it."""
    if flat.coming is not None:
        return flat.coming.buffer.stretch(start, numel).data
    return flat.shard.data[start : start + numel]
