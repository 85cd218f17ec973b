"""A parameter tied between a replicated module and sharded ones stays one: it is replicated,
whoever reads it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

import composable
from composable import checkpoint, fully_shard, remove, replicate
from composable.errors import ForeignParameterError
from tests.helpers.compare import full
from tests.helpers.mixes import (
    RECIPES,
    WIDTH,
    WORDS,
    Block,
    assert_alike,
    batch_of,
    gradient,
    kinds,
    losses,
)
from tests.helpers.mixes import train as train_as
from tests.helpers.placed import placed
from tests.helpers.world import current_device, spmd


class Tied(nn.Module):
    """Calls its head, whose weight is the embedding's."""

    detached = False  # the embedding, from backward

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, WORDS)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.detached:
            x = x.detach()
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def in_the_readme(model: Tied) -> None:
    replicate(model.embedding)
    fully_shard(model, policy={Block})


def shards_first(model: Tied) -> None:
    for block in model.blocks:
        fully_shard(block)
    replicate(model.embedding)
    fully_shard(model)


def head_replicated(model: Tied) -> None:
    replicate(model.head)
    fully_shard(model, policy={Block})


def head_a_unit(model: Tied) -> None:
    replicate(model.embedding)
    fully_shard(model, policy={Block, nn.Linear}, reshard_after_forward=False)


def with_checkpointing(model: Tied) -> None:
    checkpoint(model, policy={nn.Linear})
    head_a_unit(model)


ORDERS: Final[dict[str, Callable[[Tied], None]]] = {
    order.__name__: order
    for order in (in_the_readme, shards_first, head_replicated, head_a_unit, with_checkpointing)
}


def copies(order: str = "in_the_readme") -> tuple[Tied, Tied]:
    """A plain model, and the same one annotated."""
    torch.manual_seed(0)
    plain = placed(Tied(), current_device(), torch.float64)
    model = copy.deepcopy(plain)
    ORDERS[order](model)
    _assert_tied(model)
    return plain, model


def _assert_tied(model: Tied) -> None:
    weight = model.embedding.weight
    assert model.head.weight is weight
    assert isinstance(weight, DTensor)
    assert weight.placements == (Replicate(),)
    assert "plain" not in kinds(model)


def _train(plain: Tied, model: Tied, spec: str = "AdamW") -> None:
    for each in (plain, model):
        each.zero_grad()
    train_as(plain, model, RECIPES[spec], steps=2)
    _assert_tied(model)


@pytest.mark.parametrize("order", ORDERS)
@spmd(ranks=[2, 4])
def test_the_tie_is_kept_and_trained_as_in_one_process(order: str) -> None:
    plain, model = copies(order)
    _train(plain, model)
    _train(plain, model, "GradScaler, unscaled and clipped")
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(batch_of(0)), plain.eval()(batch_of(0)))


@pytest.mark.parametrize("order", ORDERS)
@spmd(ranks=2)
def test_loaded_and_cast_models_keep_the_tie(order: str) -> None:
    plain, model = copies(order)
    _train(plain, model)
    whole = {name: full(tensor).clone() for name, tensor in model.state_dict().items()}
    for assign, source in ((False, whole), (True, copy.deepcopy(model.state_dict()))):
        model.load_state_dict(source, assign=assign)
        plain.load_state_dict(whole)
        model.float().double()
        plain.float().double()
        _train(plain, model)


@pytest.mark.parametrize("order", ORDERS)
@spmd(ranks=2)
def test_whichever_verb_is_removed_first_plain_parameters_come_back_tied(order: str) -> None:
    for first in (replicate, fully_shard):
        plain, model = copies(order)
        for loss in losses(plain, model, 0):
            loss.backward()
        for verb in (first, fully_shard if first is replicate else replicate):
            for module in model.modules():
                if verb.__name__ in composable.registry(module):
                    remove(module, verb)
        assert model.head.weight is model.embedding.weight
        assert kinds(model) == ["plain"] * len(list(model.parameters()))
        assert_alike(plain, model, "parameters")
        assert_alike(plain, model, "gradients", gradient)
        torch.testing.assert_close(model(batch_of(0)), plain(batch_of(0)))


