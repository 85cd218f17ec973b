"""State that a run's parameters share in value but not in memory, `step` above all; knows no optimizer.

Every parameter keeps a tensor of its own, as torch makes it: saved, loaded or stepped alone, it behaves as if there were no
runs. All of them are elements of one vector, so that after a step, which changed only the first of each run, one kernel
brings the others up to date, and before a step another one tells whether somebody changed one of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

Columns = dict[tuple[str, torch.dtype, torch.device], list[list[dict[str, Any]]]]


class Column:
    """One scalar of the state of all runs."""

    def __init__(self, key: str, spans: Sequence[Sequence[dict[str, Any]]]) -> None:
        """`runs`: the states of each run's parameters; their scalars are moved into the column."""
        states = [state for span in spans for state in span]
        self._vector = torch.stack([state[key] for state in states])
        for index, state in enumerate(states):
            state[key] = self._vector[index]
        leads, first = [], 0
        for span in spans:
            leads += [first] * len(span)
            first += len(span)
        self._leads = torch.tensor(leads, device=self._vector.device)
        self._version = self._vector._version

    def agrees(self) -> bool:
        """Whether every parameter's scalar is still what its run's first one is."""
        if self._vector.is_cpu:
            return torch.equal(self._vector, self._vector[self._leads])
        return self._vector._version == self._version  # a look at the values would make the host wait

    def spread(self) -> None:
        """Every parameter's scalar becomes what its run's first one is."""
        self._vector.copy_(self._vector[self._leads])
        self._version = self._vector._version


def columns_of(spans: Sequence[Sequence[dict[str, Any]]]) -> Iterator[Column]:
    """Columns for all scalars of the states of `runs`, each of which has the same in every state."""
    columns: Columns = {}
    for span in spans:
        for key, value in span[0].items():
            if type(value) is Tensor and value.dim() == 0:
                columns.setdefault((key, value.dtype, value.device), []).append(list(span))
    for (key, _, _), members in columns.items():
        yield Column(key, members)
