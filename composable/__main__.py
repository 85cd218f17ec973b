"""`python -m composable COMMAND`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

from composable import __version__
from composable.extras import doctor
from composable.extras.forecast import commands
from composable.extras.watch import replay

# By name: what declares its arguments, what runs it, and what it does.
_COMMANDS: Final[dict[str, tuple[Callable[[Any], None], Callable[[Any], int], str]]] = {
    "forecast": (
        commands.add_forecast_arguments,
        commands.run_forecast,
        "say what training needs, without the devices: memory, messages, time",
    ),
    "describe": (
        commands.add_describe_arguments,
        commands.run_describe,
        "say how a model would rest on ranks, without the ranks: which rows are where",
    ),
    "replay": (
        replay.add_arguments,
        replay.run,
        "run the unit of an incident that watch has written again, in one process",
    ),
    "doctor": (
        doctor.add_arguments,
        doctor.run,
        "describe versions, devices, launcher and settings, for a bug report",
    ),
}


class OneLineParser(argparse.ArgumentParser):
    """Answers a bad value with one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        """End the process."""
        self.exit(2, f"{self.prog}: {message.removeprefix('argument ')} (see {self.prog} --help)\n")


def main(command_line: Sequence[str]) -> int:
    """Run one command and return the exit status.

    0: done. 1: failed. 2: asked for something that cannot be done.
    """
    parser = OneLineParser(
        prog="python -m composable", description="Scale PyTorch models by annotating them in place."
    )
    parser.add_argument("--version", action="version", version=f"composable {__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (add_arguments, run, about) in _COMMANDS.items():
        added = subparsers.add_parser(
            name, help=about, description=f"{about[0].upper()}{about[1:]}."
        )
        add_arguments(added)
        added.set_defaults(run=run)
    options = parser.parse_args(command_line)
    return int(options.run(options))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
