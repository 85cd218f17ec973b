"""One rank that lives as long as the test session and runs what it is sent; knows no test and no
pool.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import importlib
import os
import pickle
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _pytest.assertion import install_importhook
from _pytest.config import get_config, parse_warning_filter
from torch.distributed import distributed_c10d
from torch.distributed.tensor import _collective_utils, _redistribute, debug
from torch.utils._pytree import tree_map_only

from composable.comm import ledger
from composable.comm.backends import comms_wrapped_by
from tests.accelerator import sim, watch
from tests.helpers.communicators import all_accelerators
from tests.helpers.meshes import forget_shared_meshes
from tests.helpers.processes import Settings


@dataclass(frozen=True)
class Task:
    """One call on one rank. `generation` numbers the process groups of the session; a new number
    means a new group.

    Attributes:
        everywhere: what says nothing of devices runs on `device`, too.
        compared: the ranks are to launch the same collectives in the same order.
    """

    module: str
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    ranks: int
    device: str
    generation: int
    group_timeout: float
    everywhere: bool = False
    compared: bool = True


@dataclass(frozen=True)
class Outcome:
    """What became of a task on one rank: "returned" with a value, or "raised" or "skipped" with a
    text.

    Attributes:
        launches: what the rank has launched up to now, as `_compared_launches()` says it.
        groups: how many process groups it has.
    """

    kind: str
    value: Any = None
    text: str = ""
    launches: dict[str, tuple[int, int, list[str]]] = field(default_factory=dict)
    groups: int = 0


def backend_of(device: str) -> str:
    return {"cuda": "cpu:gloo,cuda:nccl", "sim": "cpu:gloo,sim:simccl"}.get(device, "gloo")


def rewrite_assertions() -> None:
    """Make plain `assert` explain itself here as it does in the pytest process."""
    config = get_config()
    config.parse(["-c", os.devnull, "--rootdir", os.getcwd()])
    install_importhook(config).mark_rewrite("tests.helpers")


@functools.cache
def prepare() -> None:
    """What takes long, and is the same for every rank."""
    torch.set_num_threads(1)
    rewrite_assertions()
    importlib.import_module("tests.helpers.compare")  # most tests do


def apply_filters(filters: Sequence[str]) -> None:
    for text in filters:
        warnings.filterwarnings(*parse_warning_filter(text, escape=False))


def forget_meshes() -> None:
    """Empty our cache of meshes, and torch's of DTensors. They hold meshes, for which equal ones
    over the groups to come would be taken; and these hold process groups, whose threads go on
    after `destroy_process_group` while a mesh refers to them.
    """
    caches = (
        forget_shared_meshes,
        getattr(debug, "_clear_sharding_prop_cache", None),
        getattr(_redistribute, "clear_redistribute_planner_cache", None),
        getattr(getattr(_redistribute, "_gen_transform_infos", None), "cache_clear", None),
        getattr(_collective_utils.MeshTopoInfo.build_from_mesh, "cache_clear", None),
    )
    for clear in caches:
        if clear is not None:
            clear()


class Worker:
    """One rank's main loop."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        # before any backward, also of the host: autograd counts devices once
        if settings.extension is not None:
            sim.load(Path(settings.extension))
        self.generation: int | None = None
        self.store = dist.TCPStore(
            "127.0.0.1", settings.store_port, is_master=False, wait_for_workers=False
        )

    def join_group(self, task: Task) -> None:
        if task.generation == self.generation:
            return
        if dist.is_initialized():
            forget_meshes()
            gc.collect()
            dist.destroy_process_group()
            gc.freeze()  # modules of tests, and what they import
        self.generation = task.generation
        if task.device == "cuda":
            torch.cuda.set_device(self.settings.index % torch.cuda.device_count())
        if task.device == "sim":
            assert self.settings.extension is not None
            watch.start(Path(self.settings.extension), self.settings.index)
        # Distinct prefixes keep a group's keys apart from those of every group before it.
        dist.init_process_group(
            backend_of(task.device),
            store=dist.PrefixStore(f"group{task.generation}", self.store),
            rank=self.settings.index,
            world_size=task.ranks,
            timeout=timedelta(seconds=task.group_timeout),
        )

    def perform(self, task: Task) -> Outcome:
        function = importlib.import_module(task.module)
        for part in task.name.split("."):
            function = getattr(function, part)
        body = getattr(function, "body", function)
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float32)
        os.environ["COMPOSABLE_TEST_DEVICE"] = task.device
        choices = (
            comms_wrapped_by(all_accelerators)
            if os.environ.get("COMPOSABLE_TEST_CHOICES")
            else nullcontext()
        )
        everywhere = torch.device(task.device) if task.everywhere else nullcontext()
        with warnings.catch_warnings(), choices, everywhere:
            apply_filters(self.settings.warning_filters)
            if task.device != "sim":
                return Outcome("returned", body(*task.args, **task.kwargs))
            watch.begin(f"{task.name}{task.args}{task.kwargs}")
            # Nobody but a rank has the simulated accelerator.
            result = tree_map_only(torch.Tensor, torch.Tensor.cpu, body(*task.args, **task.kwargs))
            watch.end()
            return Outcome("returned", result)

    def attempt(self, task: Task) -> Outcome:
        try:
            with nullcontext() if task.compared else _launches_not_compared():
                self.join_group(task)
                outcome = self.perform(task)
            pickle.dumps(outcome)
        except pytest.skip.Exception as skip:
            return Outcome("skipped", text=str(skip))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            return Outcome("raised", text="".join(_relevant(error)))
        groups = len(distributed_c10d._world.pg_map)
        return replace(outcome, launches=_compared_launches(), groups=groups)


@contextmanager
def _launches_not_compared() -> Iterator[None]:
    """For programs whose ranks disagree on purpose. All ranks enter it and leave it at one place of
    the program.
    """
    before, ledger._compared = ledger._compared, False
    try:
        yield
    finally:
        ledger._compared = before


def _compared_launches() -> dict[str, tuple[int, int, list[str]]]:
    """By group, as a key that its ranks of this host share: how many launches of this rank were
    compared, their digest, and the texts of the last ones.
    """
    every = [each.shared for each in ledger._LEDGERS.values()]
    return {
        each.key: (each.count, each.digest, each._texts(each._rank, each.count, 8))
        for each in every
        if each is not None
    }


def _relevant(error: BaseException) -> list[str]:
    """The traceback without the frames of this file."""
    tb = error.__traceback__
    while tb is not None and tb.tb_frame.f_code.co_filename == __file__:
        tb = tb.tb_next
    return traceback.format_exception(type(error), error, tb or error.__traceback__)


def end_with_parent() -> None:
    """A worker that hangs must not outlive a session that was killed."""
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def serve(connection: Connection, settings: Settings) -> None:
    """Run tasks until the connection closes. What a process that has been forked runs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pool decides when workers end
    log = open(settings.log, "ab", buffering=0)  # noqa: SIM115  (as long as the process)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable(file=log)
    faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
    threading.Thread(target=end_with_parent, daemon=True).start()
    prepare()
    # what is here now stays; to look through it takes each collection a quarter of a second
    gc.freeze()
    ledger.start_comparing()
    worker = Worker(settings)
    connection.send_bytes(pickle.dumps("ready"))
    while True:
        try:
            task = pickle.loads(connection.recv_bytes())
        except EOFError:
            break
        connection.send_bytes(pickle.dumps(worker.attempt(task)))
