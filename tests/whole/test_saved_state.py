"""State dicts and single parameters of sharded models are copied, saved and loaded as those of plain models are."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from composable import fully_shard, step_on_shards
from tests.helpers.compare import full
from tests.helpers.world import Pool, current_device, need_devices


class Small(nn.Module):
    """Parameters of several sizes, one of them without dimensions, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(24, 16)
        self.norm = nn.BatchNorm1d(16)
        self.last = nn.Linear(16, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.norm(self.first(x)).tanh()) * self.scale
        return result


def _model(**kwargs: Any) -> Small:
    torch.manual_seed(0)
    model = Small().to(current_device())
    fully_shard(model, policy={nn.Linear}, **kwargs)
    return model


def _batch(seed: int = 0) -> Tensor:
    return torch.randn(4, 24, generator=torch.Generator().manual_seed(seed)).to(current_device())


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> Tensor:
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(_batch(step)).square().mean()
        loss.backward()
        optimizer.step()
    return model(_batch(9)).detach()  # type: ignore[no-any-return]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert list(one) == list(other)
    for name, value in one.items():
        assert type(value) is type(other[name]), name
        assert torch.equal(_local(value), _local(other[name])), name


def _saved(thing: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return file


def _save_and_load(folder: str, mmap: bool) -> None:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    _train(model, optimizer)
    path = f"{folder}/{dist.get_rank()}.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    before = copy.deepcopy(model.state_dict())
    _assert_same(before, model.state_dict())
    expected = _train(model, optimizer)
    assert not torch.equal(_local(before["last.weight"]), _local(model.state_dict()["last.weight"]))
    loaded = torch.load(path, weights_only=True, mmap=mmap)
    _assert_same(before, loaded["model"])
    fresh = _model()
    again = torch.optim.AdamW(fresh.parameters(), lr=0.1)
    fresh.load_state_dict(loaded["model"])
    again.load_state_dict(loaded["optimizer"])
    assert torch.equal(_train(fresh, again), expected)


@pytest.mark.parametrize("mmap", [False, True], ids=["read", "mapped"])
def test_a_saved_state_dict_goes_on_where_it_was_saved(pool: Pool, tmp_path: Path, mmap: bool, device: str) -> None:
    need_devices(device, 2)
    pool.run(2, _save_and_load, str(tmp_path), mmap, device=device)


def _sizes() -> None:
    model = nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 2)).to(current_device())
    torch.manual_seed(0)
    fully_shard(model, sync_module_states="broadcast")
    for name, parameter in model.named_parameters():
        payload = _local(parameter).numel() * 4
        for held in (parameter.detach(), parameter.data, parameter, model.state_dict()[name]):
            assert _local(held).storage_offset() == 0
            assert _local(held).untyped_storage().nbytes() == payload, name
            assert len(_saved(held).getbuffer()) < payload + 4000, name


def test_a_saved_shard_is_as_large_as_the_shard(pool: Pool, device: str) -> None:
    need_devices(device, 2)
    pool.run(2, _sizes, device=device)


def _copies() -> None:
    model = _model()
    model(_batch()).sum().backward()
    for name, parameter in model.named_parameters():
        for twin in (copy.deepcopy(parameter), copy.deepcopy(parameter.detach()), torch.load(_saved(parameter.detach()))):
            assert isinstance(twin, DTensor), name
            assert torch.equal(twin.to_local(), _local(parameter))
            with torch.no_grad():
                twin.add_(1)
            assert not torch.equal(twin.to_local(), _local(parameter)) or not _local(parameter).numel()
        assert parameter.grad is not None
        assert torch.equal(_local(copy.deepcopy(parameter).grad), _local(parameter.grad))


def test_single_parameters_are_copied_and_saved(pool: Pool, device: str) -> None:
    need_devices(device, 2)
    pool.run(2, _copies, device=device)


def _write_into_a_state_dict() -> None:
    model = _model(reshard_after_forward=False)
    before = model(_batch())
    with torch.no_grad():
        for value in model.state_dict().values():
            if isinstance(value, DTensor):
                value.mul_(2)
    plain = Small().to(current_device())
    plain.load_state_dict({name: full(value) for name, value in model.state_dict().items()})
    after = model(_batch())
    assert not torch.allclose(after, before)
    torch.testing.assert_close(after, plain(_batch()))


def test_what_is_written_into_a_state_dict_is_computed_with(pool: Pool, device: str) -> None:
    """Checkpoints are loaded that way; parameters that were kept after forward are gathered anew."""
    need_devices(device, 2)
    pool.run(2, _write_into_a_state_dict, device=device)


def _checkpoint(folder: str, runs: bool) -> None:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if not runs:
        step_on_shards(optimizer).remove()
    _train(model, optimizer)
    before = copy.deepcopy(model.state_dict())
    pending = dcp.async_save({"model": model.state_dict()}, checkpoint_id=folder)
    _train(model, optimizer)  # what is saved is what it was
    pending.result()  # type: ignore[union-attr]
    target = _model().state_dict()
    dcp.load({"model": target}, checkpoint_id=folder)
    _assert_same(before, target)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("runs", [False, True], ids=["step by parameter", "step on shards"])
def test_an_asynchronous_checkpoint_holds_the_model_of_its_time(pool: Pool, tmp_path: Path, runs: bool, device: str) -> None:
    need_devices(device, 2)
    pool.run(2, _checkpoint, str(tmp_path), runs, device=device)


# --- full state of a parameter without dimensions ---------------------------------------------------------------------

_OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "AdamW for each": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=0.1),
}


def _load_full_state(optimizer: str) -> None:
    """A full state dict of model and optimizer, loaded into fresh ones, and into those that it is of."""
    options = StateDictOptions(full_state_dict=True)
    model = _model()
    first = _OPTIMIZERS[optimizer](model.parameters())
    _train(model, first)
    weights, state = copy.deepcopy(get_state_dict(model, first, options=options))
    expected = _train(model, first)
    fresh = _model()
    for each, stepping in ((fresh, _OPTIMIZERS[optimizer](fresh.parameters())), (model, first)):
        set_state_dict(each, stepping, model_state_dict=weights, optim_state_dict=copy.deepcopy(state), options=options)
        torch.testing.assert_close(_train(each, stepping), expected)


@pytest.mark.parametrize("optimizer", _OPTIMIZERS)
def test_an_optimizer_goes_on_from_a_full_state_dict(pool: Pool, optimizer: str, device: str) -> None:
    need_devices(device, 2)
    pool.run(2, _load_full_state, optimizer, device=device)
