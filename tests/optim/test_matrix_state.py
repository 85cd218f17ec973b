"""State of matrices that are stepped whole: on the owners, in state dicts of one rank, and in
checkpoints that load into other numbers of ranks and plain models.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from composable import fully_shard, step_on_matrices
from tests.helpers.compare import full
from tests.helpers.world import Pool, current_device, need_devices, spmd
from tests.optim.matrix_models import OPTIMIZERS, Net, OneProcess, Shampoo, Stacked, backward, made

# What torch's checkpoints warn of by themselves.
pytestmark = pytest.mark.filterwarnings("ignore")

KINDS: Final[dict[str, tuple[type[nn.Module], int]]] = {"net": (Net, 7), "stack": (Stacked, 5)}


def _sharded(kind: type[nn.Module]) -> nn.Module:
    model = made(kind)
    fully_shard(model, policy={nn.Linear})
    return model


def _train(model: nn.Module, optimizer: Optimizer, steps: range, width: int) -> None:
    for step in steps:
        backward(model, step, 0, width)  # of the same batch on all ranks
        optimizer.step()
        optimizer.zero_grad()


def _wholes(model: nn.Module) -> list[Tensor]:
    return [full(parameter.detach()).cpu() for parameter in model.parameters()]


@spmd(ranks=[2, 3])
def test_an_owner_keeps_state_whole_and_the_others_none() -> None:
    model = _sharded(Net)
    alone = OneProcess(model, Shampoo)
    optimizer = step_on_matrices(Shampoo(model.parameters()))
    alone.step_beside(optimizer, range(2), dist.get_rank(), 7)
    held = torch.zeros(len(alone.parameters))
    for number, (parameter, (copy,)) in enumerate(zip(alone.parameters, alone.copies, strict=True)):
        state = optimizer.state[parameter]
        if state:
            held[number] += 1
            expected = alone.optimizer.state[copy]
            assert torch.equal(state["momentum"], expected["momentum"])
            assert state["step"] == expected["step"] == 2
    dist.all_reduce(held)
    assert held.tolist() == [1] * len(held)


@spmd(ranks=[2, 3])
def test_rank_0_alone_may_ask_for_a_state_dict() -> None:
    model = _sharded(Net)
    optimizer = step_on_matrices(Shampoo(model.parameters()))
    _train(model, optimizer, range(1), 7)
    if dist.get_rank() == 0:
        found = optimizer.state_dict()
        owned = [state for state in found["state"].values() if state]
        assert 0 < len(owned) < len(found["state"])
        assert all(type(state["momentum"]) is Tensor for state in owned)
    dist.barrier()


@spmd(ranks=[2, 3])
def test_what_a_rank_has_loads_into_that_rank() -> None:
    model = _sharded(Stacked)
    alone = OneProcess(model, Shampoo)
    optimizer = step_on_matrices(Shampoo(model.parameters()))
    alone.step_beside(optimizer, range(2), dist.get_rank(), 5)
    again = step_on_matrices(Shampoo(model.parameters()))
    again.load_state_dict(optimizer.state_dict())
    again.calls = optimizer.calls
    alone.step_beside(again, range(2, 4), dist.get_rank(), 5)


@spmd(ranks=[1, 2, 4])
def test_checkpoints_have_state_as_of_dtensors() -> None:
    model = _sharded(Net)
    alone = OneProcess(model, Shampoo)
    optimizer = step_on_matrices(Shampoo(model.parameters()))
    alone.step_beside(optimizer, range(2), dist.get_rank(), 7)
    found = get_optimizer_state_dict(model, optimizer)
    for (name, parameter), (copy,) in zip(model.named_parameters(), alone.copies, strict=True):
        state, expected = found["state"][name], alone.optimizer.state[copy]
        assert state["step"] == 2
        momentum = state["momentum"]
        assert isinstance(momentum, DTensor)
        assert momentum.placements == parameter.placements
        assert momentum.to_local().shape == parameter.to_local().shape
        assert torch.equal(full(momentum), expected["momentum"])
        for one, other in zip(state["factors"], expected["factors"], strict=True):
            assert isinstance(one, DTensor)
            assert torch.equal(full(one), other)


@spmd(ranks=2)
def test_whole_state_dicts_are_those_of_one_process() -> None:
    model = _sharded(Net)
    alone = OneProcess(model, Shampoo)
    optimizer = step_on_matrices(Shampoo(model.parameters()))
    alone.step_beside(optimizer, range(2), dist.get_rank(), 7)
    options = StateDictOptions(full_state_dict=True)
    found = get_optimizer_state_dict(model, optimizer, options=options)
    plain = list(alone.optimizer.state_dict()["state"].values())
    for state, expected in zip(found["state"].values(), plain, strict=True):
        torch.testing.assert_close(state, expected, rtol=0, atol=0)
    again = step_on_matrices(Shampoo(model.parameters()))
    optimizer.zero_grad()  # torch makes no state to load into where gradients wait for a step
    set_optimizer_state_dict(model, again, found, options=options)
    again.calls = optimizer.calls
    alone.step_beside(again, range(2, 4), dist.get_rank(), 7)


def _pair(name: str, kind: str, *, plain: bool) -> tuple[nn.Module, Optimizer]:
    model = made(KINDS[kind][0])
    if plain:
        return model, OPTIMIZERS[name](model.parameters())
    fully_shard(model, policy={nn.Linear})
    return model, step_on_matrices(OPTIMIZERS[name](model.parameters()))


def _save(name: str, kind: str, folder: str, plain: bool = False) -> list[Tensor]:
    model, optimizer = _pair(name, kind, plain=plain)
    width = KINDS[kind][1]
    _train(model, optimizer, range(2), width)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    _train(model, optimizer, range(2, 4), width)
    return _wholes(model)


def _resume(name: str, kind: str, folder: str, plain: bool = False) -> list[Tensor]:
    model, optimizer = _pair(name, kind, plain=plain)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    weights, state = get_state_dict(model, optimizer)
    loaded: dict[str, Any] = {"model": weights, "optimizer": state}
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
    )
    if isinstance(optimizer, Shampoo):
        optimizer.calls = 2  # an attribute, of which torch saves nothing
    _train(model, optimizer, range(2, 4), KINDS[kind][1])
    return _wholes(model)


def _check(found: list[Any], expected: list[Tensor]) -> None:
    for wholes in found:
        for one, other in zip(wholes, expected, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("Muon", "net"), ("Shampoo", "net"), ("whitening", "net"), ("Shampoo", "stack")],
)
def test_checkpoints_load_into_other_numbers_of_ranks(
    pool: Pool, name: str, kind: str, device: str, tmp_path: Path
) -> None:
    need_devices(device, 4)
    expected = pool.run(2, _save, name, kind, str(tmp_path), device=device)[0]
    for ranks in (4, 1, 2):
        _check(pool.run(ranks, _resume, name, kind, str(tmp_path), device=device), expected)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_checkpoints_load_into_plain_models_and_back(
    pool: Pool, name: str, device: str, tmp_path: Path
) -> None:
    saved: Callable[..., list[Any]] = pool.run
    expected = saved(2, _save, name, "net", str(tmp_path / "a"), device=device)[0]
    found = saved(1, _resume, name, "net", str(tmp_path / "a"), True, device=device)
    _check(found, expected)
    expected = saved(1, _save, name, "net", str(tmp_path / "b"), True, device=device)[0]
    _check(saved(2, _resume, name, "net", str(tmp_path / "b"), device=device), expected)


@spmd(ranks=4)
def test_state_of_replicas_is_saved_once_and_goes_back_to_its_owner() -> None:
    model = made(Net)
    mesh = init_device_mesh(current_device().type, (2, 2))
    fully_shard(model, policy={nn.Linear}, mesh=mesh)
    alone = OneProcess(model, Shampoo)
    optimizer = step_on_matrices(Shampoo(model.parameters()))
    alone.step_beside(optimizer, range(2), dist.get_rank(), 7)
    found = get_optimizer_state_dict(model, optimizer)
    again = step_on_matrices(Shampoo(model.parameters()))
    set_optimizer_state_dict(model, again, found)
    again.calls = optimizer.calls
    alone.step_beside(again, range(2, 4), dist.get_rank(), 7)
