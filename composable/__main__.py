"""`python -m composable COMMAND`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from composable import __version__
from composable.algorithms.watch import replay as replay_command
from composable.demo.options import DemoError, OneLineParser, Options, add_arguments
from composable.forecast import command as forecast_command
from composable.forecast import describing as describe_command


def main(command_line: Sequence[str]) -> int:
    """Run one command and return the exit status.

    0: done. 1: failed. 2: asked for something that cannot be done.
    """
    parser = OneLineParser(
        prog="python -m composable", description="Scale PyTorch models by annotating them in place."
    )
    parser.add_argument("--version", action="version", version=f"composable {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    about = "train a small language model on real text over several processes"
    command = commands.add_parser("demo", help=about, description=f"{about[0].upper()}{about[1:]}.")
    add_arguments(command)
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
    options = parser.parse_args(command_line, Options())
    if (run := getattr(options, "run", None)) is not None:
        return int(run(options))
    try:
        # Imported here, because its dependencies are an extra of the package, and `--help` works
        # without them.
        demo = import_module("composable.demo.command")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("rich", "matplotlib", "numpy"):
            raise
        sys.exit(
            f"python -m composable demo: {missing} is missing; pip install 'torch-composable[demo]'"
            " brings it, or pip install -e '.[demo]' in a checkout"
        )
    try:
        status: int = demo.run(options, command_line)
    except DemoError as error:
        print(f"{command.prog}: {error}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
