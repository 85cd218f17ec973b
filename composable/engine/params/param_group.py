"""The parameters of one unit with one precision on one device, which are unsharded and resharded
together.

State machine, with everything that may affect it in this file:

| state                | `unshard`  | `wait_for_unshard` | `reshard`  | `reshard_after_forward(n)` |
|----------------------|------------|--------------------|------------|----------------------------|
| SHARDED              | UNSHARDING | -                  | -          | -                          |
| UNSHARDING           | -          | UNSHARDED          | waits, then SHARDED | -                 |
| UNSHARDED            | -          | -                  | SHARDED    | SHARDED_POST_FORWARD       |
| SHARDED_POST_FORWARD | UNSHARDING, from n ranks' shards | - | SHARDED | -                        |

If gathered parameters are out of date, `unshard` first reshards them. A collective in flight owns
its memory, so `reshard` first waits for it. Groups whose compute parameters are the users' own
memory have nothing to gather: they are UNSHARDED at all times.

Memory. The full buffer's storage lives as long as the group and its memory comes and goes inside
it, since autograd may have saved any alias of a compute parameter. Packed parameters have a buffer
of their own, which gets its memory when their message has landed. `Neighbours` holds the shards
that a few ranks keep for backward: `unshard` gathers from whatever the last reshard has kept. All
writes of the engine go through tensors made from `.data`, whose version counters are their own.

Versions. Autograd refuses a backward if the version counter of a saved tensor has moved. Graphs
save compute parameters, and users write to at-rest ones, so `unshard` looks for such writes and
moves the counters of the compute parameters (`_follow_writes`). A write moves one of two counters.
An operator on a `DTensor` moves the counter of the at-rest parameter. A write to its local tensor
moves the counter of the shard buffer, which all local tensors share. While the memory is gone, the
counters have the value `ABSENT`, which no graph has saved: autograd raises its error and does not
read freed memory.

Writes. If all ranks have written to parameters that are unsharded, the next `unshard` gathers them
again. Three kinds of writes count as writes of all ranks: an operator on a `DTensor`; any write
after a state dict was made (`expect_load`); and a call that reports its writes (`note_written`),
such as an average or an edit. An optimizer's step moves the counters of at-rest parameters. Any
other write to a local tensor may be a write of this rank alone. No message may depend on it, so it
is not gathered, and a warning says so.

`Gather` is one all-gather, prepared when its group is built and launched in every step. Its
constructor prepares buffers without memory, pairs of tensors for the communicator, casts, and
the copies of packed parameters to their places. A launch allocates memory, casts and sends. `land`
copies received parameters to where modules compute with them.

`Neighbours` gathers for backward from the few ranks that keep the parameters that forward has
gathered. `ExtendedGather` (`features/groups.py`) sends a message in another form, for example
with fewer bits and scales. A comm may use supplied memory for its messages (`comm/supplied.py`).
"""

from __future__ import annotations

import enum
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress, groupby
from operator import add, call, is_not, itemgetter, ne, or_
from typing import Any, Final, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from typing_extensions import override

from composable.comm.base import DONE, Again, Comm, Work
from composable.comm.launch import Launch, LaunchKind
from composable.comm.mesh_info import MeshInfo
from composable.engine.params.layout import GatherLayout, ParamShape, Route, Slot, plan_layout
from composable.engine.params.param import (
    ManagedParam,
    as_parameter,
    at_home,
    copy_attributes,
    cut,
    keep_gradients_in,
    label_of,
    memory_order,
    move_hooks,
    replacement_of,
    set_label,
    shape_and_strides,
    share_hooks,
)
from composable.engine.params.precision import Precision
from composable.errors import ForeignParameterError, few
from composable.memory.elastic import ElasticBuffer, with_own_storage
from composable.tensors import gradient_like, has_protocol, wrap
from composable.torch_private import (
    as_tensors,
    innermost,
    local_of,
    locals_of,
    outside_transforms,
    set_versions,
    storage_key,
    version_of,
)


