"""The row behind the gradients of a message: one small table, which each rank writes when it
launches the message, and of which all read the sum over the ranks when it lands.

| column | a rank writes | the sum tells |
|--------|---------------|---------------|
| used: one per parameter | 1 if it has a gradient | whether any rank has one |
| label: 4 bits | a checksum of the message's label | whether the ranks mean one message |
| held: 4 bits | how many backwards it accumulated before | whether all did as many |

A bit is two elements, "it is 0" and "it is 1", of which a rank sets one: if the sums of both are
not zero, two ranks differ. Any dtype can tell that.

All columns but `used` are there only where the ranks compare: on hosts, which have nothing to wait
for when a message lands, and in debug mode. What is kept from message to message is one row,
whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import torch
from torch import Tensor

from composable.comm.ledger import checksum


class Counts(NamedTuple):
    """What must be equal on all ranks; their low bits travel."""

    label: int = 0
    held: int = 0


@lru_cache(maxsize=1024)
def counts_of(label: str, held: int) -> Counts:
    """The counts of a message with this label."""
    return Counts(checksum(label), held)


_BITS: Final = {"label": 4, "held": 4}


class Row:
    """The rows of messages with the gradients of these parameters.

    Args:
        parameters: indices.
        compares: the ranks compare their counts.
    """

    def __init__(self, parameters: Sequence[int], *, compares: bool) -> None:
        self._parameters = tuple(parameters)
        sizes = {"used": len(self._parameters)}
        if compares:
            sizes |= {name: 2 * bits for name, bits in _BITS.items()}
        self._columns: dict[str, slice] = {}
        self.numel = 0
        for name, size in sizes.items():
            self._columns[name] = slice(self.numel, self.numel + size)
            self.numel += size
        self._last: tuple[object, Tensor] | None = None  # most rows are like the one before

    def write(
        self, unused: Sequence[int], counts: Counts, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """This rank's row.

        Args:
            unused: indices of parameters that this rank has no gradient of.
        """
        key = tuple(unused), counts, dtype
        if self._last is not None and self._last[0] == key:
            return self._last[1]
        values = {"used": [float(index not in unused) for index in self._parameters]}
        for name, bits in _BITS.items():
            number: int = getattr(counts, name)
            values[name] = [
                float(number >> bit & 1 == value) for bit in range(bits) for value in (0, 1)
            ]
        with torch.inference_mode(False):
            said = torch.tensor([x for name in self._columns for x in values[name]], dtype=dtype)
            row = torch.empty(self.numel, dtype=dtype, device=device)
            row.copy_(said, non_blocking=True)
        self._last = key, row
        return row

    def used(self, sums: Sequence[float]) -> dict[int, bool]:
        """By parameter, whether any rank has a gradient."""
        return dict(zip(self._parameters, map(bool, sums), strict=False))

    def agrees(self, sums: Sequence[float]) -> bool:
        """Whether all ranks wrote the same counts."""
        return all(sums[self._columns[name]].count(0.0) >= bits for name, bits in _BITS.items())
