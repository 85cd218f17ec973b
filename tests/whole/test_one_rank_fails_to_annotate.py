"""When one rank cannot annotate, or annotates otherwise, all ranks raise at once, and say which rank and why."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, Final
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from composable import fully_shard, replicate
from composable.errors import ComposableError
from composable.runtime.handle import UnitSpec
from composable.runtime.reducer import Reducer
from tests.helpers.world import Pool, current_device


class _Odd(Exception):
    pass


def _raises(*_: object) -> Any:
    raise _Odd("as planned")


# What rank 1 passes, where rank 0 passes a policy only, and what the two end with.
_CASES: Final[dict[str, tuple[dict[str, Any], str, str]]] = {
    "a policy raises": (
        {"policy": _raises},
        "RanksDisagreeError: fully_shard: rank 1 failed, so no rank annotates the module: _Odd: as planned",
        "_Odd: as planned",
    ),
    "a placement raises": (
        {"shard_placement_fn": _raises},
        "RanksDisagreeError: fully_shard: rank 1 failed, so no rank annotates the module: _Odd: as planned",
        "_Odd: as planned",
    ),
    "keeps": (
        {"reshard_after_forward": False},
        "RanksDisagreeError: fully_shard: the arguments come to different things for parameter 'weight': "
        "unit '0', reshard_after_forward=None, dimension 0 on rank 0; "
        "unit '0', reshard_after_forward=False, dimension 0 on rank 1. Pass the same arguments on every rank.",
        "",
    ),
    "frees": (
        {"reshard_after_forward": True},
        "RanksDisagreeError: fully_shard: the arguments come to different things for parameter 'weight': "
        "unit '0', reshard_after_forward=None, dimension 0 on rank 0; "
        "unit '0', reshard_after_forward=True, dimension 0 on rank 1. Pass the same arguments on every rank.",
        "",
    ),
    "regroups": (
        {"reshard_after_forward": 2},
        "RanksDisagreeError: fully_shard: the arguments come to different things for parameter 'weight': "
        "unit '0', reshard_after_forward=None, dimension 0 on rank 0; "
        "unit '0', reshard_after_forward=2, dimension 0 on rank 1. Pass the same arguments on every rank.",
        "",
    ),
    "computes otherwise": (
        {"mp_policy": "bf16"},
        "RanksDisagreeError: fully_shard: the arguments come to different things for parameter 'weight': "
        "unit '0', reshard_after_forward=None, dimension 0 on rank 0; "
        "unit '0', reshard_after_forward=None, dimension 0, param_dtype=bfloat16 on rank 1. Pass the same arguments on every "
        "rank.",
        "",
    ),
    "places otherwise": (
        {"shard_placement_fn": lambda parameter: Shard(parameter.ndim - 1)},
        "RanksDisagreeError: fully_shard: the arguments come to different things for parameter 'weight': "
        "unit '0', reshard_after_forward=None, dimension 0 on rank 0; "
        "unit '0', reshard_after_forward=None, dimension 1 on rank 1. Pass the same arguments on every rank.",
        "",
    ),
    "trusts": (
        {"sync_module_states": "off"},
        "RanksDisagreeError: fully_shard: sync_module_states is 'check' on rank 0 and 'off' on rank 1. "
        "Pass the same on every rank.",
        "",
    ),
}


def _said(act: Callable[[], object]) -> str:
    try:
        act()
    except (ComposableError, _Odd) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _annotate() -> dict[str, tuple[str, list[str]]]:
    """By case: what this rank ended with, and the kinds of parameters that the model has afterwards."""
    found = {}
    for name, (options, _, _) in _CASES.items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        common: dict[str, Any] = {"policy": {nn.Linear}}
        mine = {**common, **options} if dist.get_rank() == 1 else common
        said = _said(lambda model=model, mine=mine: fully_shard(model, **mine))  # type: ignore[misc]
        found[name] = said, [type(parameter).__name__ for parameter in model.parameters()]
        fully_shard(model, **common)  # nothing is in the way of the right call
        model(torch.ones(2, 4)).sum().backward()
    return found


def test_all_ranks_raise_and_nothing_is_annotated(pool: Pool) -> None:
    ours, theirs = pool.run(2, _annotate)
    for name, (_, here, there) in _CASES.items():
        assert ours[name] == (here, ["Parameter"] * 4), name
        assert theirs[name] == (there or here, ["Parameter"] * 4), name


@pytest.mark.parametrize("mode", ["check", "off"])
def test_a_rank_that_fails_is_told_of_whatever_is_compared(pool: Pool, mode: str) -> None:
    ours, theirs = pool.run(2, _fail_in_mode, mode)
    assert ours == "RanksDisagreeError: fully_shard: rank 1 failed, so no rank annotates the module: _Odd: as planned"
    assert theirs == "_Odd: as planned"


def _fail_in_mode(mode: str) -> str:
    model = nn.Sequential(nn.Linear(4, 4))
    options = {"shard_placement_fn": _raises} if dist.get_rank() == 1 else {}
    return _said(lambda: fully_shard(model, sync_module_states=mode, **options))


# --- replicate --------------------------------------------------------------------------------------------------------

_REPLICATED: Final[dict[str, tuple[dict[str, Any], str, str]]] = {
    "a policy raises": (
        {"policy": _raises},
        "RanksDisagreeError: replicate: rank 1 failed, so no rank annotates the module: _Odd: as planned",
        "_Odd: as planned",
    ),
    "an argument is wrong": (
        {"bucket_cap_mb": 0},
        "RanksDisagreeError: replicate: rank 1 failed, so no rank annotates the module: "
        "AnnotationError: bucket_cap_mb must be a positive number of MiB, got 0",
        "AnnotationError: bucket_cap_mb must be a positive number of MiB, got 0",
    ),
    "has smaller buckets": (
        {"bucket_cap_mb": 1.0},
        "RanksDisagreeError: replicate: the arguments come to different things for parameter 'weight': "
        "bucket_cap_mb=25.0, 0 buffers that follow rank 0 on rank 0; "
        "bucket_cap_mb=1.0, 0 buffers that follow rank 0 on rank 1. Pass the same arguments on every rank.",
        "",
    ),
    "trusts": (
        {"sync_module_states": "off"},
        "RanksDisagreeError: replicate: sync_module_states is 'broadcast' on rank 0 and 'off' on rank 1. "
        "Pass the same on every rank.",
        "",
    ),
}


def _replicate() -> dict[str, tuple[str, bool]]:
    """By case: what this rank ended with, and whether gradients are averaged as soon as the call is right."""
    found = {}
    for name, (options, _, _) in _REPLICATED.items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        common: dict[str, Any] = {"policy": {nn.Linear}}
        mine = {**common, **options} if dist.get_rank() == 1 else common
        said = _said(lambda model=model, mine=mine: replicate(model, **mine))  # type: ignore[misc]
        found[name] = said, _works(model, replicate)
    return found


def _works(model: nn.Module, verb: Callable[..., Any]) -> bool:
    """Whether the right call goes well, and a step after it."""
    verb(model, policy={nn.Linear})
    model(torch.full((2, 4), float(dist.get_rank()))).sum().backward()
    gradient = model.get_parameter("1.bias").grad
    return gradient is not None


def test_all_ranks_raise_when_replicate_fails_on_one(pool: Pool) -> None:
    ours, theirs = pool.run(2, _replicate)
    for name, (_, here, there) in _REPLICATED.items():
        assert ours[name] == (here, True), name
        assert theirs[name] == (there or here, True), name


# --- after the check --------------------------------------------------------------------------------------------------


_LATE: Final[dict[str, tuple[Callable[..., Any], Any, str]]] = {
    "fully_shard": (fully_shard, UnitSpec, "build"),
    "replicate": (replicate, Reducer, "_make_buckets"),
}


def _run_out_of_memory(verb: str, hybrid: bool = False) -> tuple[str, list[str], bool]:
    """What this rank ended with, the kinds of parameters afterwards, and whether the right call works then."""
    annotate, owner, name = _LATE[verb]
    real = getattr(owner, name)
    calls = []

    def once(self: Any, *args: Any) -> Any:
        calls.append(name)
        if len(calls) == 2:
            raise MemoryError("as planned")
        return real(self, *args)

    if hybrid:
        annotate = partial(annotate, mesh=init_device_mesh(current_device().type, (2, 2)))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    with ExitStack() as stack:
        if dist.get_rank() == 1:
            stack.enter_context(mock.patch.object(owner, name, once))
        try:
            annotate(model, policy={nn.Linear}, sync_module_states="broadcast")
            said = "nothing"
        except (ComposableError, MemoryError) as error:
            said = f"{type(error).__name__}: {error}"
    kinds = [type(parameter).__name__ for parameter in model.parameters()]
    return said, kinds, _works(model, annotate)


@pytest.mark.parametrize("verb", _LATE)
def test_an_annotation_that_fails_half_way_on_one_rank_is_taken_back_on_all(pool: Pool, verb: str) -> None:
    ours, theirs = pool.run(2, _run_out_of_memory, verb)
    failed = f"RanksDisagreeError: {verb}: rank 1 failed, so no rank annotates the module: MemoryError: as planned"
    assert ours == (failed, ["Parameter"] * 6, True)
    assert theirs == ("MemoryError: as planned", ["Parameter"] * 6, True)


def test_it_is_taken_back_in_all_groups_of_a_hybrid_mesh(pool: Pool) -> None:
    found = pool.run(4, _run_out_of_memory, "fully_shard", hybrid=True)
    failed = "RanksDisagreeError: fully_shard: rank 1 failed, so no rank annotates the module: MemoryError: as planned"
    for rank, seen in enumerate(found):
        assert seen == ("MemoryError: as planned" if rank == 1 else failed, ["Parameter"] * 6, True)
