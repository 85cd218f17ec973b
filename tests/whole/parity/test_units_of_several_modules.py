"""Units of several modules show their parameters between the modules: code there reads the weight
of the next one.

Losses that are fused with the head (TRL's and Liger's) do so over the unit `[norm, head]`, which
accelerate makes.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from composable import checkpoint, fully_shard, no_sync, replicate
from composable.comm.backends import comms_wrapped_by
from tests.helpers.communicators import Log, Recording
from tests.helpers.compare import all_full, assert_mean_gradients
from tests.helpers.world import Pool, spmd

KINDS = (
    "fused",
    "fused, the head runs",
    "head first",
    "last in a checkpoint",
    "torch's checkpoint",
    "twice",
)


class Model(nn.Module):
    """`kind` says what reads the head's weight, and which of the modules run."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.body, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)
        self.middle, self.head = nn.Linear(6, 6), nn.Linear(6, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.body(x))
        if self.kind == "torch's checkpoint":
            return torch_checkpoint(self.fused, x, use_reentrant=False).square().mean()
        if self.kind == "head first":
            x = self.middle(self.head(x).sum(-1, keepdim=True) + x)
            return (self.norm(x) @ x.t()).square().mean()
        out = self.fused(x).square().mean()
        return out + self.fused(x.sin()).square().mean() if self.kind == "twice" else out

    def fused(self, x: Tensor) -> Tensor:
        h = self.middle(self.norm(x))
        logits = F.linear(h, self.head.weight)
        return logits + self.head(h) if self.kind == "fused, the head runs" else logits


def _annotate(model: Model, verb: str, reshard: bool | None) -> None:
    if model.kind == "last in a checkpoint":
        checkpoint(model)
    if verb == "replicate":
        replicate([model.norm, model.head])
        replicate(model)
        return
    if verb == "beside":
        replicate([model.norm, model.head])
    for unit in (
        model.body,
        model.middle,
        *([[model.norm, model.head]] if verb == "fully_shard" else ()),
    ):
        fully_shard(unit, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)


def _batch(step: int, rank: int) -> Tensor:
    return torch.randn(
        3, 6, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64
    )


def _train(kind: str, verb: str, reshard: bool | None) -> None:
    torch.manual_seed(0)
    plain, model = Model(kind).double(), Model(kind).double()
    model.load_state_dict(plain.state_dict())
    _annotate(model, verb, reshard)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(3):
        for other in range(ranks):
            (plain(_batch(step, other)) / ranks).backward()
        with torch.no_grad():
            model(_batch(step, rank))
        if step == 1:  # accumulated: half of the gradient twice
            with no_sync(model):
                (model(_batch(step, rank)) / 2).backward()
        (model(_batch(step, rank)) / (2 if step == 1 else 1)).backward()
        expected = [p.grad for p in plain.parameters()]
        for found, right in zip(model.parameters(), expected, strict=True):
            assert (found.grad is None) == (right is None)
        there = [p.grad for p in model.parameters() if p.grad is not None]
        for found, right in zip(
            all_full(there), [g for g in expected if g is not None], strict=True
        ):
            torch.testing.assert_close(
                found, right, rtol=1e-9, atol=1e-11, msg=f"{kind}, {verb}, step {step}"
            )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _train_all(verb: str) -> None:
    for kind in KINDS:
        for reshard in (None, True, False) if verb == "fully_shard" else (None,):
            _train(kind, verb, reshard)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("verb", ["fully_shard", "beside", "replicate"])
def test_the_weight_of_the_next_module_is_whole_between_two_modules(
    pool: Pool, ranks: int, verb: str
) -> None:
    pool.run(ranks, _train_all, verb)


# --- how often they are gathered -----------------------------------------------------------------


