"""What was found, in words."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, field
from importlib import import_module

logger = logging.getLogger("composable")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that `watch` found. All ranks have the same.

    Attributes:
        kind: "not finite", "ranks differ", "not reproduced", or "hint".
        step: the step in which it was found, counted from 0.
        ranks: where, by their numbers among all ranks; the first one is `rank`.
        unit: the unit that it is about.
        phase: "parameter", "input", "output" or "gradient"; for ranks that differ, what does.
        tensor: which one, such as `output 0`, or the FQN of a parameter below the unit.
        what: what was seen there, in a few words.
        lines: more for the reader: a name and a text each.
        call: which call of the unit in the step it is in; -1 if that is the last one, or not known.
    """

    kind: str
    step: int
    ranks: tuple[int, ...]
    unit: str
    phase: str
    tensor: str
    what: str
    lines: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    call: int = field(default=-1, compare=False)

    @property
    def rank(self) -> int:
        """The first rank on which it was found."""
        return self.ranks[0]

    @property
    def place(self) -> tuple[str, ...]:
        """By which two findings are told apart: a place is reported once."""
        return self.kind, self.unit, self.phase, self.tensor

    def __str__(self) -> str:
        """One block of text."""
        where = ", ".join(map(str, self.ranks))
        rows = [
            ("unit", self.unit),
            ("phase", self.phase),
            ("tensor", self.tensor),
            *self.lines,
        ]
        title = f"watch: step {self.step}, rank {where}: {self.what}"
        return "\n".join([title, *(f"  {name:<10}{text}" for name, text in rows if text)])


def show(finding: Finding) -> None:
    """Log a finding; in a panel where standard error is a terminal and `rich` is installed."""
    text = str(finding)
    if sys.stderr.isatty():
        try:
            console, panel = import_module("rich.console"), import_module("rich.panel")
        except ModuleNotFoundError:
            pass
        else:
            title, _, body = text.partition("\n")
            printed = console.Console(stderr=True)
            printed.print(panel.Panel(body, title=title, title_align="left", highlight=False))
            return
    logger.log(logging.INFO if finding.kind == "hint" else logging.WARNING, "%s", text)
