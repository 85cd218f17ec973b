"""The porch: `python -m composable COMMAND`; knows which commands there are, not what they do."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from composable.demo.options import BadValue, OneLineParser, add_arguments

try:
    from composable.demo import command as demo
except ModuleNotFoundError as error:
    if error.name not in ("rich", "matplotlib", "numpy"):
        raise
    sys.exit(f"python -m composable: {error.name} is missing; pip install 'composable[demo]' brings it")


def main(command_line: Sequence[str]) -> int:
    """Run one command; returns the exit status: 0 done, 1 failed, 2 asked for something that cannot be done."""
    parser = OneLineParser(prog="python -m composable", description="Scale PyTorch models by annotating them in place.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    about = "train a small language model on real text over several processes"
    command = commands.add_parser("demo", help=about, description=f"{about[0].upper()}{about[1:]}.")
    add_arguments(command)
    arguments = parser.parse_args(command_line)
    try:
        return demo.run(arguments, command_line)
    except BadValue as error:
        print(f"{command.prog}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
