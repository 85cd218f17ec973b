"""Tables as text, and for terminals; knows no model."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from importlib import import_module
from typing import Any


def plain(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Collection[str] = (),
    total: Sequence[str] | None = None,
) -> list[str]:
    """Return the lines of a table.

    Args:
        header: the names of the columns.
        rows: a cell for each column.
        right: the names of columns that are aligned to the right.
        total: a last row, below a rule.
    """
    cells = [header, *rows, *([] if total is None else [total])]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    text = [
        "  ".join(
            cell.rjust(width) if name in right else cell.ljust(width)
            for name, cell, width in zip(header, line, widths, strict=True)
        ).rstrip()
        for line in cells
    ]
    rule = "-" * max(map(len, text))
    if total is None:
        return [text[0], rule, *text[1:]]
    return [text[0], rule, *text[1:-1], rule, text[-1]]


def rich(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Collection[str] = (),
    total: Sequence[str] | None = None,
    notes: Sequence[str] = (),
) -> Any:
    """Return the same as a table of rich, which fits it to the terminal.

    Args:
        header: as of `plain`, and so are
        rows: these,
        right: these,
        total: and this.
        notes: lines below the table.
    """
    boxes, tables, text = map(import_module, ("rich.box", "rich.table", "rich.text"))
    made = tables.Table(
        box=boxes.SIMPLE,
        pad_edge=False,
        show_footer=total is not None,
        caption=text.Text("\n".join(notes)) if notes else None,
        caption_justify="left",
    )
    for index, name in enumerate(header):
        made.add_column(
            name,
            footer="" if total is None else total[index],
            justify="right" if name in right else "left",
            overflow="fold",
            no_wrap=index == 0,
        )
    for row in rows:
        made.add_row(*map(text.Text, row))  # as they are: [0:2] is no markup
    return made
