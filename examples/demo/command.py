"""The `demo` command. Started by a user it launches the ranks; started by a launcher it is one
rank.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from examples.demo import snapshot
from examples.demo.options import DemoError, Options
from examples.demo.train import predict, train

INTERRUPTED: Final = 130  # the exit status of a command that Ctrl-C ended

# What a rank runs. Ctrl-C reaches every process of the terminal, and only the launcher should
# report it.
_RANK: Final = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
from examples.demo.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def run(options: Options, command_line: Sequence[str]) -> int:
    """Run the demo; `command_line` is what `options` were parsed from. Returns the exit status."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        options.ranks = int(os.environ["WORLD_SIZE"])
        options.check()
        return _run_rank(options)
    options.check()
    if options.resume:
        snapshot.read(options)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DemoError(f"--out {options.out}: {error.strerror}") from error
    return _launch(options, command_line)


def _launch(options: Options, command_line: Sequence[str]) -> int:
    """Run the ranks as `torchrun --standalone` does, but in this process: `torchrun` prints stack
    traces after Ctrl-C.
    """
    # Ranks share the cores of one machine: without this each would start a thread per core.
    threads = max(1, torch.get_num_threads() // options.ranks)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=options.ranks,
        run_id="demo",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    logging.disable(logging.WARNING)  # the launcher warns of every signal that it passes on
    try:
        elastic_launch(config, sys.executable)("-u", "-c", _RANK, *command_line)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        how = f"exit status {code}" if code >= 0 else f"ended by {signal.Signals(-code).name}"
        print(
            f"composable demo: rank {rank} failed ({how}); the reason stands above", file=sys.stderr
        )
        return 1
    except (KeyboardInterrupt, SignalException):
        left = "there is no checkpoint yet, so the next run starts anew"
        if step := snapshot.saved_step(options):
            left = (
                f"the checkpoint of step {step} is in {options.out}, and --resume continues from it"
            )
        print(f"composable demo: interrupted; {left}", file=sys.stderr)
        return INTERRUPTED
    return 0


def _run_rank(options: Options) -> int:
    dist.init_process_group("gloo")
    speaks = dist.get_rank() == 0 and not options.quiet
    try:
        measured = train(options)
    except DemoError as error:
        if dist.get_rank() == 0:
            print(f"composable demo: {error}", file=sys.stderr)
        return 1
    finally:
        dist.destroy_process_group()
    if speaks:
        predict(options, measured)
    return 0
