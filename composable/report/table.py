"""Tables as text, and for terminals; knows no model."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, Generic, Protocol, TypeVar

Cells = tuple[str, ...]
R = TypeVar("R", bound="Row")


class Row(Protocol):
    """A row of a table."""

    def cells(self) -> Cells:
        """Return the text of each column."""


@dataclass(frozen=True, slots=True, repr=False)
class Table(Generic[R]):
    """What prints as a table, and what `rich.print` fits to the terminal.

    Attributes:
        header: the names of the columns.
        right: the names of columns that are aligned to the right.
        rows: above the total.
    """

    header: ClassVar[Cells]
    right: ClassVar[Cells] = ()

    rows: tuple[R, ...]

    def _total_cells(self) -> Cells:
        """Return a last row, below a rule; empty if there is none."""
        return ()

    def _notes(self) -> list[str]:
        """Return lines below the table."""
        return []

    def __str__(self) -> str:
        total = self._total_cells()
        cells = [self.header, *(row.cells() for row in self.rows), *([total] if total else [])]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        text = [
            "  ".join(
                cell.rjust(width) if name in self.right else cell.ljust(width)
                for name, cell, width in zip(self.header, line, widths, strict=True)
            ).rstrip()
            for line in cells
        ]
        rule = "-" * max(map(len, text))
        text.insert(1, rule)
        if total:
            text.insert(-1, rule)
        return "\n".join([*text, *self._notes()])

    __repr__ = __str__

    def __rich__(self) -> Any:
        boxes, tables, text = map(import_module, ("rich.box", "rich.table", "rich.text"))
        total, notes = self._total_cells(), self._notes()
        made = tables.Table(
            box=boxes.SIMPLE,
            pad_edge=False,
            show_footer=bool(total),
            caption=text.Text("\n".join(notes)) if notes else None,
            caption_justify="left",
        )
        for index, name in enumerate(self.header):
            made.add_column(
                name,
                footer=total[index] if total else "",
                justify="right" if name in self.right else "left",
                overflow="fold",
                no_wrap=index == 0,
            )
        for row in self.rows:
            made.add_row(*map(text.Text, row.cells()))  # as they are: [0:2] is no markup
        return made
