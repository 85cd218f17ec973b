"""Faults that are put into the library: for each wait on the accelerator's path, one that leaves it out; knows no test.

Each is a context manager that patches what the library has, and says which finding must tell of it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final
from unittest import mock

import torch

from composable.device import streams
from composable.device.collectives import accelerator
from composable.device.streams import AcceleratorStreams
from composable.runtime.dtype_group import DtypeGroup
from composable.runtime.handle import Handle
from composable.runtime.hop import Hop
from composable.runtime.reduction import Reduction

COMPUTE: Final = r"the default stream of sim:\d"
GATHER, SCATTER, REDUCE = "stream 'all_gather'", "stream 'reduce_scatter'", "stream 'all_reduce'"


@dataclass(frozen=True)
class Fault:
    """A wait that is left out.

    Attributes:
        scheme: the annotation under which it matters.
        first: what the finding says of the earlier launch, as a regular expression.
        second: and of the later one.
        fails: a block raises in the first step.
    """

    put: Callable[[], AbstractContextManager[Any]]
    scheme: str
    first: str
    second: str
    fails: bool = False


def _launch(does: str, label: str, on: str) -> str:
    return rf"{does} by \[{label}[^\]]*\] on {on}"


# --- streams ------------------------------------------------------------------------------------------------------------


def _fork_without_waiting(only: str) -> Callable[[], AbstractContextManager[Any]]:
    fork = AcceleratorStreams.fork

    def deaf(self: AcceleratorStreams, name: str) -> AbstractContextManager[None]:
        if name != only:
            return fork(self, name)
        return streams._Fork(self.stream(name), torch.accelerator.current_stream(self.device))

    return lambda: mock.patch.object(AcceleratorStreams, "fork", deaf)


def _join_nothing() -> AbstractContextManager[Any]:
    return mock.patch.object(streams._EventMark, "join", return_value=None)


def _mark_too_early() -> AbstractContextManager[Any]:
    """The point that others wait for is that before the collective."""

    on_stream = accelerator.AcceleratorCommunicator._on_stream

    def early(self: Any, stream: str, *args: Any) -> Any:
        with self._streams.fork(stream):
            mark = self._streams.mark()
        work = on_stream(self, stream, *args)
        work._mark = mark
        return work

    return mock.patch.object(accelerator.AcceleratorCommunicator, "_on_stream", early)


def _scale_outside_of_the_stream() -> AbstractContextManager[Any]:
    """Sums are multiplied on the compute stream before it has waited for them."""
    on_stream = accelerator.AcceleratorCommunicator._on_stream

    def outside(self: Any, stream: str, label: str, launch: Any, call: Any, finish: Any = None) -> Any:
        work = on_stream(self, stream, label, launch, call)
        if finish is not None:
            finish()
        return work

    return mock.patch.object(accelerator.AcceleratorCommunicator, "_on_stream", outside)


def _keep_nothing() -> AbstractContextManager[Any]:
    """What a collective still reads is freed by whoever has dropped it."""
    on_stream = accelerator.AcceleratorCommunicator._on_stream

    def forgetful(self: Any, *args: Any) -> Any:
        work = on_stream(self, *args)
        work._kept = None
        return work

    return mock.patch.object(accelerator.AcceleratorCommunicator, "_on_stream", forgetful)


def _abort_without_waiting() -> AbstractContextManager[Any]:
    return mock.patch.object(accelerator._OnStream, "abort", return_value=None)


# --- gathers ------------------------------------------------------------------------------------------------------------


def _compute_before_the_gather_has_landed() -> AbstractContextManager[Any]:
    wait = Handle.wait_for_unshard

    def hasty(self: Handle) -> None:
        self._works = []
        wait(self)

    return mock.patch.object(Handle, "wait_for_unshard", hasty)


def _copy_out_before_the_gather_has_landed() -> AbstractContextManager[Any]:
    wait = Handle.wait_for_unshard

    def hasty(self: Handle) -> None:
        for group in self.parameters.groups:
            if self._works:
                group.flat.copy_out()
        wait(self)

    return mock.patch.object(Handle, "wait_for_unshard", hasty)


def _used_again_while_gathered(buffer: str) -> Callable[[], AbstractContextManager[Any]]:
    """A buffer of the gather goes to whoever allocates next, once the gather is launched."""
    gather = DtypeGroup.gather

    def reusing(self: DtypeGroup, *args: Any, **kwargs: Any) -> Any:
        work = gather(self, *args, **kwargs)
        elastic = getattr(self.flat, buffer)
        if work is not None and elastic is not None:
            elastic.free()
            elastic.allocate()
        return work

    return lambda: mock.patch.object(DtypeGroup, "gather", reusing)


# --- reductions ---------------------------------------------------------------------------------------------------------


def _rows_used_again_while_reduced() -> AbstractContextManager[Any]:
    launch = Reduction.launch

    def reusing(self: Reduction, *args: Any, **kwargs: Any) -> None:
        launch(self, *args, **kwargs)
        assert self._rows is not None
        self._rows.buffer.free()
        self._rows.buffer.allocate()

    return mock.patch.object(Reduction, "launch", reusing)


def _given_back_without_waiting() -> AbstractContextManager[Any]:
    """While the next unit's gradients arrive."""

    def hasty(self: Hop) -> None:
        if self._works:
            self._works.pop(0)

    return mock.patch.object(Hop, "wait_for_first", hasty)


