"""Fingerprints of values differ where values do, wherever these lie, and agree where values do,
whatever their layout.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from composable.memory.digests import digests_as_ints


def fingerprint(tensor: Tensor) -> int:
    (found,) = digests_as_ints([tensor])
    return found


def _changed() -> dict[str, tuple[Tensor, Tensor]]:
    one = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    # rows with equal sums
    alike = torch.stack([torch.arange(8.0).roll(shift) for shift in range(6)])
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
        "bytes": (
            torch.tensor([1, 2, 3], dtype=torch.uint8),
            torch.tensor([2, 1, 3], dtype=torch.uint8),
        ),
    }


@pytest.mark.parametrize("what", _changed())
def test_other_values_or_other_places_give_another_fingerprint(what: str) -> None:
    one, other = _changed()[what]
    assert fingerprint(one) != fingerprint(other)
    assert fingerprint(one) == fingerprint(one.clone())


def test_the_layout_in_memory_does_not_count() -> None:
    one = torch.randn(4, 5)
    assert fingerprint(one) == fingerprint(one.t().contiguous().t())


def test_all_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an accelerator each read makes the host wait."""
    reads = []
    item, tolist = Tensor.item, Tensor.tolist
    monkeypatch.setattr(Tensor, "item", lambda tensor: (reads.append("item"), item(tensor))[1])
    monkeypatch.setattr(
        Tensor, "__int__", lambda tensor: (reads.append("int"), int(item(tensor)))[1]
    )
    monkeypatch.setattr(
        Tensor, "tolist", lambda tensor: (reads.append("tolist"), tolist(tensor))[1]
    )
    tensors = [
        torch.arange(7.0),
        torch.empty(0),
        torch.empty(3, device="meta"),
        torch.ones(300_000, dtype=torch.bfloat16),
    ]
    found = digests_as_ints(tensors)
    assert reads == ["tolist"]
    assert found == [fingerprint(tensor) for tensor in tensors]
    assert [bool(number) for number in found] == [True, False, False, True]


class _Largest(TorchDispatchMode):
    """The bytes of the largest tensor that an operation makes, in other memory than that of
    `tensor`.
    """

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self._given = tensor.data_ptr()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.untyped_storage().data_ptr() != self._given:
            self.nbytes = max(self.nbytes, made.untyped_storage().nbytes())
        return made


def test_a_large_parameter_takes_a_few_mib_of_memory() -> None:
    tensor = torch.ones(8 << 20)
    with _Largest(tensor) as largest:
        fingerprint(tensor)
    assert largest.nbytes <= 4 << 20


def _large_tensors() -> int:
    gc.collect()
    return sum(
        issubclass(type(item), Tensor) and item.nbytes >= 1 << 20 for item in gc.get_objects()
    )


def test_nothing_of_it_stays_in_memory() -> None:
    tensor = torch.ones(1 << 20)
    before = _large_tensors()
    fingerprint(tensor)
    assert _large_tensors() == before
