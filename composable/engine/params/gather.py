"""One all-gather, prepared when its group is built and launched in every step.

The constructor prepares buffers without memory, pairs of tensors for the communicator, casts, and
the copies of packed parameters to their places. A launch allocates memory, casts and sends. `land`
copies received parameters to where modules compute with them.

`Neighbours` gathers for backward from the few ranks that keep the parameters that forward has
gathered. `ExtendedGather` (`features/extension.py`) sends a message in another form, for example
with fewer bits and scales. A comm may use supplied memory for its messages (`comm/supplied.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor

from composable.comm.base import DONE, Again, Comm, Work
from composable.comm.launch import Launch
from composable.engine.params.layout import GatherLayout, Route, Slot
from composable.engine.params.param import ManagedParam
from composable.engine.params.precision import Precision
from composable.memory.elastic import ElasticBuffer
from composable.torch_private import innermost, locals_of, storage_key


class Gather:
    """See the top of this file.

    Args:
        copied: parameters that are whole already and are computed with in other memory, with their
            slots.
        shard: the shard buffer; None where parameters are whole already and are cast only.

    Attributes:
        full: memory of compute parameters.
        late: that of packed ones, which gets its memory when the message has landed; of 0 bytes if
            they are in `full`.
        buffers: those of the two that have a size, or `full` alone.
        pairs: what a launch sends, and where that arrives.
    """

    def __init__(
        self,
        copied: Sequence[tuple[ManagedParam, Slot]],
        layout: GatherLayout,
        precision: Precision,
        device: torch.device,
        comm: Comm,
        shard: Tensor | None,
    ) -> None:
        self._comm = comm
        self._shard = shard
        dtype = precision.compute
        # A buffer of 0 bytes takes no memory, and is in no list that a step goes through.
        self.full = ElasticBuffer(layout.full_numel, dtype, device)
        self.late = ElasticBuffer(layout.late_numel, dtype, device)
        sized = tuple(buffer for buffer in (self.full, self.late) if buffer.nbytes)
        self.buffers = sized or (self.full,)  # all of its parameters may be empty
        # where packed shards arrive; cast shards that are sent: while a gather is in flight
        self._stagings: list[ElasticBuffer] = []
        self._sent = ElasticBuffer(layout.cut_numel if precision.casts else 0, dtype, device)
        self._holds_input = self._sent.nbytes > 0  # what is sent has memory of its own
        self.pairs: list[tuple[Tensor, Tensor]] = []  # the whole, and this rank's part of it
        self._casts: tuple[list[Tensor], list[Tensor]] = ([], [])
        # Of each kernel that copies packed parameters out: rows, their sizes and targets.
        self._columns: list[tuple[Tensor, list[int], list[Tensor]]] = []
        self._copies: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._plan_packed(layout, dtype, device)
        self._plan_sending(copied, layout)
        found = (*self._stagings, self._sent, self.full)
        self._in_flight = [buffer for buffer in found if buffer.nbytes]
        self.pairs = Again(self.pairs)  # the same in every step: the comm keeps its plan

    # --- made once -------------------------------------------------------------------------------

    def buffer_of(self, slot: Slot) -> ElasticBuffer:
        return self.late if slot.route is Route.PACKED and self.late.nbytes else self.full

    def _target(self, slot: Slot) -> Tensor:
        """The elements of the full buffers that are reserved for a parameter."""
        return self.buffer_of(slot).stretch(slot.full_start, slot.full_numel).data

    def _read(self, start: int, numel: int) -> Tensor:
        """A stretch of the shard buffer, where the message or a cast reads it."""
        assert self._shard is not None
        return self._shard.data[start : start + numel]

    def _send(self, start: int, numel: int, into: Tensor) -> None:
        """Let a stretch of all ranks' shard buffers arrive in `into`."""
        sent = self._sent
        mine = sent.stretch(start, numel).data if sent.nbytes else self._read(start, numel)
        self.pairs.append((into, mine))

    def _plan_sending(
        self, copied: Sequence[tuple[ManagedParam, Slot]], layout: GatherLayout
    ) -> None:
        for slot in layout.of(Route.DIRECT):
            self._send(slot.shard_start, slot.chunk_numel, self._target(slot))
        targets, sources = self._casts
        for param, slot in copied:
            if self._shard is not None:
                targets.append(self._target(slot))
                sources.append(self._read(slot.shard_start, slot.numel))
            else:
                assert param.own is not None
                targets.append(self._target(slot).view(slot.shape))
                (own,) = locals_of([param.own.data])
                sources.append(own.permute(slot.order) if slot.order else own)
        if self._sent.nbytes:
            targets.append(self._sent.tensor.data)
            sources.append(self._read(0, layout.cut_numel))

    def _plan_packed(self, layout: GatherLayout, dtype: torch.dtype, device: torch.device) -> None:
        """Packed parameters arrive in staging buffers, a row per rank, and are copied out.

        On an accelerator one kernel copies all that are cut along their first dimension, if nothing
        else is in their rows: then the others have a message of their own. A host does the same in
        half of the time without it: `split_with_sizes_copy` makes views.
        """
        packed = [slot for slot in layout.of(Route.PACKED) if slot.chunk_numel]
        ranks, start = layout.num_shards, layout.packed_start
        ends = [slot.shard_start for slot in packed[1:]] + [layout.cut_numel]
        in_columns = [slot.dim == 0 and self._comm.traits.on_stream for slot in packed]
        for by_columns, part in groupby(zip(in_columns, packed, ends, strict=False), itemgetter(0)):
            _, slots, part_ends = zip(*part, strict=True)
            numel = part_ends[-1] - start
            staging = ElasticBuffer(ranks * numel, dtype, device)
            self._stagings.append(staging)
            self._send(start, numel, staging.tensor.data)
            if by_columns:
                self._copy_columns(slots, part_ends, staging.tensor.data.view(ranks, -1))
            else:
                self._copy_parts(slots, staging, start, numel)
            start = part_ends[-1]

    def _copy_columns(self, slots: Sequence[Slot], ends: Sequence[int], rows: Tensor) -> None:
        ranks, sizes, targets = len(rows), list[int](), list[Tensor]()
        for slot, end in zip(slots, ends, strict=True):
            sizes.append(slot.chunk_numel)
            targets.append(self._target(slot).view(ranks, slot.chunk_numel))
            if padding := end - slot.shard_start - slot.chunk_numel:
                sizes.append(padding)
                targets.append(rows.new_empty(ranks, padding))
        self._columns.append((rows, sizes, targets))

    def _copy_parts(
        self, slots: Sequence[Slot], staging: ElasticBuffer, start: int, row: int
    ) -> None:
        targets, sources = self._copies
        by_rows = [slot for slot in slots if slot.dim == 0]
        for chunk, alike in groupby(by_rows, key=lambda slot: slot.chunk_numel):
            members = list(alike)
            into = self.buffer_of(members[0])
            ranks = members[0].num_shards
            full = [slot.full_start for slot in members]
            sent = [slot.shard_start - start for slot in members]
            targets.append(_stacked(into, full, ranks, chunk, chunk))
            sources.append(_stacked(staging, sent, ranks, row, chunk))
        for slot in slots:
            if slot.dim != 0:
                self._copy_across(slot, staging, slot.shard_start - start, row)

    def _copy_across(self, slot: Slot, staging: ElasticBuffer, start: int, row: int) -> None:
        """A parameter that is cut along another dimension than its first, from rows of `row`
        elements, in which it starts at `start`.
        """
        targets, sources = self._copies
        into, size, chunk = self.buffer_of(slot), slot.shape[slot.dim], slot.extent(0)[1]
        outer = slot.outer
        inner = slot.numel // (outer * size)  # elements of an index of `dim`
        full, rest = divmod(size, chunk)
        spans = [(0, full, chunk)]  # ranks that have as much: one strided copy
        if rest:
            spans.append((full, 1, rest))
        for first, ranks, length in spans:
            part = length * inner
            shape = (ranks, outer, part)
            at = slot.full_start + first * chunk * inner
            targets.append(into.part(at, shape, (part, size * inner, 1)).data)
            sources.append(staging.part(start + first * row, shape, (row, part, 1)).data)

    # --- in every step ---------------------------------------------------------------------------

    def launch(self, launch: Launch) -> Work:
        """Allocate, cast and send. If it raises, the caller frees."""
        for buffer in self._in_flight:
            buffer.allocate()
        if self._casts[0]:
            torch._foreach_copy_(*self._casts)
        return self._comm.all_gather(self.pairs, launch) if self.pairs else DONE

    def land(self) -> None:
        """The message is there: put packed parameters where they are computed with."""
        if self._holds_input:
            self.end_sending()  # frees what was sent before `late` gets its memory
        if self._stagings:
            self.late.allocate()
            self.copy_out()
            for staging in self._stagings:
                staging.free()

    def copy_out(self) -> None:
        for rows, sizes, targets in self._columns:
            torch.split_with_sizes_copy(rows, sizes, dim=1, out=targets)
        if self._copies[0]:
            torch._foreach_copy_(*self._copies)

    def end_sending(self) -> None:
        """The gather has read its input."""
        self._sent.free()

    def free(self) -> None:
        """Give all memory back. Nothing is in flight."""
        if self._holds_input:
            self.end_sending()
        for buffer in (*self._stagings, *self.buffers):
            if buffer.held:
                buffer.free()

    def aliases(self, tensor: Tensor) -> bool:
        """Whether `tensor` is, or views, memory of compute parameters."""
        key = storage_key(innermost(tensor))
        return any(buffer.held and storage_key(buffer.tensor) == key for buffer in self.buffers)