class _NoMark:
    def join(self) -> None:
        return None


def _nobody_waits_on(name: str) -> Callable[[], AbstractContextManager[Any]]:
    """What is launched on one stream is taken for over at once."""
    on_stream = accelerator.AcceleratorCommunicator._on_stream

    def unmarked(self: Any, stream: str, *args: Any) -> Any:
        work = on_stream(self, stream, *args)
        if stream == name:
            work._mark = _NoMark()  # type: ignore[attr-defined]
        return work

    return lambda: mock.patch.object(accelerator.AcceleratorCommunicator, "_on_stream", unmarked)


def _among_neighbours(put: Callable[[], AbstractContextManager[Any]]) -> Callable[[], AbstractContextManager[Any]]:
    """A fault in the gathers of two ranks only."""
    all_gather = accelerator.AcceleratorCommunicator.all_gather

    def faulty(self: Any, *args: Any, **kwargs: Any) -> Any:
        with put() if len(self.names) == 2 else nullcontext():
            return all_gather(self, *args, **kwargs)

    return lambda: mock.patch.object(accelerator.AcceleratorCommunicator, "all_gather", faulty)


FAULTS: Final[dict[str, Fault]] = {
    "a gather does not wait for what computes": Fault(
        _fork_without_waiting("all_gather"),
        "fully_shard",
        _launch("write", "", COMPUTE),
        _launch("(read|write)", "all_gather", GATHER),
    ),
    "a reduction does not wait for gradients": Fault(
        _fork_without_waiting("reduce_scatter"),
        "fully_shard",
        _launch("write", "", COMPUTE),
        _launch("read", "reduce_scatter", SCATTER),
    ),
    "a bucket's sum does not wait for gradients": Fault(
        _fork_without_waiting("all_reduce"), "replicate", _launch("write", "", COMPUTE), _launch("write", "all_reduce", REDUCE)
    ),
    "nobody waits for anything": Fault(
        _join_nothing, "fully_shard", _launch("write", "all_gather", GATHER), _launch("(read|write)", "", COMPUTE)
    ),
    "what is waited for is over too early": Fault(
        _mark_too_early, "fully_shard", _launch("write", "all_gather", GATHER), _launch("(read|write)", "", COMPUTE)
    ),
    "sums are multiplied where nobody has waited": Fault(
        _scale_outside_of_the_stream,
        "fully_shard",
        _launch("write", "reduce_scatter", SCATTER),
        _launch("(read|write)", "(_foreach_)?mul", COMPUTE),
    ),
    "gradients are freed while they are reduced": Fault(
        _keep_nothing, "fully_shard", _launch("read", "reduce_scatter", SCATTER), _launch("write", "free", COMPUTE)
    ),
    "modules compute before the gather has landed": Fault(
        _compute_before_the_gather_has_landed,
        "fully_shard",
        _launch("write", "all_gather", GATHER),
        _launch("read", "", COMPUTE),
    ),
    "packed parameters are copied before they have landed": Fault(
        _copy_out_before_the_gather_has_landed,
        "fully_shard",
        _launch("write", "all_gather", GATHER),
        _launch("read", "(_foreach_)?copy_", COMPUTE),
    ),
    "the unsharded buffer is used again while it is gathered": Fault(
        _used_again_while_gathered("full"),
        "fully_shard",
        _launch("write", "all_gather", GATHER),
        _launch("write", "free", COMPUTE),
    ),
    "the staging area is used again while it is gathered": Fault(
        _used_again_while_gathered("_staging"),
        "fully_shard",
        _launch("write", "all_gather", GATHER),
        _launch("write", "free", COMPUTE),
    ),
    "what was cast for a gather is used again while it is sent": Fault(
        _used_again_while_gathered("_sent"),
        "bfloat16",
        _launch("read", "all_gather", GATHER),
        _launch("write", "free", COMPUTE),
    ),
    "rows are given back before they are reduced": Fault(
        _given_back_without_waiting,
        "fully_shard",
        _launch("read", "reduce_scatter", SCATTER),
        _launch("write", "free", COMPUTE),
    ),
    "the first part is given back before it is reduced": Fault(
        _given_back_without_waiting,
        "in two parts",
        _launch("read", "reduce_scatter", SCATTER),
        _launch("write", "free", COMPUTE),
    ),
    "rows are used again while they are reduced": Fault(
        _rows_used_again_while_reduced,
        "fully_shard",
        _launch("read", "reduce_scatter", SCATTER),
        _launch("write", "free", COMPUTE),
    ),
    "sums over the shards are taken before they are there": Fault(
        _nobody_waits_on("reduce_scatter"),
        "fully_shard",
        _launch("write", "(reduce_scatter|(_foreach_)?mul)", SCATTER),
        _launch("(read|write)", "", COMPUTE),
    ),
    "the second hop does not wait for the first": Fault(
        _nobody_waits_on("reduce_scatter"),
        "hybrid",
        _launch("write", "reduce_scatter", SCATTER),
        _launch("(read|write)", "all_reduce", REDUCE),
    ),
    "sums over the replicas are taken before they are there": Fault(
        _nobody_waits_on("all_reduce"), "hybrid", _launch("write", "all_reduce", REDUCE), _launch("(read|write)", "", COMPUTE)
    ),
    "sums of buckets are taken before they are there": Fault(
        _nobody_waits_on("all_reduce"),
        "replicate",
        _launch("write", "all_reduce", REDUCE),
        _launch("(read|write)", "", COMPUTE),
    ),
    "a gather among neighbours does not wait for what computes": Fault(
        _among_neighbours(_fork_without_waiting("all_gather")),
        "resharded to two",
        _launch("write", "", COMPUTE),
        _launch("(read|write)", "all_gather", GATHER),
    ),
    "what neighbours gather is used before it is there": Fault(
        _among_neighbours(_nobody_waits_on("all_gather")),
        "resharded to two",
        _launch("write", "all_gather", GATHER),
        _launch("(read|write)", "", COMPUTE),
    ),
    "a reduction over the second group does not wait for gradients": Fault(
        _fork_without_waiting("reduce_scatter"),
        "reductions apart",
        _launch("write", "", COMPUTE),
        _launch("read", "reduce_scatter", SCATTER),
    ),
    "sums over the second group are taken before they are there": Fault(
        _nobody_waits_on("reduce_scatter"),
        "reductions apart",
        _launch("write", "(reduce_scatter|(_foreach_)?mul)", SCATTER),
        _launch("(read|write)", "", COMPUTE),
    ),
    "rows are used again while the second group reduces them": Fault(
        _rows_used_again_while_reduced,
        "reductions apart",
        _launch("read", "reduce_scatter", SCATTER),
        _launch("write", "free", COMPUTE),
    ),
    "what is in flight is given up without waiting": Fault(
        _abort_without_waiting,
        "fully_shard",
        _launch("write", "all_gather", GATHER),
        _launch("write", "free", COMPUTE),
        fails=True,
    ),
}
