"""Replicated units side by side, with nothing annotated around them, share an accelerator's communicator."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as checkpoint_of_torch

from composable import remove, replicate
from composable.device.collectives import communicators_wrapped_by
from composable.errors import RanksDisagreeError
from composable.model.traversal import get_replicated_states
from composable.plan.phases import GradPhase
from tests.helpers.communicators import all_accelerators
from tests.helpers.compare import averaged_gradients
from tests.helpers.world import Pool, current_device
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


# --- models that are gone, on some ranks or on all ----------------------------------------------------------------------


class _Deep(nn.Module):
    """Gradients of the last layers are there before the first one's, where a backward may raise.

    Args:
        spare: whether there is a layer that nobody uses.
    """

    def __init__(self, spare: bool = False) -> None:
        super().__init__()
        if spare:
            self.spare = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.arrived: Callable[[], None] = lambda: None
        self.broken = False

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
            if layer is self.layers[0]:
                x.register_hook(self._come_to_the_first)
        return x

    def _come_to_the_first(self, _: Tensor) -> None:
        self.arrived()
        if self.broken:
            raise ValueError("on purpose")


def _replicated(plain: nn.Module) -> Any:
    model = copy.deepcopy(plain).to(current_device())
    with _as_on_accelerators():
        return replicate(model, bucket_cap_mb=CAP)


def _as_on_accelerators() -> AbstractContextManager[object]:
    return communicators_wrapped_by(all_accelerators) if current_device().type == "cpu" else nullcontext()


def _plain(spare: bool = False) -> _Deep:
    torch.manual_seed(0)
    return _Deep(spare).to(torch.float64)


def _input(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)


def _step(model: nn.Module, step: int) -> None:
    model.zero_grad()
    model(_input(step).to(current_device())).square().sum().backward()


def _step_both(plain: nn.Module, model: nn.Module, step: int) -> None:
    plain.zero_grad()
    plain(_input(step)).square().sum().backward()
    _step(model, step)
    for (name, mean), parameter in zip(averaged_gradients(plain).items(), model.parameters(), strict=True):
        assert parameter.grad is not None
        assert mean is not None
        torch.testing.assert_close(parameter.grad, mean, rtol=1e-9, atol=1e-11, msg=lambda text, n=name: f"{step} {n}: {text}")


def _launched_early(model: Any) -> list[int]:
    """How many sums each of two backwards has launched before its last gradients."""
    (unit,) = get_replicated_states(model)
    counts: list[int] = []
    model.arrived = lambda: counts.append(
        sum(bucket.phase is GradPhase.REDUCING for bucket in unit.averaging.current.buckets.each)
    )
    for step in range(2):
        _step(model, step)
    model.arrived = lambda: None
    return counts


def _former(kept: str) -> object:
    """A model of which rank 0 alone keeps something; elsewhere no garbage of it is left. It has trained, or was removed."""
    model = _replicated(_plain())
    if kept == "a copy of one removed":
        left = copy.deepcopy(model) if dist.get_rank() == 0 else None
        remove(model, replicate)
        return left
    _step(model, 0)
    if dist.get_rank() == 0:
        if kept == "the model":
            return model
        if kept == "a copy":
            return copy.deepcopy(model)
        cycle: list[object] = [model]
        cycle.append(cycle)
        return None
    del model
    gc.collect()
    return None


def _a_backward_raises(kept: str) -> tuple[list[int], list[int]]:
    gc.collect()
    gc.disable()
    try:
        left = _former(kept)
        if kept != "garbage":
            gc.collect()
        plain = _plain()
        model = _replicated(plain)
        for step in range(3):
            model.broken = True
            with pytest.raises(ValueError, match="on purpose"):
                _step(model, 50 + step)
            model.broken = False
            _step_both(plain, model, step)
        while_kept = _launched_early(model)
        del left, model
        gc.collect()
        return while_kept, _launched_early(_replicated(plain))
    finally:
        gc.enable()


@pytest.mark.host
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kept", ["the model", "a copy", "a copy of one removed", "garbage"])
def test_a_backward_may_raise_on_all_ranks_while_one_of_them_keeps_a_model_that_is_gone(
    pool: Pool, ranks: int, kept: str
) -> None:
    """All launch alike, at once or at the end of a backward: otherwise sums of that backward meet those of the next."""
    by_rank = pool.run(ranks, _a_backward_raises, kept)
    while_kept, afterwards = by_rank[0]
    assert by_rank == [by_rank[0]] * ranks
    assert [count > 0 for count in while_kept] == [kept in ("garbage", "a copy of one removed")] * 2
    assert [count > 0 for count in afterwards][1]


def _another_one_is_removed(spare: bool) -> list[int]:
    gc.collect()
    other, model = _replicated(_plain()), _replicated(_plain(spare))
    _step(other, 0)
    counts = _launched_early(model)
    remove(other, replicate)
    return counts + _launched_early(model)


@pytest.mark.host
@pytest.mark.parametrize("spare", [False, True], ids=["", "with a layer that nobody uses"])
def test_a_model_launches_early_from_the_second_backward_after_another_one_has_been_removed(pool: Pool, spare: bool) -> None:
    for counts in pool.run(2, _another_one_is_removed, spare):
        assert [count > 0 for count in counts] == [False, False, False, True]
