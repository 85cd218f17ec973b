"""Contexts around forwards, of brackets that let autograd save something else; knows not what.

Note [Innermost last]
Autograd keeps hooks of saved tensors on a stack, and leaving such a context takes the topmost one off, whosever it is. So
all of them are on one list, and whoever finds that an interrupt ended the forwards leaves all that are open.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Final

_open: Final[list[Generator[Any, Any, Any]]] = []  # of all forwards that are running, innermost last


def close_interrupted() -> None:
    """Leave every context that is still open: an interrupt ended its forward, and autograd still saves for it."""
    while _open:
        _open.pop().close()


class OpenForwards:
    """The contexts of one bracket: generators that yield once, during forward."""

    __slots__ = ("_generators",)

    def __init__(self) -> None:
        self._generators: list[Generator[Any, Any, Any]] = []

    def __bool__(self) -> bool:
        return bool(self._generators)

    def enter(self, generator: Generator[Any, Any, Any]) -> None:
        self._generators.append(generator)
        _open.append(generator)
        next(generator)

    def leave(self) -> None:
        next(self._pop(), None)

    def close(self) -> None:
        """Forward raised."""
        if self._generators:
            self._pop().close()

    def close_all(self) -> None:
        """An interrupt ended the calls."""
        while self._generators:
            self._pop().close()

    def _pop(self) -> Generator[Any, Any, Any]:
        generator = self._generators.pop()
        _open[:] = [other for other in _open if other is not generator]
        return generator
