"""No step makes the host wait for an accelerator, be it a simulated one. Skipped where there is
none.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from composable import fully_shard, replicate
from tests.accelerator import watch
from tests.helpers.world import Pool, current_device, need_devices

_BLOCK: Final = nn.TransformerEncoderLayer


def _fully_sharded(**options: Any) -> Callable[[nn.Module], object]:
    return lambda model: fully_shard(model, policy={_BLOCK}, **options)


def _hybrid(model: nn.Module) -> None:
    mesh = init_device_mesh(current_device().type, (2, 1), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, policy={_BLOCK}, mesh=mesh)


def _mixed(model: nn.Module) -> None:
    replicate(model[-1])  # type: ignore[index]
    fully_shard(model, policy={_BLOCK})


def _side_by_side(model: nn.Module) -> None:
    for part in model:  # type: ignore[attr-defined]
        replicate(part)


_SCHEMES: Final[dict[str, Callable[[nn.Module], object]]] = {
    "fully_shard": _fully_sharded(),
    "without resharding": _fully_sharded(reshard_after_forward=False),
    "bfloat16": _fully_sharded(mp_policy="bf16"),
    "hybrid": _hybrid,
    "replicate": replicate,
    "both": _mixed,
    "side by side": _side_by_side,
}


def _train(scheme: str) -> None:
    device = current_device()
    torch.manual_seed(0)
    blocks = [_BLOCK(64, 4, 128, dropout=0.0, batch_first=True) for _ in range(3)]
    model = nn.Sequential(*blocks, nn.Linear(64, 64)).to(device)
    _SCHEMES[scheme](model)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(4, 16, 64, device=device)

    def step() -> Tensor:
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for _ in range(3):  # orders are agreed upon, and buffers made
        step()
    torch.accelerator.synchronize()
    if device.type == "sim":
        assert watch.host_waits_of(step) == []
        return
    with warnings.catch_warnings(action="ignore"):  # it calls itself a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("scheme", _SCHEMES)
def test_no_step_waits_for_the_device(pool: Pool, scheme: str, device: str) -> None:
    if device == "cpu":
        pytest.skip("needs an accelerator")
    need_devices(device, 2)
    pool.run(2, _train, scheme, device=device)


class _Leaves(nn.Module):
    """A parameter of it is used on the ranks below `ranks` only."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.extra = nn.Parameter(torch.ones(4))
        self.used = dist.get_rank() < ranks

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y + self.extra if self.used else y


def _waits_for_uses(ranks: int) -> list[int]:
    torch.manual_seed(0)
    model = _Leaves(ranks).to(current_device())
    replicate(model)
    x, waits = torch.ones(2, 4, device=current_device()), []
    for _ in range(6):
        waits.append(len(watch.host_waits_of(lambda: model(x).sum().backward())))
        model.zero_grad()
    return waits[3:]


@pytest.mark.parametrize(("ranks", "waits"), [(0, [1, 1]), (1, [0, 1]), (2, [0, 0])])
def test_a_replica_that_misses_gradients_waits_once_to_know_who_has_them(
    pool: Pool, ranks: int, waits: list[int], device: str
) -> None:
    if device != "sim":
        pytest.skip("only the simulated accelerator counts waits")
    assert pool.run(2, _waits_for_uses, ranks, device=device) == [[count] * 3 for count in waits]
