"""`replicate` and `fully_shard` on one model: torch's own functions over all parameters do what
they do in one process.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import composable
from composable import fully_shard, remove, replicate
from tests.helpers.compare import full
from tests.helpers.mixes import (
    MIXES,
    WORDS,
    assert_alike,
    batch_of,
    copies,
    gradient,
    in_the_readme,
    kinds,
    losses,
    make_model,
    train_all,
)
from tests.helpers.world import current_device, spmd


@pytest.mark.parametrize(
    ("ranks", "mix"), [(1, "in_the_readme"), *((ranks, mix) for ranks in (2, 4) for mix in MIXES)]
)
@spmd()
def test_torchs_optimizers_clipping_and_scalers_do_what_they_do_in_one_process(mix: str) -> None:
    train_all(mix)


# --- which parameters are what ------------------------------------------------------------------


@spmd(ranks=2)
def test_only_an_annotation_over_both_makes_replicated_parameters_dtensors() -> None:
    model = make_model()
    original = model.tok_emb.weight
    replicate(model.tok_emb)
    assert model.tok_emb.weight is original, "replicated models keep their own plain parameters"
    for block in model.blocks:
        fully_shard(block)
    assert model.tok_emb.weight is original, "nothing is around both"
    fully_shard(model)
    weight = model.tok_emb.weight
    assert isinstance(weight, DTensor)
    assert weight.placements == (Replicate(),)
    assert weight.device_mesh is model.scale.device_mesh  # type: ignore[attr-defined]
    assert weight.to_local().data_ptr() == original.data_ptr(), "no second copy"
    remove(model, fully_shard)
    assert model.tok_emb.weight is original


@spmd(ranks=2)
def test_removing_the_inner_of_two_annotations_around_both_leaves_dtensors() -> None:
    model = nn.Sequential(
        make_model(), nn.Linear(WORDS, 2, dtype=torch.float64, device=current_device())
    )
    in_the_readme(model[0])  # type: ignore[arg-type]
    fully_shard(model)
    model(batch_of(0)).sum().backward()
    remove(model, fully_shard)
    assert isinstance(model[0].tok_emb.weight, DTensor)  # type: ignore[union-attr]
    remove(model[0], fully_shard)
    assert kinds(model) == ["plain"] * len(list(model.parameters()))


@pytest.mark.parametrize("mix", MIXES)
@spmd(ranks=2)
def test_whatever_is_removed_first_plain_parameters_and_gradients_come_back(mix: str) -> None:
    for first in (replicate, fully_shard):
        plain, mixed = copies(mix)
        for loss in losses(plain, mixed, 0):
            loss.backward()
        verbs = [first, fully_shard if first is replicate else replicate]
        for verb in verbs:
            for module in mixed.modules():
                if verb.__name__ in composable.registry(module):
                    remove(module, verb)
        assert kinds(mixed) == ["plain"] * len(list(mixed.parameters()))
        assert_alike(plain, mixed, "parameters")
        assert_alike(plain, mixed, "gradients", gradient)
        for loss in losses(plain, mixed, 1):
            loss.backward()


@spmd(ranks=2)
def test_a_verb_that_fails_leaves_plain_parameters() -> None:
    model = make_model()
    before = list(model.parameters())
    replicate(model.tok_emb)

    def refuse(parameter: nn.Parameter) -> Shard:
        raise MemoryError

    with pytest.raises(MemoryError):
        fully_shard(model, shard_placement_fn=refuse)
    assert all(one is other for one, other in zip(model.parameters(), before, strict=True))
    fully_shard(model)
    assert "plain" not in kinds(model)


@spmd(ranks=4)
def test_replicas_of_other_ranks_than_the_shards_are_left_plain() -> None:
    """Half of the ranks hold what is replicated: on a mesh of all ranks it is not the same
    everywhere.
    """
    half = dist.new_group([0, 1]), dist.new_group([2, 3])
    model = make_model()
    replicate(model.tok_emb, mesh=half[dist.get_rank() // 2])
    fully_shard(model)
    assert kinds(model)[1] == "plain"
    assert "plain" not in kinds(model)[2:]
    plain, rank = make_model(), dist.get_rank()
    batch = batch_of(0)
    for step in range(2):
        for each in (model, plain):
            each.zero_grad()
        plain(batch).square().mean().backward()
        model(batch[rank : rank + 1]).square().mean().backward()
        for found, (name, expected) in zip(
            model.parameters(), plain.named_parameters(), strict=True
        ):
            if isinstance(found, DTensor):
                assert found.grad is not None
                torch.testing.assert_close(
                    full(found.grad),
                    expected.grad,
                    rtol=1e-9,
                    atol=1e-11,
                    msg=f"{name} in step {step}",
                )
    plain.zero_grad()
    plain(batch[rank // 2 * 2 :][:2]).square().mean().backward()
    torch.testing.assert_close(
        model.tok_emb.weight.grad, plain.tok_emb.weight.grad, rtol=1e-9, atol=1e-11
    )


# --- what modules compute with ------------------------------------------------------------------


class _Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.expert = nn.Sequential(nn.Linear(4, 4))

    def forward(self, x: Tensor, branches: str) -> Tensor:
        for name in branches:
            x = self.get_submodule(name)(x).tanh()
        return self.last(self.expert(x)).sum()  # type: ignore[no-any-return]


@spmd(ranks=4)
def test_replicas_of_other_ranks_than_the_shards_are_reduced_whichever_some_ranks_skip() -> None:
    device, rank = current_device(), dist.get_rank()
    torch.manual_seed(0)
    model = _Branches().double().to(device)
    alone = copy.deepcopy(model)
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("copies", "shards"))
    fully_shard(model.expert, mesh=mesh["shards"])  # the ranks of a row share an expert
    replicate(model, policy={nn.Linear})
    for taken in (("ab", "ab", "ab", "ab"), ("ab", "b", "ab", "a"), ("a", "b", "", "ab")):
        inputs = torch.rand(4, 3, 4, dtype=torch.float64).to(device)
        model(inputs[rank], taken[rank]).backward()
        for each, branches in zip(inputs, taken, strict=True):
            (alone(each, branches) / 4).backward()
        for name in ("a", "b", "last"):
            torch.testing.assert_close(
                model.get_submodule(name).weight.grad, alone.get_submodule(name).weight.grad
            )


class _Seeing(nn.Module):
    """Whose tower, and a layer in the middle, some batches leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        self.first, self.middle, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor, sees: str) -> Tensor:
        x = self.first(self.tower(x).tanh() if "t" in sees else x).tanh()
        return self.last(self.middle(x).tanh() if "m" in sees else x).sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize("first", ["tm", "by rank"])
