"""When one rank cannot annotate, or annotates otherwise, all ranks raise at once, and say which
rank and why.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

from composable import fully_shard, replicate
from composable.errors import ComposableError
from tests.helpers.world import Pool


class _Odd(Exception):
    pass


def _raises(*_: object) -> Any:
    raise _Odd("as planned")


def _differs(verb: str, usual: str, other: str) -> str:
    return (
        f"RanksDisagreeError: {verb}: the ranks differ in arguments: rank 0 has for 'weight'"
        f" {usual}, rank 1 has for 'weight' {other}. Pass the same arguments on every rank."
    )


def _failed(verb: str, why: str) -> str:
    return f"RanksDisagreeError: {verb}: rank 1 failed, so no rank annotates the module: {why}"


def _is_mode(verb: str, usual: str, other: str) -> str:
    return (
        f"RanksDisagreeError: {verb}: the ranks differ in modes of sync_module_states: rank 0 has"
        f" {usual}, rank 1 has {other}. Pass the same arguments on every rank."
    )


_ODD: Final = "_Odd: as planned"
_CAP: Final = (
    "ArgumentError: replicate: bucket_cap_mb must be a positive number that is not infinite, got 0"
)
_UNIT: Final = "unit '0', reshard_after_forward={}, dimension {}"
_BUCKETS: Final = "bucket_cap_mb={}, broadcast_buffers=True"


def _of_unit(after: object = None, dim: int = 0, more: str = "") -> str:
    return _differs("fully_shard", _UNIT.format(None, 0), _UNIT.format(after, dim) + more)


def _of_buckets(cap: float = 25.0, more: str = "") -> str:
    return _differs("replicate", _BUCKETS.format(25.0), _BUCKETS.format(cap) + more)


# What rank 1 passes, where rank 0 passes a policy only, and what the two end with.
_SHARDED: Final[dict[str, tuple[dict[str, Any], str, str]]] = {
    "a policy raises": ({"policy": _raises}, _failed("fully_shard", _ODD), _ODD),
    "a placement raises": ({"shard_placement_fn": _raises}, _failed("fully_shard", _ODD), _ODD),
    "keeps": ({"reshard_after_forward": False}, _of_unit(False), ""),
    "frees": ({"reshard_after_forward": True}, _of_unit(True), ""),
    "regroups": ({"reshard_after_forward": 2}, _of_unit(2), ""),
    "computes otherwise": ({"mp_policy": "bf16"}, _of_unit(more=", param_dtype=bfloat16"), ""),
    "gathers further ahead": ({"prefetch": 2}, _of_unit(more=", prefetch=2"), ""),
    "places otherwise": (
        {"shard_placement_fn": lambda parameter: Shard(parameter.ndim - 1)},
        _of_unit(dim=1),
        "",
    ),
    "trusts": ({"sync_module_states": "off"}, _is_mode("fully_shard", "check", "off"), ""),
}
_REPLICATED: Final[dict[str, tuple[dict[str, Any], str, str]]] = {
    "a policy raises": ({"policy": _raises}, _failed("replicate", _ODD), _ODD),
    "an argument is wrong": ({"bucket_cap_mb": 0}, _failed("replicate", _CAP), _CAP),
    "has smaller buckets": ({"bucket_cap_mb": 1.0}, _of_buckets(1.0), ""),
    "keeps buckets": (
        {"gradient_as_bucket_view": True},
        _of_buckets(more=", gradient_as_bucket_view=True"),
        "",
    ),
    "computes otherwise": ({"mp_policy": "bf16"}, _of_buckets(more=", param_dtype=bfloat16"), ""),
    "trusts": ({"sync_module_states": "off"}, _is_mode("replicate", "broadcast", "off"), ""),
}
_CASES: Final = {"fully_shard": _SHARDED, "replicate": _REPLICATED}


def _said(act: Callable[[], object]) -> str:
    try:
        act()
    except (ComposableError, _Odd) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _annotate(verb: Callable[..., Any]) -> dict[str, tuple[str, list[str]]]:
    """By case: what this rank ended with, and the kinds of parameters that the model has
    afterwards.
    """
    found = {}
    for name, (options, _, _) in _CASES[verb.__name__].items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        common: dict[str, Any] = {"policy": {nn.Linear}}
        mine = {**common, **options} if dist.get_rank() == 1 else common
        said = _said(lambda model=model, mine=mine: verb(model, **mine))  # type: ignore[misc]
        found[name] = said, [type(parameter).__name__ for parameter in model.parameters()]
        verb(model, **common)  # nothing is in the way of the right call
        model(torch.full((2, 4), float(dist.get_rank()))).sum().backward()
        assert model.get_parameter("1.bias").grad is not None
    return found


@pytest.mark.parametrize("verb", [fully_shard, replicate])
def test_all_ranks_raise_and_nothing_is_annotated(pool: Pool, verb: Callable[..., Any]) -> None:
    ours, theirs = pool.run(2, _annotate, verb)
    for name, (_, here, there) in _CASES[verb.__name__].items():
        assert ours[name] == (here, ["Parameter"] * 4), name
        assert theirs[name] == (there or here, ["Parameter"] * 4), name


@pytest.mark.parametrize("mode", ["check", "off"])
def test_a_rank_that_fails_is_reported_whatever_is_compared(pool: Pool, mode: str) -> None:
    ours, theirs = pool.run(2, _fail_in_mode, mode)
    assert (ours, theirs) == (_failed("fully_shard", _ODD), _ODD)


def _fail_in_mode(mode: str) -> str:
    model = nn.Sequential(nn.Linear(4, 4))
    options = {"shard_placement_fn": _raises} if dist.get_rank() == 1 else {}
    return _said(lambda: fully_shard(model, sync_module_states=mode, **options))
