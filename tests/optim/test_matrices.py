"""An optimizer that steps whole matrices on their owners does, bit for bit, what it does in one
process that is given the same gradients.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable import fully_shard, step_on_matrices
from tests.helpers.world import spmd
from tests.optim.matrix_models import OPTIMIZERS, Net, OneProcess, Stacked, made


@spmd(ranks=[1, 2, 3, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_bit_is_that_of_one_process(name: str) -> None:
    model = made(Net)
    fully_shard(model, policy={nn.Linear})
    alone = OneProcess(model, OPTIMIZERS[name])
    optimizer = OPTIMIZERS[name](model.parameters())
    assert step_on_matrices(optimizer) is optimizer
    alone.step_beside(optimizer, range(4), dist.get_rank(), 7)


@spmd(ranks=[1, 2, 4])
@pytest.mark.parametrize("name", ["Shampoo", "whitening"])
def test_a_stack_of_experts_is_stepped_slice_by_slice(name: str) -> None:
    for experts in (3, 4):
        model = made(Stacked, experts)
        fully_shard(model)
        alone = OneProcess(model, OPTIMIZERS[name])
        optimizer = step_on_matrices(OPTIMIZERS[name](model.parameters()))
        alone.step_beside(optimizer, range(3), dist.get_rank(), 5)
