"""State dicts and single parameters of sharded models are copied, saved and loaded as those of plain models are."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from composable import fully_shard
from tests.helpers.world import Pool, current_device, need_devices, spmd


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


# --- full state of a parameter without dimensions ---------------------------------------------------------------------

_OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "AdamW for each": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=0.1),
}


@pytest.mark.parametrize("optimizer", _OPTIMIZERS)
@spmd(ranks=2)
def test_an_optimizer_goes_on_from_a_full_state_dict(optimizer: str) -> None:
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
