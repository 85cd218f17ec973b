"""Whether somebody keeps a gradient that was handed out: its memory must not change under a reader; knows no parameter."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch import Tensor

from composable.device.private import CAN_COUNT_USERS, storage_key, storage_users, tensor_users


class GradientUsers:
    """Who holds gradients that lie in one buffer, besides those who did when this was made.

    Args:
        buffer: what they lie in.
        gradients: the very list in which the caller keeps them: another one would count as somebody who holds them.
    """

    __slots__ = ("_by_graphs", "_by_python", "_gradients", "_of_memory", "_storage")

    def __init__(self, buffer: Tensor, gradients: Sequence[Tensor]) -> None:
        self._gradients = gradients
        self._storage = storage_key(buffer)
        self._of_memory = storage_users(self._storage)  # through views of it, too
        self._by_python, self._by_graphs = _references([*gradients])

    def keep_any(self, indices: Sequence[int] | None = None) -> bool:
        """Whether an earlier gradient may still be read, of those with these numbers, or of all. True where this torch cannot
        tell."""
        if not CAN_COUNT_USERS or storage_users(self._storage) != self._of_memory:
            return True
        if indices is None:
            gradients = [*self._gradients]
            if list(map(sys.getrefcount, gradients)) != self._by_python:
                return True
            return list(map(tensor_users, gradients)) != self._by_graphs
        before = [self._by_python[index] for index in indices], [self._by_graphs[index] for index in indices]
        return _references([self._gradients[index] for index in indices]) != before


def _references(gradients: list[Tensor]) -> tuple[list[int], list[int]]:
    """References from Python, and from C++ (a `.grad`, a graph)."""
    return list(map(sys.getrefcount, gradients)), list(map(tensor_users, gradients))
