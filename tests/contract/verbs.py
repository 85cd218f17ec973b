"""Verbs and modules for the tests of the contract; none communicates."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from composable.contract.contract import (
    contract,
    on_undo,
)


class Level:
    """The state of `mark`: its argument and its modules."""

    def __init__(self) -> None:
        self.value = 0
        self.modules: list[nn.Module] = []


@contract(state_cls=Level)
def mark(module, *, level=1, note=None):
    modules = module if isinstance(module, list) else [module]
    mark.state(modules[0]).value = level
    mark.state(modules[0]).modules = list(modules)
    for each in modules:
        on_undo(each.register_forward_hook(pass_through).remove)
    return module


@contract(
    clashes={
        "replicate": (
            "a module can be sharded or replicated, not both. Call remove(module, replicate) first"
        ),
        "mark": "see the guide",
    },
    equivalents={
        "auto_wrap_policy": "policy=",
        "sharding_strategy": "reshard_after_forward=",
        "device_id": "the mesh says which device; leave it out",
    },
)
def fully_shard(module, *, mesh=None, policy=None, reshard_after_forward=True):
    return module


@contract(clashes=["fully_shard"])
def replicate(module):
    return module


@contract()
def mark_tree(module, *, fail_at=None):
    """Applies itself to the children, then to the module."""
    for name, child in module.named_children():
        mark_tree(child, fail_at=fail_at)
        if name == fail_at:
            raise ArithmeticError(name)
    on_undo(module.register_forward_hook(pass_through).remove)


def pass_through(module: nn.Module, args: Any, output: Any) -> Any:
    return output


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.norm(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Linear(4, 4)
        self.layers = nn.ModuleList([Block() for _ in range(4)])
        self.enc = nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.emb(x)
        for layer in self.layers:
            x = layer(x)
        return x


def everything_about(model: nn.Module) -> list[tuple[Any, ...]]:
    """All attributes of all modules with the identities in them, to compare before and after."""
    found: list[tuple[Any, ...]] = []
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, dict):
                found.append((name, key, id(value), [(k, id(v)) for k, v in value.items()]))
            elif isinstance(value, list):
                found.append((name, key, id(value), [id(v) for v in value]))
            elif isinstance(value, set):
                found.append((name, key, id(value), sorted(value)))
            else:
                found.append((name, key, id(value)))
    return found


def message(error: type[BaseException], call: Callable[[], Any]) -> str:
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


def this_line() -> int:
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def through_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def through_torch_save(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIERS = pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle, through_torch_save])
