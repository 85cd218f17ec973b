"""What one rank does by itself between steps changes no training: it needs no message, and nothing
of it is part of what ranks agree on.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from composable import fully_shard, keep_unsharded, replicate, reshard, unshard
from tests.extensions.rows import Emulated, Rows
from tests.helpers.compare import full_parameters
from tests.helpers.events import MIXED, REPLICAS, SHARDS, Scene, events_of, perform
from tests.helpers.world import Pool, current_device
from tests.tensor_parallel.models import mesh_of, parallelize_mlp

WIDTH: Final = 5
SECONDS: Final = 20.0  # until a collective gives up
LIMIT: Final = 60.0  # until a call counts as hung


class Block(nn.Module):
    def __init__(self, linear: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        self.up, self.down = linear(WIDTH, WIDTH + 2), linear(WIDTH + 2, WIDTH)
        self.act, self.drop = nn.GELU(), nn.Dropout(0.0)
        self.register_buffer("scale", torch.full((1,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(self.act(self.up(x)))) * self.scale  # type: ignore[no-any-return]


class Model(nn.Module):
    """Blocks of equal size, which can run in any order, and a head."""

    def __init__(self, linear: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(linear) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, order: tuple[int, ...] = (0, 1, 2, 3)) -> Tensor:
        for index in order:
            x = self.blocks[index](x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


# --- annotations --------------------------------------------------------------------------------


def _hybrid(model: Model) -> None:
    fully_shard(model, policy={Block}, mesh=init_device_mesh(current_device().type, (2, 2)))


def _tensor_parallel(verb: Callable[..., object], model: Model) -> None:
    mesh = mesh_of(2, 2)
    for block in model.blocks:
        parallelize_mlp(block, mesh["tp"])
    verb(model, mesh=mesh["dp"])


def _extended(model: Model) -> None:
    """Weights are sent as bytes, in parts of which each rank says how large they are."""
    for block in model.blocks:
        for linear in (block.up, block.down):  # type: ignore[union-attr]
            linear.weight = nn.Parameter(Rows(linear.weight.detach()))  # type: ignore[union-attr]
    _sharded(model)


def _replicated_blocks(model: Model) -> None:
    for index in (1, 3):
        replicate(model.blocks[index])
    for index in (0, 2):
        fully_shard(model.blocks[index])
    fully_shard(model)


def _replicated_root(model: Model) -> None:
    for block in model.blocks:
        fully_shard(block)
    replicate(model)


_sharded = partial(fully_shard, policy={Block})
_replicated = partial(replicate, bucket_cap_mb=0.0005)


@dataclass(frozen=True)
class Way:
    """How models are annotated.

    Attributes:
        kind: what a model consists of then.
        models: number of equal ones, interleaved in each step as a policy and its reference are.
        peers: ranks that have the same batch.
        linear: what the model in one process has in place of linear layers.
    """

    kind: str
    annotate: Callable[..., object]
    ranks: int = 2
    models: int = 1
    peers: int = 1
    linear: type[nn.Linear] = nn.Linear

    @property
    def events(self) -> list[str]:
        return events_of(self.kind, distributed=self.peers > 1)


_distribute = partial(Way, ranks=4, peers=2)

WAYS: Final = {
    "fully_shard": Way(SHARDS, _sharded),
    "fully_shard, kept after forward": Way(SHARDS, partial(_sharded, reshard_after_forward=False)),
    "hybrid": Way(SHARDS, _hybrid, ranks=4),
    "replicate": Way(REPLICAS, _replicated),
    "replicate, bucket views": Way(REPLICAS, partial(_replicated, gradient_as_bucket_view=True)),
    "replicated blocks beside shards": Way(MIXED, _replicated_blocks),
    "replicated root around shards": Way(MIXED, _replicated_root),
    "two sharded models": Way(SHARDS, _sharded, models=2),
    "two replicated models": Way(REPLICAS, _replicated, models=2),
    "tensor-parallel shards": _distribute(SHARDS, partial(_tensor_parallel, _sharded)),
    "tensor-parallel replicas": _distribute(REPLICAS, partial(_tensor_parallel, _replicated)),
    "extended parameters": Way(SHARDS, _extended, linear=Emulated),
}

LOST_IN: Final = [way for way, each in WAYS.items() if each.models == each.peers == 1]

# Of whose events, which take long, `--sample` runs a third: not the same one in all of these ways.
IN_THIRDS: Final = (
    "hybrid",
    "tensor-parallel shards",
    "two sharded models",
    "extended parameters",
    "tensor-parallel replicas",
)

# Whose events are tests of their own, too: for whoever looks for what one of them breaks.
ONE_BY_ONE: Final = ("fully_shard", "replicate", "replicated blocks beside shards")


# --- training -----------------------------------------------------------------------------------


def _batch(number: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + 10 * number + rank)
    x = torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)
    return x.to(current_device())


def _made(linear: type[nn.Linear] = nn.Linear) -> Model:
    torch.manual_seed(0)
    return Model(linear).to(current_device(), torch.float64)


def _optimizer(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class _Training:
    """Models that are annotated, and the same ones in one process on the batches of all ranks."""

    def __init__(self, way: Way) -> None:
        self.plain = [_made(way.linear) for _ in range(way.models)]
        self.models = [_made() for _ in range(way.models)]
        for model in self.models:
            way.annotate(model)
        self._plain_optimizers = [_optimizer(model) for model in self.plain]
        self._optimizers = [_optimizer(model) for model in self.models]
        self.steps = 0
        self.rank, self.ranks = dist.get_rank() // way.peers, dist.get_world_size() // way.peers

    def step(self, order: tuple[int, ...] = (0, 1, 2, 3)) -> None:
        """One forward and its backward, or two forwards and then two backwards."""
        self.steps += 1
        parts = range(1 + self.steps % 2)
        expected = [
            [self._loss(self.plain, rank, order, part) for rank in range(self.ranks)]
            for part in parts
        ]
        losses = [self._loss(self.models, self.rank, order, part) for part in parts]
        for loss, by_rank in zip(losses, expected, strict=True):
            torch.stack(by_rank).mean().backward()
            torch.testing.assert_close(loss, by_rank[self.rank])
            loss.backward()
        for optimizer in (*self._plain_optimizers, *self._optimizers):
            optimizer.step()
            optimizer.zero_grad()

    def _loss(self, models: list[Model], rank: int, order: tuple[int, ...], part: int) -> Tensor:
        x = _batch(10 * self.steps + part, rank).requires_grad_()
        with torch.no_grad():
            for model in models[1:]:
                model(x)
        outputs = [model(x, order) for model in models]
        return torch.stack([output.square().mean() for output in outputs]).sum()

    def compare(self) -> None:
        for model, plain in zip(self.models, self.plain, strict=True):
            for name, value in full_parameters(model).items():
                torch.testing.assert_close(value, plain.get_parameter(name).detach())

    def scene(self, name: str, acting: int) -> Scene:
        draw = random.Random(f"{name} {self.steps} {self.rank}")
        which, x = -acting % len(self.models), _batch(0, self.rank)
        calls: list[Callable[[Any], object]] = [
            lambda model: model(x, (3, 1, 2, 0)),
            lambda model: model(x),
            lambda model: model(x, (2,)),
            lambda model: model.blocks[draw.randrange(4)](x),
        ]
        parts: list[Callable[[Any], object]] = [
            lambda model: model.head(model.norm(model.blocks[1](x))),
            lambda model: model.blocks[draw.randrange(4)].up(x),
        ]
        return Scene(
            self.models[which], self.rank == acting, calls, parts, draw, self._optimizers[which]
        )


def _train_through(names: list[str], way: str, everywhere: bool) -> None:
    """Do each event, train, and compare.

    Args:
        everywhere: on the last rank and on the first one; otherwise on ranks by turns.
    """
    training = _Training(WAYS[way])
    for turn, name in enumerate(names):
        for acting in (training.ranks - 1, 0) if everywhere else (turn % training.ranks,):
            print(f"event '{name}' on rank {acting}")  # printed where a worker dies
            try:
                for _ in perform(name, training.scene(name, acting)):
                    training.step()
                training.step()
                training.compare()
            except Exception as error:
                raise AssertionError(f"event '{name}' on rank {acting}") from error


def _run(pool: Pool, program: Callable[..., None], *args: Any, way: str, **options: Any) -> None:
    pool.run(
        WAYS[way].ranks, program, *args, way=way, **options, timeout=LIMIT, group_timeout=SECONDS
    )


@pytest.mark.unsampled
@pytest.mark.parametrize("way", WAYS)
def test_what_one_rank_does_by_itself_between_steps_changes_no_training(
    pool: Pool, pytestconfig: pytest.Config, way: str
) -> None:
    events = WAYS[way].events
    if way in IN_THIRDS and pytestconfig.getoption("--sample"):
        events = events[IN_THIRDS.index(way) % 3 :: 3]
    _run(pool, _train_through, events, everywhere=False, way=way)


@pytest.mark.parametrize(
    ("way", "name"), [(way, name) for way in ONE_BY_ONE for name in WAYS[way].events]
)
def test_an_event_on_one_rank_before_and_after_the_first_step_changes_no_training(
    pool: Pool, way: str, name: str
) -> None:
    _run(pool, _train_through, [name], everywhere=True, way=way)


# --- steps that are lost, and gradients that come late ------------------------------------------


class _Fault(Exception):
    """What loses a step."""


def _fail(*_: object) -> None:
    raise _Fault


def _lose_step(model: Model, order: tuple[int, ...], *, in_forward: bool) -> None:
    """Here either in the last block or after the forward, between the same two messages."""
    handle = model.blocks[order[-1]].down.register_forward_hook(_fail) if in_forward else None
    try:
        model(_batch(99, dist.get_rank()), order)
        _fail()
    except _Fault:
        pass
    if handle is not None:
        handle.remove()


def _lose_in_other_places(orders: list[tuple[int, ...]], in_forward: int, way: str) -> None:
    """Orders alternate by step; before each step one is lost, from the third on."""
    training = _Training(WAYS[way])
    for step in range(8):
        order = orders[step % len(orders)]
        if step >= 2 and step % 2 == 0:
            other = orders[(step + 1) % len(orders)]
            _lose_step(training.models[0], other, in_forward=training.rank == in_forward)
        training.step(order)
    training.compare()


@pytest.mark.parametrize("in_forward", [0, 1])
@pytest.mark.parametrize(
    "way", [way for way, each in WAYS.items() if each.models == each.peers == 1]
)
def test_a_step_lost_in_the_last_unit_or_after_the_forward_leaves_one_order_of_gathers(
    pool: Pool, way: str, in_forward: int
) -> None:
    orders = [(0, 1, 2, 3), (3, 1, 0, 2)]
    _run(pool, _lose_in_other_places, orders, in_forward, way=way)


class _ReadTwice(nn.Module):
    """The weight of the head is read before the block by the ranks that say so: its gradient comes
    a second time there, after backward has gone through the block.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.block = nn.LayerNorm(WIDTH), Block()
        self.head = nn.Linear(WIDTH, WIDTH)
        self.norm.requires_grad_(False)

    def forward(self, x: Tensor, reads: bool) -> Tensor:
        x = self.norm(x)
        if reads:
            x = x + self.head.weight.sum(0)  # autograd does not save the weight for it
        return self.head(self.block(x))  # type: ignore[no-any-return]


