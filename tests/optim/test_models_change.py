"""Whatever happens to a model, an optimizer on its shards goes on like any other."""

from __future__ import annotations

from typing import Final

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from composable import fully_shard, remove, step_on_shards
from composable.errors import OptimizerError
from tests.helpers.world import spmd
from tests.optim.twins import local, make_twins, sharded_model, train

ADAMW: Final = ("AdamW", {"foreach": True})
LOOP: Final = ("AdamW", {"foreach": False})


@spmd(ranks=2)
def test_moved_parameters() -> None:
    """Memory that parameters have left is not stepped."""
    twins = make_twins(*LOOP)
    twins.steps(0, 1)

    def assign(model: nn.Module, optimizer: Optimizer) -> None:
        blocks = model.get_submodule("blocks")
        old = list(blocks.parameters())
        blocks.load_state_dict({name: value.clone() for name, value in blocks.state_dict().items()}, assign=True)
        new = {id(one): other for one, other in zip(old, blocks.parameters(), strict=True)}
        assert not any(one is other for one, other in zip(old, new.values(), strict=True))
        for group in optimizer.param_groups:
            group["params"] = [new.get(id(p), p) for p in group["params"]]
        for parameter in old:
            optimizer.state.pop(parameter, None)

    twins.both(assign)
    twins.steps(2, 3)


@spmd(ranks=2)
def test_moved_data() -> None:
    """The same parameter objects, whose data moved into memory of another dtype and back."""
    twins = make_twins(*ADAMW)
    twins.steps(0, 1)
    before = [local(p).data_ptr() for p in twins.models[1].blocks.parameters()]  # type: ignore[union-attr]
    twins.both(lambda model, _: model.blocks.double().float())  # type: ignore[union-attr, operator]
    moved = [local(p).data_ptr() for p in twins.models[1].blocks.parameters()]  # type: ignore[union-attr]
    assert moved != before
    for optimizer in twins.optimizers:
        optimizer.step()  # gradients moved along
    twins.check("moved")
    twins.steps(2, 3)


@spmd(ranks=2)
def test_annotation_removed() -> None:
    twins = make_twins(*ADAMW)
    twins.steps(0, 1)
    for model in twins.models:
        remove(model, fully_shard)
    whole = [parameter.detach().clone() for parameter in twins.models[1].parameters()]
    for optimizer in twins.optimizers:
        with pytest.raises(OptimizerError, match="was replaced when the annotation was removed"):
            optimizer.step()
    for parameter, expected in zip(twins.models[1].parameters(), whole, strict=True):
        assert torch.equal(parameter, expected), "a refused step changes nothing"


@spmd(ranks=2)
def test_gradients_are_released() -> None:
    """Nothing of a step keeps gradients alive."""
    model = sharded_model()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    step_on_shards(optimizer)
    for number in range(2):
        optimizer.zero_grad()
        train(model, number)
        optimizer.step()
        assert all(local(parameter).grad is None for parameter in model.parameters() if isinstance(parameter, DTensor))