class Gather:
    """See the top of this file.

    Attributes:
        full: memory of compute parameters.
        late: that of packed ones, which gets its memory when the message has landed; of 0 bytes if
            they are in `full`.
        buffers: those of the two that have a size, or `full` alone.
        pairs: what a launch sends, and where that arrives.
    """

    def __init__(self, group: ParamGroup) -> None:
        self._comm = group.comm
        self._shard = group.shard
        layout, dtype, device = group.layout, group.precision.compute, group.device
        # A buffer of 0 bytes takes no memory, and is in no list that a step goes through.
        self.full = ElasticBuffer(layout.full_numel, dtype, device)
        self.late = ElasticBuffer(layout.late_numel, dtype, device)
        sized = tuple(buffer for buffer in (self.full, self.late) if buffer.nbytes)
        self.buffers = sized or (self.full,)  # all of its parameters may be empty
        # where packed shards arrive; cast shards that are sent: while a gather is in flight
        self._stagings: list[ElasticBuffer] = []
        cast = layout.cut_numel if group.precision.casts else 0
        self._sent = ElasticBuffer(cast, dtype, device)
        self._holds_input = self._sent.nbytes > 0  # what is sent has memory of its own
        self.pairs: list[tuple[Tensor, Tensor]] = []  # the whole, and this rank's part of it
        self._casts: tuple[list[Tensor], list[Tensor]] = ([], [])
        # Of each kernel that copies packed parameters out: rows, their sizes and targets.
        self._columns: list[tuple[Tensor, list[int], list[Tensor]]] = []
        self._copies: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._plan_packed(layout, dtype, device)
        self._plan_sending(group.copied(), layout)
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


logger = logging.getLogger("composable")


# A version that no parameter comes to. docs/errors.md has it, since users read it in autograd's
# error.
ABSENT: Final = 2**31 - 1
_CACHE_LINE: Final = 64  # bytes
_WRITTEN_HERE: Final = (
    "unit '%s': the shard of %s was written to through its local tensor while the unit is"
    " unsharded. Forwards go on with what was gathered, since other ranks may have written nothing."
    " Call reshard(model) on all ranks after such writes"
)
_WRITE_LOST: Final = (
    "unit '%s': %s was written to in place while it was unsharded; the write is lost, since only"
    " shards are kept. Write to the parameter outside of forward, where it is a DTensor"
)


class ShardedState(enum.Enum):
    """Where the parameters of a group are."""

    SHARDED = "every rank has its shard"
    UNSHARDING = "the all-gather is in flight"
    UNSHARDED = "every rank has all of them"
    SHARDED_POST_FORWARD = "a few neighbouring ranks have all of them together"


class GroupKey(NamedTuple):
    """What the parameters of one group have in common."""

    precision: Precision
    device: torch.device  # of what modules compute with
    mesh_info: MeshInfo