def _read_on_some_ranks(kind: str, reads: list[list[bool]]) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def made() -> _ReadTwice:
        torch.manual_seed(0)
        return _ReadTwice().to(current_device(), torch.float64)

    plain, model = made(), made()
    if kind == "a list":
        fully_shard(model.block)
        fully_shard([model.norm, model.head])
        fully_shard(model)
    elif kind == "its root":
        fully_shard(model, policy={Block})
    elif kind == "replicate":
        replicate(model, bucket_cap_mb=0.0005)
    else:
        fully_shard(model.block)
        replicate([model.norm, model.head])
        fully_shard(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for step, by_rank in enumerate(reads):
        losses = [plain(_batch(step, each), by_rank[each]).square().mean() for each in range(ranks)]
        torch.stack(losses).mean().backward()
        model(_batch(step, rank), by_rank[rank]).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, value in full_parameters(model).items():
        torch.testing.assert_close(value, plain.get_parameter(name).detach())


@pytest.mark.parametrize("kind", ["a list", "its root", "replicate", "a replicated list"])
def test_a_weight_that_some_ranks_read_a_second_time_gets_the_mean_gradient(
    pool: Pool, kind: str
) -> None:
    both, none, first, second = [True, True], [False, False], [True, False], [False, True]
    reads = [both, first, none, second, first, both]
    pool.run(2, _read_on_some_ranks, kind, reads, timeout=LIMIT, group_timeout=SECONDS)


# --- what is gathered without a message that all ranks expect -----------------------------------


def _two_layers() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)).to(
        current_device(), torch.float64
    )


