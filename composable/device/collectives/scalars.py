"""A few numbers that all ranks of a group agree on, in one collective; moves no parameters and no gradients."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from composable.device.collectives.communicator import raise_failed


def reduce_numbers(numbers: Tensor, group: dist.ProcessGroup, *, largest: bool, label: str) -> Tensor:
    """The sum, or the largest, of every rank's `numbers` (1-D), element by element; NaN on one rank is NaN on all."""
    if not largest:
        return _all_reduce(numbers.clone(), group, dist.ReduceOp.SUM, label)
    # Backends differ in whether the larger of NaN and a number is NaN, gloo even by the order of the ranks.
    missing = numbers.isnan()
    pairs = torch.cat([numbers.masked_fill(missing, -torch.inf), missing.to(numbers.dtype)])
    found, lost = _all_reduce(pairs, group, dist.ReduceOp.MAX, label).chunk(2)
    return found.masked_fill(lost > 0, torch.nan)


def _all_reduce(numbers: Tensor, group: dist.ProcessGroup, operation: dist.ReduceOp.RedOpType, label: str) -> Tensor:
    try:
        dist.all_reduce(numbers, op=operation, group=group)
    except RuntimeError as error:
        raise_failed(label, dist.get_rank(), error)
    return numbers
