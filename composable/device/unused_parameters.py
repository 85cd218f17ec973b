"""Which parameters had a gradient on any rank: numbers that travel with the gradients; knows no layout and no communicator.

Note [Unused parameters]
A rank that has no gradient for a parameter contributes zeros, and a zero where the others put a one. The sum of these numbers
tells every rank whether any rank had a gradient: what nobody had one for stays as it was, on all ranks, at the price of no
message. Rows of shards and buckets of replicas differ in where the numbers lie, and in what it takes to let a gradient be.
Who had a gradient for everything himself need not read them: somebody used it all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from composable.device.host_numbers import numbers_for


class UseFlags:
    """The numbers for some parameters.

    Args:
        parameters: numbers of the parameters, in the order of the flags.
        dtype, device: of the message.
        rows: how often the message says the same, once for each rank that a part of it is for; None if it says it to all.
    """

    __slots__ = ("_all_used", "_places", "parameters")

    def __init__(self, parameters: Sequence[int], dtype: torch.dtype, device: torch.device, rows: int | None = None) -> None:
        self.parameters = tuple(parameters)
        self._places = {parameter: place for place, parameter in enumerate(parameters)}
        shape = (len(parameters),) if rows is None else (rows, len(parameters))
        with torch.inference_mode(False):
            self._all_used = torch.ones(shape, dtype=dtype, device=device)

    def without(self, missing: Sequence[int]) -> Tensor:
        """What this rank writes if it has no gradient for the parameters in `missing`. Not to be written to."""
        if not missing:
            return self._all_used
        row = [1.0] * len(self.parameters)
        for parameter in missing:
            row[self._places[parameter]] = 0.0
        return numbers_for(row, self._all_used.device, self._all_used.dtype).expand_as(self._all_used)

    def unused(self, missing: Sequence[int], summed: Sequence[float]) -> list[int]:
        """Those of `missing` that no rank had a gradient for.

        Args:
            summed: what all ranks wrote, added up, and read: on an accelerator the host has waited for it.
        """
        return [parameter for parameter in missing if not summed[self._places[parameter]]]
