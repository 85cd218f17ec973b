"""Faults that are put into the library: for each wait on the accelerator's path, one that leaves it
out.

Each is a context manager that patches the library, with the finding that must name the two
launches.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final
from unittest import mock

import torch

from composable.comm.backends import AcceleratorComm, _StreamWork
from composable.comm.base import DONE
from composable.engine.gradients.reduction import Reduction
from composable.engine.params.param_group import ParamGroup, ShardedState
from composable.engine.step.root import Root
from composable.memory import streams
from composable.memory.streams import AcceleratorStreams

COMPUTE: Final = r"the default stream of sim:\d"
GATHER, SCATTER, REDUCE = "stream 'all_gather'", "stream 'reduce_scatter'", "stream 'all_reduce'"

Patch = AbstractContextManager[Any]


@dataclass(frozen=True)
class Fault:
    """A wait that is left out.

    Attributes:
        scheme: the annotation under which it matters.
        first: what the finding says of the earlier launch, as a regular expression.
        second: and of the later one.
        fails: "forward" or "backward": a block raises there in the first step.
    """

    put: Callable[[], Patch]
    scheme: str
    first: str
    second: str
    fails: str = ""


def _launch(does: str, label: str, on: str) -> str:
    return rf"{does} by \[{label}[^\]]*\] on {on}"


def assert_found(outcomes: list[list[str]], first: str, second: str) -> None:
    """On every rank a finding names both launches."""
    pattern = re.compile(f"{first} is not ordered before {second}")
    for found in outcomes:
        assert any(pattern.match(each) for each in found), "\n".join([pattern.pattern, *found])


# Launches as findings name them.
WRITTEN: Final = _launch("write", "", COMPUTE)
USED: Final = _launch("(read|write)", "", COMPUTE)
READ: Final = _launch("read", "", COMPUTE)
FREED: Final = _launch("write", "free", COMPUTE)
GATHERED: Final = _launch("write", "all_gather", GATHER)
IN_GATHER: Final = _launch("(read|write)", "all_gather", GATHER)
SENT: Final = _launch("read", "reduce_scatter", SCATTER)
SCATTERED: Final = _launch("write", "(reduce_scatter|(_foreach_)?mul)", SCATTER)
SUMMED: Final = _launch("write", "(all_reduce|(_foreach_)?mul)", REDUCE)


# --- streams and collectives --------------------------------------------------------------------


def fork_without_waiting(only: str) -> Callable[[], Patch]:
    fork = AcceleratorStreams.fork

    def deaf(self: AcceleratorStreams, name: str) -> AbstractContextManager[None]:
        if name != only:
            return fork(self, name)
        return streams._Fork(self.stream(name), torch.accelerator.current_stream(self.device))

    return lambda: mock.patch.object(AcceleratorStreams, "fork", deaf)


def _join_nothing() -> Patch:
    return mock.patch.object(streams._EventMark, "join", return_value=None)


@contextmanager
def _stay_on_the_callers_stream(self: AcceleratorStreams, stream: torch.Stream) -> Any:
    yield


def _end_backward_where_it_was_called() -> Patch:
    return mock.patch.object(AcceleratorStreams, "on", _stay_on_the_callers_stream)


def _changed_work(change: Callable[[AcceleratorComm, Any], None], only: str) -> Callable[[], Patch]:
    """Works of one kind of collective are changed after the launch."""
    start = AcceleratorComm._start

    def changed(self: AcceleratorComm, kind: str, *args: Any) -> Any:
        work = start(self, kind, *args)
        if kind == only:
            change(self, work)
        return work

    return lambda: mock.patch.object(AcceleratorComm, "_start", changed)


class _NoMark:
    def join(self) -> None:
        return None


def _wait_for_nothing_on(only: str) -> Callable[[], Patch]:
    return _changed_work(lambda _, work: setattr(work, "_mark", _NoMark()), only)


def _keep_nothing() -> Patch:
    return _changed_work(lambda _, work: setattr(work, "_kept", None), "reduce_scatter")()


def _mark_too_early() -> Patch:
    """The point that the compute stream waits for is that before the collective."""
    start = AcceleratorComm._start

    def early(self: AcceleratorComm, kind: str, *args: Any) -> Any:
        if kind != "all_gather":
            return start(self, kind, *args)
        with self._streams.fork(kind):
            mark = self._streams.mark()
        work: Any = start(self, kind, *args)
        work._mark = mark
        return work

    return mock.patch.object(AcceleratorComm, "_start", early)


def _scale_outside_of_the_stream() -> Patch:
    """Sums are multiplied on the compute stream before it has waited for them."""
    start = AcceleratorComm._start

    def outside(self: AcceleratorComm, kind: str, label: str, scale: float, *tensors: Any) -> Any:
        if kind != "reduce_scatter":
            return start(self, kind, label, scale, *tensors)
        work = start(self, kind, label, 1.0, *tensors)
        torch._foreach_mul_(list(tensors[0]), scale)
        return work

    return mock.patch.object(AcceleratorComm, "_start", outside)


def _among_neighbours(put: Callable[[], Patch]) -> Callable[[], Patch]:
    """A fault in the gathers of two ranks only."""
    all_gather = AcceleratorComm.all_gather

    def faulty(self: AcceleratorComm, *args: Any) -> Any:
        with put() if self.size == 2 else nullcontext():
            return all_gather(self, *args)

    return lambda: mock.patch.object(AcceleratorComm, "all_gather", faulty)


def _without_work(owner: type, wait: str, work: str) -> Callable[[], Patch]:
    """What was launched is taken for done."""
    waits = getattr(owner, wait)

    def hasty(self: Any) -> None:
        setattr(self, work, DONE)
        waits(self)

    return lambda: mock.patch.object(owner, wait, hasty)


# --- gathers ------------------------------------------------------------------------------------


def _copy_out_before_the_gather_has_landed() -> Patch:
    wait = ParamGroup.wait_for_unshard

    def hasty(self: ParamGroup) -> None:
        work, self._work = self._work, DONE
        wait(self)
        work.wait()

    return mock.patch.object(ParamGroup, "wait_for_unshard", hasty)


def _used_again_while_gathered(buffer: str) -> Callable[[], Patch]:
    """The memory of a buffer is given to the next allocation once the gather is launched."""
    unshard = ParamGroup.unshard

    def reusing(self: ParamGroup) -> None:
        before = self.state
        unshard(self)
        found = getattr(self.gather, buffer, None)
        if self.state is ShardedState.UNSHARDING and before is not self.state and found:
            for elastic in found if isinstance(found, list) else [found]:
                elastic.free()
                elastic.allocate()

    return lambda: mock.patch.object(ParamGroup, "unshard", reusing)


# --- reductions ---------------------------------------------------------------------------------


def _rows_used_again_while_reduced() -> Patch:
    launch = Reduction._launch

    def reusing(self: Reduction, *args: Any) -> Any:
        work = launch(self, *args)
        self.plan.message.free()
        self.plan.message.allocate()
        return work

    return mock.patch.object(Reduction, "_launch", reusing)


def _free_rows_before_waiting() -> Patch:
    wait = Reduction.wait

    def hasty(self: Reduction) -> None:
        self.plan.message.free()
        wait(self)

    return mock.patch.object(Reduction, "wait", hasty)


# --- a lost step --------------------------------------------------------------------------------


def _reset_without_waiting() -> Patch:
    reset = Root.reset

    def hasty(self: Root, *args: Any) -> None:
        with mock.patch.object(_StreamWork, "wait", return_value=None):
            reset(self, *args)

    return mock.patch.object(Root, "reset", hasty)


FAULTS: Final[dict[str, Fault]] = {
    "a gather does not wait for what computes": Fault(
        fork_without_waiting("all_gather"), "fully_shard", WRITTEN, IN_GATHER
    ),
    "a reduction does not wait for gradients": Fault(
        fork_without_waiting("reduce_scatter"), "fully_shard", WRITTEN, SENT
    ),
    "a bucket's sum does not wait for gradients": Fault(
        fork_without_waiting("all_reduce"),
        "replicate",
        WRITTEN,
        _launch("write", "all_reduce", REDUCE),
    ),
    "the compute stream waits for nothing": Fault(_join_nothing, "fully_shard", GATHERED, USED),
    "the mark that is waited for comes before the collective": Fault(
        _mark_too_early, "fully_shard", GATHERED, USED
    ),
    "sums are multiplied on a stream that has not waited": Fault(
        _scale_outside_of_the_stream,
        "fully_shard",
        _launch("write", "reduce_scatter", SCATTER),
        _launch("(read|write)", "(_foreach_)?mul", COMPUTE),
    ),
    "gradients are freed while they are reduced": Fault(_keep_nothing, "fully_shard", SENT, FREED),
    "modules compute before the gather has landed": Fault(
        _without_work(ParamGroup, "wait_for_unshard", "_work"), "fully_shard", GATHERED, READ
    ),
    "packed parameters are copied before they have landed": Fault(
        _copy_out_before_the_gather_has_landed,
        "fully_shard",
        GATHERED,
        _launch("read", "(_foreach_)?copy_", COMPUTE),
    ),
    "the unsharded buffer is used again while it is gathered": Fault(
        _used_again_while_gathered("full"), "fully_shard", GATHERED, FREED
    ),
    "the staging area is used again while it is gathered": Fault(
        _used_again_while_gathered("_stagings"), "fully_shard", GATHERED, FREED
    ),
    "what was cast for a gather is used again while it is sent": Fault(
        _used_again_while_gathered("_sent"),
        "bfloat16",
        _launch("read", "all_gather", GATHER),
        FREED,
    ),
    "rows are freed before they are reduced": Fault(
        _free_rows_before_waiting, "fully_shard", SENT, FREED
    ),
    "gradients land before they are reduced": Fault(
        _without_work(Reduction, "wait", "work"), "fully_shard", SCATTERED, USED
    ),
    "rows are used again while they are reduced": Fault(
        _rows_used_again_while_reduced, "fully_shard", SENT, FREED
    ),
    "sums over the shards are taken before they are there": Fault(
        _wait_for_nothing_on("reduce_scatter"), "fully_shard", SCATTERED, USED
    ),
    "the second stage does not wait for the first": Fault(
        _wait_for_nothing_on("reduce_scatter"),
        "hybrid",
        _launch("write", "reduce_scatter", SCATTER),
        _launch("(read|write)", "all_reduce", REDUCE),
    ),
    "sums over the replicas are taken before they are there": Fault(
        _wait_for_nothing_on("all_reduce"), "hybrid", SUMMED, USED
    ),
    "sums of buckets are taken before they are there": Fault(
        _wait_for_nothing_on("all_reduce"), "replicate", SUMMED, USED
    ),
    "a gather among neighbours does not wait for what computes": Fault(
        _among_neighbours(fork_without_waiting("all_gather")),
        "resharded to two",
        WRITTEN,
        IN_GATHER,
    ),
    "what neighbours gather is used before it is there": Fault(
        _among_neighbours(_wait_for_nothing_on("all_gather")), "resharded to two", GATHERED, USED
    ),
    "a reduction over the second group does not wait for gradients": Fault(
        fork_without_waiting("reduce_scatter"), "reductions apart", WRITTEN, SENT
    ),
    "sums over the second group are taken before they are there": Fault(
        _wait_for_nothing_on("reduce_scatter"), "reductions apart", SCATTERED, USED
    ),
    "rows are used again while the second group reduces them": Fault(
        _rows_used_again_while_reduced, "reductions apart", SENT, FREED
    ),
    "a gather in flight is given up without waiting": Fault(
        _reset_without_waiting, "fully_shard", GATHERED, FREED, fails="forward"
    ),
    "a reduction in flight is given up without waiting": Fault(
        _reset_without_waiting, "fully_shard", SENT, FREED, fails="backward"
    ),
    "a backward ends on the stream of its caller": Fault(
        _end_backward_where_it_was_called,
        "forward on a stream of its own",
        GATHERED,
        _launch("write", "free", "the user's stream"),
    ),
}
