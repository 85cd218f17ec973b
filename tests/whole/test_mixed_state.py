"""Gradients and state of replicated parameters that rest as DTensors, as users see and change them; knows no bucket."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from composable import fully_shard, replicate
from composable.errors import ForeignParameterError, OptimizerError
from tests.helpers.compare import full
from tests.helpers.mixes import (
    MIXES,
    RECIPES,
    assert_alike,
    batch_of,
    gradient,
    kinds,
    losses,
    make_model,
    train,
    twins,
)
from tests.helpers.world import current_device, spmd

# --- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("set_to_none", [True, False])
@spmd(ranks=2)
def test_gradients_cleared_between_forward_and_backward_are_not_added(set_to_none: bool) -> None:
    plain, mixed = twins("in_the_readme")
    for step in range(3):
        pair = losses(plain, mixed, step)
        for model in (plain, mixed):
            model.zero_grad(set_to_none)
        for loss in pair:
            loss.backward()
        assert_alike(plain, mixed, f"gradients of step {step}", gradient)


@pytest.mark.parametrize("steps", [False, True], ids=["written to", "stepped"])
@spmd(ranks=2)
def test_a_write_between_forward_and_backward_is_refused_as_in_one_process(steps: bool) -> None:
    for model in twins("in_the_readme"):
        optimizer = torch.optim.SGD([model.tok_emb.weight], lr=0.1)
        model(batch_of(0)).square().mean().backward()
        loss = model(batch_of(1)).square().mean()
        if steps:
            optimizer.step()
        else:
            with torch.no_grad():
                model.tok_emb.weight.mul_(2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@spmd(ranks=2)
def test_an_optimizer_made_before_an_annotation_came_to_cover_both_is_refused() -> None:
    model = make_model()
    replicate(model.tok_emb)
    early = torch.optim.SGD([model.tok_emb.weight], lr=0.1)
    fully_shard(model)
    model(batch_of(0)).square().mean().backward()
    with pytest.raises(OptimizerError) as caught:
        early.step()
    assert str(caught.value) == (
        "SGD.step: parameter 'weight' of unit 'tok_emb' is what modules compute with: the optimizer was made inside a forward "
        "or backward, or before an annotation came around both replicated and sharded modules. Make it after annotating, and "
        "between steps, from model.parameters(), or call rebind_optimizer(). The step would train nothing"
    )


# --- state ------------------------------------------------------------------------------------------------------------


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    model(batch_of(step)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("mix", MIXES)
@spmd(ranks=2)
def test_moved_and_loaded_models_train_on(mix: str) -> None:
    plain, mixed = twins(mix)
    for model in (plain, mixed):
        model.float().double()
    train(plain, mixed, RECIPES["SGD(foreach=True)"])
    assert "plain" not in kinds(mixed)
    other = twins(mix)[1]
    for assign in (False, True):
        other.load_state_dict(copy.deepcopy(mixed.state_dict()), assign=assign)
        reference = make_model()
        reference.load_state_dict({name: full(tensor) for name, tensor in mixed.state_dict().items()})
        train(reference, other, RECIPES["AdamW(fused=True)"])


def _mesh_of_this_rank() -> DeviceMesh:
    return init_device_mesh(current_device().type, (2, 1), mesh_dim_names=("here", "alone"))["alone"]


@spmd(ranks=2)
def test_a_dtensor_that_is_spread_otherwise_is_refused_in_a_replicated_parameters_place_and_nothing_is_left_of_it() -> None:
    plain, mixed = twins("in_the_readme")
    weight = mixed.tok_emb.weight
    assert isinstance(weight, DTensor)
    for mesh, placement in ((weight.device_mesh, Shard(0)), (_mesh_of_this_rank(), Replicate())):
        whole = full(weight)
        intruder = nn.Parameter(distribute_tensor(whole, mesh, [placement]))
        mixed.tok_emb.weight = intruder
        with pytest.raises(ForeignParameterError) as caught:
            mixed(batch_of(0))
        over = f"the ({mesh.size()},) {mesh.device_type} mesh of ranks {', '.join(map(str, mesh.mesh.tolist()))}"
        assert str(caught.value) == (
            "parameter 'weight' of unit 'tok_emb' was replaced by a DTensor that is spread otherwise: "
            f"({placement!r},) over {over}, where the unit has (Replicate(),) over the (2,) {mesh.device_type} mesh of ranks "
            "0, 1. Register its full_tensor(), or load it with load_state_dict()"
        )
        assert mixed.tok_emb.weight is intruder
        mixed.tok_emb.weight = nn.Parameter(whole)
        for model in (plain, mixed):
            model.zero_grad()
        for loss in losses(plain, mixed, 0):
            loss.backward()
        assert_alike(plain, mixed, "gradients", gradient)
        assert "plain" not in kinds(mixed)


@spmd(ranks=2)
def test_an_optimizer_that_holds_what_a_replicated_parameter_was_replaced_by_is_refused() -> None:
    _, mixed = twins("in_the_readme")
    optimizer = torch.optim.SGD(mixed.parameters(), lr=0.1)
    _step(mixed, optimizer, 0)
    mixed.tok_emb.weight = nn.Parameter(full(mixed.tok_emb.weight))
    mixed(batch_of(1)).square().mean().backward()
    with pytest.raises(OptimizerError, match=r"parameter 'weight' of unit 'tok_emb' was replaced on its module"):
        optimizer.step()
