"""A rank sees every write to its tensors."""

from __future__ import annotations

import pytest
import torch

from composable.memory.digests import digests_as_ints


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8, torch.complex64]
)
@pytest.mark.parametrize("first", range(4))
def test_a_change_of_any_element_and_an_exchange_of_two_are_seen(
    dtype: torch.dtype, first: int
) -> None:
    tensor = torch.arange(1, 40).to(dtype)[first:]
    (before,) = digests_as_ints([tensor])
    assert digests_as_ints([tensor]) == [before]
    seen = {before}
    for index in range(tensor.numel()):
        changed = torch.arange(1, 40).to(dtype)[first:]
        changed[index] += 1
        seen |= set(digests_as_ints([changed]))
        other = (index + 5) % tensor.numel()
        changed = torch.arange(1, 40).to(dtype)[first:]
        changed[index], changed[other] = tensor[other].clone(), tensor[index].clone()
        seen |= set(digests_as_ints([changed]))
    assert len(seen) == 1 + 2 * tensor.numel()


def test_equal_tensors_that_begin_alike_have_equal_numbers() -> None:
    whole = torch.arange(200000.0)
    parts = whole[1:], whole[1:].clone(), whole.flip(0)[:-1].flip(0), torch.empty(0)
    numbers = digests_as_ints(parts)
    assert numbers[1] == numbers[2]
    assert digests_as_ints([whole[1:]])[0] == numbers[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
def test_signs_that_flip_together_are_seen(dtype: torch.dtype) -> None:
    tensor = torch.arange(1, 41).to(dtype)
    seen = set(digests_as_ints([tensor, -tensor]))
    for start in (0, 1):
        changed = tensor.clone()
        changed[start::2] = changed[start::2].neg()
        seen |= set(digests_as_ints([changed]))
    assert len(seen) == 4