class Neighbours:
    """The gather for backward from a few ranks, which together keep what forward has gathered.

    A launch fills the full buffer directly. The part of this rank has memory from `keep` until that
    gather has landed.

    Args:
        full: the buffer of all parameters.
    """

    def __init__(self, full: ElasticBuffer, comm: Comm) -> None:
        self._full, self._comm = full, comm
        whole = full.tensor.data
        numel = whole.numel() // comm.size
        self._part = ElasticBuffer(numel, whole.dtype, whole.device)
        self._mine = full.stretch(comm.rank * numel, numel).data
        self.pairs = Again([(whole, self._part.tensor.data)])

    def keep(self) -> None:
        """Keep this rank's part of the parameters, and free them."""
        self._part.allocate()
        self._part.tensor.data.copy_(self._mine)
        self._full.free()

    def launch(self, launch: Launch) -> Work:
        self._full.allocate()
        return self._comm.all_gather(self.pairs, launch)

    def free(self) -> None:
        """Nothing is in flight."""
        self._part.free()

    land = free


def _stacked(
    buffer: ElasticBuffer, starts: Sequence[int], ranks: int, row: int, chunk: int
) -> Tensor:
    """The chunks that all ranks have of parameters of one size, side by side, `row` elements from
    rank to rank: one view, so that they are copied at once.
    """
    step = starts[1] - starts[0] if len(starts) > 1 else 0
    return buffer.part(starts[0], (len(starts), ranks, chunk), (step, row, 1)).data