class ParamGroup(ABC):
    """See the top of this file. How its parameters rest is the matter of `ShardedGroup` and
    `ReplicatedGroup`.

    Args:
        params: as they are registered now: as users made them, or at rest in an earlier group of
            the same unit.

    Attributes:
        unit: its name, for messages.
        to_rest: brings what rests beside them, as gradients do, from the device to where they rest.
        extended: its parameters are gathered in a form of their own, see `features/groups.py`.
        shard: the memory of shards; None if there is no one buffer of them.
        gathers: compute parameters are memory of ours that comes and goes: unsharding takes a
            message, a cast, or a copy from the host. Otherwise they are the users' memory.
        members: parameters with their slots.
        takes_message: unsharding takes a message, so that all ranks take part.
    """

    extended = False
    to_rest: Callable[[list[Tensor]], list[Tensor]] = list
    shard: Tensor | None = None

    def __init__(self, params: Sequence[ManagedParam], key: GroupKey) -> None:
        self.params = tuple(params)
        self.precision, self.device, self.mesh_info = key
        self.comm: Comm = self.mesh_info.shard
        self.unit = ""
        self._launch = Launch("", LaunchKind.GATHER, self)
        self._work: Work = DONE  # the all-gather in flight
        self._warned = False
        self.layout = self._plan()
        self.slots = self.layout.slots
        self.members = tuple(zip(self.params, self.slots, strict=True))
        self.takes_message = self.layout.gathered or self.extended
        # whose compute parameters are the memory of at-rest ones
        self._stays = [self._aliased(slot) for slot in self.slots]
        self.gathers = not all(self._stays)
        self._near: Neighbours | None = None
        with torch.no_grad(), torch.inference_mode(False):
            self._memory = self._make_memory()
            self.gather = self._make_gather() if self.gathers else None
            self._source: Gather | Neighbours | None = self.gather  # what `unshard` launches
            near = self.mesh_info.post_forward
            if near and self.gather and self.layout.gathered and not self.extended:
                self._near = Neighbours(self.gather.full, near)
            for param, slot in self.members:
                self._make_forms(param, slot)
            self._watch()
        self.state = ShardedState.SHARDED if self.gathers else ShardedState.UNSHARDED

    # --- construction ----------------------------------------------------------------------------

    def _plan(self) -> GatherLayout:
        traits, precision = self.comm.traits, self.precision
        specs = []
        for param in self.params:
            tensor = param.info.form.local_like(param.current)
            # Memory that stays where it is needs no plan of its order; a buffer of ours is laid out
            # as the parameter is.
            order, dim = memory_order(tensor), param.info.shard_dim
            shape = tuple(tensor.shape[axis] for axis in order) if order else tuple(tensor.shape)
            cut = order.index(dim) if order and dim is not None else dim
            specs.append(ParamShape(param.fqn, shape, cut, order))
        smallest = min(
            precision.original.itemsize, precision.compute.itemsize, precision.reduce.itemsize
        )
        return plan_layout(
            specs,
            num_shards=self.comm.size,
            direct_numel=-(-traits.direct_bytes // precision.compute.itemsize),
            max_direct=traits.max_direct,
            align=max(1, _CACHE_LINE // smallest),
            packed_align=max(1, traits.align // smallest),
            late=self.mesh_info.post_forward is None,
        )

    @abstractmethod
    def _make_memory(self) -> tuple[Tensor, ...]:
        """The memory that at-rest parameters are views of: a buffer of shards, with the values that
        parameters have now; or the users' own.
        """

    @abstractmethod
    def _make_at_rest(self, param: ManagedParam, slot: Slot) -> nn.Parameter:
        """The at-rest parameter over that memory: a `DTensor` around it, or the user's own."""

    @abstractmethod
    def _is_changed(self, param: ManagedParam, slot: Slot, address: int) -> bool:
        """Whether one was moved or cast.

        Args:
            address: of the local tensor when the group was made.
        """

    def _make_gather(self) -> Gather:
        return Gather(self)

    def copied(self) -> list[tuple[ManagedParam, Slot]]:
        """Parameters that are whole already, and are computed with in other memory."""
        return [
            (param, slot)
            for param, slot in self.members
            if slot.route is Route.WHOLE and slot.numel and not self._aliased(slot)
        ]

    def _make_forms(self, param: ManagedParam, slot: Slot) -> None:
        """Give a parameter its at-rest and its compute form."""
        param.rest_as(self._make_at_rest(param, slot))
        keep_gradients_in(self.precision.gradient, param.at_rest)
        param.compute_with(self._make_compute(param, slot))
        if param.compute is not param.at_rest:
            copy_attributes(param.at_rest, param.compute)
            if self.precision.accumulate is not None:
                keep_gradients_in(self.precision.accumulate, param.compute)

    def _make_compute(self, param: ManagedParam, slot: Slot) -> nn.Parameter:
        """The compute parameter, whose memory may come later."""
        return param.info.form.compute_parameter(
            self._local_compute(slot), requires_grad=self._differentiable
        )

    def _local_compute(self, slot: Slot) -> Tensor:
        assert self.gather is not None
        buffer = self.gather.buffer_of(slot)
        return buffer.part(slot.full_start, *shape_and_strides(slot)).data

    @property
    def _differentiable(self) -> bool:
        return self.precision.compute.is_floating_point or self.precision.compute.is_complex

    def _watch(self) -> None:
        """Note the versions of parameters, and where they are."""
        coming = [index for index, stays in enumerate(self._stays) if not stays]
        computes = [param.compute for param in self.params]
        # Autograd may have saved a `DTensor`, or its local tensor.
        dtensors = [index for index in coming if isinstance(computes[index], DTensor)]
        self._compute_counters = (
            *[computes[index] for index in coming],
            *locals_of([computes[index] for index in dtensors]),
        )
        self._numbers = (*coming, *dtensors)  # of which parameter each counter is
        self._compute_versions = tuple(map(version_of, self._compute_counters))
        self._absent = (ABSENT,) * len(self._compute_counters)
        apart = any(param.compute is not param.at_rest for param in self.params)
        self._rest_counters = (
            (*[param.at_rest for param in self.params], *self._memory) if apart else ()
        )
        self._rest_versions = self._rest_versions_now()
        self._regather = False  # writes were noted, and the gather is to be repeated
        self._loads = False  # see `expect_load`
        locals_ = locals_of([param.at_rest for param in self.params])
        self._addresses = [local.data_ptr() for local in locals_]
        # of DTensors, which `model.to()` exchanges; weak, for that is to free memory
        self._locals = list(map(ref, self._local_tensors()))
        set_versions(self._compute_counters, self._absent)

    def _aliased(self, slot: Slot) -> bool:
        """Whether a parameter's compute form is the memory of its at-rest form, though the group
        gathers others.
        """
        return slot.route is Route.WHOLE and not self.precision.casts

    def adopt_changes(self) -> bool:
        """Whether users have moved or cast parameters at rest, or asked for gradients of another
        dtype, so that the group has to be made anew. Notes what they have asked for.

        Raises:
            ForeignParameterError: what they did cannot be followed.
        """
        precision, changed = self.precision, False
        for param, slot, address in zip(self.params, self.slots, self._addresses, strict=True):
            at_rest = param.at_rest
            known = (None, precision.gradient)
            if at_rest.dtype == precision.original and at_rest.grad_dtype not in known:
                param.follow_grad_dtype()
                changed = True
            changed = self._is_changed(param, slot, address) or changed
            # `model.to()` exchanges a DTensor with one that was made of it, also where nothing
            # moves: hooks in C++, and the label, stay behind
            if label_of(at_rest) is None:
                set_label(at_rest, param, self.unit, "at_rest")
        return changed or any(map(is_not, self._local_tensors(), map(call, self._locals)))

    def _local_tensors(self) -> list[Tensor]:
        return [local_of(p.at_rest) for p in self.params if isinstance(p.at_rest, DTensor)]

    def recast(self) -> list[ManagedParam]:
        """Parameters of which users have cast or moved what modules compute with."""
        expected = self.precision.compute, self.device
        return [p for p in self.params if (p.compute.dtype, p.compute.device) != expected]

    def put_back(self) -> None:
        """Users may have exchanged the memory of what modules compute with (`param.data = ...`):
        the next gather would fill what nobody reads. Theirs is dropped. Other ranks may not have
        done so, so that nothing is gathered for it.
        """
        for param, slot in self.members:
            compute = param.compute
            if isinstance(compute, DTensor) or not (self.gathers or param.own is None):
                continue
            view = self._local_compute(slot)
            if storage_key(compute) != storage_key(view):
                compute.data = view

    def move(self, move: Callable[[Tensor], Tensor]) -> None:
        """Let at-rest parameters and gradients be elsewhere, where `move` makes copies; the unit
        drops the group.
        """
        for param in self.params:
            param.move(move)

    def rename(self, unit_name: str) -> None:
        self.unit = unit_name
        text = f"all-gather of unit '{unit_name}'"
        self._launch = Launch(text, LaunchKind.GATHER, self, unit_name)

    # --- unshard and reshard ---------------------------------------------------------------------

    def _rest_versions_now(self) -> list[int]:
        with as_tensors():
            return list(map(version_of, self._rest_counters))

    @property
    def is_stale(self) -> bool:
        """Whether at-rest parameters were written to since they were gathered."""
        return self._regather or self._rest_versions != self._rest_versions_now()

    def note_written(self) -> None:
        """All ranks have written to at-rest parameters; no version counter need show it."""
        if self._rest_counters:
            self._follow_writes(self._rest_versions_now(), by_all=True)

    def _follow_writes(self, now: list[int], *, by_all: bool = False) -> None:
        """At-rest parameters were written to. Decide whether the group gathers again, and move the
        version counters of compute parameters: autograd refuses a graph that has saved one.

        | written to                                                   | gathered again         |
        |--------------------------------------------------------------|------------------------|
        | by an operator on an at-rest parameter                       | yes, on all ranks      |
        | its memory, after `expect_load`, or by a call of all ranks   | likewise               |
        | that says so (`by_all`)                                      |                        |
        | its memory, otherwise                                        | no: a warning, since   |
        |                                                              | it may be one rank     |

        Args:
            now: what `_rest_versions_now` returns: of at-rest parameters, and of their memory.
        """
        number = len(self.params)
        changed = list(map(ne, self._rest_versions, now))
        by_operator = changed[:number]
        in_memory = changed[number:] * (number // len(self._memory))  # one buffer, or one for each
        written = list(map(or_, by_operator, in_memory))
        self._rest_versions = now
        again = self._regather or by_all or self._loads or any(by_operator)
        self._regather = again and self.gathers
        if not again and self.state is not ShardedState.SHARDED and not any(self._stays):
            self._warn(_WRITTEN_HERE, compress(self.params, in_memory))
        moved = list(map(written.__getitem__, self._numbers))
        if self.state is ShardedState.UNSHARDED:
            increment_version(list(compress(self._compute_counters, moved)))
        self._compute_versions = tuple(map(add, self._compute_versions, moved))
        # Modules compute with the memory of parameters that are not gathered. A plain tensor shares
        # the memory's counter, which the write has moved, unless an operator on a `DTensor` wrote.
        behind = [
            param.compute
            for param, is_written, counted in compress(
                zip(self.params, written, in_memory, strict=True), self._stays
            )
            if is_written and (not counted or isinstance(param.compute, DTensor))
        ]
        if behind:
            increment_version(behind)
            self._rest_versions = self._rest_versions_now()

    def _warn(self, text: str, params: Iterable[ManagedParam]) -> None:
        """Tell of writes to these parameters, once per group."""
        names = [f"'{param.fqn}'" for param in params]
        if names and not self._warned:
            self._warned = True
            logger.warning(text, self.unit, few(names))

    def expect_load(self) -> None:
        """A state dict is made: all ranks may load a checkpoint into its tensors."""
        if self.state is not ShardedState.SHARDED and not self._loads:  # each module asks
            now = self._rest_versions_now()
            if now != self._rest_versions:  # earlier writes were no load
                self._follow_writes(now)
            self._loads = True

    def unshard(self) -> bool:
        """Launch the all-gather, unless the parameters are there or on their way, and were not
        written to since. Returns whether it did.
        """
        if self._rest_counters:
            with as_tensors():
                now = list(map(version_of, self._rest_counters))
            if now != self._rest_versions:
                self._follow_writes(now)
        if self._source is None:
            return False
        if self._regather:
            self.reshard()
            self._regather = False
        if self.state is ShardedState.UNSHARDING or self.state is ShardedState.UNSHARDED:
            return False
        try:
            self._work = self._source.launch(self._launch)
        except BaseException:  # out of memory, or the communicator refuses
            self._free()
            raise
        self.state = ShardedState.UNSHARDING
        return True

    def wait_for_unshard(self) -> None:
        """Wait for the all-gather, and copy packed parameters to their place."""
        if self.state is not ShardedState.UNSHARDING:
            return
        self._wait()
        assert self._source is not None
        self._source.land()
        set_versions(self._compute_counters, self._compute_versions)
        self.state = ShardedState.UNSHARDED

    def _wait(self) -> None:
        """Wait for the gather in flight. If it failed, the group is sharded again."""
        work, self._work = self._work, DONE
        try:
            work.wait()
        except BaseException:
            self._free()
            raise

    def reshard(self) -> None:
        """Free the compute parameters; a gather in flight is waited for first."""
        if self.state is ShardedState.SHARDED or not self.gathers:
            return
        if self.state is ShardedState.UNSHARDING:
            self._wait()
        elif self.state is ShardedState.UNSHARDED:
            self._look_for_writes()
        self._free()

    def _free(self) -> None:
        assert self.gather is not None
        self._loads = False
        set_versions(self._compute_counters, self._absent)
        self.gather.free()
        self._source = self.gather
        if self._near is not None:
            self._near.free()
        self.state = ShardedState.SHARDED

    def _look_for_writes(self) -> None:
        """Warn, once, if a forward wrote to a gathered parameter: the write is lost now.

        Only warn: some writes change nothing (PEFT's parametrizations `set_` a parameter to
        itself).
        """
        now = tuple(map(version_of, self._compute_counters))
        if now == self._compute_versions:
            return
        numbers = compress(self._numbers, map(ne, self._compute_versions, now))
        self._compute_versions = now
        written = [
            param
            for param in [self.params[index] for index in sorted({*numbers})]
            # An embedding with a largest norm writes to its weight whenever it is used.
            if all(getattr(place.module, "max_norm", None) is None for place in param.info.places)
        ]
        self._warn(_WRITE_LOST, written)

    @outside_transforms
    def reshard_after_forward(self) -> None:
        """Keep a shard over the few ranks of `mesh_info.post_forward`, for backward to gather
        from.
        """
        near = self._near
        if near is None:
            self.reshard()
            return
        if self.state is not ShardedState.UNSHARDED:
            return
        self._look_for_writes()
        near.keep()
        set_versions(self._compute_counters, self._absent)
        self._source = near
        self.state = ShardedState.SHARDED_POST_FORWARD

    def aliases(self, tensor: Tensor) -> bool:
        """Whether `tensor` is, or views, a compute parameter. For groups that gather."""
        assert self.gather is not None
        key, buffers = storage_key(innermost(tensor)), self.gather.buffers
        return any(buffer.held and storage_key(buffer.tensor) == key for buffer in buffers)


class ShardedGroup(ParamGroup):
    """Parameters that rest as shards: `DTensor`s over a buffer of the group's."""

    shard: Tensor

    @override
    def _make_memory(self) -> tuple[Tensor, ...]:
        self.shard = self._make_shard()
        for param, slot in self.members:
            view, given = self.shard_view(slot).data, param.users_local
            if given is None:
                view.copy_(local_of(param.current).reshape(view.shape))  # type: ignore[arg-type]
            else:
                view.copy_(cut(given.data, slot, self.comm.rank))
        return (self.shard,)

    def _make_shard(self) -> Tensor:
        numel = self.layout.shard_numel
        filled = sum(slot.local_numel(self.comm.rank) for slot in self.slots) == numel
        make = torch.empty if filled else torch.zeros  # padding is sent, too
        return make(numel, dtype=self.precision.original, device=self.device)

    def _stretch(self, slot: Slot) -> Tensor:
        return self.shard[slot.shard_start : slot.shard_start + slot.local_numel(self.comm.rank)]

    def shard_view(self, slot: Slot) -> Tensor:
        return as_parameter(self._stretch(slot).view(slot.local_shape(self.comm.rank)), slot)

    def _local(self, slot: Slot) -> Tensor:
        """A shard as the at-rest parameter holds it: the buffer's memory and version counter, and a
        storage of its own.

        What `torch.save` writes is storages, and a view of the buffer would take the whole buffer
        with it.
        """
        shard = self._stretch(slot)
        local = shard.detach()
        local.data = as_parameter(
            with_own_storage(shard).view(slot.local_shape(self.comm.rank)), slot
        )
        return local

    @override
    def _make_at_rest(self, param: ManagedParam, slot: Slot) -> nn.Parameter:
        registered, form, info = param.current, param.info.form, self.mesh_info
        mesh = form.mesh_at_rest(info.mesh)
        assert mesh is not None
        assert info.mesh is not None
        if param.users_local is None:
            return at_home(registered, self._local(slot))
        placements = [*form.kept, *_shard_placements(slot, info.mesh, info.shard_dim)]
        size = form.size_of(*shape_and_strides(slot))
        at_rest = replacement_of(registered, wrap(self._local(slot), mesh, placements, *size))
        # If the annotation is refused, `registered` is what the user has again, unchanged.
        share_hooks(registered, at_rest)
        return at_rest

    @override
    def _local_compute(self, slot: Slot) -> Tensor:
        if self._aliased(slot):
            # It shares the shards' version counter; torch.compile refuses views.
            return self.shard_view(slot).detach()
        return super()._local_compute(slot)

    @override
    def _is_changed(self, param: ManagedParam, slot: Slot, address: int) -> bool:
        at_rest = param.at_rest
        assert isinstance(at_rest, DTensor)
        local, right = local_of(at_rest), self.shard_view(slot)
        if at_rest.device_mesh.device_type == "cpu" and local.device.type not in ("cpu", "meta"):
            raise ForeignParameterError(
                f"parameter '{param.fqn}' of unit '{self.unit}' was moved to {local.device}, and"
                " the ranks of its mesh communicate on cpu. Call"
                f" module.to('{local.device.type}') before fully_shard, or pass it a mesh of"
                f" {local.device.type}"
            )
        moved = local.data_ptr() != address
        if param.registered is at_rest and not moved and local.numel() != right.numel():
            # An operator with `out=` resizes a shard to the whole, and fails. The next write would
            # go behind the shard's memory.
            local.as_strided_(right.shape, right.stride())
            raise ForeignParameterError(
                f"parameter '{param.fqn}' of unit '{self.unit}': its shard was resized by an"
                " operator with out=, as torch.nn.init.eye_ calls one. The shard has its shape and"
                " its values again. Initialise the parameter before fully_shard, or"
                " load_state_dict() the whole tensor"
            )
        # An empty shard has no address, wherever it is. A protocol may have been given to it after
        # the annotation.
        elsewhere = (local.device, local.dtype) != (self.shard.device, self.shard.dtype)
        return elsewhere or (moved and local._base is None) or has_protocol(local)

    @override
    def move(self, move: Callable[[Tensor], Tensor]) -> None:
        self.shard = move(self.shard)
        for param, slot in self.members:
            param.move(move, self._local(slot))


def _shard_placements(slot: Slot, mesh: DeviceMesh, mesh_dim: int) -> list[Placement]:
    """The placements of a sharded parameter: cut over `mesh_dim`, the same along other dimensions
    of the mesh.
    """
    uncut = slot.route is Route.WHOLE and (slot.num_shards > 1 or not slot.shape)
    along: Placement = Replicate() if uncut else Shard(slot.cut_dim)
    return [along if dim == mesh_dim else Replicate() for dim in range(mesh.ndim)]


class ReplicatedGroup(ParamGroup):
    """Parameters that rest whole, in their users' own memory.

    Args:
        rest_mesh: the mesh on which they rest as `DTensor(Replicate)`, next to shards; None: they
            rest as users made them.
        read_apart: modules of other units compute with some of them, in calls that this unit does
            not see.
    """

    def __init__(self, *args: Any, rest_mesh: DeviceMesh | None, read_apart: bool) -> None:
        self._rest_mesh, self._read_apart = rest_mesh, read_apart
        super().__init__(*args)

    @override
    def _make_memory(self) -> tuple[Tensor, ...]:
        return tuple(map(_adopt, self.params))

    @override
    def _make_at_rest(self, param: ManagedParam, slot: Slot) -> nn.Parameter:
        registered, own, mesh = param.current, param.own, self._rest_mesh
        assert own is not None
        if mesh is None:
            if registered is param.at_rest is not own:  # the shards around it were removed
                move_hooks(registered, own)
                if isinstance(registered.grad, DTensor):
                    own.grad = local_of(registered.grad)
            return own
        if isinstance(registered, DTensor) and registered.device_mesh == mesh:
            return at_home(registered, own.detach())
        replicated = [Replicate()] * mesh.ndim
        at_rest = replacement_of(own, wrap(own.detach(), mesh, replicated, own.shape, own.stride()))
        # autograd accumulates on `own`, and users mean the reduced gradient
        move_hooks(own, at_rest)
        if own.grad is not None:
            at_rest.grad = gradient_like(own.grad, at_rest)
            own.grad = None
        return at_rest

    @override
    def _make_compute(self, param: ManagedParam, slot: Slot) -> nn.Parameter:
        if self.precision.casts:
            return super()._make_compute(param, slot)
        assert param.own is not None
        if self._read_apart or not self.precision.changes or param.at_rest is not param.own:
            return param.own
        # Gradients are summed in another dtype. Autograd must not add to the user's gradient, which
        # would be rounded again. (What other units read keeps the user's object: their calls would
        # not show another form.)
        (own,) = locals_of([param.own])
        return param.info.form.compute_parameter(own.detach(), requires_grad=self._differentiable)

    @override
    def _is_changed(self, param: ManagedParam, slot: Slot, address: int) -> bool:
        local, own = locals_of([param.at_rest, param.own])  # type: ignore[list-item]
        return (
            not local.data_ptr() == own.data_ptr() == address
            or local.device != self.device
            or param.at_rest.dtype != self.precision.original
        )


def _adopt(param: ManagedParam) -> nn.Parameter:
    """The user's own parameter, of what is registered now."""
    registered, own = param.current, param.own
    if not param.info.form.is_whole:  # it rests as the user made it, next to shards, too
        own = registered
    elif own is not None and registered is param.at_rest:
        (local,) = locals_of([registered])
        # torch gives no memory to what was made on the meta device
        if own.is_meta and not local.is_meta:
            own = nn.Parameter(local.detach(), requires_grad=registered.requires_grad)
        elif local.data_ptr() != own.data_ptr():
            own.data = local  # the at-rest parameter was moved
    elif isinstance(registered, DTensor):  # loaded with assign=True
        own = nn.Parameter(local_of(registered), requires_grad=registered.requires_grad)
    else:
        own = registered
    param.keep(own)
    return own


@dataclass(frozen=True)
class Grouping:
    """Which groups the sharded parameters of a unit that have one key are in: here, one.
    `features/groups.py` has others. Equal ones give the same kinds of groups.
    """

    @property
    def on_host(self) -> bool:
        """Whether shards rest in host memory, wherever they are gathered."""
        return False

    def groups(self, params: Sequence[ManagedParam], key: GroupKey) -> list[ParamGroup]:
        return [ShardedGroup(params, key)]
