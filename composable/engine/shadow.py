"""How a rank without data follows one that has data: what the engine tells of its steps while a
`join` scope is open.

All ranks of a model launch the same collectives in the same order. Which ones a step launches is
decided where a forward or a backward enters or leaves a unit, so the engine tells of these places.
A rank that has data says them to the others, and a rank without data does them: it gathers, reduces
and reshards, and does not compute. Its gradients are those of a rank on which every parameter is
unused. Outside of a scope nobody listens, and nothing is told.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, Final, Protocol
from weakref import ref

from torch import Tensor


class Event(enum.IntEnum):
    """What one unit does. `Unit.shadow` does it without computing; its `detail` is a number."""

    # A forward of the module with this index, or its recomputation, begins.
    ENTER = 0
    # That forward has outputs through which backward will come; 1: it counts as trained on.
    OUTPUT = 1
    # It ends; twice the index of the module, and 1 if parameters must outlive it.
    LEAVE = 2
    OPEN = 3  # a backward begins in the unit's root
    # It has come to the outputs of one forward; 1: of one that counts as trained on, in this
    # iteration.
    COUNT = 4
    BACK = 5  # it enters the unit
    GRADIENT = 6  # a parameter has a gradient, and its unit was not entered
    END = 7  # it ends
    LOST = 8  # the step failed


class Listener(Protocol):
    """A scope.

    Attributes:
        source: the rank that buffers follow.
        narrates: some ranks have no data.
    """

    source: int
    narrates: bool

    def begin(self, root: Any) -> None:
        """The outermost forward of `root` is about to begin."""

    def open(self, root: Any) -> None:
        """A backward is about to begin in `root`."""

    def tell(self, event: Event, unit: Any, detail: int, *, now: bool) -> None:
        """Of an event; `now`: before the next collective."""

    def call(self, what: str, parameters: Sequence[Tensor], *args: Any) -> None:
        """A function that communicates is about to work on the gradients of `parameters`."""


# one at most; weak, since a scope that raised is dropped without a word
LISTENERS: Final[list[ref[Any]]] = []


def listener() -> Listener | None:
    return LISTENERS[0]() if LISTENERS else None


def tell(event: Event, unit: Any, detail: int = 0, *, now: bool = False) -> None:
    scope = listener()
    if scope is not None:
        scope.tell(event, unit, detail, now=now)


def tell_of_call(what: str, parameters: Sequence[Tensor], *args: Any) -> None:
    scope = listener()
    if scope is not None:
        scope.call(what, parameters, *args)


def source() -> int:
    """The rank that buffers follow."""
    scope = listener()
    return 0 if scope is None else scope.source


def narrates() -> bool:
    """Whether some ranks have no data, so that nothing may be launched where they are not told of
    it.
    """
    scope = listener()
    return scope is not None and scope.narrates
