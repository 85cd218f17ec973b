"""`python -m composable COMMAND`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from composable import __version__
from composable.demo.options import BadValue, OneLineParser, add_arguments


def main(command_line: Sequence[str]) -> int:
    """Run one command; returns the exit status: 0 done, 1 failed, 2 asked for something that cannot be done."""
    parser = OneLineParser(prog="python -m composable", description="Scale PyTorch models by annotating them in place.")
    parser.add_argument("--version", action="version", version=f"composable {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    about = "train a small language model on real text over several processes"
    command = commands.add_parser("demo", help=about, description=f"{about[0].upper()}{about[1:]}.")
    add_arguments(command)
    arguments = parser.parse_args(command_line)
    demo = _demo()
    try:
        status: int = demo.run(arguments, command_line)
    except BadValue as error:
        print(f"{command.prog}: {error}", file=sys.stderr)
        return 2
    return status


def _demo() -> Any:
    """Import the demo. Its dependencies are an extra of the package, and `--help` works without them."""
    try:
        return import_module("composable.demo.command")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("rich", "matplotlib", "numpy"):
            raise
        sys.exit(
            f"python -m composable demo: {missing} is missing; pip install 'torch-composable[demo]' brings it, "
            "or pip install -e '.[demo]' in a checkout"
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
