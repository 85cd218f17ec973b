"""A module below several annotated models, such as the encoder of an actor and a critic, trains in
any order of their steps.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from functools import partial
from typing import Final
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable import fully_shard, no_sync, reduce_gradients, replicate, reset
from tests.helpers.compare import all_full, full_gradients
from tests.helpers.world import Pool, current_device, spmd


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 7), nn.Linear(7, 7)
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.full((7,), 2.0))
        self.runs = True

    def forward(self, x: Tensor) -> Tensor:
        if not self.runs:
            return torch.ones(len(x), 7, dtype=x.dtype)
        return torch.tanh(self.other(torch.tanh(self.one(x))) * self.scale)


class Model(nn.Module):
    def __init__(self, encoder: Encoder, width: int) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(7, width)
        self.skips = False

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.new_ones(len(x), 7) if self.skips else self.encoder(x))  # type: ignore[no-any-return]


class Models:
    """An encoder, and what trains with it: in one process on the batches of all ranks, or annotated
    on this rank's.
    """

    def __init__(self, annotate: Callable[[Encoder, Model, Model], object] | None) -> None:
        torch.manual_seed(0)
        self.encoder = Encoder().double()
        self.actor, self.critic = Model(self.encoder, 3).double(), Model(self.encoder, 2).double()
        self.plain = annotate is None
        if annotate is not None:
            annotate(self.encoder, self.actor, self.critic)
        self.parameters = list(
            {id(p): p for m in (self.actor, self.critic) for p in m.parameters()}.values()
        )
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.1, momentum=0.9)

    def run(self, *losses: Callable[[int], Tensor]) -> None:
        """A backward of the sum of the losses, each of which is given whose batch it takes."""
        ranks = range(dist.get_world_size()) if self.plain else (dist.get_rank(),)
        for rank in ranks:
            (torch.stack([loss(rank) for loss in losses]).sum() / len(ranks)).backward()

    def loss(self, model: nn.Module, step: int, rank: int) -> Tensor:
        x = torch.randn(
            3, 6, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64
        )
        return model(x).square().mean()  # type: ignore[no-any-return]

    def of(self, model: nn.Module, step: int) -> Callable[[int], Tensor]:
        return partial(self.loss, model, step)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def _joint(m: Models, i: int) -> None:
    m.run(m.of(m.actor, i), m.of(m.critic, i + 1))


def _apart(m: Models, i: int) -> None:
    m.run(m.of(m.actor, i))
    m.run(m.of(m.critic, i + 1))


def _in_turns(m: Models, i: int) -> None:
    m.run(m.of(m.actor, i))
    m.step()
    m.run(m.of(m.critic, i + 1))


def _forwards_first(m: Models, i: int) -> None:
    if m.plain:
        _apart(m, i)
        return
    rank = dist.get_rank()
    one, other = m.loss(m.actor, i, rank), m.loss(m.critic, i + 1, rank)
    (other if i % 2 else one).backward()
    (one if i % 2 else other).backward()


def _twice_the_same(m: Models, i: int) -> None:
    m.run(m.of(m.actor, i), m.of(m.critic, i + 1), m.of(m.actor, i + 2))


def _one_only(m: Models, i: int) -> None:
    m.run(m.of(m.critic if i % 2 else m.actor, i))


def _constant_by_rank(m: Models, i: int) -> None:
    def loss(model: Model, step: int, rank: int) -> Tensor:
        m.encoder.runs = (rank + step) % 2 == 0
        return m.loss(model, step, rank)

    m.run(partial(loss, m.actor, i), partial(loss, m.critic, i + 1))
    m.run(partial(loss, m.actor, i + 1))
    m.encoder.runs = True


def _with_the_encoder_alone(m: Models, i: int) -> None:
    m.run(m.of(m.encoder, i), m.of(m.actor, i + 1), m.of(m.encoder, i + 2))


def _evaluated_between(m: Models, i: int) -> None:
    def loss(rank: int) -> Tensor:
        found = m.loss(m.actor, i, rank)
        with torch.no_grad():
            m.loss(m.critic, i, rank)
            m.loss(m.encoder, i, rank)
        return found

    m.run(loss)


def _accumulated(m: Models, i: int) -> None:
    if m.plain:
        _apart(m, i)
        return
    rank = dist.get_rank()
    with no_sync(m.actor), no_sync(m.critic):
        m.loss(m.actor, i, rank).backward()
        if i % 2:
            m.loss(m.critic, i + 1, rank).backward()
    if i % 2:
        reduce_gradients(m.actor)
        reduce_gradients(m.critic)
    else:
        m.loss(m.critic, i + 1, rank).backward()
        reduce_gradients(m.actor)  # its head


def _after_a_lost_step(m: Models, i: int) -> None:
    if not m.plain:
        handle = m.critic.head.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            _joint(m, i)
        handle.remove()
        reset(m.actor)
    _joint(m, i)


def _after_a_lost_backward_without_the_encoder(m: Models, i: int) -> None:
    if not m.plain:
        handle = m.actor.head.register_full_backward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            m.run(m.of(m.actor, i))
        handle.remove()
    m.actor.skips = m.critic.skips = True
    m.run(m.of(m.critic if i % 2 else m.actor, i))
    m.actor.skips = m.critic.skips = False
    m.run(m.of(m.actor, i + 1))


PROGRAMS: Final = (
    _constant_by_rank, _joint, _apart, _in_turns, _forwards_first, _twice_the_same, _one_only,
    _with_the_encoder_alone, _evaluated_between, _accumulated, _after_a_lost_step,
    _after_a_lost_backward_without_the_encoder,
)  # fmt: skip


def _all(verb: Callable[..., object], encoder: Encoder, actor: Model, critic: Model) -> None:
    for module in (encoder, actor, critic):
        verb(module)


def _blocks_only(
    verb: Callable[..., object], encoder: Encoder, actor: Model, critic: Model
) -> None:
    """Nothing annotates the encoder itself, which owns no trained parameter then."""
    encoder.unused.requires_grad_(False)
    for module in (encoder.one, encoder.other):
        verb(module)
    for module in (actor, critic):
        verb(module, ignored_params=[encoder.unused])


def _blocks_too(verb: Callable[..., object], encoder: Encoder, actor: Model, critic: Model) -> None:
    for module in (encoder.one, encoder.other, encoder, actor, critic):
        verb(module)


def _of_two_verbs(
    below: Callable[..., object], above: Callable[..., object], encoder: Encoder, *models: Model
) -> None:
    below(encoder)
    for model in models:
        above(model)


def _hybrid(encoder: Encoder, *models: Model) -> None:
    mesh = dist.device_mesh.init_device_mesh(
        "cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard")
    )
    for module in (encoder.one, encoder, *models):
        fully_shard(module, mesh=mesh)


PLANS: Final[dict[str, Callable[..., object]]] = {
    "replicated": partial(_all, replicate),
    "sharded": partial(_all, fully_shard),
    "replicated blocks": partial(_blocks_too, replicate),
    "sharded blocks": partial(_blocks_too, fully_shard),
    "replicated blocks only": partial(_blocks_only, replicate),
    "sharded blocks only": partial(_blocks_only, fully_shard),
    "replicated below shards": partial(_of_two_verbs, replicate, fully_shard),
    "shards below replicated": partial(_of_two_verbs, fully_shard, replicate),
}


def _agree(plan: str) -> None:
    annotate = _hybrid if plan == "hybrid" else PLANS[plan]
    # sharded units that some ranks skip are refused
    has_blocks = "blocks" in plan or plan == "hybrid"
    for program in PROGRAMS[has_blocks:]:
        models, plain = Models(annotate), Models(None)
        if "only" in plan:
            plain.encoder.unused.requires_grad_(False)
        for step in range(4):
            program(models, step)
            program(plain, step)
            found = [p.grad for p in models.parameters]
            expected = [p.grad for p in plain.parameters]
            where = f"{program.__name__}, step {step}"
            assert [g is None for g in found] == [g is None for g in expected], where
            there = zip(
                all_full([g for g in found if g is not None]),
                [g for g in expected if g is not None],
                strict=True,
            )
            for one, other in there:
                torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11, msg=where)
            models.step()
            plain.step()
        for one, other in zip(all_full(models.parameters), plain.parameters, strict=True):
            torch.testing.assert_close(
                one, other.detach(), rtol=1e-9, atol=1e-11, msg=program.__name__
            )


@pytest.mark.parametrize("plan", PLANS)
def test_a_shared_encoder_trains_as_in_one_process(pool: Pool, plan: str) -> None:
    pool.run(2, _agree, plan)


@pytest.mark.parametrize(
    ("ranks", "plan"),
    [(1, "sharded"), (1, "replicated"), (3, "replicated"), (3, "sharded blocks"), (4, "hybrid")],
)
def test_a_shared_encoder_trains_on_other_numbers_of_ranks(
    pool: Pool, ranks: int, plan: str
) -> None:
    pool.run(ranks, _agree, plan)


# --- one after another ---------------------------------------------------------------------------


def _drop_one_after_another(verb: Callable[..., object], collected: str) -> None:
    torch.manual_seed(0)
    encoder = Encoder().double()
    plain = copy.deepcopy(encoder)
    verb(encoder, policy={nn.Linear})
    gone = []
    for task in range(4):
        torch.manual_seed(task)
        model = Model(encoder, 3).double()
        alone = Model(plain, 3)
        alone.head = copy.deepcopy(model.head)
        verb(model)
        for each, ranks in ((model, [dist.get_rank()]), (alone, range(dist.get_world_size()))):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            for _ in range(2):
                for rank in ranks:
                    x = torch.full((3, 6), 0.1 * rank + task, dtype=torch.float64)
                    (each(x).square().mean() / len(ranks)).backward()
                optimizer.step()
                optimizer.zero_grad()
            each(x).sum()  # a forward that nobody uses
        gone += [ref(model), ref(model.head.weight)]
        del model, each, optimizer
        # garbage is collected at other times on other ranks: nothing depends on it
        if collected == "on all ranks" or (collected == "on one" and dist.get_rank() == 0):
            gc.collect()
    gc.collect()
    assert [each for each in gone if each() is not None] == []
    found = all_full(list(encoder.parameters()))
    for value, expected in zip(found, plain.parameters(), strict=True):
        torch.testing.assert_close(value, expected.detach())


@pytest.mark.parametrize("collected", ["on all ranks", "on one", "at the end"])
@pytest.mark.parametrize("verb", [fully_shard, replicate])
def test_models_around_one_encoder_that_are_dropped_one_after_another_are_freed(
    pool: Pool, verb: Callable[..., object], collected: str
) -> None:
    pool.run(2, _drop_one_after_another, verb, collected)


def _annotate_each(
    encoder: Callable[..., object], critic: Callable[..., object], m: Models
) -> None:
    encoder(m.encoder)
    replicate(m.actor)
    critic(m.critic)


def _move_on_one_rank(encoder: Callable[..., object], critic: Callable[..., object]) -> None:
    ours, plain = Models(None), Models(None)
    _annotate_each(encoder, critic, ours)
    if dist.get_rank() == 1:
        ours.critic._apply(lambda tensor: tensor.clone())
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # the actor's forward comes before any of the encoder's own root
    (ours.loss(ours.actor, 0, rank) + ours.loss(ours.critic, 1, rank)).backward()
    for each in range(ranks):
        ((plain.loss(plain.actor, 0, each) + plain.loss(plain.critic, 1, each)) / ranks).backward()
    for mine, theirs in ((ours.actor, plain.actor), (ours.critic, plain.critic)):
        for name, gradient in full_gradients(mine).items():
            expected = theirs.get_parameter(name).grad
            if expected is None:  # of `unused`
                assert gradient is None or not gradient.any()
            else:
                torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("critic", [fully_shard, replicate])
@pytest.mark.parametrize("encoder", [fully_shard, replicate])
def test_memory_that_one_rank_moves_before_the_encoders_first_forward_is_followed(
    pool: Pool, encoder: Callable[..., object], critic: Callable[..., object]
) -> None:
    pool.run(2, _move_on_one_rank, encoder, critic)


class _Pair(nn.Module):
    """Two modules that are one unit; between them the weight of the second is read."""

    def __init__(self, pair: nn.ModuleList, stops: bool) -> None:
        super().__init__()
        self.pair, self.head, self.stops = pair, nn.Linear(4, 2), stops

    def forward(self, x: Tensor) -> Tensor:
        x = self.pair[1](x)
        if self.stops:
            raise ValueError("between the two")
        return self.head(self.pair[0](x @ self.pair[0].weight))  # type: ignore[no-any-return]


@spmd(ranks=2)
def test_a_forward_lost_between_modules_of_a_shared_unit_leaves_them_at_rest() -> None:
    torch.manual_seed(0)
    pair = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)).to(current_device())
    actor, critic = _Pair(pair, True).to(current_device()), _Pair(pair, False).to(current_device())
    plain = copy.deepcopy(critic)
    fully_shard(list(pair))
    fully_shard(actor)
    fully_shard(critic)
    x = torch.ones(2, 4, device=current_device())
    at_rest = list(pair.parameters())
    with pytest.raises(ValueError, match="between the two"):
        actor(x)
    assert [id(p) for p in pair.parameters()] == [id(p) for p in at_rest]
    torch.testing.assert_close(critic(x), plain(x))
