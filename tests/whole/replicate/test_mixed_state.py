"""Gradients and state of replicated parameters that rest as DTensors, as users see and change them;
knows no bucket.
"""

from __future__ import annotations

import copy

import pytest
import torch

from tests.helpers.compare import full
from tests.helpers.mixes import (
    MIXES,
    RECIPES,
    assert_alike,
    batch_of,
    copies,
    gradient,
    kinds,
    losses,
    make_model,
    train,
)
from tests.helpers.world import spmd


@pytest.mark.parametrize("set_to_none", [True, False])
@spmd(ranks=2)
def test_gradients_cleared_between_forward_and_backward_are_not_added(set_to_none: bool) -> None:
    plain, mixed = copies("in_the_readme")
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
    for model in copies("in_the_readme"):
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


@pytest.mark.parametrize("mix", MIXES)
@spmd(ranks=2)
def test_moved_and_loaded_models_train_on(mix: str) -> None:
    plain, mixed = copies(mix)
    for model in (plain, mixed):
        model.float().double()
    train(plain, mixed, RECIPES["SGD(foreach=True)"])
    assert "plain" not in kinds(mixed)
    other = copies(mix)[1]
    for assign in (False, True):
        other.load_state_dict(copy.deepcopy(mixed.state_dict()), assign=assign)
        reference = make_model()
        reference.load_state_dict(
            {name: full(tensor) for name, tensor in mixed.state_dict().items()}
        )
        train(reference, other, RECIPES["AdamW(fused=True)"])
