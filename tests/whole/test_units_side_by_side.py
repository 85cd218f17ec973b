"""Replicated units side by side, with nothing annotated around them, share an accelerator's communicator."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as checkpoint_of_torch

from composable import replicate
from composable.device.collectives import communicators_wrapped_by
from composable.errors import RanksDisagreeError
from tests.helpers.communicators import all_accelerators
from tests.helpers.world import Pool
from tests.whole.test_one_communicator import CAP, WIDTH, Block, communicators_in, compare_gradients


class _Sides(nn.Module):
    """Parts of which each rank runs all, in an order of its own, and shortens one."""

    def __init__(self, reentrant: int = -1) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Block() for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: Tensor, step: int) -> Tensor:
        rank = dist.get_rank()
        for turn in range(3):
            index = (rank + step + turn) % 3 if self.reentrant < 0 else turn
            short = index == (rank + step) % 3
            if index == self.reentrant:
                x = checkpoint_of_torch(self.parts[index], x, short, use_reentrant=True)
            else:
                x = self.parts[index](x, short)
        return x


def _side_by_side(reentrant: int) -> None:
    """Nothing is annotated around the units: over one communicator they may be in backwards inside of each other."""
    torch.manual_seed(0)
    plain = _Sides(reentrant).to(torch.float64)
    model = copy.deepcopy(plain)
    with communicators_wrapped_by(all_accelerators):
        for part in model.parts:
            replicate(part, bucket_cap_mb=CAP, broadcast_buffers=False)
    assert communicators_in(model) == 1
    for step in range(4):
        for each in (plain, model):
            each.zero_grad()
            generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
            x = torch.randn(3, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)
            each(x, step).square().sum().backward()
        compare_gradients(plain, model, step)


@pytest.mark.host
@pytest.mark.parametrize("reentrant", [-1, 0, 1], ids=["side by side", "the first in a backward inside", "the middle one"])
def test_units_side_by_side_share_an_accelerators_communicator_in_whatever_order_gradients_come(
    pool: Pool, reentrant: int
) -> None:
    pool.run(2, _side_by_side, reentrant)


def _buffers_in_other_orders() -> str:
    parts = _Sides().parts
    with communicators_wrapped_by(all_accelerators):
        for part in parts:
            replicate(part)
    with pytest.raises(RanksDisagreeError) as caught:
        parts[dist.get_rank()](torch.ones(3, WIDTH))
    return str(caught.value)


@pytest.mark.host
def test_units_side_by_side_with_buffers_must_be_called_in_one_order_on_an_accelerator(pool: Pool) -> None:
    for text in pool.run(2, _buffers_in_other_orders):
        assert text.startswith("replicate: rank ")
        assert text.endswith("Call such units in the same order on every rank, or call the annotated module around them")


def _a_copy_stays_on_one_rank() -> None:
    """There one unit more was made, and a model lives that nobody uses any more."""

    def made() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
        with communicators_wrapped_by(all_accelerators):
            return replicate(model)

    former = made()
    kept = copy.deepcopy(former) if dist.get_rank() == 0 else None
    del former
    gc.collect()
    model = made()
    for step in range(2):
        model(torch.full((3, WIDTH), float(step + dist.get_rank()))).sum().backward()
    lowest = torch.cat([buffer.reshape(-1).double() for buffer in model.buffers()])
    model.eval()(torch.ones(3, WIDTH))  # which shares rank 0's
    shared = torch.cat([buffer.reshape(-1).double() for buffer in model.buffers()])
    dist.broadcast(lowest, 0)
    assert torch.equal(shared, lowest)
    del kept


@pytest.mark.host
def test_units_with_buffers_agree_on_their_order_whatever_each_rank_has_made_and_kept(pool: Pool) -> None:
    pool.run(2, _a_copy_stays_on_one_rank)
