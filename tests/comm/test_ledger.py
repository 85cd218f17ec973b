"""Errors name the rank, the collective and what every rank launched last; ranks that launch
different things are reported.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Final
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from composable.comm import ledger
from composable.comm.backends import GenericComm, PointToPointComm, comm_of, world_group
from composable.comm.base import Comm, compare_launches
from composable.comm.launch import Launch
from composable.comm.ledger import Ledger, debug_enabled, ledger_of
from composable.errors import CommunicationError, RanksDisagreeError
from tests.helpers.world import Pool, spmd

CPU: Final = torch.device("cpu")
KINDS: Final[dict[str, Callable[..., Comm]]] = {"pairs": PointToPointComm, "tensors": GenericComm}
_CURE: Final = (
    "Another rank raised, ended or took another path through the model; look for the first error"
    " among all ranks."
)


def _gather(comm: Comm, label: str) -> None:
    comm.all_gather([(torch.empty(2 * comm.size), torch.ones(2))], Launch(label)).wait()


def _reduce(comm: Comm, label: str) -> None:
    comm.reduce_scatter([(torch.empty(2), torch.ones(2 * comm.size))], Launch(label)).wait()


def _all_reduce(comm: Comm, label: str) -> None:
    comm.all_reduce([torch.ones(2)], Launch(label)).wait()


def _exchange(comm: Comm, label: str) -> None:
    comm.all_gather_ints([1], Launch(label))


def _broadcast(comm: Comm, label: str) -> None:
    comm.broadcast([torch.ones(2)], Launch(label), src=1)


# --- failures -----------------------------------------------------------------------------------

ALONE: Final = (_gather, _reduce, _all_reduce, _exchange, _broadcast)


# of what ran in this process before
_WHEN: Final = r"(?: (?:in|after) [^:]*step \d+)?"


def _reported(
    act: Callable[[Comm, str], None], comm: Comm, label: str = "all-gather of unit 'layers.3'"
) -> str:
    with pytest.raises(CommunicationError) as failed:
        act(comm, label)
    assert isinstance(failed.value.__cause__, (RuntimeError, OSError))
    return str(failed.value)


def _failures() -> dict[str, str]:
    """What rank 0 reports in groups of which rank 1 does not take part in a collective, or that it
    has left.
    """
    cases = [(kind, act, leaves) for kind in KINDS for act in ALONE for leaves in (False, True)]
    groups = [dist.new_group([0, 1], timeout=timedelta(seconds=3.0)) for _ in cases]
    comms = [KINDS[kind](group, CPU) for (kind, _, _), group in zip(cases, groups, strict=True)]
    reported: dict[str, str] = {}
    if dist.get_rank() == 1:
        for (_, _, leaves), group in zip(cases, groups, strict=True):
            if leaves:
                dist.destroy_process_group(group)
    dist.barrier()
    if dist.get_rank() == 0:
        with (
            ThreadPoolExecutor(len(cases)) as threads,
            mock.patch.object(ledger, "REPORT_SECONDS", 0.2),
        ):
            # all of them wait at the same time
            texts = threads.map(lambda case, comm: _reported(case[1], comm), cases, comms)
            reported = {
                f"{kind} {act.__name__} {leaves}": text
                for (kind, act, leaves), text in zip(cases, texts, strict=True)
            }
    dist.barrier()
    return reported


@pytest.mark.launches_not_compared("one rank does not join")
def test_a_collective_that_another_rank_does_not_join_ends_with_its_name_and_the_ranks(
    pool: Pool,
) -> None:
    reported, _ = pool.run(2, _failures, spoils=True)
    assert len(reported) == len(KINDS) * len(ALONE) * 2
    for case, text in reported.items():
        assert re.fullmatch(
            rf"rank 0: the all-gather of unit 'layers\.3' failed{_WHEN}: \S.*\n"
            + re.escape(_CURE)
            + r"\nLast launches of rank 0 \(1 in all\): all-gather of unit 'layers\.3'\n"
            r"rank 1: no report within 0\.2 s: ended, or did not fail so far",
            text,
        ), f"{case}: {text}"


@spmd(ranks=1)
def test_a_work_that_failed_fails_again_with_the_same_text() -> None:
    comm = PointToPointComm(world_group(), CPU)
    with mock.patch.object(dist.ProcessGroup, "allreduce") as launch:
        launch.return_value.wait.side_effect = RuntimeError("connection closed")
        work = comm.all_reduce([torch.ones(1)], Launch("sum"))
        texts = []
        for _ in range(2):
            with pytest.raises(CommunicationError) as failed:
                work.wait()
            texts.append(str(failed.value))
    assert texts[0] == texts[1]
    assert launch.return_value.wait.call_count == 1


def _one_is_killed() -> str:
    """Rank 1 of 3 is stopped by the system between two collectives; ranks 0 and 2 report it."""
    group = dist.new_group([0, 1, 2], timeout=timedelta(seconds=20.0))
    comm = comm_of(group, CPU)
    _gather(comm, "all-gather of unit 'layers.0'")
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if dist.get_rank() == 2:
        time.sleep(0.3)
    with mock.patch.object(ledger, "REPORT_SECONDS", 1.5):
        text = _reported(_gather, comm, "all-gather of unit 'layers.1'")
    lines = text.splitlines()
    me, other = dist.get_rank(), 2 - dist.get_rank()
    assert re.fullmatch(
        rf"rank {me}: the all-gather of unit 'layers\.1' failed{_WHEN}: \S.*", lines[0]
    )
    assert lines[1:] == [
        _CURE,
        (
            f"Last launches of rank {me} (2 in all): all-gather of unit 'layers.0', all-gather of"
            " unit 'layers.1'"
        ),
        f"rank {other} launched last: all-gather of unit 'layers.1' (its launch 2)",
        "rank 1 has ended: its process is gone, killed or ended by os._exit",
    ], text
    raise ZeroDivisionError  # so that the pool sees which ranks came here


def test_when_a_rank_is_killed_the_others_report_what_each_launched_last(
    pool: Pool,
) -> None:
    with pytest.raises(AssertionError) as failed:
        pool.run(3, _one_is_killed)
    text = str(failed.value)
    assert "rank 1:\ndied with exit code -9" in text
    assert "ZeroDivisionError" in text
    assert "AssertionError" not in text, text


def _ends_by_an_error() -> str:
    group = dist.new_group([0, 1])
    comm = comm_of(group, CPU)
    error = None
    if dist.get_rank() == 1:
        error = ValueError("no such file\nand more")
        with mock.patch.object(sys, "last_value", error, create=True):
            ledger._tell_ends()  # as the interpreter calls it
    dist.barrier()
    if error is not None:
        return ""
    assert isinstance(comm, PointToPointComm)
    return ledger_of(group).report()


def test_a_rank_that_ends_by_an_error_says_so_to_those_that_fail(pool: Pool) -> None:
    said, _ = pool.run(2, _ends_by_an_error, spoils=True)
    assert said.endswith("\nrank 1 has ended: by ValueError: no such file")


def test_the_first_difference_is_named_where_all_failed() -> None:
    labels = {0: ["a", "b", "c"], 1: ["a", "x"], 2: ["a", "b"]}
    found = ledger._first_difference(
        {rank: (len(each), each) for rank, each in labels.items()}, until=2
    )
    assert found == "The first difference is in launch 2: rank 0, 2: b; rank 1: x."
    assert ledger._first_difference({0: (7, ["f", "g"]), 1: (6, ["e", "f"])}, until=6) is None


def _reports(differs: bool) -> str:
    comm = comm_of(dist.new_group([0, 1, 2]), CPU)
    assert isinstance(comm, PointToPointComm)
    notes = ledger_of(comm.group)
    for label in (
        "all-gather of unit 'a'",
        "all-gather of unit 'b'" if dist.get_rank() != 1 or not differs else "reduction",
    ):
        notes.note(Launch(label))
    first = notes.report()
    dist.barrier()
    if dist.get_rank() == 0:
        assert notes.report() == first, "of another collective that was in flight"
        notes.note(Launch("all-gather of unit 'c'"))
        with mock.patch.object(ledger, "REPORT_SECONDS", 0.3):
            assert "rank 1, 2: no report" in notes.report(), (
                "reports of an earlier error are not taken for new ones"
            )
    dist.barrier()
    return first


@pytest.mark.launches_not_compared("reports of different launches")
def test_reports_say_what_others_launched_and_where_the_ranks_differ(pool: Pool) -> None:
    assert pool.run(3, _reports, True)[0].splitlines() == [
        "Last launches of rank 0 (2 in all): all-gather of unit 'a', all-gather of unit 'b'",
        "rank 1 launched last: reduction (its launch 2)",
        "rank 2 launched last: all-gather of unit 'b' (its launch 2)",
        (
            "The first difference is in launch 2: rank 0, 2: all-gather of unit 'b'; rank 1:"
            " reduction."
        ),
    ]
    assert pool.run(3, _reports, False)[2].splitlines()[1:] == [
        "rank 0, 1 launched last: all-gather of unit 'b' (its launch 2)",
    ]


class _Store:
    """A store whose server is gone, or hangs."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def set(self, key: str, value: str) -> None:
        time.sleep(self._seconds)
        raise dist.DistNetworkError("gone")


