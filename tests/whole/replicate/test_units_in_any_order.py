"""Replicated units below one annotated module launch their reductions in one order, which all ranks
share.

Ranks run the units in orders of their own and leave out units and layers, so gradients become ready
in different orders.
"""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as checkpoint_of_torch

from composable import fully_shard, replicate
from composable.comm.backends import comms_wrapped_by
from tests.helpers.communicators import all_accelerators, all_ordered
from tests.helpers.compare import assert_mean_gradients
from tests.helpers.means import WIDTH, copies
from tests.helpers.world import Pool, current_device

CAP: Final = 100 / (1 << 20)  # bytes: several buckets in a unit
_COMMS: Final = {
    "messages": lambda comm: comm,
    "collectives": all_ordered,
    "accelerator": all_accelerators,
}


class Block(nn.Module):
    """Two layers and a buffer that differs from rank to rank until rank 0's comes."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.one = nn.Linear(WIDTH, WIDTH)
        self.two = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, short: bool = False) -> Tensor:
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() == -1:
            self.seen = self.seen + 1 + dist.get_rank()
        y = self.one(x).tanh()
        return x + (y if short else self.two(y)) * self.seen.cos()


class Model(nn.Module):
    """Rows of a sparse table, then blocks. In step `s` rank `r` begins with block `r + s`, leaves
    one out and shortens one.
    """

    def __init__(self, count: int = 4, reentrant: int = -1) -> None:
        super().__init__()
        # which has no sparse tensors
        self.table = nn.Embedding(6, WIDTH, sparse=current_device().type != "sim")
        self.blocks = nn.ModuleList(Block() for _ in range(count))
        self.head = nn.Linear(WIDTH, WIDTH)
        # which block runs in a checkpoint of torch's, of the kind that calls backward in backward
        self.reentrant = reentrant

    def forward(self, rows: Tensor, step: int) -> Tensor:
        x = self.table(rows)
        rank, count = dist.get_rank(), len(self.blocks)
        for turn in range(count):
            index = (rank + step + turn) % count
            if index == (rank + 2 * step) % count != self.reentrant:
                continue
            short = index == (2 * rank + step) % count
            if index == self.reentrant:
                x = checkpoint_of_torch(self.blocks[index], x, short, use_reentrant=True)
            else:
                x = self.blocks[index](x, short)
        return self.head(x) if (rank + step) % 3 else x  # type: ignore[no-any-return]


def _by_policy(model: nn.Module) -> None:
    replicate(model, policy={Block, nn.Embedding}, bucket_cap_mb=CAP)


def _one_by_one(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, (Block, nn.Embedding)):
            replicate(module, bucket_cap_mb=CAP)


def _in_a_loop(model: nn.Module) -> None:
    _one_by_one(model)
    replicate(model, bucket_cap_mb=CAP)


def _below_shards(model: nn.Module) -> None:
    _one_by_one(model)
    fully_shard(model)


_FORMS: Final = {each.__name__: each for each in (_by_policy, _in_a_loop, _below_shards)}


def _annotated(form: str, comm: str, **options: Any) -> tuple[nn.Module, nn.Module]:
    """A plain model and an annotated one."""
    with comms_wrapped_by(_COMMS[comm]):
        return copies(lambda: Model(**options), _FORMS[form])


def _loss(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    output = model(torch.randint(0, 6, (3,), generator=generator), step)
    return output.square().sum()  # type: ignore[no-any-return]


def _follow(plain: nn.Module) -> None:
    for buffer in plain.buffers():
        dist.broadcast(buffer, 0)


def compare_gradients(plain: nn.Module, model: nn.Module, step: object) -> None:
    for parameter in plain.parameters():
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()
    assert_mean_gradients(plain, model, step)


def _train(plain: nn.Module, model: nn.Module, steps: int = 4) -> None:
    for step in range(steps):
        _follow(plain)
        for each in (plain, model):
            each.zero_grad()
            _loss(each, step).backward()
        compare_gradients(plain, model, step)
    for ours, theirs in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.equal(ours, theirs)


def _parity(form: str, comm: str, **options: Any) -> None:
    _train(*_annotated(form, comm, **options))


@pytest.mark.parametrize("comm", _COMMS)
@pytest.mark.parametrize("form", _FORMS)
def test_ranks_whose_units_become_ready_in_different_orders_get_the_means(
    pool: Pool, form: str, comm: str
) -> None:
    pool.run(2, _parity, form, comm)


@pytest.mark.parametrize("form", ["_by_policy", "_below_shards"])
def test_so_do_four_ranks(pool: Pool, form: str) -> None:
    pool.run(4, _parity, form, "messages")


@pytest.mark.parametrize("form", ["_by_policy", "_below_shards"])
def test_a_unit_whose_gradients_come_in_a_backward_inside_another_one_belongs_to_the_outer_one(
    pool: Pool, form: str
) -> None:
    pool.run(2, _parity, form, "messages", reentrant=2)