@pytest.mark.parametrize("order", ["head_replicated", "head_a_unit", "with_checkpointing"])
@spmd(ranks=2)
def test_a_head_that_is_called_by_itself_computes_and_its_gradient_is_averaged(order: str) -> None:
    plain, model = copies(order)
    rows = torch.linspace(-1, 1, 2 * WIDTH, dtype=torch.float64, device=current_device()).view(
        2, WIDTH
    )
    for rank in range(2):
        (plain.head(rows[rank]).square().mean() / 2).backward()
    model.head(rows[dist.get_rank()]).square().mean().backward()
    assert_alike(plain, model, "gradients", gradient)


@spmd(ranks=2)
def test_an_annotation_further_out_ties_what_the_one_inside_did_not_cover() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Sequential(nn.Embedding(WORDS, WIDTH), Block()), nn.Linear(WIDTH, WORDS)
    )
    plain[1].weight = plain[0][0].weight  # type: ignore[index]
    plain = placed(plain, current_device(), torch.float64)
    model = copy.deepcopy(plain)
    replicate(model[0][0])  # type: ignore[index]
    fully_shard(model[0])
    clone = model[1].weight
    fully_shard(model)
    assert model[1].weight is model[0][0].weight is not clone  # type: ignore[index]
    for loss in losses(plain, model, 0):
        loss.backward()
    assert_alike(plain, model, "gradients", gradient)
    remove(model, fully_shard)
    remove(model[0], fully_shard)
    assert model[1].weight is model[0][0].weight is clone  # type: ignore[index]


@spmd(ranks=2)
def test_a_parameter_put_at_one_place_comes_to_both_and_different_ones_are_refused() -> None:
    plain, model = copies()
    value = torch.ones(WORDS, WIDTH, dtype=torch.float64, device=current_device())
    plain.embedding.weight = plain.head.weight = nn.Parameter(value.clone())
    model.head.weight = nn.Parameter(value.clone())
    model(batch_of(0))
    _train(plain, model)
    weight = model.embedding.weight
    others = nn.Parameter(value.clone()), nn.Parameter(value.clone())
    model.embedding.weight, model.head.weight = others
    with pytest.raises(ForeignParameterError) as caught:
        model(batch_of(0))
    assert (
        str(caught.value)
        == "parameter 'weight' of unit 'embedding' is tied: it has 2 places, and different"
        " parameters were registered at them. Register one parameter at all of them; to untie"
        " them, call remove() on the annotated modules first"
    )
    assert model.embedding.weight is others[0]
    assert model.head.weight is others[1]
    model.embedding.weight = model.head.weight = weight
    _train(plain, model)


@pytest.mark.parametrize("order", ORDERS)
@spmd(ranks=2)
def test_one_rank_may_detach_one_of_its_readers(order: str) -> None:
    """The gradient is complete at another moment there."""
    plain, model = copies(order)
    for step in range(3):
        model.zero_grad()
        plain.zero_grad()
        batch = batch_of(step)
        for rank, tokens in enumerate(batch):
            plain.detached = step > 0 and rank == 1
            (plain(tokens[None]).square().mean() / len(batch)).backward()
        model.detached = step > 0 and dist.get_rank() == 1
        model(batch[dist.get_rank()][None]).square().mean().backward()
        assert_alike(plain, model, "gradients", gradient)


def test_one_process_without_a_group_keeps_the_tie() -> None:
    plain = Tied()
    model = copy.deepcopy(plain)
    in_the_readme(model)
    assert model.head.weight is model.embedding.weight
    tokens = torch.arange(WORDS)
    for each in (plain, model):
        each(tokens).square().mean().backward()
    assert_alike(plain, model, "gradients", gradient)


@spmd(ranks=1)
def test_a_group_of_one_rank_keeps_the_tie() -> None:
    _train(*copies())
