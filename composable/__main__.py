"""`python -m composable COMMAND`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, Final, NoReturn

from composable import __version__
from composable.extras import doctor
from composable.extras.forecast import command as forecast_command
from composable.extras.forecast import describing as describe_command
from composable.extras.watch import replay as replay_command

_COMMANDS: Final[dict[str, tuple[Any, str]]] = {
    "forecast": (
        forecast_command,
        "say what training needs, without the devices: memory, messages, time",
    ),
    "describe": (
        describe_command,
        "say how a model would rest on ranks, without the ranks: which rows are where",
    ),
    "replay": (
        replay_command,
        "run the unit of an incident that watch has written again, in one process",
    ),
    "doctor": (doctor, "describe versions, devices, launcher and settings, for a bug report"),
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
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (command, about) in _COMMANDS.items():
        added = commands.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.")
        command.add_arguments(added)
        added.set_defaults(run=command.run)
    options = parser.parse_args(command_line)
    return int(options.run(options))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
