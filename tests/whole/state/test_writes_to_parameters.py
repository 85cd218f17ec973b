"""What user code writes to unsharded parameters: it is not lost without a word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable import fully_shard, keep_unsharded, unshard
from tests.helpers.logged import logged
from tests.helpers.world import current_device, spmd

_WIDE: Final = 1024  # a parameter of 4 MiB: what is done for large ones only is done for it


class _Writes(nn.Module):
    """Writes to its weight before it computes with it."""

    def __init__(self, write: Callable[[nn.Parameter], object], width: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width, width), 1.0 / width))
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.write(self.weight)
        return x @ self.weight


@spmd(ranks=[1, 2])
@pytest.mark.parametrize("width", [4, _WIDE])
@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
def test_a_write_that_is_lost_is_reported_once_by_name(
    width: int, reshard_after_forward: bool | None
) -> None:
    model = nn.Sequential(_Writes(lambda weight: weight.mul_(2.0), width)).to(current_device())
    fully_shard(model[0], reshard_after_forward=reshard_after_forward)
    fully_shard(model)
    x = torch.ones(2, width, device=current_device())
    with logged() as lines:
        for _ in range(3):
            out = model(x)
            out.sum().backward()
    if dist.get_world_size() == 1:
        assert lines == []  # the parameter is all here, nothing is lost
        assert out[0, 0].item() == pytest.approx(8.0)
        return
    assert out[0, 0].item() == pytest.approx(2.0)
    assert lines == [
        "WARNING: unit '0': 'weight' was written to in place while it was unsharded; the write is"
        " lost, since only shards are kept. Write to the parameter outside of forward, where it is"
        " a DTensor"
    ]


@spmd(ranks=2)
def test_steps_of_some_parameters_while_all_are_unsharded_are_no_such_writes() -> None:
    model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(current_device()))
    with logged() as lines, keep_unsharded(model):
        for module in (model, model[0]):
            model(torch.ones(2, 4, device=current_device())).sum().backward()
            torch.optim.SGD(module.parameters(), lr=0.1).step()
            unshard(model)
    assert lines == []


@spmd(ranks=2)
def test_a_number_that_every_rank_holds_may_be_written_to() -> None:
    """CLIP clamps its temperature so. Such a parameter is not sharded, so that nothing is lost."""
    module = _Writes(lambda weight: None).to(current_device())
    module.write = lambda weight: module.temperature.clamp_(max=0.5)
    model = fully_shard(module)
    with logged() as lines:
        model(torch.ones(2, 4, device=current_device())).sum().backward()
    assert model.temperature.to_local().item() == 0.5
    assert lines == []


@spmd(ranks=2)
def test_an_embedding_that_scales_its_rows_down_is_left_alone() -> None:
    model = fully_shard(nn.Embedding(8, 4, max_norm=0.5).to(current_device()))
    with logged() as lines:
        out = model(torch.arange(8, device=current_device()))
        out.sum().backward()
    assert out.norm(dim=1).max() <= 0.5 + 1e-5
    assert lines == []
