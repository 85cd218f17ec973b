"""What travels behind the gradients in a unit's last bucket: who had gradients, and in which backward; knows no bucket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from composable.device.unused_parameters import UseFlags
from composable.runtime.rounds import NUMBERS, Round

_EVERYTHING: Final = -1  # as a parameter of which a rank has a gradient if it has one for every parameter


class Trailer:
    """These numbers, in one unit's buckets.

    Args:
        parameters: numbers of those that have a place in a bucket.
        dtype, device: of the bucket.
    """

    __slots__ = ("_round", "_uses", "numel")

    def __init__(self, parameters: Sequence[int], round_: Round, dtype: torch.dtype, device: torch.device) -> None:
        self._round = round_
        self._uses = UseFlags((*parameters, _EVERYTHING), dtype, device)
        self.numel = len(parameters) + 1 + NUMBERS

    def write(self, numbers: Tensor, missing: Sequence[int], *, complete: bool) -> None:
        """Say what this rank has.

        Args:
            missing: parameters without a gradient.
            complete: whether this backward brought one for every parameter.
        """
        self.write_round(numbers)
        numbers[:-NUMBERS].copy_(self._uses.without(missing if complete else [*missing, _EVERYTHING]))

    def write_round(self, numbers: Tensor) -> None:
        """Say again which backward this is."""
        self._round.write(numbers[-NUMBERS:])

    def read(self, numbers: Tensor) -> list[float]:
        """The numbers, once for all who ask: on an accelerator the host waits."""
        said: list[float] = numbers.tolist()
        return said

    def unused(self, said: Sequence[float]) -> tuple[list[int], bool]:
        """The parameters that no rank had a gradient for, and whether some rank had them all.

        Args:
            said: the numbers, read.
        """
        unused = self._uses.unused(self._uses.parameters, said[:-NUMBERS])
        complete = _EVERYTHING not in unused  # it would be the last
        return (unused if complete else unused[:-1]), complete

    def check(self, said: Sequence[float], refuse_others: Callable[[], None]) -> None:
        """Raise, on every rank, if the ranks are in different backwards.

        Args:
            said: the numbers, read.
        """
        self._round.check(said[-NUMBERS:], refuse_others)

    def others(self, numbers: Tensor) -> bool:
        """Whether some rank keeps others that launch over the same communicator. Reads memory."""
        return self._round.read_others(numbers[-NUMBERS:])
