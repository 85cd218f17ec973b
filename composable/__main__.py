"""`python -m composable COMMAND`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from composable import __version__
from composable.extras import doctor
from composable.extras.forecast import command as forecast_command
from composable.extras.forecast import describing as describe_command
from composable.extras.watch import replay as replay_command


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
    about = "say what training needs, without the devices: memory, messages, time"
    forecast = commands.add_parser(
        "forecast", help=about, description=f"{about[0].upper()}{about[1:]}."
    )
    forecast_command.add_arguments(forecast)
    forecast.set_defaults(run=forecast_command.run)
    about = "say how a model would rest on ranks, without the ranks: which rows are where"
    described = commands.add_parser(
        "describe", help=about, description=f"{about[0].upper()}{about[1:]}."
    )
    describe_command.add_arguments(described)
    described.set_defaults(run=describe_command.run)
    about = "run the unit of an incident that watch has written again, in one process"
    replay = commands.add_parser(
        "replay", help=about, description=f"{about[0].upper()}{about[1:]}."
    )
    replay_command.add_arguments(replay)
    replay.set_defaults(run=replay_command.run)
    about = "describe versions, devices, launcher and settings, for a bug report"
    reported = commands.add_parser(
        "doctor", help=about, description=f"{about[0].upper()}{about[1:]}."
    )
    reported.set_defaults(run=_doctor)
    options = parser.parse_args(command_line)
    return int(options.run(options))


def _doctor(_: argparse.Namespace) -> int:
    print(doctor.report())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
