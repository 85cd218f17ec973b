"""Tensor collectives of any backend, and of an accelerator on streams of their own; knows no point-to-point messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import starmap
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from composable.device.collectives.group import GroupWire, all_gather_single, reduce_scatter_single
from composable.device.collectives.wire import (
    Arrival,
    Capabilities,
    Channel,
    GatherPart,
    Pending,
    ReducePart,
    Scratch,
    Term,
    Works,
    failed,
    put_term,
    scale_sums,
)
from composable.device.private import as_real, coalesced, launchers
from composable.device.streams import Mark, Streams

DIRECT_BYTES: Final = 1 << 20  # bytes in a shard from which its own message pays


class TensorsWire(GroupWire):
    """Plain tensor collectives; `async_op` keeps those of a host backend off this thread."""

    capabilities = Capabilities(DIRECT_BYTES, even_only=True, ordered=True)

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        (self._gather, self._for_gather), (self._scatter, self._for_sum), (_, self._for_mean) = launchers(group)

    def prepare(self, parts: Sequence[GatherPart]) -> Any:
        return [(as_real(part.whole), as_real(part.shard), self._for_gather) for part in parts]

    def all_gather(self, prepared: Any, *, label: str, channel: Channel) -> Arrival:
        return self._run(label, self._gather, prepared)

    def reduce_scatter(self, parts: Sequence[ReducePart], *, scratch: Scratch, label: str, channel: Channel) -> Arrival:
        is_mean = self._is_mean(parts)
        options = self._for_mean if is_mean else self._for_sum
        calls = [(as_real(part.out), as_real(part.source), options) for part in parts]
        return self._run(label, self._scatter, calls, None if is_mean else partial(scale_sums, parts))

    def all_reduce(self, tensor: Tensor, *, label: str, term: Term | None = None) -> Pending:
        put_term(tensor, term)
        return self._run(label, partial(dist.all_reduce, group=self.group, async_op=True), [(tensor,)])

    def _run(
        self,
        label: str,
        launch: Callable[..., Any],
        calls: Sequence[tuple[Any, ...]],
        finish: Callable[[], None] | None = None,
    ) -> Pending:
        try:
            return Works(list(starmap(launch, calls)), label, self.rank, finish)
        except RuntimeError as error:
            raise failed(label, self.rank, error) from error


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

    def give_up(self) -> None:
        self.wait()


class StreamsWire(GroupWire):
    """An accelerator's tensor collectives, many in one launch, each kind on a stream of its own."""

    capabilities = Capabilities(DIRECT_BYTES, even_only=True, ordered=True)

    def __init__(self, group: dist.ProcessGroup, device: torch.device, streams: Streams) -> None:
        super().__init__(group, device)
        self._streams = streams

    def prepare(self, parts: Sequence[GatherPart]) -> Any:
        return tuple(parts)

    def all_gather(self, prepared: Any, *, label: str, channel: Channel) -> Arrival:
        def calls() -> None:
            for part in prepared:
                all_gather_single(part.whole, part.shard, group=self.group)

        return self._on_stream("all_gather", label, calls, len(prepared), prepared)

    def reduce_scatter(self, parts: Sequence[ReducePart], *, scratch: Scratch, label: str, channel: Channel) -> Arrival:
        is_mean = self._is_mean(parts)
        operation = dist.ReduceOp.AVG if is_mean else dist.ReduceOp.SUM

        def calls() -> None:
            for part in parts:
                reduce_scatter_single(part.out, part.source, op=operation, group=self.group)

        rest = None if is_mean else partial(scale_sums, parts)
        return self._on_stream("reduce_scatter", label, calls, len(parts), parts, rest)

    def all_reduce(self, tensor: Tensor, *, label: str, term: Term | None = None) -> Pending:
        put_term(tensor, term)
        return self._on_stream("all_reduce", label, lambda: dist.all_reduce(tensor, group=self.group), 1, tensor)

    def _on_stream(
        self,
        stream: str,
        label: str,
        calls: Callable[[], Any],
        count: int,
        kept: object,
        finish: Callable[[], None] | None = None,
    ) -> Pending:
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
            raise failed(label, self.rank, error) from error