class _Constant(nn.Linear):
    """Of which no loss takes a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach()


def _train_beside_a_constant(kind: str) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    plain, models = _two_layers(), _two_layers()
    for each in (plain, models):
        each[0].__class__ = _Constant
    for module in models:
        fully_shard(module)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, models)]
    for step in range(3):
        mine = [(models, _batch(step, rank), 1)]
        for each, x, parts in (*mine, *((plain, _batch(step, r), ranks) for r in range(ranks))):
            (sum(module(x) for module in each).square().mean() / parts).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0 and kind == "moved":
            models._apply(lambda tensor: tensor.clone())
        for parameter in models.parameters() if rank == 0 and kind == "written" else ():
            local = parameter.detach().to_local()  # type: ignore[operator]
            local.copy_(local.clone())
    for found, expected in zip(models, plain, strict=True):
        torch.testing.assert_close(full_parameters(found)["weight"], expected.weight.detach())


@pytest.mark.parametrize("kind", ["moved", "written"])
def test_what_a_forward_has_left_gathered_for_no_backward_goes_when_an_optimizer_steps(
    pool: Pool, kind: str
) -> None:
    pool.run(2, _train_beside_a_constant, kind, timeout=LIMIT, group_timeout=SECONDS)


def _gather_what_was_moved() -> None:
    models, x = _two_layers(), _batch(0, 0)
    for module in models:
        fully_shard(module)
    first, second = models
    expected = [module(x).detach() for module in _two_layers()]
    if dist.get_rank() == 0:
        models._apply(lambda tensor: tensor.clone())
    with keep_unsharded(first), torch.no_grad():
        for _ in range(2 - dist.get_rank()):
            torch.testing.assert_close(first(x), expected[0])
    unshard(second)
    with torch.no_grad():
        for _ in range(dist.get_rank()):
            torch.testing.assert_close(second(x), expected[1])
    reshard(second)
    second._apply(lambda tensor: tensor * 2)
    unshard(second)
    torch.testing.assert_close(second.weight.detach(), 2 * _two_layers()[1].weight.detach())


def test_parameters_moved_before_the_first_forward_are_followed_where_ranks_gather_them(
    pool: Pool,
) -> None:
    pool.run(2, _gather_what_was_moved, timeout=LIMIT, group_timeout=SECONDS)
