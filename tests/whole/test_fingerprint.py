"""Fingerprints of values differ where values do, wherever these lie, and agree where values do, whatever their layout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from composable.api.sync_module_states import fingerprint


def _changed() -> dict[str, tuple[Tensor, Tensor]]:
    one = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    alike = torch.stack([torch.arange(8.0).roll(shift) for shift in range(6)])  # rows with equal sums
    long = torch.arange(600_000, dtype=torch.float32)
    odd = torch.ones(3, dtype=torch.bfloat16)
    other_end = odd.clone()
    other_end[2] = 2
    return {
        "rows swapped": (one, one[[1, 0, 2, 3, 4, 5]]),
        "rows reversed": (one, one.flip(0)),
        "rows mirrored around the middle": (one, one[[5, 1, 2, 3, 4, 0]]),
        "rows of equal sums swapped": (alike, alike[[0, 4, 2, 3, 1, 5]]),
        "columns swapped": (one, one[:, [1, 0, 2, 3, 4, 5, 6, 7]]),
        "distant blocks swapped": (long, torch.cat([long[300_000:], long[:300_000]])),
        "one bit": (torch.zeros(5), torch.tensor([0, 0, 0, 0, -0.0])),
        "the last element of an odd number of short ones": (odd, other_end),
        "bytes": (torch.tensor([1, 2, 3], dtype=torch.uint8), torch.tensor([2, 1, 3], dtype=torch.uint8)),
    }


@pytest.mark.parametrize("what", _changed())
def test_other_values_or_other_places_give_another_fingerprint(what: str) -> None:
    one, other = _changed()[what]
    assert fingerprint(one) != fingerprint(other)
    assert fingerprint(one) == fingerprint(one.clone())


def test_the_layout_in_memory_does_not_count() -> None:
    one = torch.randn(4, 5)
    assert fingerprint(one) == fingerprint(one.t().contiguous().t())
