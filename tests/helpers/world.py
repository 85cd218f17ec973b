"""Runs functions on N ranks in worker processes started once per test session; knows nothing of
what they compute.

A function is sent by its module and name and runs on every rank with a default process group of
that size. What it returns comes back as a list by rank. If a rank fails, dies or hangs, the report
has every rank's traceback or stack, and the workers are replaced, so that the next test starts
clean.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.helpers.processes import Parent, Rank, Settings
from tests.helpers.worker import Outcome, Task

# Seconds until a call counts as hung; a safety net, never an assertion.
TIMEOUT = float(os.environ.get("COMPOSABLE_TEST_TIMEOUT", "120"))
GRACE = 3.0  # seconds the other ranks get to end by themselves once one has failed
START = TIMEOUT  # seconds for workers to start
# gloo keeps three threads for each group, which wake a hundred times a second: two hundred groups
# of two ranks cost a third of a core.
MANY_GROUPS = 16


class RanksFailed(AssertionError):
    """At least one rank raised, died or hung; the message says which, where and why."""


class RanksLaunchedApart(RanksFailed):
    """All ranks returned, and have launched different collectives.

    Attributes:
        returned: what each of them returned, which may say why.
    """

    def __init__(self, text: str, returned: list[Any]) -> None:
        super().__init__(text)
        self.returned = returned


class Pool:
    """Worker processes and the process groups formed from them. A world of n ranks is the first n
    workers.

    Args:
        device: what functions run on that are sent without saying where.
        extension: the simulated accelerator, where it is there.
    """

    # whether ranks are to launch the same collectives; conftest.py sets it for each test
    compares = True

    def __init__(
        self,
        warning_filters: Sequence[str] = ("error",),
        device: str = "cpu",
        extension: Path | None = None,
    ) -> None:
        self._filters = tuple(warning_filters)
        self.device = device
        self._extension = extension
        self._parents: dict[int, Parent] = {}
        self._ranks: list[Rank] = []
        self._store: dist.TCPStore | None = None
        self._generation = 0
        self._shape: tuple[int, str, float] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        atexit.register(self.stop)

    def run(
        self,
        ranks: int,
        function: Callable[..., Any],
        *args: Any,
        device: str | None = None,
        timeout: float = TIMEOUT,
        group_timeout: float = TIMEOUT,
        spoils: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """Call `function(*args, **kwargs)` on every rank of a world.

        Args:
            ranks: size of the default process group.
            function: importable under its module and qualified name.
            device: "cpu", "cuda" or "sim"; ranks share devices where there are fewer. None: what
                the session runs on, also for tensors that are made without saying where.
            timeout: seconds until the call counts as hung.
            group_timeout: seconds until a collective of the default group gives up.
            spoils: the call leaves the process group unusable, though no rank raises; new workers
                take over.

        Returns:
            What every rank returned, by rank.

        Raises:
            RanksFailed: some rank raised, died or hung.
        """
        everywhere = device is None and self.device != "cpu"
        device = device or self.device
        shape = (ranks, device, group_timeout)
        self._start(ranks)
        if shape != self._shape:
            self._generation += 1
            self._shape = shape
        task = Task(
            function.__module__,
            function.__qualname__,
            args,
            kwargs,
            ranks,
            device,
            self._generation,
            group_timeout,
            everywhere,
            self.compares,
        )
        world = self._ranks[:ranks]
        sent = pickle.dumps(task)
        for rank in world:
            rank.mark_log()
            rank.connection.send_bytes(sent)
        outcomes, notes = self._collect(world, timeout)
        apart = _launched_apart(outcomes)
        raised = any(outcome.kind == "raised" for outcome in outcomes.values())
        if spoils or apart or raised or len(outcomes) < ranks:
            self.stop()
        elif max(outcome.groups for outcome in outcomes.values()) > MANY_GROUPS:
            self._shape = None  # the next call gets a new default group, and the others go
        return _verdict(ranks, outcomes, notes, apart)

    def _start(self, ranks: int) -> None:
        if any(rank.has_ended() for rank in self._ranks):
            self.stop()
        if self._store is None:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        fresh = [self._spawn(index) for index in range(len(self._ranks), ranks)]
        self._ranks += fresh
        for rank in fresh:
            if not rank.connection.poll(START):
                stack = rank.stack()
                self.stop()
                raise RanksFailed(f"a worker did not start:\n{stack}")
            try:
                rank.receive()
            except EOFError:
                text = rank.printed()
                self.stop()
                raise RanksFailed(f"a worker ended while it started:\n{text}") from None

    def _spawn(self, index: int) -> Rank:
        assert self._store is not None
        assert self._folder is not None
        log = Path(self._folder.name) / f"rank{index}.log"
        log.touch()
        settings = Settings(
            index,
            str(log),
            self._store.port,
            self._filters,
            str(self._extension) if self._extension is not None else None,
        )
        if index not in self._parents or not self._parents[index].is_alive():
            self._parents[index] = self._parent_of(index)
        return self._parents[index].start(settings)

    def _parent_of(self, index: int) -> Parent:
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        found = {
            name: os.environ.get(name, loopback)
            for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        }
        # NCCL refuses two ranks on one device of one host, but takes them for ranks of two hosts if
        # they say so.
        host = {"NCCL_HOSTID": f"rank{index}"} if torch.cuda.device_count() == 1 else {}
        # cuBLAS gives the same bits every time only where each of its streams has memory of its
        # own.
        said = {"OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", **found, **host}
        with mock.patch.dict(os.environ, said):
            return Parent(index, prepares=not torch.cuda.is_available())

    def _collect(
        self, world: list[Rank], timeout: float
    ) -> tuple[dict[int, Outcome], dict[int, str]]:
        """Outcomes by rank, and for ranks without one a note on how they ended or where they
        stand.
        """
        outcomes: dict[int, Outcome] = {}
        notes: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        waiting = dict(enumerate(world))
        while waiting and (left := deadline - time.monotonic()) > 0:
            by_source = {rank.connection: index for index, rank in waiting.items()}
            for source in wait(list(by_source), timeout=left):
                index = by_source[source]
                rank = waiting.pop(index)
                try:
                    outcomes[index] = rank.receive()
                except (EOFError, ConnectionResetError):
                    notes[index] = f"died with exit code {rank.exit_code(GRACE)}\n{rank.printed()}"
            if notes or any(outcome.kind != "returned" for outcome in outcomes.values()):
                deadline = min(deadline, time.monotonic() + GRACE)
        failed = bool(notes) or any(outcome.kind != "returned" for outcome in outcomes.values())
        why = "was still running after another rank had failed" if failed else "hung"
        for index, rank in waiting.items():
            notes[index] = f"{why}; it stands at\n{rank.stack()}"
        return outcomes, notes

    def stop(self) -> None:
        """End all workers. The next `run` starts new ones."""
        for rank in self._ranks:
            rank.kill()
        self._ranks = []
        self._shape = None
        self._store = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _verdict(
    ranks: int, outcomes: dict[int, Outcome], notes: dict[int, str], apart: str
) -> list[Any]:
    bad = {
        index: outcome.text for index, outcome in outcomes.items() if outcome.kind == "raised"
    } | notes
    if bad:
        raise RanksFailed(_report(ranks, bad))
    if apart:
        raise RanksLaunchedApart(apart, [outcomes[index].value for index in range(ranks)])
    skipped = [outcome.text for outcome in outcomes.values() if outcome.kind == "skipped"]
    if skipped:
        pytest.skip(skipped[0])
    return [outcomes[index].value for index in range(ranks)]


def _launched_apart(outcomes: dict[int, Outcome]) -> str:
    """Where ranks that share a group have launched different collectives up to the end. Until then
    each launch is compared with those of ranks that have come as far.
    """
    by_group: dict[str, dict[int, tuple[int, int, list[str]]]] = {}
    for rank, outcome in outcomes.items():
        for key, launches in outcome.launches.items():
            by_group.setdefault(key, {})[rank] = launches
    for launches_of in by_group.values():
        if len({(count, digest) for count, digest, _ in launches_of.values()}) > 1:
            counts = "\n".join(
                f"rank {rank} {n}, the last ones {', '.join(texts)}"
                for rank, (n, _, texts) in sorted(launches_of.items())
            )
            return f"all ranks have ended, and launched different collectives in a group:\n{counts}"
    return ""


def _report(ranks: int, bad: dict[int, str]) -> str:
    """Every failing rank's text; ranks that say the same share one."""
    groups: dict[str, list[int]] = {}
    for index in sorted(bad):
        groups.setdefault(bad[index], []).append(index)
    parts = [f"{len(bad)} of {ranks} ranks failed"]
    for text, who in groups.items():
        parts.append(f"--- rank {', '.join(map(str, who))}:\n{text.rstrip()}")
    return "\n".join(parts)


