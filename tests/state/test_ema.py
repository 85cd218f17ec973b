"""Exponential moving averages on shards, and torch's own `AveragedModel`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from composable import EMA, full_state_dict, fully_shard, replicate
from composable.comm.ledger import ledger_of
from composable.errors import ForeignParameterError
from composable.extras.averaging import ema as ema_file
from composable.seams import Observer, observe
from composable.tensors import cloned
from tests.helpers.compare import full
from tests.helpers.world import current_device, spmd
from tests.state.models import PLANS, Block, Net, plain, tokens

_EXACT = [plan for plan in PLANS if plan != "mixed precision"]


def _steps(model: nn.Module, ema: EMA, count: int, start: int = 0) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(start, start + count):
        model(tokens(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update()


def _averages(model: Net, ema: EMA) -> dict[str, torch.Tensor]:
    with ema.swap():
        return full_state_dict(model, rank0_only=False)


@pytest.mark.parametrize("plan", _EXACT)
@spmd(ranks=[2, 4])
def test_averages_are_those_of_one_process(plan: str) -> None:
    expected = plain()
    reference = AveragedModel(expected, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    reference.update_parameters(expected)  # the first one copies
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for step in range(4):
        expected(tokens(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        reference.update_parameters(expected)
    model = plain()
    PLANS[plan](model)
    ema = EMA(model, decay=0.9)
    _steps(model, ema, 2)
    saved = copy.deepcopy(ema.state_dict())
    resumed = EMA(model, decay=0.5)
    resumed.load_state_dict(saved)
    _steps(model, resumed, 2, start=2)
    before = full_state_dict(model, rank0_only=False)
    found = _averages(model, resumed)
    for name, value in reference.module.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(found[name], value.cpu(), rtol=1e-4, atol=1e-6, msg=name)
    after = full_state_dict(model, rank0_only=False)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert any(not torch.equal(found[name], value) for name, value in before.items())


class _Exchanges(Observer):
    def __init__(self) -> None:
        self.noted: list[bool] = []

    def exchanges_values(self, back: bool) -> None:
        self.noted.append(back)


@spmd(ranks=2)
def test_a_scope_that_runs_out_of_memory_as_it_opens_changes_nothing() -> None:
    model = fully_shard(plain(), policy={Block})
    ema = EMA(model, decay=0.5)
    _steps(model, ema, 1)
    before, averages = full_state_dict(model, rank0_only=False), _averages(model, ema)
    calls = []

    def limited(value: torch.Tensor) -> torch.Tensor:
        calls.append(value)
        if len(calls) == 3:
            raise MemoryError
        return cloned(value)

    exchanges = _Exchanges()
    end = observe(exchanges)
    with mock.patch.object(ema_file, "cloned", limited), pytest.raises(MemoryError), ema.swap():
        pass
    end()
    assert exchanges.noted == [False, True]
    after, found = full_state_dict(model, rank0_only=False), _averages(model, ema)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(torch.equal(found[name], value) for name, value in averages.items())
    assert not all(torch.equal(found[name], value) for name, value in before.items())


@spmd(ranks=2)
def test_an_exception_inside_the_scope_gives_the_values_back() -> None:
    model = fully_shard(plain(), policy={Block})
    ema = EMA(model, decay=0.5)
    _steps(model, ema, 1)
    before = full_state_dict(model, rank0_only=False)
    with pytest.raises(ZeroDivisionError), ema.swap():
        raise ZeroDivisionError
    assert all(
        torch.equal(value, before[name])
        for name, value in full_state_dict(model, rank0_only=False).items()
    )


@spmd(ranks=2)
def test_averages_are_shards_and_need_no_message() -> None:
    model = fully_shard(plain(), policy={Block})
    ema = EMA(model, decay=0.5)
    _steps(model, ema, 1)
    before = ledger_of(dist.group.WORLD).count
    ema.update()
    with ema.swap():
        pass
    assert ledger_of(dist.group.WORLD).count == before
    averages = ema.state_dict()["averages"]
    assert isinstance(averages["blocks.0.up.weight"], DTensor)
    assert "head.weight" not in averages, "a tied parameter has one average"
    assert "blocks.0.table" not in averages


@pytest.mark.parametrize("before", ["fully_shard", "hybrid", "replicate inside fully_shard"])
@spmd(ranks=4)
def test_averages_move_between_plans_and_plain_models(before: str) -> None:
    model = plain()
    PLANS[before](model)
    ema = EMA(model, decay=0.5)
    _steps(model, ema, 2)
    wanted, state = _averages(model, ema), ema.state_dict()
    for after in (*_EXACT, "plain"):
        other = plain(1)
        if after != "plain":
            PLANS[after](other)
        moved = EMA(other, decay=0.9)
        moved.load_state_dict(state)
        with moved.swap():
            found = (
                other.state_dict() if after == "plain" else full_state_dict(other, rank0_only=False)
            )
            for name, value in wanted.items():
                assert torch.equal(found[name].cpu(), value), (after, name)


class _Unusual(nn.Module):
    """A complex parameter, a parameter of one row, and entries that hooks rename or drop."""

    def __init__(self) -> None:
        super().__init__()
        self.renamed, self.dropped = nn.Linear(2, 1), nn.Linear(2, 3)
        self.wave = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        self.register_buffer("kept", torch.ones(2))
        self.register_buffer("computed", torch.ones(2), persistent=False)
        self.register_state_dict_post_hook(_rename_and_drop)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def _rename_and_drop(
    module: nn.Module, state: dict[str, torch.Tensor], prefix: str, _: object
) -> None:
    state[prefix + "weight"] = state.pop(prefix + "renamed.weight")
    del state[prefix + "dropped.weight"]


@pytest.mark.parametrize("verb", [fully_shard, replicate])
@spmd(ranks=2)
def test_every_parameter_follows_slowly_whatever_its_dtype_and_its_entry(
    verb: Callable[[nn.Module], nn.Module],
) -> None:
    model = _Unusual()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    verb(model)
    ema = EMA(model, decay=0.75)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    ema.update()
    with ema.swap():
        assert all((full(parameter.detach()) == 0.75).all() for parameter in model.parameters())
        assert (model.kept == 0).all()
    assert "computed" not in ema.state_dict()["averages"]


@spmd(ranks=2)
def test_averages_of_another_shape_or_rank_are_refused_before_anything_changes() -> None:
    ema = EMA(fully_shard(nn.Linear(4, 6)), decay=0.5)
    mesh = DeviceMesh(current_device().type, [1 - dist.get_rank()])
    foreign = DTensor.from_local(
        torch.zeros(6, 4), mesh, run_check=False, shape=(6, 4), stride=(4, 1)
    )
    for value, said in (
        (torch.zeros(1, 4), r"'weight' has the shape \(1, 4\)"),
        (foreign, "'weight', .* of another rank"),
    ):
        state = {"decay": 0.9, "averages": {**ema.state_dict()["averages"], "weight": value}}
        before = {
            name: full(average).clone() for name, average in ema.state_dict()["averages"].items()
        }
        with pytest.raises(ForeignParameterError, match=said):
            ema.load_state_dict(state)
        assert ema.state_dict()["decay"] == 0.5
        assert all(
            torch.equal(full(ema.state_dict()["averages"][name]), average)
            for name, average in before.items()
        )


@pytest.mark.parametrize("plan", _EXACT)
@spmd(ranks=2)
def test_torchs_averaged_model_has_the_averages_of_one_process(plan: str) -> None:
    expected, model = plain(), plain()
    PLANS[plan](model)
    averages = []
    for each in (expected, model):
        averaged = AveragedModel(each, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for step in range(3):
            each(tokens(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            averaged.update_parameters(each)
        averages.append(averaged)
    torch.testing.assert_close(averages[1](tokens(9)), averages[0](tokens(9)), rtol=1e-4, atol=1e-6)
    found = full_state_dict(averages[1], rank0_only=False)
    for name, value in averages[0].state_dict().items():
        torch.testing.assert_close(found[name], value.cpu(), rtol=1e-4, atol=1e-6, msg=name)
