"""The library's log without warnings, for programs that fail on purpose; knows no test."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def errors_only() -> Iterator[None]:
    """Also a decorator. Afterwards the log is as before: other tests of the same worker read it."""
    logger = logging.getLogger("composable")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
