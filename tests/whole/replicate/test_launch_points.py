"""Replicated units that ranks use in different ways, next to shards: which collectives there are
does not depend on gradients.

Sharded units of which ranks leave out different layers, units in units and recomputations are in
the generated programs.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable import MixedPrecisionPolicy, fully_shard, replicate
from composable.comm.backends import comms_wrapped_by
from composable.comm.base import Comm
from tests.helpers.communicators import Log, Recording, all_ordered
from tests.helpers.compare import assert_mean_gradients
from tests.helpers.means import WIDTH, batch_of, copies
from tests.helpers.world import Pool, need_devices


class Block(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x).tanh()


class Chain(nn.Module):
    """Five layers, of which the last one, whose gradients come first, is left out by all ranks but
    the first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[: 5 if dist.get_rank() == 0 else 4]:
            x = layer(x)
        return x


class Branches(nn.Module):
    """Replicated branches that every rank runs in an order of its own, between sharded blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(WIDTH, WIDTH), Block(WIDTH, WIDTH)
        self.branches = nn.ModuleList(Chain() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        rank = dist.get_rank()
        outputs = [self.branches[(rank + step) % 3](x) for step in range(3)]
        return self.second(sum(outputs))  # type: ignore[no-any-return]


class OneOfTwo(nn.Module):
    """Each rank calls one of two branches, and uses the output of one of two heads."""

    apart = True  # otherwise all ranks do as the first one does

    def __init__(self) -> None:
        super().__init__()
        self.first = Block(WIDTH, WIDTH)
        self.branches = nn.ModuleList(Chain() for _ in range(2))
        self.heads = nn.ModuleList(Chain() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        number = dist.get_rank() % 2 if self.apart else 0
        x = self.branches[number](self.first(x))
        outputs = [head(x) for head in self.heads]
        return outputs[number]  # type: ignore[no-any-return]


class Reader(nn.Module):
    """The first rank reads a weight of replicated layers that nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(WIDTH, WIDTH), Block(WIDTH, WIDTH)
        self.words = Chain()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if dist.get_rank() == 0:
            x = x + nn.functional.linear(x, self.words.layers[0].weight)  # type: ignore[arg-type]
        return self.second(x)  # type: ignore[no-any-return]


class SkippedCast(nn.Module):
    """A replicated unit that computes in another dtype; from some step on only rank 0 runs it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (Block(WIDTH, WIDTH) for _ in range(3))
        self.cast = Chain()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if not self.apart or dist.get_rank() == 0:
            x = x + self.cast(x).to(x.dtype)
        return self.third(self.second(x))  # type: ignore[no-any-return]


def _mixed(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, Chain):
            replicate(module, bucket_cap_mb=0.0001)
    fully_shard(model, policy={Block})


def _cast(model: nn.Module) -> None:
    replicate(model.cast, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float64))
    fully_shard(model, policy={Block}, reshard_after_forward=True)


def _replicated(model: nn.Module) -> None:
    replicate(model, policy={Block, Chain})


def _train(
    kind: type[nn.Module], annotate: Callable[..., None], ordered: bool, later: int = 0
) -> list[str]:
    """The labels of what was launched, in order; gradients are those of the plain model.

    Args:
        later: from this step on ranks do different things.
    """
    log = Log()

    def wrapped(comm: Comm) -> Comm:
        return Recording(all_ordered(comm) if ordered else comm, log)

    with comms_wrapped_by(wrapped):
        plain, model = copies(kind, annotate)
    for step in range(3 + later):
        for each in (plain, model):
            each.apart = step >= later
            each.zero_grad()
            x = batch_of(step).requires_grad_()
            (each(x) + 0.1 * each(x * 2)).square().mean().backward()
        assert_mean_gradients(plain, model, step)
    return log.labels()


@pytest.mark.parametrize("ordered", [False, True], ids=["point to point", "collectives"])
@pytest.mark.parametrize(
    ("ranks", "kind", "annotate"),
    [
        (2, Branches, _mixed),
        (4, Branches, _mixed),
        (2, OneOfTwo, _mixed),
        (2, OneOfTwo, _replicated),
        (4, OneOfTwo, _replicated),
        (2, Reader, _mixed),
    ],
)
def test_all_ranks_launch_what_one_launches_and_what_is_sharded_in_one_order(
    pool: Pool,
    ranks: int,
    kind: type[nn.Module],
    annotate: Callable[..., None],
    ordered: bool,
    device: str,
) -> None:
    need_devices(device, ranks)
    labels = pool.run(ranks, _train, kind, annotate, ordered, device=device)
    sharded = [[label for label in mine if "all-reduce" not in label] for mine in labels]
    for rank in range(1, ranks):
        assert sorted(labels[rank]) == sorted(labels[0])
        assert sharded[rank] == sharded[0]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("ordered", [False, True], ids=["point to point", "collectives"])
def test_ranks_may_come_to_use_different_replicated_units_after_some_steps(
    pool: Pool, ranks: int, ordered: bool
) -> None:
    for kind, annotate in ((OneOfTwo, _mixed), (SkippedCast, _cast)):
        labels = pool.run(ranks, _train, kind, annotate, ordered, 2)
        assert labels == [labels[0]] * ranks
