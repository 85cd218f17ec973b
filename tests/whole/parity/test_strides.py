"""A parameter that is not contiguous keeps its layout: unsharded, in its shards and their
gradients, and after `remove`.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from composable import fully_shard, remove, step_on_shards
from tests.helpers.compare import full
from tests.helpers.world import Pool, current_device, need_devices


class Strided(nn.Module):
    """Dense in other orders, of sizes that no number of ranks divides, with gaps, and expanded."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.across = nn.Linear(width, 5)
        self.across.weight = nn.Parameter(torch.randn(width, 5).t())
        self.gaps = nn.Parameter(torch.randn(5, 9)[:, :5])
        self.turned = nn.Parameter(torch.randn(2, 3, 5).permute(2, 0, 1))
        self.plain = nn.Linear(5, 4)
        self.seen: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.seen = {name: (p.shape, p.stride()) for name, p in self.named_parameters()}
        mixed = self.across(self.conv(x).mean((2, 3))) @ self.gaps
        result: Tensor = self.plain(mixed) + (mixed @ self.turned.sum((1, 2))).unsqueeze(1)
        return result


def _dense(parameter: Tensor) -> tuple[int, ...]:
    return torch.empty_like(parameter, device="meta").stride()


def _train(width: int, options: dict[str, Any], runs: bool) -> None:
    torch.manual_seed(0)
    plain = Strided(width).to(current_device())
    model = copy.deepcopy(plain)
    expected = {name: (p.shape, _dense(p)) for name, p in plain.named_parameters()}
    before = {name: p.stride() for name, p in model.named_parameters()}
    fully_shard(model, policy={nn.Linear}, **options)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (plain, model)]
    if not runs:
        step_on_shards(optimizers[1], enabled=False)
    for step in range(3):
        x = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(step)).to(
            current_device()
        )
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.zero_grad()
            each(x).square().mean().backward()
        assert model.seen == expected
        for (name, one), other in zip(plain.named_parameters(), model.parameters(), strict=True):
            assert isinstance(other, DTensor)
            assert one.grad is not None
            assert isinstance(other.grad, DTensor)
            assert other.grad.shape == other.shape
            assert (
                other.to_local().stride() == other.grad.to_local().stride()
                or not other.to_local().numel()
            )
            torch.testing.assert_close(full(other.grad), one.grad, msg=name)
        for optimizer in optimizers:
            optimizer.step()
    for (name, one), other in zip(plain.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(full(other), one.detach(), msg=name)
    model.load_state_dict(plain.state_dict(), assign=True)
    torch.testing.assert_close(model(x), plain(x))
    remove(model, fully_shard)
    assert {name: p.stride() for name, p in model.named_parameters()} == before
    torch.testing.assert_close(model(x), plain(x))


def _along(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.ndim > 1 else None


@pytest.mark.parametrize(
    ("how", "ranks", "width"),
    [
        ("default", 1, 7),
        ("default", 2, 7),
        ("default", 2, 700),
        ("default", 4, 7),
        ("other dimension", 2, 7),
        ("no resharding", 2, 7),
        ("steps on shards", 2, 7),
    ],
)
def test_parameters_that_are_not_contiguous_keep_their_layout(
    pool: Pool, how: str, ranks: int, width: int, device: str
) -> None:
    need_devices(device, ranks)
    options: dict[str, Any] = {
        "other dimension": {"shard_placement_fn": _along},
        "no resharding": {"reshard_after_forward": False},
    }
    pool.run(ranks, _train, width, options.get(how, {}), how == "steps on shards", device=device)
