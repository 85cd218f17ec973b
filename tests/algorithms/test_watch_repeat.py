"""`watch(model, repeat=True)`: a unit that runs again computes the same bits."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from composable import fully_shard, replicate, watch
from composable.errors import NotReproducedError
from tests.algorithms.test_watch_agreement import train
from tests.algorithms.watched import PROGRAMS, SKIPPING
from tests.helpers.world import Pool, current_device, spmd

BLOCKS: Final = 3


def _all_reproduce(name: str) -> None:
    assert train(PROGRAMS.get(name, SKIPPING), None, on="raise", repeat=True) == []


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", [*PROGRAMS, "skipped units"])
def test_sound_units_reproduce(pool: Pool, name: str, ranks: int) -> None:
    pool.run(ranks, _all_reproduce, name)


class _Wrong(torch.autograd.Function):
    """The same value; a gradient with one other bit."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient.view(-1)[:1].view(torch.int32).bitwise_xor_(1)
        return gradient


class Unreliable(nn.Module):
    """Computes wrongly on one rank, in one call or in all.

    Attributes:
        wrong: "forward", "backward", "weight", or "always".
    """

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("count", torch.zeros(()))
        self.wrong = ""
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        wrong = self.wrong if dist.get_rank() == dist.get_world_size() - 1 else ""
        self.wrong = self.wrong if self.wrong == "always" else ""
        weight = _Wrong.apply(self.inner.weight) if wrong == "weight" else self.inner.weight  # type: ignore[no-untyped-call]
        x = _Wrong.apply(x) if wrong == "backward" else x  # type: ignore[no-untyped-call]
        y: Tensor = self.dropout(nn.functional.linear(x, weight, self.inner.bias)).tanh()
        if wrong == "always":
            self.calls += 1
            return y * (1 + self.calls / 64)
        return y * 1.0001 if wrong == "forward" else y


class Residual(nn.Module):
    """Residuals around units: others read the units' inputs, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Unreliable() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return x


def _trained(verb: str, wrong: str, block: int, on: str) -> list[Any]:
    torch.manual_seed(0)
    model = Residual().to(current_device())
    if verb == "shards":
        fully_shard(model, policy={Unreliable})
    else:
        for each in model.blocks:
            replicate(each)
        replicate(model)
    optimizer = SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    counts = []
    with watch(model, repeat=True, agree=0, on=on) as watched:
        for step in range(BLOCKS):
            if step == block:
                model.blocks[block].wrong = wrong
            model(torch.randn(3, 4, device=current_device())).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            counts.append([int(each.count) for each in model.blocks])
    assert counts == [[step + 1] * BLOCKS for step in range(BLOCKS)]  # and not of runs again
    return [*watched.findings, *watched.hints]


@pytest.mark.parametrize("block", range(BLOCKS))
@pytest.mark.parametrize(
    ("verb", "wrong", "what"),
    [
        ("shards", "forward", "output 0"),
        ("shards", "backward", "gradient of input 0"),
        ("shards", "weight", "gradient of inner.weight"),
        ("replicate", "forward", "output 0"),
        ("replicate", "backward", "gradient of input 0"),
    ],
)
@spmd(ranks=2)
def test_a_rank_that_computes_wrongly_once_is_named(
    verb: str, wrong: str, what: str, block: int
) -> None:
    (found,) = _trained(verb, wrong, block, "warn")
    named = found.kind, found.unit, found.tensor, found.ranks, found.step
    assert named == ("not reproduced", f"blocks.{block}", what, (1,), block)


@spmd(ranks=2)
def test_kernels_that_are_not_deterministic_are_a_hint() -> None:
    (found,) = _trained("shards", "always", 1, "raise")
    assert (found.kind, found.ranks) == ("hint", (1,))
    assert "its kernels are not deterministic" in str(found)


@spmd(ranks=2)
def test_on_raise_it_is_an_error_on_all_ranks() -> None:
    with pytest.raises(NotReproducedError, match="rank 1: a unit that ran again computed other"):
        _trained("shards", "forward", 0, "raise")


@spmd(ranks=2)
def test_a_unit_with_hooks_of_the_user_is_left_out() -> None:
    model = fully_shard(nn.Sequential(nn.Linear(4, 4)).to(current_device()), policy={nn.Linear})
    if dist.get_rank() == 1:
        model[0].register_forward_hook(lambda module, args, output: output * 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    with watch(model, repeat=True, agree=0, on="raise") as watched:
        model(torch.randn(3, 4, device=current_device())).square().sum().backward()
        optimizer.step()
    assert watched.findings == []
