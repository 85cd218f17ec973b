"""Which gradients share a message of a replicated model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from composable import fully_shard, replicate
from composable.comm.backends import LocalComm
from composable.comm.ledger import ledger_of
from composable.comm.mesh_info import MeshInfo
from composable.contract.tree import Place
from composable.engine.edits.loading import StateDictHooks
from composable.engine.gradients.agreed import Agreed
from composable.engine.gradients.post_backward import FIRST_BYTES, Buckets
from composable.engine.params.param import ParamInfo
from composable.engine.step.unit import Unit, UnitSpec
from composable.engine.step.visit import GRADIENT_HOOKS
from composable.errors import PhaseError
from tests.engine.layouts import SETTINGS
from tests.engine.ranks import CPU
from tests.helpers.world import current_device, spmd

_DTYPES = {"f": torch.float32, "h": torch.bfloat16}


def _unit(
    sizes: Sequence[int], kinds: str, bucket_bytes: int, info: MeshInfo
) -> tuple[Unit, Buckets]:
    """A replicated unit with parameters p0, p1, ... of these element counts, and its buckets."""
    module = nn.Module()
    for index, (size, kind) in enumerate(zip(sizes, kinds, strict=True)):
        module.register_parameter(f"p{index}", nn.Parameter(torch.zeros(size, dtype=_DTYPES[kind])))
    params = tuple(ParamInfo(name, (Place(module, name),)) for name in module._parameters)
    unit = Unit()
    spec = UnitSpec("replicate", (module,), params, info, bucket_bytes=bucket_bytes)
    unit.initialize(spec, GRADIENT_HOOKS, StateDictHooks(unit).watch)
    unit.build()
    return unit, Buckets([unit.gradients], Agreed(()))


def _filled(buckets: Buckets) -> list[list[int]]:
    return [[int(param.fqn[1:]) for param in each.params] for each in buckets.buckets]


@SETTINGS
@given(
    st.lists(st.tuples(st.integers(0, 20), st.sampled_from("fh")), max_size=12), st.integers(1, 120)
)
def test_buckets_are_filled_in_order_until_they_reach_their_size(
    items: list[tuple[int, str]], cap: int
) -> None:
    sizes, kinds = [size for size, _ in items], "".join(kind for _, kind in items)
    alone = LocalComm(CPU)
    filled = _filled(_unit(sizes, kinds, cap, MeshInfo(None, alone, alone))[1])
    assert sorted(index for bucket in filled for index in bucket) == list(range(len(items)))
    assert all(bucket == sorted(bucket, reverse=True) for bucket in filled), (
        "backward brings the last ones first"
    )
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


class Twice(nn.Module):
    """A layer that runs twice; reentrant checkpoints give each run a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor, *, checkpoints: bool) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True) if checkpoints else self.layer(x)
        return x


@spmd(ranks=2)
def test_what_brings_several_gradients_in_the_first_backward_waits_for_the_end_of_each() -> None:
    """Only one rank has seen several, and not the one whose order is taken."""
    plain = Twice().to(current_device())
    model = replicate(copy.deepcopy(plain), bucket_cap_mb=1e-5)
    x = torch.ones(2, 3, device=current_device(), requires_grad=True)
    for step in range(3):
        model(x, checkpoints=step > 0 or dist.get_rank() == 1).sum().backward()
        plain(x, checkpoints=False).sum().backward()
        if step == 1:
            model.add_module("other", nn.Identity())  # what is agreed outlives it
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@spmd(ranks=2)
def test_a_second_gradient_after_the_first_was_sent_is_refused_by_name() -> None:
    model = replicate(Twice().to(current_device()), bucket_cap_mb=1e-5)
    x = torch.ones(2, 3, device=current_device(), requires_grad=True)
    model(x, checkpoints=False).sum().backward()  # no parameter brings several
    for _ in range(2):
        with pytest.raises(
            PhaseError,
            match=r"^parameter 'layer\.(weight|bias)' of .* got a second gradient in one backward",
        ):
            model(x, checkpoints=True).sum().backward()
    model(x, checkpoints=False).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


class Branches(nn.Module):
    """Two layers, of which each rank reads as many as its number says."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[: 1 + dist.get_rank()]:
            x = layer(x)
        return x


@spmd(ranks=2)
def test_each_backward_of_several_forwards_launches_in_one_order_beside_another_root() -> None:
    sharded = fully_shard(nn.Linear(3, 3).to(current_device()), reshard_after_forward=True)
    replicated = replicate(Branches().to(current_device()), bucket_cap_mb=1e-5)
    for _ in range(2):  # in the first step all buckets wait for the end
        losses = [
            replicated(sharded(torch.ones(2, 3, device=current_device()))).sum() for _ in range(3)
        ]
        for loss in losses:
            loss.backward()
    launches: list[Any] = [None] * dist.get_world_size()
    ledger = ledger_of(dist.group.WORLD)
    dist.all_gather_object(launches, (ledger.count, tuple(ledger.texts)))
    assert len(set(launches)) == 1
