"""Where collectives are launched, and who waits for what, does not depend on which gradients a rank happens to have.

Ranks leave out parameters, each in its own way; sharded units run on all of them. Generated programs have units in units, modules
that hand on what they were given, and several outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch.distributed as dist
from torch import Tensor, nn

from composable import checkpoint, fully_shard, replicate
from composable.comm import Comm, comms_wrapped_by
from composable.errors import RanksDisagreeError
from tests.helpers.communicators import Log, Recording, all_ordered
from tests.helpers.compare import assert_mean_gradients
from tests.helpers.means import WIDTH, batch_of, twins
from tests.helpers.world import Pool, current_device, need_devices


class Block(nn.Module):
    """A residual block of two layers, which leaves both out where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH)
        self.two = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, short: bool = False) -> Tensor:
        return x.tanh() if short else x + self.two(self.one(x).tanh())


class HeadAndSpare(nn.Module):
    """Eight blocks; a head and a second layer are left over in the unit around them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(8))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.spare = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        x = self.head(x)
        return self.spare(x) if dist.get_rank() == 0 else x


class Twice(nn.Module):
    """A block called twice, whose layers the first rank uses the second time, and the others the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.shared = Block()

    def forward(self, x: Tensor) -> Tensor:
        first = dist.get_rank() == 0
        x = self.shared(x, short=first)
        for block in self.blocks:
            x = block(x)
        x = self.shared(x, short=not first)
        for block in self.blocks:
            x = block(x)
        return x


MODELS: Final = (HeadAndSpare, Twice)


def _sharded(model: nn.Module, **options: Any) -> None:
    fully_shard(model, policy={Block}, **options)


def _checkpointed(model: nn.Module, **options: Any) -> None:
    checkpoint(model, policy={Block})
    _sharded(model, **options)


def _train(plain: nn.Module, model: nn.Module, log: Log | None = None, steps: int = 3) -> None:
    for step in range(steps):
        if log is not None:
            log.add("step", str(step))
        for each in (plain, model):
            x = batch_of(step).requires_grad_()
            (each(x) + 0.1 * each(x * 2)).square().mean().backward()
        assert_mean_gradients(plain, model, step)
        plain.zero_grad()
        model.zero_grad()


def _run(kind: type[nn.Module], annotate: Callable[..., None], ordered: bool, **options: Any) -> list[str]:
    """Train; returns the labels of what was launched, in order."""
    log = Log()

    def wrapped(comm: Comm) -> Comm:
        return Recording(all_ordered(comm) if ordered else comm, log)

    with comms_wrapped_by(wrapped):
        plain, model = twins(kind, annotate, **options)
    _train(plain, model, log)
    return log.labels()


@pytest.mark.parametrize("ordered", [False, True], ids=["point to point", "collectives"])
@pytest.mark.parametrize("keep", [False, True], ids=["resharded", "kept"])
@pytest.mark.parametrize(
    ("kind", "ranks"),
    [*((kind, 2) for kind in MODELS), (HeadAndSpare, 4)],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_ranks_that_leave_out_different_parameters_launch_the_same(
    pool: Pool, ranks: int, kind: type[nn.Module], keep: bool, ordered: bool, device: str
) -> None:
    need_devices(device, ranks)
    options = {"reshard_after_forward": not keep}
    labels = pool.run(ranks, _run, kind, _sharded, ordered, device=device, **options)
    assert all(other == labels[0] for other in labels[1:])


@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
def test_ranks_that_recompute_different_parameters_launch_the_same(pool: Pool, kind: type[nn.Module], device: str) -> None:
    need_devices(device, 2)
    labels = pool.run(2, _run, kind, _checkpointed, True, device=device)
    assert labels[0] == labels[1]


# --- replicated units -------------------------------------------------------------------------------------------------


class Chain(nn.Module):
    """Five layers, of which the last one, whose gradients come first, is left out by all ranks but the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[: 5 if dist.get_rank() == 0 else 4]:
            x = layer(x)
        return x


class ShardedThenReplicated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = Chain()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


class Branches(nn.Module):
    """Replicated branches that every rank runs in an order of its own, between sharded blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.branches = nn.ModuleList(Chain() for _ in range(3))
        self.second = Block()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        rank = dist.get_rank()
        outputs = [self.branches[(rank + step) % 3](x) for step in range(3)]
        return self.second(sum(outputs))  # type: ignore[no-any-return]


def _mixed(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, Chain):
            replicate(module, bucket_cap_mb=0.0001)
    fully_shard(model, policy={Block})


@pytest.mark.parametrize("ordered", [False, True], ids=["point to point", "collectives"])
@pytest.mark.parametrize("kind", [ShardedThenReplicated, Branches], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("ranks", [2, 4])
def test_nobody_waits_in_a_backward_for_a_bucket_that_others_launch_at_its_end(
    pool: Pool, ranks: int, kind: type[nn.Module], ordered: bool, device: str
) -> None:
    need_devices(device, ranks)
    labels = pool.run(ranks, _run, kind, _mixed, ordered, device=device)
    sharded = [[label for label in mine if "all-reduce" not in label] for mine in labels]
    for rank in range(1, ranks):
        assert sharded[rank] == sharded[0]
        assert sorted(labels[rank]) == sorted(labels[0])


class OneOfTwo(nn.Module):
    """Each rank calls one of two branches, and uses the output of one of two heads."""

    apart = True  # otherwise all ranks do as the first one does

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.branches = nn.ModuleList(Chain() for _ in range(2))
        self.heads = nn.ModuleList(Chain() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        number = dist.get_rank() % 2 if self.apart else 0
        x = self.branches[number](self.first(x))
        outputs = [head(x) for head in self.heads]
        return outputs[number]  # type: ignore[no-any-return]


def _replicated(model: nn.Module) -> None:
    replicate(model, policy={Block, Chain})


@pytest.mark.parametrize("ordered", [False, True], ids=["point to point", "collectives"])
@pytest.mark.parametrize(("ranks", "annotate"), [(2, _replicated), (4, _replicated), (2, _mixed)])
def test_a_replicated_unit_takes_part_where_a_rank_uses_nothing_of_it(
    pool: Pool, ranks: int, annotate: Callable[..., None], ordered: bool, device: str
) -> None:
    need_devices(device, ranks)
    labels = pool.run(ranks, _run, OneOfTwo, annotate, ordered, device=device)
    for rank in range(1, ranks):
        assert sorted(labels[rank]) == sorted(labels[0])


def _part_later() -> str:
    model = OneOfTwo().to(current_device())
    model.apart = False
    _mixed(model)
    for _ in range(2):
        model(batch_of(0).float()).sum().backward()
    model.apart = True
    with pytest.raises(RanksDisagreeError) as caught:
        model(batch_of(0).float()).sum().backward()
    return str(caught.value)


@pytest.mark.beyond_sim("an accelerator compares what is launched in debug mode only")
def test_ranks_that_come_to_use_different_replicated_units_are_told_on_a_host(pool: Pool) -> None:
    for rank, text in enumerate(pool.run(2, _part_later)):
        assert f"reduction of unit 'heads.{rank}': the ranks brought gradients of different units or steps. Before it, " in text
        assert f"rank {1 - rank} accumulated 0 backwards before its gradient reduction of unit 'heads.{1 - rank}'" in text
