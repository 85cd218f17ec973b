"""`python -m examples.demo`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from examples.demo.options import DemoError, OneLineParser, Options, add_arguments


def main(command_line: Sequence[str]) -> int:
    """Run the demo and return the exit status.

    0: done. 1: failed. 2: asked for something that cannot be done.
    """
    parser = OneLineParser(
        prog="python -m examples.demo",
        description="Train a small language model on real text over several processes.",
    )
    add_arguments(parser)
    options = parser.parse_args(command_line, Options())
    try:
        # Imported here, because its dependencies are an extra of the package, and `--help` works
        # without them.
        demo = import_module("examples.demo.command")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("rich", "matplotlib", "numpy"):
            raise
        sys.exit(
            f"python -m examples.demo: {missing} is missing; pip install -e '.[demo]' in a checkout"
            " brings it"
        )
    try:
        status: int = demo.run(options, command_line)
    except DemoError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