@spmd(ranks=2)
def test_a_store_that_is_gone_or_hangs_delays_no_error_for_long() -> None:
    notes = Ledger(world_group())
    notes.note(Launch("sum"))
    for seconds in (0.0, 30.0):
        start = time.monotonic()
        with (
            mock.patch.object(ledger, "store_of", return_value=_Store(seconds)),
            mock.patch.object(ledger, "REPORT_SECONDS", 0.2),
        ):
            text = notes.report()
        assert text.startswith(f"Last launches of rank {dist.get_rank()} (1 in all): sum")
        assert time.monotonic() - start < 5.0


# --- comparison ---------------------------------------------------------------------------------


def _debugged(setting: str) -> bool:
    debug_enabled.cache_clear()
    try:
        with mock.patch.dict(os.environ, {ledger.DEBUG_VARIABLE: setting}):
            return debug_enabled()
    finally:
        debug_enabled.cache_clear()


def test_debugging_is_switched_on_by_one() -> None:
    assert [_debugged(setting) for setting in ("1", "0", "")] == [True, False, False]


@mock.patch.object(ledger, "debug_enabled", return_value=True)
@mock.patch.object(ledger, "KEPT_IN_DEBUG", ledger.KEPT)
@mock.patch.object(ledger, "shared_launches", return_value=None)  # as on several hosts
def _compared(labels_of_ranks: list[list[str]], *_: object) -> str:
    comm = comm_of(dist.new_group(), CPU)
    notes = ledger_of(comm.group)
    for label in ["all-gather of unit 'a'"] * 40:
        notes.note(Launch(label))
    assert notes.digest, "debug mode keeps digests"
    compare_launches(comm)
    alike = len({len(labels) for labels in labels_of_ranks}) == 1
    for label in labels_of_ranks[dist.get_rank()]:
        if alike:
            # sums that differ in their name alone meet
            comm.all_reduce([torch.ones(4)], Launch(label)).wait()
        else:
            notes.note(Launch(label))
    try:
        compare_launches(comm)
    except RanksDisagreeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ([["x", "y"], ["x", "y"]], ""),
        (
            [["x", "y", "z"], ["x", "b", "z"]],
            "The first difference is in launch 43: rank 0: y; rank 1: b.",
        ),
        ([["x", "y"], ["x"]], "The first difference is in launch 43: rank 0: y; rank 1: nothing."),
        (
            [["a", *["x"] * 32], ["b", *["x"] * 32]],
            "The difference lies further back than they remember.",
        ),
    ],
    ids=["nothing", "a launch", "a launch more", "what lies far back"],
)
def test_a_comparison_names_the_first_launch_that_differs(
    pool: Pool, labels: list[list[str]], said: str
) -> None:
    whole = said and (
        f"the ranks launched different collectives. {said} All ranks must run the same modules in"
        " the same order, forward and backward."
    )
    assert pool.run(2, _compared, labels) == [whole] * 2
