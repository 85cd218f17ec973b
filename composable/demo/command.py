"""The `demo` command. Started by a user it launches the ranks; started by a launcher it is one rank."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import torch.distributed as dist

from composable.demo import snapshot
from composable.demo.launch import INTERRUPTED, is_rank, launch
from composable.demo.options import BadValue, Options, ParityError, options_from
from composable.demo.screen import Screen
from composable.demo.train import train


def run(arguments: argparse.Namespace, command_line: Sequence[str]) -> int:
    """Run the demo as `arguments` say; `command_line` is what they were parsed from. Returns the exit status."""
    if is_rank():
        return _run_rank(options_from(arguments, ranks=int(os.environ["WORLD_SIZE"])))
    options = options_from(arguments)
    _prepare(options)
    status = launch(options.ranks, command_line)
    if status == INTERRUPTED:
        print(f"composable demo: interrupted; {_what_is_left(options)}", file=sys.stderr)
    return status


def _what_is_left(options: Options) -> str:
    step = snapshot.saved_step(options)
    if not step:
        return "there is no checkpoint yet, so the next run starts anew"
    return f"the checkpoint of step {step} is in {options.out}, and --resume continues from it"


def _prepare(options: Options) -> None:
    """Check the options before any rank is started."""
    if options.resume:
        snapshot.read_record(options)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadValue(f"--out {options.out}: {error.strerror}") from error
    if not os.access(options.out, os.W_OK):
        raise BadValue(f"--out {options.out}: not writable")


def _run_rank(options: Options) -> int:
    dist.init_process_group("gloo")
    try:
        train(options, Screen(shown=dist.get_rank() == 0, quiet=options.quiet))
    except (BadValue, ParityError) as error:
        if dist.get_rank() == 0:
            print(f"composable demo: {error}", file=sys.stderr)
        return 1
    finally:
        dist.destroy_process_group()
    return 0
