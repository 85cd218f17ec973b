"""Programs that torchrun launches elsewhere, run by ranks of the pool instead, which need not start
first; knows no program.
"""

from __future__ import annotations

import io
import os
import runpy
import sys
import warnings
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Final
from unittest import mock

import torch.distributed as dist

from tests.helpers.world import Pool

SECONDS: Final = 240.0  # until a program counts as hung


def launched(
    pool: Pool, ranks: int, program: Path | str, *arguments: str, stderr: bool = False
) -> str:
    """What `program`, a file or the name of a module, prints on rank 0, on the host; with `stderr`,
    also what it prints there. New ranks take over afterwards.
    """
    printed: list[str] = pool.run(
        ranks,
        _as_torchrun_does,
        program,
        arguments,
        stderr,
        device="cpu",
        timeout=SECONDS,
        group_timeout=SECONDS,
        spoils=True,
    )
    return printed[0]


def environment(port: int, **more: str) -> dict[str, str]:
    """What a launcher says to this rank."""
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    of_ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    return {**of_ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **more}


def _as_torchrun_does(program: Path | str, arguments: tuple[str, ...], stderr: bool) -> str:
    """Ranks find each other by the environment, in a store that is there already."""
    store = (
        dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        if dist.get_rank() == 0
        else None
    )
    port = [store.port if store is not None else 0]
    dist.broadcast_object_list(port)
    said = environment(port[0], TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
    dist.destroy_process_group()
    printed = io.StringIO()
    with (
        mock.patch.dict(os.environ, said),
        mock.patch.object(sys, "argv", [str(program), *arguments]),
        redirect_stdout(printed),
        redirect_stderr(printed) if stderr else nullcontext(),
        warnings.catch_warnings(action="default"),  # as in a program that nobody tests
    ):
        try:
            if isinstance(program, Path):
                runpy.run_path(str(program), run_name="__main__")
            else:
                runpy.run_module(program, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            if end.code:
                raise AssertionError(
                    f"it ended with status {end.code}, and printed\n{printed.getvalue()}"
                ) from end
    return printed.getvalue()
