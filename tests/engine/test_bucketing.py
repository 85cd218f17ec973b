"""Which gradients share a message of a replicated model, and that buckets are launched in one order whatever arrives when."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from composable.comm import LocalComm, MeshInfo
from composable.engine.bucketing import FIRST_BYTES, Buckets
from composable.engine.param import ManagedParam, ParamInfo, Place
from composable.engine.unit import Unit, UnitSpec
from composable.errors import PhaseError
from tests.engine.layouts import SETTINGS
from tests.engine.ranks import CPU, infos_of_replicas
from tests.helpers.communicators import Log, Recording

_DTYPES = {"f": torch.float32, "h": torch.bfloat16}


def _unit(sizes: Sequence[int], kinds: str, bucket_bytes: int, info: MeshInfo) -> tuple[Unit, Buckets]:
    """A replicated unit with parameters p0, p1, ... of these numbers of elements, and its buckets."""
    module = nn.Module()
    for index, (size, kind) in enumerate(zip(sizes, kinds, strict=True)):
        module.register_parameter(f"p{index}", nn.Parameter(torch.zeros(size, dtype=_DTYPES[kind])))
    params = tuple(ParamInfo(name, (Place(module, name),)) for name in module._parameters)
    unit = Unit()
    unit.initialize(UnitSpec("replicate", (module,), params, info, bucket_bytes=bucket_bytes))
    root: Any = SimpleNamespace(iteration=None)
    return unit, Buckets(root, [unit])


def _filled(buckets: Buckets) -> list[list[int]]:
    return [[int(param.fqn[1:]) for param in each.bucket.params] for each in buckets._buckets]


@SETTINGS
@given(st.lists(st.tuples(st.integers(0, 20), st.sampled_from("fh")), max_size=12), st.integers(1, 120))
def test_buckets_are_filled_in_order_until_they_reach_their_size(items: list[tuple[int, str]], cap: int) -> None:
    sizes, kinds = [size for size, _ in items], "".join(kind for _, kind in items)
    alone = LocalComm(CPU)
    filled = _filled(_unit(sizes, kinds, cap, MeshInfo(None, alone, alone))[1])
    assert sorted(index for bucket in filled for index in bucket) == list(range(len(items)))
    assert all(bucket == sorted(bucket, reverse=True) for bucket in filled), "backward brings the last ones first"
    for position, bucket in enumerate(filled):
        (kind,) = {kinds[index] for index in bucket}
        nbytes = [sizes[index] * _DTYPES[kind].itemsize for index in bucket]
        assert sum(nbytes[:-1]) < cap
        follows = any(kinds[other[0]] == kind for other in filled[position + 1 :])
        assert not follows or sum(nbytes) >= cap, "one of its kind comes later, so it is full"


def test_the_first_bucket_is_small_so_that_communication_starts_early() -> None:
    quarter = FIRST_BYTES // 16  # elements
    alone = LocalComm(CPU)
    _, buckets = _unit([quarter] * 13, "f" * 13, 2 * FIRST_BYTES, MeshInfo(None, alone, alone))
    assert [len(bucket) for bucket in _filled(buckets)] == [4, 8, 1]


def _ranks(number: int = 2) -> tuple[list[Unit], list[Buckets], list[Log]]:
    """Four parameters in buckets of their own on every rank."""
    logs = [Log() for _ in range(number)]
    made = []
    for info, log in zip(infos_of_replicas(number), logs, strict=True):
        comm: Any = Recording(info.all, log)
        made.append(_unit([3] * 4, "f" * 4, 1, MeshInfo(info.mesh, info.shard, comm, comm)))
    return [unit for unit, _ in made], [buckets for _, buckets in made], logs


def _launched(log: Log) -> str:
    found = [label.partition("('p")[2][0] if "('p" in label else "o" for label in log.labels()]
    log.events.clear()
    return "".join(found)


def _arrive(unit: Unit, buckets: Buckets, *indices: int) -> None:
    for index in indices:
        param: ManagedParam = unit.params[index]
        param.at_rest.grad = torch.full((3,), index + 1.0)
        buckets.arrived(param)


def test_buckets_are_launched_in_one_order_by_gradients_that_come_in_any_order_or_not_at_all() -> None:
    units, buckets, (log, other) = _ranks()
    for each in buckets:
        each._ready = None  # the order is agreed
        each.open()
    _arrive(units[0], buckets[0], 2, 0)
    assert _launched(log) == "", "the bucket of 3 comes first"
    _arrive(units[0], buckets[0], 3)
    assert _launched(log) == "32"
    _arrive(units[0], buckets[0], 1)
    assert _launched(log) == "10"
    buckets[1].open()
    _arrive(units[1], buckets[1], 3)
    for each in buckets:
        each.launch_rest()
        each.launch_rest()
    assert _launched(other) == "3210"
    for each in buckets:
        each.land()
    for unit in units:
        found = [param.at_rest.grad for param in unit.params]
        assert [float(gradient[0]) for gradient in found if gradient is not None] == [0.5, 1.0, 1.5, 4.0]


def test_the_order_is_that_of_arrival_on_rank_0_agreed_once() -> None:
    units, buckets, logs = _ranks()
    order = {0: [1, 3, 0, 2], 1: [0, 1, 2, 3]}
    sent: list[list[int]] = []
    for rank, (unit, each) in enumerate(zip(units, buckets, strict=True)):
        each.open()
        _arrive(unit, each, *order[rank])
    for unit, each in zip(units, buckets, strict=True):

        def broadcast(tensors: Sequence[torch.Tensor], label: str) -> None:
            sent.append(tensors[0].tolist())
            tensors[0].copy_(torch.tensor(sent[0]))

        comm: Any = unit.mesh_info.all
        comm.broadcast = broadcast
        each.land()
        assert _filled(each) == [[1], [3], [0], [2]]
    assert len(sent) == 2
    for rank, (unit, each) in enumerate(zip(units, buckets, strict=True)):
        each.open()
        _launched(logs[rank])
        _arrive(unit, each, 0, 1, 2, 3)
        assert _launched(logs[rank]) == "1302"
    for each in buckets:
        each.land()
    assert len(sent) == 2


def test_a_second_gradient_after_the_first_was_sent_is_refused_by_name() -> None:
    units, buckets, _ = _ranks()
    buckets[0].open()
    _arrive(units[0], buckets[0], 3)
    with pytest.raises(PhaseError, match=r"^parameter 'p3' of unit .* got a second gradient in one backward"):
        _arrive(units[0], buckets[0], 3)
