"""No step makes the host wait for an accelerator. Skipped where there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from composable import fully_shard, replicate
from tests.helpers.world import Pool

_BLOCK: Final = nn.TransformerEncoderLayer


def _fully_sharded(**options: Any) -> Callable[[nn.Module], object]:
    return lambda model: fully_shard(model, policy={_BLOCK}, **options)


def _hybrid(model: nn.Module) -> None:
    mesh = init_device_mesh("cuda", (2, 1), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, policy={_BLOCK}, mesh=mesh)


def _mixed(model: nn.Module) -> None:
    replicate(model[-1])  # type: ignore[index]
    fully_shard(model, policy={_BLOCK})


_SCHEMES: Final[dict[str, Callable[[nn.Module], object]]] = {
    "fully_shard": _fully_sharded(),
    "without resharding": _fully_sharded(reshard_after_forward=False),
    "bfloat16": _fully_sharded(mp_policy="bf16"),
    "hybrid": _hybrid,
    "replicate": replicate,
    "both": _mixed,
}


def _train(scheme: str) -> None:
    torch.manual_seed(0)
    blocks = [_BLOCK(64, 4, 128, dropout=0.0, batch_first=True) for _ in range(3)]
    model = nn.Sequential(*blocks, nn.Linear(64, 64)).cuda()
    _SCHEMES[scheme](model)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(4, 16, 64, device="cuda")

    def step() -> Tensor:
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for _ in range(3):  # orders are agreed upon, and buffers made
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("scheme", _SCHEMES)
def test_no_step_waits_for_the_device(pool: Pool, scheme: str) -> None:
    pool.run(2, _train, scheme, device="cuda")
