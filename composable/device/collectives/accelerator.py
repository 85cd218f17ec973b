"""An accelerator's tensor collectives, many in one launch, on streams of their own; knows no host backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from composable.device.collectives.base import GroupCommunicator, all_gather_single, reduce_scatter_single
from composable.device.collectives.communicator import (
    ON_ACCELERATOR,
    GatherPart,
    PollableWork,
    ReducePart,
    ScaledInput,
    Scratch,
    Work,
    failed,
    put_scaled_input,
    scale_sums,
)
from composable.device.collectives.tags import TagSequence
from composable.device.private import coalesced
from composable.device.streams import Mark, Streams


class _OnStream:
    """Collectives on a stream: waiting orders the compute stream and leaves the host alone."""

    __slots__ = ("_kept", "_mark")

    def __init__(self, mark: Mark, kept: object) -> None:
        self._mark = mark
        self._kept = kept  # what the stream still reads must not be freed before the compute stream has waited

    def progress(self) -> bool:
        return False  # waiting is for the compute stream to do, at the end

    def wait(self) -> None:
        self._mark.join()
        self._kept = None

    def abort(self) -> None:
        self.wait()


class AcceleratorCommunicator(GroupCommunicator):
    """An accelerator's tensor collectives, many in one launch, each kind on a stream of its own."""

    capabilities = ON_ACCELERATOR

    def __init__(self, group: dist.ProcessGroup, device: torch.device, streams: Streams) -> None:
        super().__init__(group, device)
        self._streams = streams

    def prepare(self, parts: Sequence[GatherPart]) -> Any:
        return tuple(parts)

    def all_gather(self, prepared: Any, *, label: str, tags: TagSequence) -> Work:
        def calls() -> None:
            for part in prepared:
                all_gather_single(part.whole, part.shard, group=self.group)

        return self._on_stream("all_gather", label, calls, len(prepared), prepared)

    def reduce_scatter(self, parts: Sequence[ReducePart], *, scratch: Scratch, label: str, tags: TagSequence) -> Work:
        is_mean = self._is_mean(parts)
        operation = dist.ReduceOp.AVG if is_mean else dist.ReduceOp.SUM

        def calls() -> None:
            for part in parts:
                reduce_scatter_single(part.out, part.source, op=operation, group=self.group)

        rest = None if is_mean else partial(scale_sums, parts)
        return self._on_stream("reduce_scatter", label, calls, len(parts), parts, rest)

    def all_reduce(
        self, tensor: Tensor, *, label: str, scaled_input: ScaledInput | None = None, tags: TagSequence | None = None
    ) -> PollableWork:
        put_scaled_input(tensor, scaled_input)
        return self._on_stream("all_reduce", label, lambda: dist.all_reduce(tensor, group=self.group), 1, tensor)

    def _on_stream(
        self,
        stream: str,
        label: str,
        calls: Callable[[], Any],
        count: int,
        kept: object,
        finish: Callable[[], None] | None = None,
    ) -> PollableWork:
        try:
            with self._streams.fork(stream):
                if count == 1:
                    calls()
                else:
                    with coalesced(self.group):
                        calls()
                if finish is not None:
                    finish()
                return _OnStream(self._streams.mark(), kept)
        except RuntimeError as error:
            raise failed(label, self.names[self.rank], error) from error
