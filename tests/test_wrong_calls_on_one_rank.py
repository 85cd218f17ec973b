"""A wrong argument, or another one, on one rank of two: both ranks raise, and neither waits.

The calls are made from the signatures of the functions that compare arguments among the ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import composable
from composable.checked import checks_of
from composable.errors import ArgumentError, RanksDisagreeError
from tests.helpers.world import current_device, spmd

_COMPARING = (
    "HierarchicalAverager", "PeriodicAverager", "export", "full_state_dict", "join", "load",
    "local_steps", "materialize", "stream_full", "summon_full_params", "watch",
)  # fmt: skip
_VALUES = (False, True, 1, 2, 0.25, torch.bfloat16, None, "warn", "raise", {2: 1}, {2: 2})


def _model() -> nn.Module:
    mesh = init_device_mesh(current_device().type, (2, 1), mesh_dim_names=("replicate", "shard"))
    return composable.fully_shard(nn.Linear(4, 4).to(current_device()), mesh=mesh)


def _compares(name: str) -> bool:
    function = getattr(composable, name)
    code = getattr(function.__init__ if inspect.isclass(function) else function, "__code__", None)
    return code is not None and code.co_filename.endswith("composable/state/whole.py")


def _raised(call: Callable[[], object]) -> Exception:
    with pytest.raises((ArgumentError, RanksDisagreeError)) as caught:
        call()
    return caught.value


@spmd(ranks=2)
def test_ranks_that_pass_other_arguments_all_raise(tmp_path: Any) -> None:
    assert sorted(filter(_compares, composable.__all__)) == sorted(_COMPARING)
    model, other = _model(), dist.get_rank() == 1
    right: Mapping[str, Any] = {
        "folder": tmp_path, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "every": 2,
        "period": 2, "periods": {2: 2}
    }  # fmt: skip
    tried = 0
    for name in _COMPARING:
        function: Any = getattr(composable, name)
        code = inspect.unwrap(function.__init__ if inspect.isclass(function) else function)
        checks = checks_of(code)
        parameters = [
            each
            for each in list(checks.signature.parameters.values())[1:]
            if each.kind is not each.VAR_POSITIONAL
        ]
        needed = {p.name: right[p.name] for p in parameters if p.default is p.empty}
        for argument in (each.name for each in parameters):
            wrong = {**needed, argument: object()} if other else needed
            error = _raised(partial(function, model, **wrong))
            said = f"{name}: {argument} must be "
            assert said in str(error), error
            assert type(error) is (ArgumentError if other else RanksDisagreeError)
            assert other or str(error).startswith(f"{name}: rank 1: ArgumentError: {said}")
            fits = checks.kinds[argument].fits
            values = [each for each in _VALUES if fits(each) and argument not in ("folder", "over")]
            if len(values) > 1:
                given = {**needed, argument: values[-1 if other else 0]}
                error = _raised(partial(function, model, **given))
                assert str(error) == (
                    f"{name}: the ranks differ in {argument}: rank 0 has {values[0]}, rank 1"
                    f" {values[-1]}. Pass the same arguments on every rank"
                )
                tried += 1
    assert tried > 15


@spmd(ranks=2)
def test_arguments_that_ranks_need_not_pass_alike(tmp_path: Any) -> None:
    """Another folder, other numbers of a kind, a default that one rank passes by itself."""
    rank = dist.get_rank()
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    composable.export(model, tmp_path / "weights")
    for folder in (tmp_path / "weights", tmp_path / "weights" / "model.safetensors"):
        composable.load(model, folder if rank else tmp_path / "weights")
    more: dict[str, Any] = {"every": 1, "repeat": False} if rank else {}
    with ExitStack() as scopes:
        scopes.enter_context(composable.watch(model, agree=2 if rank else True + 1, **more))
        scopes.enter_context(composable.join(model, optimizer))
        scopes.enter_context(composable.local_steps(model, optimizer, every=2))
        composable.PeriodicAverager(model, period=2)
        composable.HierarchicalAverager(model, periods={2: 2})
    with composable.summon_full_params(model):
        assert len(dict(composable.stream_full(model))) == 2
    plain = composable.replicate(nn.Linear(2, 2))
    if rank == 0:  # sends nothing
        assert len(composable.full_state_dict(plain)) == 2


@spmd(ranks=2)
def test_a_scope_of_lost_steps_with_other_arguments() -> None:
    model = _model()
    x = torch.ones(2, 4, device=current_device())

    def step(give_up_after: int) -> None:
        with composable.together(model, give_up_after=give_up_after):
            model(x).sum().backward()

    step(3)
    with pytest.raises(RanksDisagreeError, match="differ in give_up_after: from 2 to 3"):
        step(2 + dist.get_rank())
    step(2)


@spmd(ranks=4)
def test_ranks_beyond_the_mesh_of_the_model_raise_too() -> None:
    """The ranks compare along the model's mesh, and then among those that have parts of the same
    parameters.
    """
    mesh = init_device_mesh(current_device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Linear(4, 4, device=current_device())
    parallelize_module(model, mesh["tp"], ColwiseParallel())
    composable.fully_shard(model, mesh=mesh["dp"])
    dtype = torch.bfloat16 if dist.get_rank() == 1 else None
    error = _raised(lambda: composable.full_state_dict(model, dtype=dtype))
    assert "the ranks differ in dtype: rank 1 has torch.bfloat16, rank 3 None" in str(error)
