"""Factors of gradients: numbers and tensors multiply alike, zero counts nothing, and what is there is never written to."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from composable.device.term_factors import Factor


def _both(value: float, dtype: torch.dtype = torch.float32) -> list[Factor]:
    return [Factor(value), Factor(torch.tensor(value, dtype=dtype))]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64])
def test_products_are_new_tensors_of_the_dtype_that_gradients_have(dtype: torch.dtype) -> None:
    gradients: list[Tensor | None] = [torch.full((2, 3), 3.0, dtype=dtype), None, torch.tensor(5.0, dtype=dtype)]
    for factor in _both(0.3):
        first, second, third = factor.times(gradients)
        assert first is not None
        assert second is None
        assert third is not None
        assert first.dtype == third.dtype == dtype
        assert torch.allclose(first, torch.full((2, 3), 0.9, dtype=dtype), rtol=1e-2)
        assert torch.allclose(third, torch.tensor(1.5, dtype=dtype), rtol=1e-2)
    assert gradients[0] is not None
    assert (gradients[0] == 3.0).all()


def test_gradients_are_cast_before_they_are_multiplied() -> None:
    gradient = torch.tensor([1.0 / 3], dtype=torch.bfloat16)
    for factor in _both(1.7):
        (found,) = factor.times([gradient], torch.float32)
        assert found is not None
        assert torch.equal(found, gradient.float() * torch.tensor(1.7))


def test_a_factor_of_zero_gives_zeros_also_of_what_is_no_number() -> None:
    for factor in _both(0.0):
        (found,) = factor.times([torch.tensor([float("nan"), float("inf"), 1.0])])
        assert found is not None
        assert found.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.sparse
def test_sparse_gradients_stay_sparse() -> None:
    gradient = torch.sparse_coo_tensor([[0, 2]], torch.tensor([[1.0], [float("nan")]]), (3, 1), check_invariants=True)
    for factor, value in ((Factor(2.0), 2.0), (Factor(torch.tensor(2.0)), 2.0), (Factor(torch.tensor(0.0)), 0.0)):
        (found,) = factor.times([gradient])
        assert found is not None
        assert found.is_sparse
        assert found.to_dense()[0].item() == value
        assert found.to_dense()[2].isnan().item() == (value != 0.0)


def test_a_gradient_with_a_graph_keeps_it() -> None:
    x = torch.tensor([3.0], requires_grad=True)
    for factor in _both(2.0):
        (found,) = factor.times([x * x])
        assert found is not None
        (slope,) = torch.autograd.grad(found, x)
        assert slope.item() == 12.0
