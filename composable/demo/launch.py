"""Start the ranks with torch's launcher."""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from collections.abc import Sequence
from typing import Final

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

INTERRUPTED: Final = 130  # the exit status of a command that Ctrl-C ended

# What a rank runs. Ctrl-C reaches every process of the terminal, and only the launcher should report it.
_RANK: Final = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
from composable.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def is_rank() -> bool:
    """Whether a launcher has started this process as one rank of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def launch(ranks: int, arguments: Sequence[str]) -> int:
    """Run `python -m composable` with `arguments` on `ranks` local processes; returns the exit status.

    It is what `torchrun --standalone` does, in this process: `torchrun` prints a page of stack traces after Ctrl-C.
    """
    # Ranks that share one machine share its cores: without this each would start a thread per core.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // ranks)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    logging.disable(logging.WARNING)  # the launcher warns of every signal that it passes on
    try:
        elastic_launch(config, sys.executable)("-u", "-c", _RANK, *arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(f"composable demo: rank {rank} failed ({_how(failure.exitcode)}); the reason stands above", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, SignalException):
        return INTERRUPTED
    return 0


def _how(exitcode: int) -> str:
    return f"exit status {exitcode}" if exitcode >= 0 else f"ended by {signal.Signals(-exitcode).name}"
