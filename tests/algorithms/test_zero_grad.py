"""`zero_grad` that is followed (`join`) is that of one module."""

from __future__ import annotations

import copy

from torch import nn

from composable import fully_shard
from composable.torch_private import on_zero_grad


def test_a_copy_zeroes_its_own_gradients_and_notifies_nobody() -> None:
    model, seen = nn.Linear(2, 1), list[bool]()
    fully_shard(model)
    ends = [on_zero_grad(model, seen.append) for _ in range(2)]
    copied = copy.deepcopy(model)
    for each in (model, copied):
        each.weight.grad = each.weight.detach() + 1
    copied.zero_grad()
    assert copied.weight.grad is None
    assert model.weight.grad is not None
    assert seen == []
    model.zero_grad(set_to_none=False)
    assert model.weight.grad is not None
    assert not model.weight.grad.any()
    assert seen == [False, False]
    for end in reversed(ends):
        end()
    assert "zero_grad" not in vars(model)
