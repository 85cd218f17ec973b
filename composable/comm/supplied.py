"""Messages in memory that somebody supplies: a comm of the user's, FSDP2's `AllGather` and
`ReduceScatter`, or NCCL's symmetric memory.

A collective is one message. What is sent is copied into memory that `allocate` has returned, and
what came is copied out of it where the work is waited for, which gives the memory back. FSDP2
copies in the same way.

| collective | memory that is asked for |
|---|---|
| all-gather | the output, of which the input is this rank's part |
| reduce-scatter | the input and the output |
| all-reduce | each tensor, which is reduced in place |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from composable.comm.base import DONE, Comm, Pairs, Work, backend_of
from composable.comm.launch import Launch
from composable.errors import AnnotationError, MeshError, first_line
from composable.torch_private import choose_symmetric_memory, symmetric_tensor


class Memory(Protocol):
    """Supplies the memory of messages; called alike on all ranks. If it can be called, too, it
    launches the collective itself, as FSDP2's `AllGather` and `ReduceScatter` do.
    """

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor: ...


@dataclass(eq=False, slots=True)
class _Landing:
    """A message in flight, whose memory it holds; `land` copies out what came."""

    _work: Work
    _held: object
    _land: Callable[[], object] | None

    def wait(self) -> None:
        land, self._land = self._land, None
        try:
            self._work.wait()
        finally:
            self._held = None
        if land is not None:
            with torch.no_grad():
                land()


class SuppliedComm:
    """A comm whose messages are in the memory of others.

    Args:
        comm: sends them.
        gathers, reductions: a `Memory` each; None for torch's.
    """

    def __init__(self, comm: Comm, gathers: Any = None, reductions: Any = None) -> None:
        self.inner = comm
        self.gathers, self.reductions = gathers, reductions
        self.rank, self.size, self.device = comm.rank, comm.size, comm.device
        # Packed here, so that the engine has no reason to pack small parameters before. Where they
        # are of whole cache lines, nothing lies between their gradients: under offload, what no
        # message has written would be copied to the host.
        self.traits = replace(comm.traits, direct_bytes=0, max_direct=1 << 30, align=64)
        self.broadcast, self.min_max = comm.broadcast, comm.min_max
        self.all_gather_ints = comm.all_gather_ints
        self.all_gather_objects = comm.all_gather_objects
        self.all_to_all = comm.all_to_all

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self.inner.group

    @torch.no_grad()
    def all_gather(self, pairs: Pairs, launch: Launch) -> Work:
        if not pairs:
            return DONE
        sizes = [shard.numel() for _, shard in pairs]
        output = _taken(self.gathers, self.size * sum(sizes), pairs[0][1])
        rows = output.view(self.size, sum(sizes))
        mine = rows[self.rank]
        torch._foreach_copy_(list(mine.split(sizes)), [shard for _, shard in pairs])
        if callable(self.gathers):
            work = self._launched_by(self.gathers, "all_gather", launch, output, mine)
        else:
            work = self.inner.all_gather([(output, mine)], launch)
        targets = [whole.view(self.size, shard.numel()) for whole, shard in pairs]
        land = partial(torch.split_with_sizes_copy, rows, sizes, dim=1, out=targets)
        return _Landing(work, output, land)

    @torch.no_grad()
    def reduce_scatter(self, pairs: Pairs, launch: Launch, scale: float = 1.0) -> Work:
        if not pairs:
            return DONE
        sizes = [out.numel() for out, _ in pairs]
        sent = _taken(self.reductions, self.size * sum(sizes), pairs[0][0])
        sums = _taken(self.reductions, sum(sizes), pairs[0][0])
        rows = sent.view(self.size, sum(sizes)).split(sizes, dim=1)
        torch._foreach_copy_(
            list(rows), [whole.view(self.size, out.numel()) for out, whole in pairs]
        )
        if callable(self.reductions):
            op = partial(self.reductions, op=dist.ReduceOp.SUM)
            work = self._launched_by(op, "reduce_scatter", launch, sums, sent)
        else:
            work = self.inner.reduce_scatter([(sums, sent)], launch)
        targets = [out for out, _ in pairs]
        land = partial(_put, targets, list(sums.split(sizes)), [sums], scale)
        return _Landing(work, (sums, sent), land)

    @torch.no_grad()
    def all_reduce(self, tensors: Sequence[Tensor], launch: Launch, scale: float = 1.0) -> Work:
        if callable(self.reductions) or not tensors:  # FSDP2's are for reduce-scatters
            return self.inner.all_reduce(tensors, launch, scale)
        sums = [_taken(self.reductions, tensor.numel(), tensor) for tensor in tensors]
        flat = [tensor.view(-1) for tensor in tensors]
        torch._foreach_copy_(sums, flat)
        work = self.inner.all_reduce(sums, launch)
        return _Landing(work, sums, partial(_put, flat, sums, sums, scale))

    def _launched_by(
        self,
        call: Callable[..., Any],
        collective: str,
        launch: Launch,
        output: Tensor,
        source: Tensor,
    ) -> Work:
        """Launch by a function of the user's, with the arguments that FSDP2 gives it."""
        # On a host its work can be waited for later; a stream is not held up by one that is done.
        start = partial(
            call, output_tensor=output, input_tensor=source,
            group=self.group, async_op=not self.traits.on_stream,
        )  # fmt: skip
        launched_by: Callable[..., Work] = self.inner.launched_by  # type: ignore[attr-defined]
        return launched_by(start, collective, launch, ((output,), (source,)))