class Tied(nn.Module):
    """Its first and its last module have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(7, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.norm, self.out = nn.LayerNorm(6), nn.Linear(6, 7, bias=False)
        self.out.weight = self.emb.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.emb(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.out(self.norm(x)).square().mean()


def _gathers_of_a_tied_unit(reshard: bool | None) -> tuple[int, int]:
    torch.manual_seed(0)
    plain, model, log = Tied().double(), Tied().double(), Log()
    model.load_state_dict(plain.state_dict())
    with comms_wrapped_by(lambda comm: Recording(comm, log)):
        for block in model.blocks:
            fully_shard(block)
        fully_shard([model.norm, model.emb, model.out], reshard_after_forward=reshard)
        fully_shard(model)
    found = []
    for forwards in (1, 2):
        for each in (plain, model):
            each.zero_grad()
        x = torch.arange(4 * forwards).view(forwards, 4) % 7 + dist.get_rank()
        log.events.clear()
        for each in (plain, model):
            torch.stack([each(row % 7) for row in x]).sum().backward()
        assert_mean_gradients(plain, model, reshard)
        found.append(log.labels().count("all-gather of unit 'norm'"))
        assert log.labels().count("gradient reduction of unit 'norm'") == 1
    return found[0], found[1]


@pytest.mark.parametrize(("reshard", "gathers"), [(None, 1), (False, 1), (True, 2)])
def test_backward_gathers_a_unit_whose_first_module_runs_first_and_whose_last_runs_last_once(
    pool: Pool, reshard: bool | None, gathers: int
) -> None:
    for once, of_two_forwards in pool.run(2, _gathers_of_a_tied_unit, reshard):
        assert once == gathers
        assert of_two_forwards == gathers + 1, "each root forward gathers anew"


def _names_of_what_is_registered(model: Model) -> set[str]:
    return {type(p).__name__ for p in (model.norm.weight, model.head.weight)}


def _look() -> None:
    model = Model("fused").double()
    _annotate(model, "fully_shard", None)
    seen: list[set[str]] = []
    model.middle.register_forward_hook(lambda *_: seen.append(_names_of_what_is_registered(model)))
    loss = model(_batch(0, 0))
    # the head has not run, and the root's forward is over
    seen.append(_names_of_what_is_registered(model))
    loss.backward()
    seen.append(_names_of_what_is_registered(model))
    handle = model.middle.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(_batch(0, 0))
    seen.append(_names_of_what_is_registered(model))
    handle.remove()
    model(_batch(0, 0)).backward()
    at_rest, whole = {"DTensor"}, {"Parameter"}
    assert seen == [whole, at_rest, at_rest, whole, at_rest, whole]


def test_parameters_are_sharded_again_when_the_roots_forward_ends_or_fails(pool: Pool) -> None:
    pool.run(2, _look)


def _below_two_models(kind: str) -> None:
    torch.manual_seed(0)
    pairs = []
    for annotated in (False, True):
        first, second = Model(kind).double(), Model(kind).double()
        second.norm, second.head = first.norm, first.head
        if annotated:
            for mine, right in zip((first, second), pairs[0], strict=True):
                mine.load_state_dict(right.state_dict())
            fully_shard([first.norm, first.head])
            fully_shard(first)
            fully_shard(second)
        pairs.append((first, second))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for step in range(3):
        for plain, model in zip(*pairs, strict=True):
            for other in range(ranks):
                (plain(_batch(step, other)) / ranks).backward()
            with torch.no_grad():
                model(_batch(step, rank))
            model(_batch(step, rank)).backward()
            there = [p.grad for p in model.parameters() if p.grad is not None]
            expected = [p.grad for p in plain.parameters() if p.grad is not None]
            assert len(there) == len(expected)
            for found, right in zip(all_full(there), expected, strict=True):
                torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", ["fused", "fused, the head runs"])
def test_a_unit_of_several_modules_may_be_below_two_models(pool: Pool, kind: str) -> None:
    pool.run(2, _below_two_models, kind)


@spmd(ranks=2)
def test_models_that_are_one_unit_are_planned_together_whichever_is_called_first() -> None:
    """So what is between two modules of a unit inside of the second one is inside of a model,
    too.
    """
    torch.manual_seed(0)
    plain, ours = (nn.ModuleList([nn.Linear(6, 6), Model("fused")]).double() for _ in range(2))
    ours.load_state_dict(plain.state_dict())
    fully_shard([ours[1].norm, ours[1].head])  # type: ignore[list-item]
    fully_shard(list(ours))
    x = torch.randn(3, 6, dtype=torch.float64)
    for _ in range(2):
        for encoder, model in (plain, ours):
            model(encoder(x)).backward()
            model(x).backward()
        assert_mean_gradients(plain, ours)
