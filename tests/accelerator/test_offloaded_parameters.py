"""Parameters that rest on the host: the numbers of a twin whose parameters do not, alone and with all that goes with them."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from composable import (
    CPUOffloadPolicy,
    apply_optimizer_in_backward,
    checkpoint,
    clip_grad_norm_,
    fully_shard,
    no_sync,
    offload_activations,
    reduce_gradients,
    remove,
    replicate,
    step_on_shards,
    weighted_gradients,
)
from composable.device.collectives import base
from composable.device.private import local_of
from tests.accelerator import sim
from tests.accelerator.twins import Block, assert_at_home, assert_equal, mesh_of, model_of, one_batch, train, twins_of, x_of
from tests.helpers.compare import full
from tests.helpers.world import Pool, current_device, spmd

Options = dict[str, Any]
WAYS: Final[dict[str, Options]] = {
    "plain": {},
    "one unit": {"policy": None},
    "ordinary memory": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "bfloat16": {"mp_policy": "bf16"},
    "kept after forward": {"reshard_after_forward": False},
    "regrouped": {"reshard_after_forward": 2},
    "a sum": {"grad_reduce": "sum"},
}


@spmd(ranks=[1, 2, 4])
@pytest.mark.parametrize("way", WAYS)
def test_steps_are_those_of_a_model_that_does_not_offload(way: str) -> None:
    if way != "regrouped" or dist.get_world_size() > 1:
        train(twins_of(**WAYS[way]), one_batch)


# --- several backwards ------------------------------------------------------------------------------------------------


def _two_batches(model: nn.Module, step: int) -> None:
    one_batch(model, 2 * step)
    one_batch(model, 2 * step + 1)


def _held(model: nn.Module, step: int) -> None:
    with no_sync(model):
        one_batch(model, 2 * step)
        one_batch(model, 2 * step + 2)
    one_batch(model, 2 * step + 1)


def _held_after_reduced(model: nn.Module, step: int) -> None:
    one_batch(model, 2 * step)
    with no_sync(model):
        one_batch(model, 2 * step + 1)
    reduce_gradients(model)


def _weighted(model: nn.Module, step: int) -> None:
    for part in range(2):
        with weighted_gradients(model, weight=1 + step + part + dist.get_rank(), more=part == 0):
            one_batch(model, 2 * step + part)


def _held_as_shards(model: nn.Module, step: int) -> None:
    with no_sync(model, level="replicate"):
        one_batch(model, 2 * step)
    one_batch(model, 2 * step + 1)


_WINDOWS: Final = {
    "added up": _two_batches,
    "held": _held,
    "held after reduced": _held_after_reduced,
    "weighted": _weighted,
    "held as shards": _held_as_shards,
}


@spmd(ranks=[2, 4])
@pytest.mark.parametrize("window", _WINDOWS)
def test_gradients_of_several_backwards_add_up(window: str) -> None:
    hybrid = dist.get_world_size() == 4
    if hybrid or window != "held as shards":
        mesh = mesh_of(2, 2) if hybrid else mesh_of()
        train(twins_of(mesh=mesh, mp_policy="bf16" if window == "held" else None), _WINDOWS[window])


# --- what works on gradients and parameters ---------------------------------------------------------------------------


def _clipped(clip: Callable[..., Any]) -> Callable[[nn.Module, int], None]:
    def step_of(model: nn.Module, step: int) -> None:
        one_batch(model, step)
        norm = clip(model.parameters(), 0.01)
        norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))

    norms: list[float] = []
    step_of.norms = norms  # type: ignore[attr-defined]
    return step_of


@spmd(ranks=[2, 4])
@pytest.mark.parametrize("clip", [clip_grad_norm_, torch.nn.utils.clip_grad_norm_])
def test_clipping(clip: Callable[..., Any]) -> None:
    step_of = _clipped(clip)
    train(twins_of(), step_of)
    norms = step_of.norms  # type: ignore[attr-defined]
    assert norms[::2] == norms[1::2]
    assert min(norms) > 0.01


@spmd(ranks=2)
@pytest.mark.parametrize("fused", [False, True])
def test_steps_on_shards_are_steps(fused: bool) -> None:
    models = twins_of()[1], twins_of()[1]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused) for model in models]
    step_on_shards(optimizers[0])
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            one_batch(model, step)
            optimizer.step()
        assert_equal(*models)


@spmd(ranks=2)
def test_an_infinity_on_one_rank_leaves_a_step_out_on_all() -> None:
    model = fully_shard(model_of(), policy={Block}, mesh=mesh_of(), offload_policy=CPUOffloadPolicy())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("sim", init_scale=8.0)
    for step in range(3):
        assert scaler.get_scale() == (4.0 if step > 1 else 8.0)
        before = [local_of(parameter).clone() for parameter in model.parameters()]
        scaler.scale(model(x_of(step)).square().mean()).backward()
        sim.native.sleep(20_000)  # what the scaler copies to the host comes late
        if step == 1 and dist.get_rank() == 1:
            local_of(model.get_parameter("0.up.weight").grad)[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        changed = [not torch.equal(local_of(p), old) for p, old in zip(model.parameters(), before, strict=True)]
        assert any(changed) == (step != 1), step


@spmd(ranks=2)
def test_hooks_find_gradients_that_have_arrived() -> None:
    seen: list[float] = []
    models = twins_of()
    for model in models:
        weight = model.get_parameter("0.up.weight")
        weight.register_hook(lambda gradient: seen.append(float(local_of(gradient).sum())))
        other = model.get_parameter("1.down.weight")
        other.register_post_accumulate_grad_hook(lambda parameter: seen.append(float(local_of(parameter.grad).sum())))
    train(models, one_batch)
    half = [seen[start : start + 2] for start in range(0, 12, 2)]
    assert half[::2] == half[1::2]
    assert len(seen) == 12


@spmd(ranks=[1, 2])
def test_steps_in_backward_are_steps() -> None:
    models = twins_of()
    for model in models:
        apply_optimizer_in_backward(torch.optim.AdamW, model.parameters(), {"lr": 0.01})
    for step in range(3):
        for model in models:
            one_batch(model, step)
        assert_equal(*models)
        assert_at_home(models[1])


# --- saving, loading, copying -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4])
def test_checkpoints_are_saved_and_loaded(pool: Pool, ranks: int, tmp_path: Path) -> None:
    pool.run(ranks, _save_and_load, str(tmp_path))


def _save_and_load(folder: str) -> None:
    plain, offloaded = twins_of()
    other = fully_shard(model_of(), policy={Block}, mesh=mesh_of(), offload_policy=CPUOffloadPolicy())
    for models, optimizers in [([m], [torch.optim.AdamW(m.parameters(), lr=0.1)]) for m in (offloaded, plain, other)]:
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
            set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
            one_batch(model, 1)
            optimizer.step()
    assert_equal(plain, other)
    assert_at_home(other)


@spmd(ranks=2)
@pytest.mark.parametrize("assign", [False, True])
def test_whole_state_dicts_load(assign: bool) -> None:
    whole = {name: value + 0.5 for name, value in model_of().state_dict().items()}
    models = twins_of()
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
    with mock.patch.object(base, "PIECE_BYTES", 64):
        fully_shard(model, policy={Block}, mesh=mesh_of(), offload_policy=CPUOffloadPolicy(), sync_module_states="broadcast")
    for name, value in model.state_dict().items():
        assert torch.equal(full(value), expected[name])


def _moved_and_back(model: nn.Module) -> None:
    model.to(current_device())


def _moved_to_the_host(model: nn.Module) -> None:
    model.to("cpu")


@spmd(ranks=2)
@pytest.mark.parametrize("move", [_moved_and_back, _moved_to_the_host])
def test_whoever_moves_the_model_finds_it_at_home_after_the_next_forward(move: Callable[[nn.Module], None]) -> None:
    models = twins_of()
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
    train((twins_of()[0], model), one_batch)


@spmd(ranks=2)
def test_copies_train_on() -> None:
    models = twins_of()
    one_batch(models[1], 3)
    twin = copy.deepcopy(models[1])
    twin.zero_grad()
    train((models[0], twin), one_batch)
    file = io.BytesIO()
    torch.save(twin.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert all(torch.equal(local_of(value), local_of(loaded[name])) for name, value in twin.state_dict().items())


@spmd(ranks=[1, 2])
@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("of", ["cpu", "sim"])
def test_removal_brings_whole_parameters_to_the_device(precision: str | None, of: str) -> None:
    model = model_of().to(of)
    originals = dict(model.named_parameters())
    fully_shard(model, policy={Block}, mesh=mesh_of(), offload_policy=CPUOffloadPolicy(), mp_policy=precision)
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


# --- with other annotations -------------------------------------------------------------------------------------------


def _recompute(model: nn.Module) -> None:
    checkpoint(model, policy={Block})


def _offload(model: nn.Module) -> None:
    offload_activations(model, policy={Block}, min_bytes=0)


@spmd(ranks=2)
@pytest.mark.parametrize("annotate", [_recompute, _offload])
def test_other_verbs_change_nothing(annotate: Callable[[nn.Module], None]) -> None:
    models = twins_of()
    for model in models:
        annotate(model)
    train(models, one_batch)


@spmd(ranks=2)
def test_some_units_rest_on_the_host_and_others_on_the_device_or_are_replicated() -> None:
    def made(policy: CPUOffloadPolicy | None) -> nn.Module:
        model = model_of()
        model[2].to(current_device())
        replicate(model[2], mesh=mesh_of())
        chosen = {"offload_policy": policy}
        return fully_shard(model, policy={"0": chosen, "1": {}, "3": chosen}, mesh=mesh_of())

    models = made(None), made(CPUOffloadPolicy())
    assert [p.device.type for p in models[1].parameters()].count("sim") == 2 + 8
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    for step in range(3):
        norms = []
        for model, optimizer in zip(models, optimizers, strict=True):
            one_batch(model, step)
            norms.append(float(clip_grad_norm_(model, 0.01)))
            optimizer.step()
            optimizer.zero_grad()
        for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
            torch.testing.assert_close(local_of(one).cpu(), local_of(other).cpu())
        assert norms[0] == pytest.approx(norms[1])