@spmd(ranks=2)
def test_ranks_may_skip_replicated_units_next_to_shards_in_any_step(first: str) -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = _Seeing().double().to(current_device())
    alone = copy.deepcopy(model)
    for each in (*model.tower, model.middle):
        replicate(each)
    fully_shard(model, policy={nn.Linear})
    steps = [("tm", "tm") if first == "tm" else ("tm", "m"), ("tm", ""), ("m", "t"), ("", "tm")]
    for number, sees in enumerate([*steps, ("", ""), ("tm", "tm")]):
        inputs = torch.rand(2, 3, 4, dtype=torch.float64).to(current_device())
        model(inputs[rank], sees[rank]).backward()
        for each, seen in zip(inputs, sees, strict=True):
            (alone(each, seen) / 2).backward()
        for found, (name, expected) in zip(
            model.parameters(), alone.named_parameters(), strict=True
        ):
            assert found.grad is not None, f"{name} in step {number}"
            torch.testing.assert_close(full(found.grad), expected.grad)


@pytest.mark.parametrize("skipped", ["replicated", "an expert"])
@spmd(ranks=4)
def test_a_unit_with_shards_is_called_on_both_sides_of_one_that_some_ranks_skip(
    skipped: str,
) -> None:
    device, rank = current_device(), dist.get_rank()
    torch.manual_seed(0)
    model = _Branches().double().to(device)
    alone = copy.deepcopy(model)
    fully_shard(model.a)
    if skipped == "replicated":
        replicate(model.b)
    else:
        mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("experts", "shards"))
        fully_shard(model.b, mesh=mesh["shards"])
    fully_shard(model)
    for taken in (("aba",) * 4, ("aba", "aba", "aa", "aa"), ("aa", "aa", "aba", "aba")):
        inputs = torch.rand(4, 3, 4, dtype=torch.float64).to(device)
        model(inputs[rank], taken[rank]).backward()
        for x, branches in zip(inputs, taken, strict=True):
            (alone(x, branches) / 4).backward()
        for name in ("a", "expert.0", "last"):
            found, expected = (each.get_submodule(name).weight.grad for each in (model, alone))
            torch.testing.assert_close(full(found), expected)


@spmd(ranks=2)
def test_a_replicated_unit_that_some_ranks_skip_gathers_none_ahead_in_backward() -> None:
    """What is next there is a unit of an earlier forward, and only ranks that run it come to it."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = _Branches().double().to(current_device())
    alone = copy.deepcopy(model)
    replicate(model.a)
    fully_shard(model.expert)
    replicate(model)
    for taken in (("a", "a"), ("a", ""), ("", "a")):
        inputs = torch.rand(2, 2, 3, 4, dtype=torch.float64).to(current_device())
        for loss in [model(x, taken[rank]) for x in inputs[rank]]:
            loss.backward()
        for batches, branches in zip(inputs, taken, strict=True):
            for x in batches:
                (alone(x, branches) / 2).backward()
        for name in ("a", "expert.0", "last"):
            found, expected = (each.get_submodule(name).weight.grad for each in (model, alone))
            torch.testing.assert_close(full(found), expected)
