"""The options of the demo, and their checks."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

DEFAULT_STEPS: Final = 200
MORE_STEPS: Final = 100
HEAD_WIDTH: Final = 32


class BadValue(Exception):
    """The user asked for something that cannot be done. The text is the one line that is printed."""


class ParityError(Exception):
    """The losses of the annotated and the un-annotated model differ."""


@dataclass(frozen=True)
class Options:
    """One run of the demo. `steps` is the step the run ends at; `batch_size` counts sequences over all ranks."""

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
    save_every: int
    sample_bytes: int
    prompt: str
    resume: bool
    quiet: bool

    def until(self, start: int) -> int:
        """The step to end at when the run begins at `start`."""
        if self.steps is not None:
            return self.steps
        return start + MORE_STEPS if self.resume else DEFAULT_STEPS

    @property
    def compared_steps(self) -> int:
        """How many first steps of a new run are compared with the un-annotated model: no more than there are."""
        return min(self.baseline_steps, self.until(0))

    def fixed(self) -> dict[str, Any]:
        """The options that a resumed run must have in common with the first one."""
        names = ("seed", "batch_size", "context", "layers", "width", "learning_rate")
        return {name: getattr(self, name) for name in names}


class OneLineParser(argparse.ArgumentParser):
    """Answers a bad value with one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message.removeprefix('argument ')} (see {self.prog} --help)\n")


class _Whole:
    """A whole number within bounds, as an argparse type."""

    def __init__(self, least: int, most: int | None = None) -> None:
        self.least, self.most = least, most

    def __call__(self, text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = self.least - 1
        if number < self.least or (self.most is not None and number > self.most):
            bounds = f"of at least {self.least}" if self.most is None else f"from {self.least} to {self.most}"
            raise argparse.ArgumentTypeError(f"needs a whole number {bounds}, got {text!r}")
        return number


def _rate(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0.0 < number <= 1.0:
        raise argparse.ArgumentTypeError(f"needs a number above 0 and up to 1, got {text!r}")
    return number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the demo's options on `parser`."""
    run = parser.add_argument_group("the run")
    run.add_argument(
        "--steps",
        type=_Whole(1),
        metavar="N",
        help=f"train until step N (default {DEFAULT_STEPS}; with --resume {MORE_STEPS} more than the checkpoint)",
    )
    run.add_argument("--ranks", type=_Whole(1, 64), default=2, metavar="N", help="processes (default 2)")
    run.add_argument("--out", type=Path, default=Path("runs/demo"), metavar="DIR", help="where checkpoint and pictures go")
    run.add_argument("--resume", action="store_true", help="continue from the checkpoint in --out")
    run.add_argument("--save-every", type=_Whole(1), default=100, metavar="N", help="steps between checkpoints (default 100)")
    run.add_argument("--quiet", action="store_true", help="no progress bar, no tables: one line per result")
    check = parser.add_argument_group("the check against the un-annotated model")
    check.add_argument(
        "--baseline-steps", type=_Whole(1), default=20, metavar="N", help="steps to compare, loss by loss (default 20)"
    )
    check.add_argument("--no-baseline", dest="baseline_steps", action="store_const", const=0, help="do not compare")
    job = parser.add_argument_group("the job")
    job.add_argument(
        "--seed", type=_Whole(0, 2**31 - 1), default=0, metavar="N", help="of weights, data and sampling (default 0)"
    )
    job.add_argument(
        "--batch-size", type=_Whole(1), default=16, metavar="N", help="sequences per step, over all ranks (default 16)"
    )
    job.add_argument("--context", type=_Whole(8, 4096), default=128, metavar="N", help="bytes per sequence (default 128)")
    job.add_argument("--layers", type=_Whole(1, 128), default=4, metavar="N", help="transformer blocks (default 4)")
    job.add_argument("--width", type=_Whole(HEAD_WIDTH), default=256, metavar="N", help="channels (default 256)")
    job.add_argument("--learning-rate", type=_rate, default=2e-3, metavar="X", help="of AdamW, after warm-up (default 0.002)")
    job.add_argument("--sample-bytes", type=_Whole(0), default=240, metavar="N", help="length of the text sample (default 240)")
    job.add_argument("--prompt", default="def ", metavar="TEXT", help="what the text sample starts with (default 'def ')")


def options_from(arguments: argparse.Namespace, *, ranks: int | None = None) -> Options:
    """Options from parsed arguments; a launcher that has already started `ranks` processes overrides `--ranks`.

    Raises:
        BadValue: the values are each legal but do not fit together.
    """
    values = {name: getattr(arguments, name) for name in Options.__dataclass_fields__}
    if ranks is not None:
        values["ranks"] = ranks
    options = Options(**values)
    if options.batch_size % options.ranks:
        fitting = sorted({max(1, options.batch_size // options.ranks), options.batch_size // options.ranks + 1})
        choices = " or ".join(str(n * options.ranks) for n in fitting)
        raise BadValue(f"--batch-size {options.batch_size} cannot be divided among {options.ranks} ranks; {choices} can")
    if options.width % HEAD_WIDTH:
        raise BadValue(f"--width {options.width} must be a multiple of {HEAD_WIDTH}, the width of an attention head")
    if not options.prompt:
        raise BadValue("--prompt needs at least one character")
    return options
