"""An accelerator's tensor collectives, many in one launch, on streams of their own; knows no host backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

from composable.device.collectives.base import GroupCommunicator, alive
from composable.device.collectives.communicator import (
    ON_ACCELERATOR,
    GatherPart,
    PreparedGather,
    ReducePart,
    ScaledInput,
    Scratch,
    Work,
    put_scaled_input,
    raise_failed,
    scale_sums,
)
from composable.device.collectives.tags import TagSequence
from composable.device.private import as_real
from composable.device.private_groups import Launcher, cannot_coalesce, launchers, sum_launcher
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
    """An accelerator's tensor collectives, many in one launch, each kind on a stream of its own.

    Attributes:
        reductions: another group of the same ranks, for reduce-scatters, if they have one: a group runs its collectives one
            after the other. Not kept, as the group is not.
    """

    capabilities = ON_ACCELERATOR

    def __init__(self, group: dist.ProcessGroup, device: torch.device, streams: Streams) -> None:
        super().__init__(group, device)
        self._streams = streams
        self._gather, self._sum, self._mean = launchers(group, asynchronous=False)
        self._sum_in_place, self._for_sum_in_place = sum_launcher(group)
        self.reductions = self._group
        self._coalesces = True  # until the backend says otherwise

    def prepare(self, parts: Sequence[GatherPart]) -> PreparedGather:
        return [as_real(part.whole) for part in parts], [as_real(part.shard) for part in parts]

    def all_gather(self, prepared: PreparedGather, *, label: str, tags: TagSequence) -> Work:
        return self._on_stream("all_gather", label, self._launch_all, (self._group, self._gather, *prepared))

    def reduce_scatter(self, parts: Sequence[ReducePart], *, scratch: Scratch, label: str, tags: TagSequence) -> Work:
        is_mean = self._is_mean(parts)
        outputs, inputs = [as_real(part.out) for part in parts], [as_real(part.source) for part in parts]
        rest = None if is_mean else partial(scale_sums, parts)
        call = (self.reductions, self._mean if is_mean else self._sum, outputs, inputs)
        return self._on_stream("reduce_scatter", label, self._launch_all, call, rest)

    def all_reduce(
        self, tensor: Tensor, *, label: str, scaled_input: ScaledInput | None = None, tags: TagSequence | None = None
    ) -> Work:
        put_scaled_input(tensor, scaled_input)
        return self._on_stream("all_reduce", label, self._launch_sum, (as_real(tensor),))

    def _launch_all(
        self, among: ref[dist.ProcessGroup], launcher: Launcher, outputs: list[Tensor], inputs: list[Tensor]
    ) -> None:
        group = alive(among)
        if self._coalesces and len(outputs) > 1:
            try:
                _finish(getattr(group, launcher.coalesced)(outputs, inputs, launcher.options))
                return
            except RuntimeError as error:
                if not cannot_coalesce(error):
                    raise
                self._coalesces = False
        launch = getattr(group, launcher.single)
        for output, source in zip(outputs, inputs, strict=True):
            _finish(launch(output, source, launcher.options))

    def _launch_sum(self, tensor: Tensor) -> None:
        _finish(getattr(self.group, self._sum_in_place)([tensor], self._for_sum_in_place))

    def _on_stream(
        self,
        stream: str,
        label: str,
        launch: Callable[..., None],
        call: tuple[Any, ...],
        finish: Callable[[], None] | None = None,
    ) -> Work:
        try:
            with self._streams.fork(stream):
                launch(*call)
                if finish is not None:
                    finish()
                return _OnStream(self._streams.mark(), call)
        except RuntimeError as error:
            raise_failed(label, self.names[self.rank], error)


def _finish(work: Any) -> None:
    """Backends that order the current stream by themselves have nothing to wait for."""
    if work is not None:
        work.wait()
