"""Tensor collectives of any backend, off this thread where it is a host's; knows no point-to-point messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import starmap
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from composable.device.collectives.base import GroupCommunicator
from composable.device.collectives.communicator import (
    Capabilities,
    CompositeWork,
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
from composable.device.collectives.process_groups import backend_of
from composable.device.collectives.tags import TagSequence
from composable.device.private import as_real
from composable.device.private_groups import launchers
from composable.plan.routes import DIRECT_BYTES_OF_COLLECTIVES


class GenericCommunicator(GroupCommunicator):
    """Plain tensor collectives; `async_op` keeps those of a host backend off this thread."""

    capabilities = Capabilities(DIRECT_BYTES_OF_COLLECTIVES, even_only=True, ordered=True)

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        self._gather, self._sum, self._mean = launchers(group, asynchronous=True)
        # Torch's fake group is done with a collective when the call returns, and never says so.
        self._completes_at_launch = backend_of(group, device) == "fake"

    def prepare(self, parts: Sequence[GatherPart]) -> PreparedGather:
        return [(as_real(part.whole), as_real(part.shard), self._gather.options) for part in parts]

    def all_gather(self, prepared: PreparedGather, *, label: str, tags: TagSequence) -> Work:
        return self._run(label, self._gather.single, prepared)

    def reduce_scatter(self, parts: Sequence[ReducePart], *, scratch: Scratch, label: str, tags: TagSequence) -> Work:
        is_mean = self._is_mean(parts)
        launcher = self._mean if is_mean else self._sum
        calls = []
        for part in parts:
            out, source = part.out, part.source
            if out.dtype.is_complex:
                out, source = as_real(out), as_real(source)
            calls.append((out, source, launcher.options))
        finish = None if is_mean else partial(scale_sums, parts)
        return self._run(label, launcher.single, calls, finish)

    def all_reduce(
        self, tensor: Tensor, *, label: str, scaled_input: ScaledInput | None = None, tags: TagSequence | None = None
    ) -> Work:
        put_scaled_input(tensor, scaled_input)
        work = self._launch(label, lambda: dist.all_reduce(tensor, group=self.group, async_op=True))
        return CompositeWork([work], label, self.names[self.rank])

    def _run(
        self,
        label: str,
        method: str,
        calls: Sequence[tuple[Any, ...]],
        finish: Callable[[], None] | None = None,
    ) -> Work:
        """Call a method of the group's own, by name, once for each part."""
        try:
            launch = getattr(self._group() or self.group, method)  # the latter raises
            works = list(starmap(launch, calls))
            return CompositeWork(works, label, self.names[self.rank], finish, completed=self._completes_at_launch)
        except RuntimeError as error:
            raise_failed(label, self.names[self.rank], error)
