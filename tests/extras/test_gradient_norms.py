"""An extra from outside: what is in `seams.py` suffices for it, and it leaves nothing behind."""

from __future__ import annotations

import gc
import math
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from composable import (
    apply_optimizer_in_backward,
    fully_shard,
    join,
    replicate,
    seams,
    step_on_shards,
)
from composable.comm import base, observe_launches
from composable.comm.backends import world_group
from composable.comm.launch import Launch
from composable.comm.ledger import ledger_of
from tests.extras.gradient_norms import GradientNorms
from tests.helpers.world import current_device, spmd


def _plain() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 1)
    return nn.Sequential(*layers).to(current_device())


def _sharded() -> nn.Sequential:
    model = _plain()
    fully_shard(model, policy={nn.Linear})
    return model


def _replicated() -> nn.Sequential:
    model = _plain()
    for module in (model[0], model[2]):
        replicate(module)
    return replicate(model)


def _both() -> nn.Sequential:
    model = _plain()
    replicate(model[0])
    fully_shard([model[2], model[3]])
    fully_shard(model)
    return model


def _hybrid() -> nn.Sequential:
    model = _plain()
    mesh = init_device_mesh(
        current_device().type,
        (dist.get_world_size() // 2, 2),
        mesh_dim_names=("replicate", "shard"),
    )
    fully_shard(model, policy={nn.Linear}, mesh=mesh)
    return model


def _batch(step: int) -> torch.Tensor:
    """Rows of all ranks."""
    generator = torch.Generator().manual_seed(step)
    rows = torch.randn(2 * dist.get_world_size(), 4, generator=generator)
    return rows.to(current_device())


def _groups(model: nn.Module) -> list[dist.ProcessGroup]:
    infos = [unit.mesh_info for unit in seams.units_in(model)]
    comms = [comm for info in infos for comm in (info.all, info.shard, info.replicate)]
    return [comm.group for comm in comms if comm is not None and comm.group is not None]


def _norm(module: nn.Module) -> float:
    squares = [p.grad.square().sum().item() for p in module.parameters() if p.grad is not None]
    return math.sqrt(sum(squares))


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, rows: torch.Tensor) -> None:
    model(rows).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


_UNITS: dict[Callable[[], nn.Sequential], dict[str, int]] = {
    _sharded: {"0": 0, "2": 2, "4": 4},
    _replicated: {"(root)": 4, "0": 0, "2": 2},
    _both: {"(root)": 4, "0": 0, "2, 3": 2},
    _hybrid: {"0": 0, "2": 2, "4": 4},
}


def _norms_are_those_of_one_process(make: Callable[[], nn.Sequential]) -> None:
    plain, model = _plain(), make()
    lines: list[str] = []
    plain_optimizer, optimizer = _sgd(plain), _sgd(model)
    rank = dist.get_rank()
    ledgers = [ledger_of(group) for group in _groups(model)]
    with GradientNorms(model, optimizer, lines.append) as norms:
        for step in range(3):
            rows = _batch(step)
            plain(rows).square().mean().backward()
            expected = {name: _norm(plain[layer]) for name, layer in _UNITS[make].items()}
            plain_optimizer.step()
            plain_optimizer.zero_grad()
            _train(model, optimizer, rows.chunk(dist.get_world_size())[rank])
            assert norms.norms == pytest.approx(expected, rel=1e-4)
            assert norms.slowest is not None
            assert norms.slowest[0] in {text for each in ledgers for text in each.texts}
            assert norms.slowest[1] > 0
    assert [line.partition(":")[0] for line in lines] == ["step 1", "step 2", "step 3"] * (
        rank == 0
    )


@spmd(ranks=2)
def test_norms_of_sharded_units_are_those_of_one_process() -> None:
    _norms_are_those_of_one_process(_sharded)


@spmd(ranks=2)
def test_norms_of_replicated_units_are_those_of_one_process() -> None:
    _norms_are_those_of_one_process(_replicated)


@spmd(ranks=2)
def test_norms_of_both_kinds_of_units_are_those_of_one_process() -> None:
    _norms_are_those_of_one_process(_both)


@spmd(ranks=4)
def test_norms_of_a_hybrid_mesh_are_those_of_one_process() -> None:
    _norms_are_those_of_one_process(_hybrid)


@spmd(ranks=2)
def test_steps_on_shards_are_written_once() -> None:
    model = _sharded()
    optimizer = _sgd(model)
    step_on_shards(optimizer)
    with GradientNorms(model, optimizer, lambda _: None) as norms:
        _train(model, optimizer, _batch(0))
    assert norms.step == 1


@spmd(ranks=2)
def test_the_launch_that_takes_longest_is_named() -> None:
    delays = dict[str, float]()

    def delay(_: object, launch: Launch, *__: object) -> None:
        time.sleep(delays.get(launch.text, 0.0))

    model, other = _sharded(), _sharded()
    optimizer = _sgd(model)
    for each in (model, other):
        each(_batch(0)).sum().backward()  # checks of the first step wait for the other rank
    with GradientNorms(model, optimizer, lambda _: None) as norms:
        end = observe_launches(launching=delay)  # after the logger has looked at the clock
        try:
            delays["gradient reduction of unit '0'"] = 0.2
            other(_batch(0)).sum().backward()  # of another model
            delays.clear()
            delays["all-gather of unit '2'"] = 0.1
            _train(model, optimizer, _batch(0))
        finally:
            end()
        assert norms.waited > 0.0
        text, seconds = norms.slowest or ("", 0.0)
        assert (text, seconds >= 0.1) == ("all-gather of unit '2'", True)
        _train(model, optimizer, _batch(0))
        assert norms.slowest != (text, seconds)  # the former step's are forgotten


def _observers() -> list[list[Any]]:
    return [[*each] for each in (base._LAUNCHING, base._LAUNCHED, base._WAITING, base._WAITED)]


@spmd(ranks=2)
def test_a_closed_logger_leaves_nothing_behind() -> None:
    model = _sharded()
    optimizer, ledger = _sgd(model), ledger_of(world_group())

    def launches() -> int:
        before = ledger.count
        _train(model, optimizer, _batch(0))
        return ledger.count - before

    launches()  # checks of the first step
    observers = _observers()
    alone, lines = launches(), list[str]()
    norms: Any = GradientNorms(model, optimizer, lines.append)
    assert launches() == alone + 1  # one message for all units
    norms.close()
    written, gone = len(lines), weakref.ref(norms)
    del norms
    gc.collect()
    assert gone() is None
    assert _observers() == observers
    assert (launches(), len(lines)) == (alone, written)


@spmd(ranks=2)
def test_ranks_without_data_take_part() -> None:
    model = _sharded()
    optimizer, batches = _sgd(model), 1 + 2 * dist.get_rank()
    with GradientNorms(model, optimizer, lambda _: None) as norms, join(model, optimizer):
        for step in range(batches):
            _train(model, optimizer, _batch(step))
    assert norms.step == 3
    assert all(norm > 0 for norm in norms.norms.values())


@spmd(ranks=2)
def test_an_optimizer_in_backward_is_refused() -> None:
    model = _sharded()
    optimizer = _sgd(model)
    apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    with pytest.raises(ValueError, match=r"GradientNorms: .*weight.* in backward"):
        GradientNorms(model, optimizer)
