"""The options of the demo, and their checks."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NoReturn

DEFAULT_STEPS: Final = 120
MORE_STEPS: Final = 100
HEAD_WIDTH: Final = 32


class DemoError(Exception):
    """What ends the demo; the text is the one line that is printed."""


class Options(argparse.Namespace):
    """One run of the demo. `steps` is the step that it ends at; `batch_size` counts sequences over
    all ranks.
    """

    steps: int | None
    ranks: int
    out: Path
    seed: int
    batch_size: int
    context: int
    layers: int
    width: int
    learning_rate: float
    baseline_steps: int
    sample_bytes: int
    resume: bool
    quiet: bool

    def until(self, start: int) -> int:
        """The step to end at when the run begins at `start`."""
        if self.steps is not None:
            return self.steps
        return start + MORE_STEPS if self.resume else DEFAULT_STEPS

    def fixed(self) -> dict[str, Any]:
        """The options that a resumed run must have in common with the first one."""
        names = ("seed", "batch_size", "context", "layers", "width", "learning_rate")
        return {name: getattr(self, name) for name in names}

    def check(self) -> None:
        """Refuse values that are each legal but do not fit together."""
        if self.batch_size % self.ranks:
            below = self.batch_size // self.ranks * self.ranks
            choices = " or ".join(str(size) for size in (below, below + self.ranks) if size)
            raise DemoError(
                f"--batch-size {self.batch_size} cannot be divided among {self.ranks} ranks;"
                f" {choices} can"
            )
        if self.width % HEAD_WIDTH:
            raise DemoError(
                f"--width {self.width} must be a multiple of {HEAD_WIDTH}, the width of an"
                " attention head"
            )


class OneLineParser(argparse.ArgumentParser):
    """Answers a bad value with one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message.removeprefix('argument ')} (see {self.prog} --help)\n")


def number(
    kind: type[int] | type[float], least: float, most: float | None = None
) -> Callable[[str], float]:
    """Return what reads numbers within bounds."""

    def parse(text: str) -> float:
        with suppress(ValueError):
            found = kind(text)
            if found >= least and (most is None or found <= most):
                return found
        what = "a whole number" if kind is int else "a number"
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise argparse.ArgumentTypeError(f"needs {what} {bounds}, got {text!r}")

    return parse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    run = parser.add_argument_group("the run")
    check = parser.add_argument_group("the check against the un-annotated model")
    job = parser.add_argument_group("the job")
    for group, flag, bounds, default, about in (
        (run, "--steps", (1,), None, f"train until step N (default {DEFAULT_STEPS}; with --resume"
            f" {MORE_STEPS} more than the checkpoint)"),
        (run, "--ranks", (1, 64), 2, "processes"),
        (check, "--baseline-steps", (1,), 20, "steps to compare, loss by loss"),
        (job, "--seed", (0, 2**31 - 1), 0, "of weights, data and sampling"),
        (job, "--batch-size", (1,), 16, "sequences per step, over all ranks"),
        (job, "--context", (8, 4096), 128, "bytes per sequence"),
        (job, "--layers", (1, 128), 4, "transformer blocks"),
        (job, "--width", (HEAD_WIDTH,), 256, "channels"),
        (job, "--sample-bytes", (0,), 240, "length of the text sample"),
    ):  # fmt: skip
        said = about if default is None else f"{about} (default {default})"
        group.add_argument(flag, type=number(int, *bounds), default=default, metavar="N", help=said)
    run.add_argument(
        "--out", type=Path, default=Path("runs/demo"), help="where checkpoint and pictures go"
    )
    run.add_argument("--resume", action="store_true", help="continue from the checkpoint in --out")
    run.add_argument("--quiet", action="store_true", help="no tables: one line per result")
    check.add_argument(
        "--no-baseline", dest="baseline_steps", action="store_const", const=0, help="do not compare"
    )
    job.add_argument(
        "--learning-rate",
        type=number(float, 1e-6, 1),
        default=2e-3,
        metavar="X",
        help="of AdamW, after warm-up (default 0.002)",
    )
