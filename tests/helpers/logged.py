"""What the library logs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def logged() -> Iterator[list[str]]:
    """Lines like "WARNING: unit '0': ..." that are logged within the scope."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(f"{record.levelname}: {record.getMessage()}")  # type: ignore[method-assign]
    logger = logging.getLogger("composable")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
