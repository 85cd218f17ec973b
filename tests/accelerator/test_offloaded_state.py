"""Parameters that rest on the host are saved, loaded, moved and removed as others are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from composable import (
    CPUOffloadPolicy,
    fully_shard,
    remove,
)
from composable.comm import base
from tests.accelerator.copies import (
    Block,
    assert_at_home,
    assert_equal,
    copies_of,
    mesh_of,
    model_of,
    one_batch,
    train,
)
from tests.helpers.compare import full
from tests.helpers.world import Pool, current_device, spmd


@pytest.mark.parametrize("ranks", [2, 4])
def test_checkpoints_are_saved_and_loaded(pool: Pool, ranks: int, tmp_path: Path) -> None:
    pool.run(ranks, _save_and_load, str(tmp_path))


def _save_and_load(folder: str) -> None:
    plain, offloaded = copies_of()
    other = fully_shard(
        model_of(), policy={Block}, mesh=mesh_of(), offload_policy=CPUOffloadPolicy()
    )
    for models, optimizers in [
        ([m], [torch.optim.AdamW(m.parameters(), lr=0.1)]) for m in (offloaded, plain, other)
    ]:
        for model, optimizer in zip(models, optimizers, strict=True):
            one_batch(model, 0)
            optimizer.step()
            optimizer.zero_grad()
            if model is other:
                one_batch(model, 7)
                optimizer.step()
                optimizer.zero_grad()
            state, optimizer_state = get_state_dict(model, optimizer)
            saved = {"model": state, "optimizer": optimizer_state}
            if model is offloaded:
                dcp.save(saved, checkpoint_id=folder)
                continue
            dcp.load(saved, checkpoint_id=folder)
            set_state_dict(
                model,
                optimizer,
                model_state_dict=saved["model"],
                optim_state_dict=saved["optimizer"],
            )
            one_batch(model, 1)
            optimizer.step()
    assert_equal(plain, other)
    assert_at_home(other)


@spmd(ranks=2)
@pytest.mark.parametrize("assign", [False, True])
def test_whole_state_dicts_load(assign: bool) -> None:
    whole = {name: value + 0.5 for name, value in model_of().state_dict().items()}
    models = copies_of()
    for model in models:
        one_batch(model, 0)
        model.load_state_dict(whole, assign=assign)
        model.zero_grad()
    train(models, one_batch, steps=2)


@spmd(ranks=2)
def test_rank_0_is_copied_in_pieces() -> None:
    model = model_of()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    if dist.get_rank():
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
    with mock.patch.object(base, "MESSAGE_BYTES", 64):
        fully_shard(
            model,
            policy={Block},
            mesh=mesh_of(),
            offload_policy=CPUOffloadPolicy(),
            sync_module_states="broadcast",
        )
    for name, value in model.state_dict().items():
        assert torch.equal(full(value), expected[name])


def _moved_and_back(model: nn.Module) -> None:
    model.to(current_device())


def _moved_to_the_host(model: nn.Module) -> None:
    model.to("cpu")


@spmd(ranks=2)
@pytest.mark.parametrize("move", [_moved_and_back, _moved_to_the_host])
def test_a_model_that_was_moved_is_at_home_again_after_the_next_forward(
    move: Callable[[nn.Module], None],
) -> None:
    models = copies_of()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            one_batch(model, 2 * step)
            if model is models[1]:
                move(model)
            one_batch(model, 2 * step + 1)
            optimizer.step()
        assert_at_home(models[1])
        assert_equal(*models)
        for optimizer in optimizers:
            optimizer.zero_grad()


@spmd(ranks=2)
@pytest.mark.parametrize("to", ["sim", "cpu"])
def test_a_model_on_meta_comes_home_when_it_gets_memory(to: str) -> None:
    model = model_of().to("meta")
    fully_shard(model, policy={Block}, mesh=mesh_of(), offload_policy=CPUOffloadPolicy())
    model.to_empty(device=to)
    model.load_state_dict(model_of().state_dict())
    train((copies_of()[0], model), one_batch)


@spmd(ranks=[1, 2])
@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("of", ["cpu", "sim"])
def test_removal_brings_whole_parameters_to_the_device(precision: str | None, of: str) -> None:
    model = model_of().to(of)
    originals = dict(model.named_parameters())
    fully_shard(
        model,
        policy={Block},
        mesh=mesh_of(),
        offload_policy=CPUOffloadPolicy(),
        mp_policy=precision,
    )
    one_batch(model, 0)
    expected = {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    remove(model, fully_shard)
    for name, value in model_of().named_parameters():
        found = model.get_parameter(name)
        assert found.device == current_device()
        assert (found is originals[name]) == (of == "sim")  # torch cannot move one there
        assert torch.equal(found.cpu(), value), name
        if name in expected:
            assert torch.equal(found.grad.cpu(), expected[name].cpu()), name
    one_batch(model, 1)
