"""The comm for tensors of an accelerator: many collectives in one launch, on streams of their
own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final
from weakref import ref

import torch
import torch.distributed as dist

from composable.comm.base import Columns, GroupComm, Traits, Work, launch_each
from composable.comm.launch import Launch
from composable.memory.streams import Mark, Streams, range_label
from composable.torch_private import Launcher, cannot_coalesce

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
        return launch_each(group, launcher, tensors)
