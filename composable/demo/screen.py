"""What the demo prints. Only rank 0 prints anything."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

MIB = float(1 << 20)


class Screen:
    """Prints on the rank with `shown`; on the others every call does nothing.

    `quiet` leaves out the bar and the tables. Where the output is not a terminal a bar would show nothing until
    the end, so a line every few steps takes its place.
    """

    LINE_EVERY = 20

    def __init__(self, *, shown: bool, quiet: bool) -> None:
        self._console = Console(highlight=False, quiet=not shown)
        self._quiet = quiet
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            disable=quiet or not shown or not self._console.is_terminal,
            transient=True,
        )

    def line(self, text: str) -> None:
        """One line that is always shown."""
        self._console.print(text, soft_wrap=True)

    def heading(self, text: str) -> None:
        """A title above what follows."""
        if not self._quiet:
            self._console.print()
            self._console.rule(f"[bold]{text}", align="left")

    def text(self, text: str) -> None:
        """Text as it is, with its own line breaks."""
        if not self._quiet:
            self._console.print(text, markup=False, soft_wrap=True)

    def losses_side_by_side(self, ours: Sequence[float], theirs: Sequence[float], differences: Sequence[float]) -> None:
        """Some rows of the check against the un-annotated model, the first and the last among them."""
        if self._quiet:
            return
        table = Table("step", "un-annotated, 1 process", "annotated", "relative difference", box=None, pad_edge=False)
        for column in table.columns:
            column.justify = "right"
        stride = max(1, len(ours) // 5)
        for i in sorted({0, len(ours) - 1, *range(stride - 1, len(ours), stride)}):
            table.add_row(str(i + 1), f"{theirs[i]:.7f}", f"{ours[i]:.7f}", f"{differences[i]:.1e}")
        self._console.print(table)

    def bytes_per_rank(self, local: dict[str, int], whole: dict[str, int], kept: int, ranks: int) -> None:
        """What one rank holds between steps and at the end of backward, beside the un-annotated model.

        Args:
            local, whole: bytes of a rank, and of the un-annotated model, by what they are for (`Footprint`).
            kept: other bytes that a rank holds between steps.
        """
        if self._quiet:
            return
        table = Table("MiB", "un-annotated", f"each of {ranks} ranks", "share", box=None, pad_edge=False)
        for column in table.columns[1:]:
            column.justify = "right"

        def row(name: str, mine: int, all_of_it: int, style: str | None = None) -> None:
            share = f"{mine / all_of_it:.0%}" if all_of_it else ""
            table.add_row(name, f"{all_of_it / MIB:.2f}", f"{mine / MIB:.2f}", share, style=style)

        mine, all_of_it = kept, 0
        for name in whole:
            if name != "gradients":
                row(name, local[name], whole[name])
                mine, all_of_it = mine + local[name], all_of_it + whole[name]
        row("anything else", kept, 0)
        row("between steps", mine, all_of_it, "bold")
        row("gradients", local["gradients"], whole["gradients"])
        row("at the end of backward", mine + local["gradients"], all_of_it + whole["gradients"], "bold")
        self._console.print(table)

    def sample(self, prompt: str, continuation: str) -> None:
        """Generated text in a frame, what was given in bold."""
        if not self._quiet:
            continuation = "".join(c if c.isprintable() or c == "\n" else "\N{MIDDLE DOT}" for c in continuation)
            self._console.print(Panel(f"[bold]{escape(prompt)}[/bold]{escape(continuation)}", expand=False))

    def written(self, what: str, path: Path) -> None:
        """Where something was put."""
        self.line(f"{what:<18} {escape(str(path))}")

    def training(self, start: int, until: int, bytes_per_step: int) -> Training:
        """A context in which steps are reported."""
        return Training(self, self._bar, start, until, bytes_per_step)

    @property
    def lines_instead_of_bar(self) -> bool:
        return self._bar.disable and not self._quiet


class Training:
    """The progress of one training loop: a bar, or lines where there is no terminal."""

    def __init__(self, screen: Screen, bar: Progress, start: int, until: int, bytes_per_step: int) -> None:
        self._screen, self._bar = screen, bar
        self._until, self._bytes_per_step = until, bytes_per_step
        self._task = bar.add_task("training", total=until, completed=start, figures="")
        self._validation = ""
        self._seconds = 0.0
        self._steps = 0
        self._since = time.perf_counter()

    def __enter__(self) -> Training:
        self._bar.start()
        self._since = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def pause(self) -> None:
        """What follows is not training: it does not count for the rate."""
        self._seconds += time.perf_counter() - self._since

    def resume(self) -> None:
        """Training goes on."""
        self._since = time.perf_counter()

    def step(self, done: int, loss: float) -> None:
        """Step number `done` is done."""
        self._steps += 1
        figures = f"loss {loss:.4f}{self._validation}  {self.rate():,.0f} tokens/s"
        self._bar.update(self._task, completed=done, figures=figures)
        if self._screen.lines_instead_of_bar and (done % Screen.LINE_EVERY == 0 or done == self._until):
            self._screen.line(f"step {done:>5}/{self._until}  {figures}")

    def validated(self, loss: float) -> None:
        """The latest validation loss."""
        self._validation = f"  validation {loss:.4f}"

    def rate(self) -> float:
        """Tokens per second over all ranks since the beginning, pauses left out."""
        seconds = self._seconds + time.perf_counter() - self._since
        return self._steps * self._bytes_per_step / max(seconds, 1e-9)
