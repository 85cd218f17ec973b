"""Frozen parameters cost no gradient, no memory for one and no reduction. Their parity is in test_compositions and the battery."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable import fully_shard
from composable.engine.param_group import ShardedState
from composable.engine.root import units_below
from composable.traversal import get_handles
from tests.helpers.compare import full
from tests.helpers.world import current_device, spmd

WIDTH = 12


class Adapted(nn.Module):
    """A frozen layer of small integers with its scale, a frozen one, and a low-rank correction."""

    def __init__(self) -> None:
        super().__init__()
        self.quantised = nn.Parameter(torch.randint(-9, 9, (WIDTH, WIDTH), dtype=torch.int8), requires_grad=False)
        self.norm = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 3, bias=False), nn.Linear(3, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return x + self.frozen(x @ self.quantised.to(x.dtype) / 9) + self.up(self.down(x))  # type: ignore[no-any-return]


class Base(nn.Sequential):
    """All of it frozen."""


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    base = [Base(nn.Linear(WIDTH, WIDTH), nn.Tanh()).requires_grad_(False) for _ in range(2)]
    return nn.Sequential(Adapted(), base[0], Adapted(), base[1], nn.Linear(WIDTH, 2)).to(current_device())


def _batch(rank: int, turn: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * rank + turn)
    return torch.randn(3, WIDTH, generator=generator).to(current_device())


@spmd(ranks=2)
def test_frozen_parameters_have_no_gradient_no_memory_for_one_and_no_reduction() -> None:
    model = _model()
    fully_shard(model, policy={Adapted, Base})
    for turn in range(2):
        model(_batch(dist.get_rank(), turn)).sum().backward()
    for groups in get_handles(model):
        for group in groups:
            assert group.state is ShardedState.SHARDED
    for unit in units_below([model]):
        for bucket in unit.buckets:
            trained = [p for p, trains in zip(bucket.at_rest, bucket.trainable, strict=True) if trains]
            assert bool(bucket._plans) == bool(trained), "no reduction"
            local = sum(parameter.to_local().numel() for parameter in trained)  # type: ignore[attr-defined]
            whole = sum(parameter.numel() for parameter in trained)
            gaps = 16 * (1 + len(trained))  # between parameters, and flags
            for plan in bucket._plans.values():
                assert plan.layout.numel <= local + gaps
                assert plan.message.tensor.numel() <= whole + 2 * gaps
    for parameter in model.parameters():
        assert (parameter.grad is not None) is parameter.requires_grad


@spmd(ranks=2)
def test_a_frozen_unit_that_is_kept_after_forward_sees_what_is_written_to_it() -> None:
    model, plain = _model(), _model()
    fully_shard(model, policy={Adapted, Base}, reshard_after_forward=False)
    for each in (model, plain):
        each(_batch(0, 0)).sum().backward()
        with torch.no_grad():
            each[1][0].weight.mul_(2)  # type: ignore[index]
    torch.testing.assert_close(model(_batch(0, 1)), plain(_batch(0, 1)))
    state = {name: full(tensor) * (3 if tensor.is_floating_point() else 1) for name, tensor in model.state_dict().items()}
    for each in (model, plain):
        each.load_state_dict(state)
    torch.testing.assert_close(model(_batch(0, 2)), plain(_batch(0, 2)))
    for each in (model, plain):
        each.zero_grad()
        each[1].requires_grad_(True)  # type: ignore[index]
        each(_batch(0, 0)).sum().backward()
    for (name, expected), actual in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert (actual.grad is None) == (expected.grad is None), name
        if expected.grad is not None and actual.grad is not None:
            torch.testing.assert_close(full(actual.grad), expected.grad, msg=name)