def spmd(
    ranks: int | Iterable[int] | None = None, *, everywhere: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turn a module-level test into one whose body runs on every rank, for one world size or
    several.

    The body's parameters are filled by pytest and must be picklable. The body runs on the session's
    device (`--device`).

    Args:
        ranks: None: the test is parametrised with it.
        everywhere: the body says nothing of devices; it runs on that of the session alone.

    Example:
        >>> @spmd(ranks=[1, 2])
        ... def test_that_ranks_agree():
        ...     total = torch.ones(1)
        ...     dist.all_reduce(total)
        ...     assert total.item() == dist.get_world_size()
    """
    sizes = [ranks] if isinstance(ranks, int) else ranks

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(*, pool: Pool, ranks: int, device: str | None = None, **kwargs: Any) -> None:
            if device is not None:
                need_devices(device, ranks)
            pool.run(ranks, test, device=device, **kwargs)

        own = list(inspect.signature(body).parameters.values())
        names = ("pool", "ranks") if everywhere else ("pool", "ranks", "device")
        added = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
        test.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
        test.body = body  # type: ignore[attr-defined]
        return test if sizes is None else pytest.mark.parametrize("ranks", list(sizes))(test)

    return decorate


def need_devices(device: str, ranks: int) -> None:
    """Skip a test that wants more accelerators than there are, unless there is one, which all ranks
    share.
    """
    if device == "cuda" and 1 < torch.cuda.device_count() < ranks:
        pytest.skip(f"{ranks} ranks need {ranks} CUDA devices, {torch.cuda.device_count()} found")


def current_device() -> torch.device:
    """The device that this rank's part of a test runs on."""
    kind = os.environ.get("COMPOSABLE_TEST_DEVICE", "cpu")
    return (
        torch.device(kind)
        if kind == "cpu"
        else torch.device(kind, torch.accelerator.current_device_index())
    )


def set_timeout(group: dist.ProcessGroup, seconds: float) -> None:
    """Let collectives of `group` give up after `seconds` from here on. Its ranks have found each
    other with more patience.
    """
    public = getattr(dist, "set_timeout", None)  # since torch 2.15, where the other is deprecated
    (public or distributed_c10d._set_pg_timeout)(timedelta(seconds=seconds), group)