def _taken(memory: Memory | None, numel: int, like: Tensor) -> Tensor:
    if memory is None:
        return torch.empty(numel, dtype=like.dtype, device=like.device)
    taken = memory.allocate((numel,), dtype=like.dtype, device=like.device)
    if taken.shape != (numel,) or taken.dtype != like.dtype or taken.device != like.device:
        raise AnnotationError(
            f"{type(memory).__name__}.allocate() was asked for {numel} elements of {like.dtype} on"
            f" {like.device}, and returned a tensor of shape {tuple(taken.shape)} of {taken.dtype}"
            f" on {taken.device}. Return what it was asked for, contiguous"
        )
    return taken


def _put(
    targets: list[Tensor], sources: list[Tensor], sums: Sequence[Tensor], scale: float
) -> None:
    for each in sums if scale != 1.0 else ():
        each.mul_(scale)
    torch._foreach_copy_(targets, sources)


def with_own_memory(comm: Comm) -> Comm:
    """A comm that defines `allocate` sends its messages in that memory; others are as they are."""
    supplies = hasattr(comm, "allocate") and comm.group is not None
    return SuppliedComm(comm, comm, comm) if supplies else comm


# --- symmetric memory ----------------------------------------------------------------------------


class SymmetricMemory:
    """Memory that NCCL maps on all ranks of a group, for which it has faster collectives."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        group = self._comm.group
        assert group is not None
        return symmetric_tensor(size, dtype, device, group)


def with_symmetric_memory(comm: Comm) -> Comm:
    """Send messages in symmetric memory. All ranks of the group call this.

    Raises:
        MeshError: the backend has none.
    """
    if comm.group is None:  # this rank alone sends none
        return comm
    backend = backend_of(comm.group, comm.device)
    why = f"the backend of its process group for {comm.device} is {backend}"
    if backend == "nccl":
        try:
            choose_symmetric_memory()
            why = ""
        except (AttributeError, RuntimeError) as error:
            why = f"this torch has none: {first_line(error)}"
    if why:
        raise MeshError(
            f"messages were to be in symmetric memory, and {why}. It takes NCCL 2.27 or later, and"
            " a torch that was built with it; leave COMPOSABLE_SYMMETRIC_MEMORY and"
            " set_symm_mem_for_comm() out for others"
        )
    # NCCL's communicator is made by its first collective, and has to be there.
    comm.min_max([0], Launch("start of symmetric memory"))
    memory = SymmetricMemory(comm)
    return SuppliedComm(comm, memory, memory)
