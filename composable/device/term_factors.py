"""What gradients are multiplied by before anything adds them up; knows neither parameters nor the reason.

Note [Terms]
Whatever sums gradients makes a mean: of what arrives, of what earlier backwards left on their rank, of what was reduced before.
To have something else than a mean, each rank multiplies its own terms first, where nothing has been added to them yet. So what
is there already is never multiplied with them, whatever way gradients go. Where gradients are copied into messages anyway,
terms are multiplied in the dtype that they are summed in.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Factor:
    """A factor for the gradients of one rank.

    Args:
        value: not negative; a tensor (0-D, of a floating-point dtype) where the host has not read it.
        may_be_zero: of a tensor, whether it may.
    """

    __slots__ = ("_may_be_zero", "value")

    def __init__(self, value: float | Tensor, *, may_be_zero: bool = True) -> None:
        self.value = value
        self._may_be_zero = may_be_zero

    def times(self, gradients: Sequence[Tensor | None], dtype: torch.dtype | None = None) -> list[Tensor | None]:
        """New tensors: each gradient, cast to `dtype` if one is given, and multiplied; None stays None.

        A factor of zero gives zeros, also for what is infinite or NaN.
        """
        present = [g if dtype is None or g.dtype == dtype else g.to(dtype) for g in gradients if g is not None]
        products = iter(self._products(present))
        return [None if gradient is None else next(products) for gradient in gradients]

    def _products(self, gradients: list[Tensor]) -> Sequence[Tensor]:
        value = self.value
        if not gradients:
            return gradients
        if not isinstance(value, Tensor) and value == 0.0:
            return [torch.zeros_like(gradient) for gradient in gradients]
        if any(gradient.layout is not torch.strided or gradient.requires_grad for gradient in gradients):
            return [self._product(gradient) for gradient in gradients]
        if not isinstance(value, Tensor):
            return torch._foreach_mul(gradients, value)
        if len(dict.fromkeys((value.device, *(gradient.device for gradient in gradients)))) > 1:
            return [self._product(gradient) for gradient in gradients]
        products = torch._foreach_mul(gradients, value)
        return [self._in_place_of(gradient, product) for gradient, product in zip(gradients, products, strict=True)]

    def _product(self, gradient: Tensor) -> Tensor:
        value = self.value
        if not isinstance(value, Tensor):
            return gradient * value
        value = value.to(gradient.device)
        if gradient.layout is torch.strided:
            return self._in_place_of(gradient, gradient * value)
        rows = gradient.coalesce()
        values = self._in_place_of(rows.values(), rows.values() * value)
        return torch.sparse_coo_tensor(rows.indices(), values, rows.shape, is_coalesced=True, check_invariants=False)

    def _in_place_of(self, gradient: Tensor, product: Tensor) -> Tensor:
        """In its dtype: two tensors without dimensions have the wider one's; and zeros for a factor of zero, not for NaN."""
        assert isinstance(self.value, Tensor)
        product = product.to(gradient.dtype)
        if not self._may_be_zero:
            return product
        nothing = self.value.to(product.device) <= 0
        return torch.where(nothing, torch.zeros((), dtype=product.dtype, device=product.device), product)
