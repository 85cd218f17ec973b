"""What user code writes to unsharded parameters: it never reaches another rank, and is not lost without a word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable import fully_shard, reshard, unshard
from composable.memory.torch_private import CAN_SWAP
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
        dist.barrier()  # all ranks compute after all of them have written
        return x @ self.weight


def _double_the_weight(module: nn.Module, _: object) -> None:
    module.weight.mul_(2.0)


def _through_data(weight: nn.Parameter) -> None:
    weight.data.fill_(3.0 / len(weight))


def _through_numpy(weight: nn.Parameter) -> None:
    weight.detach().cpu().numpy()[:] = 3.0 / len(weight)


def _through_dlpack(weight: nn.Parameter) -> None:
    torch.from_dlpack(weight.detach()).fill_(3.0 / len(weight))


@spmd(ranks=2)
@pytest.mark.parametrize("write", [_through_data, _through_numpy, _through_dlpack])
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_a_write_that_leaves_no_trace_changes_nothing_on_other_ranks(
    write: Callable[[nn.Parameter], None], reshard_after_forward: bool
) -> None:
    if current_device().type != "cpu" and write is _through_numpy:
        pytest.skip("what NumPy writes to is a copy there")
    if not CAN_SWAP and write is _through_numpy:
        pytest.skip("what NumPy has seen, this torch can neither resize nor swap")
    module = _Writes(write if dist.get_rank() == 0 else lambda weight: None, _WIDE).to(current_device())
    model = fully_shard(module, reshard_after_forward=reshard_after_forward)
    with torch.no_grad():
        out = model(torch.ones(2, _WIDE, device=current_device()))
    if dist.get_rank() == 1:
        assert out[0, 0].item() == pytest.approx(1.0, rel=1e-5)


@spmd(ranks=[1, 2])
@pytest.mark.parametrize("width", [4, _WIDE])
@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
def test_a_write_that_is_lost_is_told_of_once_by_name(width: int, reshard_after_forward: bool | None) -> None:
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
        "WARNING: unit '0': 'weight' was written to in place while it was unsharded; the write is lost, since only shards are kept. "
        "Write to the parameter outside of forward, where it is a DTensor"
    ]


@spmd(ranks=2)
def test_a_write_after_steps_of_all_or_some_parameters_names_the_one_that_was_written_to() -> None:
    for order in ("all", "first", "all first", "first all"):
        module = nn.Sequential(*[nn.Linear(_WIDE, _WIDE) for _ in range(3)]).to(current_device())
        model = fully_shard(module)
        optimizers = {
            "all": torch.optim.SGD(model.parameters(), lr=0.1),
            "first": torch.optim.SGD(model[0].parameters(), lr=0.1),
        }
        with logged() as lines, torch.no_grad():
            for name in order.split():
                with torch.enable_grad():
                    model(torch.ones(2, _WIDE, device=current_device())).sum().backward()
                optimizers[name].step()
                model.zero_grad()
            model[2].register_forward_pre_hook(_double_the_weight)
            model(torch.ones(2, _WIDE, device=current_device()))
        assert [line.partition(" was written")[0] for line in lines] == ["WARNING: unit '(root)': '2.weight'"], order


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


@spmd(ranks=2)
def test_explicitly_unsharded_parameters_are_this_ranks_own() -> None:
    model = fully_shard(nn.Linear(_WIDE, _WIDE).to(current_device()))
    unshard(model).wait()
    with torch.no_grad():
        model.weight.fill_(float(dist.get_rank()))
    dist.barrier()
    assert model.weight.eq(float(dist.get_rank())).all()
    dist.barrier()
    reshard(model)
