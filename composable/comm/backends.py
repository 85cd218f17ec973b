"""The communicators, one class per kind of backend; which of them serves a process group and a
device (`comm_of`); groups that are made of others.

| class | for |
|---|---|
| `AcceleratorComm` | tensors of an accelerator: many collectives in one launch, on own streams |
| `GenericComm` | tensors of a host: the tensor collectives of any backend |
| `PointToPointComm` | tensors of a host over gloo |
| `LocalComm` | one rank alone: it copies, and calls no collective |

gloo's tensor collectives clone their inputs, reduce everything on every rank and copy in `wait`.
Point-to-point messages move each byte once, straight from the shard to its final place, while the
caller computes. The messages per rank grow with the ranks, so in large groups gloo's own
collectives are faster.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import count, repeat
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from composable.comm.base import (
    DONE,
    Again,
    Columns,
    Comm,
    GroupComm,
    Pairs,
    Sizes,
    Traits,
    Work,
    backend_of,
    scale_sums,
)
from composable.comm.launch import Launch
from composable.comm.ledger import checksum
from composable.comm.supplied import with_own_memory, with_symmetric_memory
from composable.errors import CommunicationError, RanksDisagreeError, first_line
from composable.memory.elastic import borrow, give_back
from composable.memory.streams import Mark, Streams, has_streams, range_label, streams_of
from composable.torch_private import Launcher, as_real, cannot_coalesce, profiled, timeout_of


def _launch_each(
    group: dist.ProcessGroup, launcher: Launcher, tensors: Sequence[Sequence[Tensor]]
) -> list[Any]:
    """Launch a collective per output and input, or per tensor that is reduced in place. Works that
    are done may be None.
    """
    launch, options = getattr(group, launcher.single), repeat(launcher.options)
    if len(tensors) == 1:
        return list(map(launch, [[as_real(tensor)] for tensor in tensors[0]], options))
    if tensors[0][0].is_complex():  # all have one dtype
        tensors = [list(map(as_real, each)) for each in tensors]
    return list(map(launch, *tensors, options))


# A launch of more messages than this takes longer than the copies that it saves; kernels read 16
# aligned bytes at once.
ON_ACCELERATOR: Final = Traits(direct_bytes=1 << 20, max_direct=32, align=16, on_stream=True)


@dataclass(eq=False, slots=True)
class _StreamWork:
    """Collectives on a stream. To wait orders the current stream, and does not hold up the host."""

    _mark: Mark
    _launch: Launch
    # Memory that the stream uses must not be freed before the compute stream waits, see Note
    # [Stream discipline].
    _kept: object

    def wait(self) -> None:
        with range_label(self._launch.text, "wait for the "):
            self._mark.join()
        self._kept = None


class AcceleratorComm(GroupComm):
    """The group's own tensor collectives: all of one call in one launch, each kind of collective on
    a stream of its own.

    Args:
        reductions: another group of the same ranks for reduce-scatters. A group runs its
            collectives one after the other; with two of them an all-gather and a reduce-scatter run
            at the same time.
    """

    traits = ON_ACCELERATOR

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        streams: Streams,
        reductions: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(group, device)
        self._streams = streams
        self._reductions = self._group if reductions is None else ref(reductions)
        self._coalesces = True  # until the backend says that it does not

    def _start(self, launch: Launch, collective: str, tensors: Columns, scale: float) -> Work:
        launcher, factor = self._launcher(collective, scale)
        group = (collective == "reduce_scatter" and self._reductions()) or self.group
        with self._streams.fork(collective):
            for work in self._works(group, launcher, tensors):
                if work is not None:  # of a backend that has not made the current stream wait
                    work.wait()
            if factor != 1.0:
                torch._foreach_mul_(list(tensors[0]), factor)
            return _StreamWork(self._streams.mark(), launch, tensors)

    def _start_by(
        self, call: Callable[[], Any], launch: Launch, collective: str, tensors: Columns, *_: Any
    ) -> Work:
        with self._streams.fork(collective):
            if (work := call()) is not None:
                work.wait()
            return _StreamWork(self._streams.mark(), launch, tensors)

    def _works(self, group: dist.ProcessGroup, launcher: Launcher, tensors: Columns) -> list[Any]:
        # The tensors of one launch have one dtype, a real one.
        if (
            self._coalesces
            and len(tensors[0]) > 1
            and len({tensor.dtype for tensor in tensors[0]}) == 1
            and not tensors[0][0].is_complex()
        ):
            try:
                return [getattr(group, launcher.coalesced)(*tensors, launcher.coalesced_options)]
            except RuntimeError as error:
                if not cannot_coalesce(error):
                    raise
                self._coalesces = False
        return _launch_each(group, launcher, tensors)


# apart from the small tags that users choose for messages of their own; a tag is a C int
_FIRST_TAG: Final = 1 << 30


@dataclass(eq=False, slots=True)
class _HostWork:
    """The works of one collective, and what is left to do on this rank when they are complete."""

    _comm: GenericComm
    _launch: Launch
    _works: list[Any]
    _finish: Callable[[], None] | None = None
    _failure: str = ""

    def wait(self) -> None:
        if self._failure:
            raise CommunicationError(self._failure)  # again, and without another report
        try:
            if not profiled():
                self._complete()
                return
            with range_label(self._launch.text, "wait for the "):
                self._complete()
        except (RuntimeError, OSError) as error:
            failure = self._comm.failure(self._launch, error)
            self._failure = str(failure)
            raise failure from error

    def _complete(self) -> None:
        for work in self._works:
            if work is not None:  # of a group written in Python, that was complete at its launch
                work.wait()
        self._works = []
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


class GenericComm(GroupComm):
    """The group's own tensor collectives, launched asynchronously. Works for every backend of a
    host.
    """

    traits = Traits(direct_bytes=1 << 20, max_direct=512, align=1, on_stream=False)

    def _start(self, launch: Launch, collective: str, tensors: Columns, scale: float) -> Work:
        launcher, factor = self._launcher(collective, scale)
        works = _launch_each(self.group, launcher, tensors)
        return _HostWork(
            self, launch, works, None if factor == 1.0 else partial(scale_sums, tensors[0], factor)
        )

    def _start_by(
        self, call: Callable[[], Any], launch: Launch, collective: str, tensors: Columns, *_: Any
    ) -> Work:
        return _HostWork(self, launch, [call()])


class _Gathers(NamedTuple):
    """What all-gathers send: `messages` as of `PointToPointComm._exchange`, and the places of this
    rank's own shards.
    """

    messages: list[tuple[Sequence[Tensor], Sequence[Tensor]]]
    own: list[Tensor]
    shards: list[Tensor]


class PointToPointComm(GenericComm):
    """gloo, up to 8 ranks: each pair of ranks exchanges the bytes that it must, and no others.

    Ranks count messages alike, and each has a tag of its own in its pair of ranks. The launch's
    text is part of the tag: ranks that launched different collectives must not get each other's
    bytes. They wait for the timeout, and say what they launched.
    """

    traits = Traits(direct_bytes=512 << 10, max_direct=512, align=1, on_stream=False)

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        self._messages = count()
        # Each rank starts with its right neighbour; if all started with rank 0, that would be the
        # bottleneck.
        self._peers = tuple((self.rank + step) % self.size for step in range(1, self.size))

    def _start(self, launch: Launch, collective: str, tensors: Columns, scale: float) -> Work:
        if collective == "all_gather":
            return self._all_gather(self._gathers(zip(*tensors, strict=True)), launch)
        if collective == "reduce_scatter":
            return self._reduce_scatter(zip(*tensors, strict=True), launch, scale)
        return super()._start(launch, collective, tensors, scale)

    @override
    def all_gather(self, pairs: Pairs, launch: Launch) -> Work:
        if not pairs or not isinstance(pairs, Again):
            return super().all_gather(pairs, launch)
        plan = pairs.plans.get(self) or pairs.keep_plan(self, self._gathers(pairs))
        start = partial(self._all_gather, plan)
        return self._launch(launch, "all_gather", pairs.columns, 1.0, start)

    def _gathers(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> _Gathers:
        split = [(whole.split(shard.numel()), shard) for whole, shard in pairs if shard.numel()]
        return _Gathers(
            [
                ([parts[peer] for peer in self._peers], [shard for _ in self._peers])
                for parts, shard in split
            ],
            [parts[self.rank] for parts, _ in split],
            [shard for _, shard in split],
        )

    def _all_gather(self, planned: _Gathers, launch: Launch, *_: Any) -> Work:
        works = self._exchange(launch, planned.messages)
        if planned.own:
            torch._foreach_copy_(planned.own, planned.shards)
        return _HostWork(self, launch, works)

    def _reduce_scatter(
        self, pairs: Iterable[tuple[Tensor, Tensor]], launch: Launch, scale: float
    ) -> Work:
        split = [(out, whole.split(out.numel())) for out, whole in pairs if out.numel()]
        lent = [borrow(len(self._peers) * out.numel(), out.dtype) for out, _ in split]
        received = [buffer.split(out.numel()) for buffer, (out, _) in zip(lent, split, strict=True)]
        works = self._exchange(
            launch,
            [
                (rows, [parts[peer] for peer in self._peers])
                for rows, (_, parts) in zip(received, split, strict=True)
            ],
        )

        def add_up() -> None:
            for (out, parts), rows in zip(split, received, strict=True):
                # In the order of ranks, so that every run rounds alike.
                by_rank = {self.rank: parts[self.rank], **dict(zip(self._peers, rows, strict=True))}
                torch.add(by_rank[0], by_rank[1], out=out)
                for rank in range(2, self.size):
                    out.add_(by_rank[rank])
            for buffer in lent:
                give_back(buffer)
            if scale != 1.0:
                scale_sums([out for out, _ in split], scale)

        return _HostWork(self, launch, works, add_up)

    @override
    def _start_to_all(
        self, out: Tensor, out_sizes: Sizes, source: Tensor, sizes: Sizes, launch: Launch, *_: Any
    ) -> Work:
        received, sent = out.split([*out_sizes]), source.split([*sizes])
        message = [received[peer] for peer in self._peers], [sent[peer] for peer in self._peers]
        works = self._exchange(launch, [message])
        received[self.rank].copy_(sent[self.rank])
        return _HostWork(self, launch, works)

    def _exchange(
        self, launch: Launch, messages: list[tuple[Sequence[Tensor], Sequence[Tensor]]]
    ) -> list[Any]:
        """Launch messages. Each has what is received from, and what is sent to, each of
        `self._peers`; nothing is sent of what is empty.
        """
        group, works, sends = self.group, [], []
        for received, sent in messages:
            tag = _FIRST_TAG | (next(self._messages) ^ checksum(launch.text)) & (_FIRST_TAG - 1)
            works += [
                group.recv([part], peer, tag)
                for part, peer in zip(received, self._peers, strict=True)
                if part.numel()
            ]
            sends += [
                (part, peer, tag)
                for part, peer in zip(sent, self._peers, strict=True)
                if part.numel()
            ]
        # All receives come first: what arrives for one that is posted needs no memory in between.
        return works + [group.send([part], peer, tag) for part, peer, tag in sends]


# Without messages every parameter may as well go straight to its place.
_HOST: Final = Traits(direct_bytes=0, max_direct=1 << 30, align=1, on_stream=False)
_ACCELERATOR: Final = replace(ON_ACCELERATOR, direct_bytes=0, max_direct=1 << 30)


class LocalComm:
    group = None
    rank = 0
    size = 1

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.traits = _ACCELERATOR if has_streams(device) else _HOST

    def all_gather(self, pairs: Pairs, launch: Launch) -> Work:
        if pairs:
            with range_label(launch.text):
                torch._foreach_copy_([whole for whole, _ in pairs], [shard for _, shard in pairs])
        return DONE

    def reduce_scatter(self, pairs: Pairs, launch: Launch, scale: float = 1.0) -> Work:
        self.all_gather(pairs, launch)
        return self.all_reduce([out for out, _ in pairs], launch, scale)

    def all_reduce(self, tensors: Sequence[Tensor], launch: Launch, scale: float = 1.0) -> Work:
        if scale != 1.0:
            scale_sums(tensors, scale)
        return DONE

    def all_to_all(
        self, out: Tensor, out_sizes: Sizes, source: Tensor, sizes: Sizes, launch: Launch
    ) -> Work:
        out.copy_(source)
        return DONE

    def broadcast(self, tensors: Sequence[Tensor], launch: Launch, src: int = 0) -> None:
        return None

    def min_max(self, values: Sequence[int], launch: Launch) -> tuple[list[int], list[int]]:
        return list(values), list(values)

    def all_gather_ints(self, values: Sequence[int], launch: Launch) -> list[list[int]]:
        return [list(values)]

    def all_gather_objects(self, value: Any, launch: Launch) -> list[Any]:
        return [value]


# --- which of them serves a group -----------------------------------------------------------------

# ranks in a gloo group up to which point-to-point messages are faster than its collectives
PAIRS_UP_TO: Final = 8
# "1" in the environment of all ranks, see `AcceleratorComm`
REDUCTIONS_VARIABLE: Final = "COMPOSABLE_SEPARATE_REDUCTIONS"
# "1" in the environment of all ranks, see supplied.py
SYMMETRIC_VARIABLE: Final = "COMPOSABLE_SYMMETRIC_MEMORY"

_CPU: Final = torch.device("cpu")
_COMMS: Final[WeakKeyDictionary[dist.ProcessGroup, dict[tuple[torch.device, bool], Comm]]] = (
    WeakKeyDictionary()
)
_WRAPPERS: Final[list[Callable[[Comm], Comm]]] = []
_local_comm: Final = cache(LocalComm)


def comm_of(
    group: dist.ProcessGroup | None, device: torch.device, *, symmetric: bool = False
) -> Comm:
    """The comm for tensors on `device` among the ranks of `group` (None: this rank alone); the same
    one at every call.

    Args:
        symmetric: its messages are in symmetric memory.
    """
    comm: Comm
    device = device if has_streams(device) else _CPU
    if group is None or dist.get_world_size(group) == 1:
        comm = _local_comm(device)
    else:
        made = _COMMS.setdefault(group, {})
        if (device, symmetric) not in made:
            fresh = _make_comm(group, device)
            made[device, symmetric] = with_symmetric_memory(fresh) if symmetric else fresh
        comm = made[device, symmetric]
    for wrapper in _WRAPPERS:
        comm = wrapper(comm)
    return comm


def comm_of_messages(group: dist.ProcessGroup, device: torch.device) -> Comm:
    """The comm that gathers and reduces for a unit: as the environment says, in symmetric memory.

    Raises:
        MeshError: the group's backend has none.
    """
    return comm_of(group, device, symmetric=os.environ.get(SYMMETRIC_VARIABLE) == "1")


def _make_comm(group: dist.ProcessGroup, device: torch.device) -> Comm:
    if has_streams(device):
        apart = os.environ.get(REDUCTIONS_VARIABLE) == "1"
        ranks = dist.get_process_group_ranks(group)
        return AcceleratorComm(
            group,
            device,
            streams_of(device),
            _group_of(ranks, group, device, "reduce-scatters") if apart else None,
        )
    if backend_of(group, device) == "gloo" and dist.get_world_size(group) <= PAIRS_UP_TO:
        return PointToPointComm(group, device)
    return GenericComm(group, device)


@contextmanager
def comms_wrapped_by(wrapper: Callable[[Comm], Comm]) -> Iterator[None]:
    """Let comms that are asked for in the body pass through `wrapper`: how users send in their own
    way, and tests record, delay or break collectives.

    A comm that defines `allocate(size, *, dtype, device)`, as FSDP2's `AllGather` does, supplies
    the memory of its messages; see supplied.py.
    """

    # One wrapped comm for each comm, as units that share a group share a comm.
    cached: Callable[[Comm], Comm] = cache(lambda comm: with_own_memory(wrapper(comm)))  # type: ignore[assignment]
    _WRAPPERS.append(cached)
    try:
        yield
    finally:
        _WRAPPERS.remove(cached)


def reduce_numbers(
    numbers: Tensor, group: dist.ProcessGroup, *, largest: bool, text: str
) -> Tensor:
    """The sum, or the largest, of all ranks' `numbers` (1-D, a few), one by one. NaN on one rank is
    NaN on all.

    Args:
        text: of the launch.
    """
    comm, launch = comm_of(group, numbers.device), Launch(text)
    if not largest:
        found = numbers.clone()
        comm.all_reduce([found], launch).wait()
        return found
    # Gathered, because backends differ in which one of NaN and a number is the larger.
    every = numbers.new_empty(comm.size * numbers.numel())
    comm.all_gather([(every, numbers.contiguous())], launch).wait()
    return every.view(comm.size, -1).amax(0)


def notification_sum(mine: float, group: dist.ProcessGroup, device: torch.device) -> float:
    """The sum over all ranks of one number, as torch's `Join` makes it; other ranks may be inside
    of `Join` itself.
    """
    number = torch.full((1,), mine, device=device)  # of this shape and dtype
    try:
        dist.all_reduce(number, group=group)
    except RanksDisagreeError:
        raise
    except RuntimeError as error:
        raise CommunicationError(
            f"rank {dist.get_rank()}: the exchange of which ranks have data failed:"
            f" {first_line(error)}\nAnother rank raised or ended inside of a join scope; look for"
            " the first error among all ranks."
        ) from error
    return number.item()


# --- groups -------------------------------------------------------------------------------------

# By the group that they are made of, their ranks and their purpose. Weak: torch keeps groups until
# they are destroyed.
_Made = WeakValueDictionary[tuple[object, ...], dist.ProcessGroup]
_GROUPS: Final[WeakKeyDictionary[dist.ProcessGroup, _Made]] = WeakKeyDictionary()


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def world_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None, "callers ask is_distributed() first"
    return group


def ranks_of(comm: Comm) -> list[int]:
    """The global ranks of a comm, in the order of its own."""
    if comm.group is None:
        return [dist.get_rank() if is_distributed() else 0]
    return dist.get_process_group_ranks(comm.group)


def subgroup_of(group: dist.ProcessGroup, size: int, device: torch.device) -> dist.ProcessGroup:
    """The group of `size` consecutive ranks of `group` that this rank belongs to. All ranks of
    `group` call it.
    """
    ranks = dist.get_process_group_ranks(group)
    start = dist.get_rank(group) // size * size
    return _group_of(
        ranks[start : start + size], group, device, "all-gathers of post-forward shards"
    )


def group_of_all(
    groups: Sequence[dist.ProcessGroup], ranks: list[int], device: torch.device
) -> dist.ProcessGroup:
    """The group of all `ranks` of a mesh, whose dimensions have `groups` on this rank."""
    for group in (*groups, world_group()):
        if dist.get_world_size(group) == len(ranks):
            return group
    return _group_of(sorted(ranks), groups[0], device, "all ranks of a mesh")


def _group_of(
    ranks: list[int], like: dist.ProcessGroup, device: torch.device, purpose: str
) -> dist.ProcessGroup:
    """A group of `ranks` with the backends and the timeout of `like`, made once. All of `ranks`
    call it, and no others.

    torch names such a group by its ranks and by how many groups this process knows: that must be
    the same on all `ranks`.
    """
    made = _GROUPS.setdefault(like, WeakValueDictionary())
    key = (purpose, *ranks)
    found = made.get(key)
    if found is None:
        default = world_group()
        # Where the default group is bound to a device, torch would split the new communicator off
        # it, and all ranks of the default group have to take part in that.
        bound, default.bound_device_id = default.bound_device_id, None
        try:
            found = made[key] = dist.new_group(
                ranks,
                timeout_of(like, device),
                str(dist.get_backend_config(like)),
                use_local_synchronization=True,
                group_desc=f"composable: {purpose}",
            )
        finally:
            default.bound_device_id = bound
    return found
