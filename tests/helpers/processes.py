"""Processes of ranks, each forked from one that has imported what they need, for that takes
seconds; knows no task.

Every rank has a process of its own to be forked from, which started as any interpreter does: ranks
differ in the order of their sets and in where their objects lie, as they do elsewhere.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any, Final

# `serve` there is what a rank runs, `prepare` what may be done before the fork
SERVES: Final = "tests.helpers.worker"


@dataclass(frozen=True)
class Settings:
    """What every worker of a pool is given at its start."""

    index: int
    log: str
    store_port: int
    warning_filters: tuple[str, ...]
    extension: str | None = None  # the simulated accelerator's


class Rank:
    """The pool's side of one worker."""

    def __init__(self, parent: Parent, connection: Connection, log: Path) -> None:
        self.connection = connection
        self.log = log
        self.log_start = 0
        self._parent = parent
        self._pid: int | None = None
        self._exit_code: int | None = None

    def receive(self) -> Any:
        return pickle.loads(self.connection.recv_bytes())

    def has_ended(self, within: float = 0.0) -> bool:
        return self.exit_code(within) is not None

    def exit_code(self, within: float | None = None) -> int | None:
        """None: it has not ended after so many seconds."""
        deadline = None if within is None else time.monotonic() + within
        while self._exit_code is None:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._parent.control.poll(left):
                return None
            self._note()
        return self._exit_code

    def _note(self) -> None:
        """First the process's number comes, then how it ended."""
        try:
            reported = self._parent.control.recv()
        except (EOFError, ConnectionResetError):  # what it was to be forked from has ended
            self._exit_code = self._parent.end()
            return
        if self._pid is None:
            self._pid = reported
        else:
            self._exit_code = reported

    def kill(self) -> None:
        """Afterwards it has ended."""
        self.connection.close()
        while self._pid is None and self._exit_code is None:
            self._note()
        if not self.has_ended():
            assert self._pid is not None
            os.kill(self._pid, signal.SIGKILL)
            self.exit_code()

    def mark_log(self) -> None:
        self.log_start = self.log.stat().st_size if self.log.exists() else 0

    def printed(self) -> str:
        if not self.log.exists():
            return ""
        with self.log.open("rb") as file:
            file.seek(self.log_start)
            return file.read()[-6000:].decode(errors="replace")

    def stack(self) -> str:
        """Where the worker stands now, all threads, even when it holds no interpreter lock."""
        before = self.log.stat().st_size
        if self.has_ended() or self._pid is None:
            return "(no process)\n"
        os.kill(self._pid, signal.SIGUSR1)
        deadline = time.monotonic() + 2
        text = ""
        while time.monotonic() < deadline and not text.endswith("\n"):
            wait([self._parent.control], timeout=0.05)
            with self.log.open("rb") as file:
                file.seek(before)
                text = file.read().decode(errors="replace")
        return text or "(no stack came back)\n"


class Parent:
    """What the workers of one rank are forked from, one after the other.

    Args:
        prepares: import before the fork. Not where that may start libraries which do not outlive
            it: CUDA, and those of macOS.
    """

    def __init__(self, index: int, *, prepares: bool = True) -> None:
        self.control, theirs = multiprocessing.Pipe()
        prepares = prepares and sys.platform == "linux"
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(
            target=fork_ranks, args=(theirs, prepares), daemon=True, name=f"rank{index}"
        )
        self._process.start()
        theirs.close()

    def start(self, settings: Settings) -> Rank:
        """A new worker, which says that it is ready. There is one at a time."""
        ours, theirs = multiprocessing.Pipe()
        self.control.send(settings)
        assert self._process.pid is not None
        send_handle(self.control, theirs.fileno(), self._process.pid)
        theirs.close()
        return Rank(self, ours, Path(settings.log))

    def is_alive(self) -> bool:
        return self._process.is_alive()

    def end(self) -> int:
        """Its workers must have ended."""
        self.control.close()
        self._process.kill()
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode


def fork_ranks(control: Connection, prepares: bool) -> None:
    """Fork a rank whenever asked to, and tell its number and how it ended. Entry point of a spawned
    process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pool decides when processes end
    if prepares:
        importlib.import_module(SERVES).prepare()
    while True:
        try:
            settings = control.recv()
            handle = recv_handle(control)
        except EOFError:
            return
        pid = os.fork()
        if pid == 0:
            control.close()
            importlib.import_module(SERVES).serve(Connection(handle), settings)
            return
        os.close(handle)
        control.send(pid)
        control.send(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
