"""The comm for tensors of an accelerator: many collectives in one launch, on streams of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

from composable.comm.base import GroupComm, Pairs, Traits, Work
from composable.memory.streams import Mark, Streams, range_label
from composable.memory.torch_private import Launcher, as_real, cannot_coalesce, launchers

# A launch of more messages than this takes longer than the copies that it saves; kernels read 16 aligned bytes at once.
ON_ACCELERATOR: Final = Traits(direct_bytes=1 << 20, max_direct=32, align=16, on_stream=True)


class _StreamWork:
    """Collectives on a stream. To wait orders the current stream, and does not hold up the host."""

    __slots__ = ("_kept", "_label", "_mark")

    def __init__(self, mark: Mark, label: str, kept: object) -> None:
        self._mark = mark
        self._label = label
        # Memory that the stream uses must not be freed before the compute stream waits, see Note [Stream discipline].
        self._kept = kept

    def wait(self) -> None:
        with range_label(self._label, "wait for the "):
            self._mark.join()
        self._kept = None


class AcceleratorComm(GroupComm):
    """The group's own tensor collectives: all of one call in one launch, each kind of collective on a stream of its own.

    Args:
        reductions: another group of the same ranks for reduce-scatters. A group runs its collectives one after the other; with
            two of them an all-gather and a reduce-scatter run at the same time.
    """

    traits = ON_ACCELERATOR

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, streams: Streams, reductions: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(group, device)
        self._streams = streams
        self._launchers = launchers(group, asynchronous=False)
        self._reductions = self._group if reductions is None else ref(reductions)
        self._coalesces = True  # until the backend says that it does not

    def _all_gather(self, pairs: Pairs, label: str) -> Work:
        with self._streams.fork("all_gather"):
            self._start(self.group, self._launchers.all_gather, *_unzip(pairs))
            return _StreamWork(self._streams.mark(), label, pairs)

    def _reduce_scatter(self, pairs: Pairs, label: str, scale: float) -> Work:
        is_mean = self._is_mean(scale)
        launcher = self._launchers.reduce_scatter_mean if is_mean else self._launchers.reduce_scatter
        with self._streams.fork("reduce_scatter"):
            self._start(self._reductions() or self.group, launcher, *_unzip(pairs))
            if scale != 1.0 and not is_mean:
                torch._foreach_mul_([out for out, _ in pairs], scale)
            return _StreamWork(self._streams.mark(), label, pairs)

    def _all_reduce(self, tensors: Sequence[Tensor], label: str, scale: float) -> Work:
        is_mean = self._is_mean(scale)
        launcher = self._launchers.all_reduce_mean if is_mean else self._launchers.all_reduce
        by_dtype: dict[torch.dtype, list[Tensor]] = {}  # the tensors of one launch have one dtype
        for tensor in map(as_real, tensors):
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        with self._streams.fork("all_reduce"):
            for same in by_dtype.values():
                self._start(self.group, launcher, same)
            if scale != 1.0 and not is_mean:
                torch._foreach_mul_(list(tensors), scale)
            return _StreamWork(self._streams.mark(), label, tensors)

    def _start(self, group: dist.ProcessGroup, launcher: Launcher, *tensors: list[Tensor]) -> None:
        """Launch one kind of collective for outputs and inputs, or for what is reduced in place, on the current stream."""
        if self._coalesces and len(tensors[0]) > 1:
            try:
                _finish(getattr(group, launcher.coalesced)(*tensors, launcher.coalesced_options))
                return
            except RuntimeError as error:
                if not cannot_coalesce(error):
                    raise
                self._coalesces = False
        launch = getattr(group, launcher.single)
        in_place = len(tensors) == 1
        for arguments in zip(*tensors, strict=True):
            _finish(launch(list(arguments) if in_place else arguments[0], *arguments[1:], launcher.options))


def _unzip(pairs: Pairs) -> tuple[list[Tensor], list[Tensor]]:
    return [as_real(output) for output, _ in pairs], [as_real(source) for _, source in pairs]


def _finish(work: Any) -> None:
    """Make the current stream wait. Backends that have done so return no work."""
    if work is not None:
        work.wait()
