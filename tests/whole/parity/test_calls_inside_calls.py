"""A module that is called inside of its own call computes as in one process."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Final
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composable import (
    MixedPrecisionPolicy,
    checkpoint,
    fully_shard,
    join,
    no_sync,
    register_forward_method,
    registry,
    replicate,
)
from composable.engine.step.root import Root
from tests.helpers.compare import assert_mean_gradients, full
from tests.helpers.means import WIDTH, batch_of, copies
from tests.helpers.world import current_device, spmd


class Recursive(nn.Module):
    """Calls itself, and reads a parameter of its own after it has."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, again: int = 0) -> Tensor:
        y: Tensor = self.down(self.up(x).tanh())
        return self(y, again - 1) * self.scale if again else y

    def generate(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self(x)
        return x * self.scale


def _checkpointed(model: nn.Module) -> None:
    checkpoint(model)
    fully_shard(model)


VERBS: Final[dict[str, Callable[..., object]]] = {
    "fully_shard": fully_shard,
    "units inside": partial(fully_shard, policy={nn.Linear}),
    "freed at once": partial(fully_shard, reshard_after_forward=True),
    "checkpointed": _checkpointed,
    "replicate": replicate,
}


# What checkpointing runs again must not call itself: torch raises `CheckpointError`.
_CASES: Final = [
    (verb, way)
    for verb in VERBS
    for way in ("recursion", "generate")
    if (verb, way) != ("checkpointed", "recursion")
]


@pytest.mark.parametrize(("verb", "way"), _CASES)
@spmd(ranks=2)
def test_gradients_are_those_of_one_process(verb: str, way: str) -> None:
    reported: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: reported.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("composable").addHandler(handler)
    plain, ours = copies(Recursive, VERBS[verb])
    register_forward_method(ours, "generate")
    for step in range(3):
        for model in (plain, ours):
            with no_sync(ours, enabled=step == 1):  # what is accumulated must not be dropped
                x = batch_of(step)
                output = model.generate(x) if way == "generate" else model(x, 2)
                output.square().mean().backward()
        if step != 1:
            assert_mean_gradients(plain, ours)
    logging.getLogger("composable").removeHandler(handler)
    assert reported == []  # no step was given up


class _NotCast(Tensor):
    """What no memory is left for when it is cast."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.to:
            raise MemoryError("as planned")
        return super().__torch_function__(func, types, args, kwargs or {})


class Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y.as_subclass(_NotCast) if self.fails else y


@pytest.mark.parametrize("inside", [False, True])
@spmd(ranks=2)
def test_an_output_that_cannot_be_cast_loses_the_step_and_no_more(inside: bool) -> None:
    policy = MixedPrecisionPolicy(output_dtype=torch.float32)
    options = {"policy": {Sometimes}} if inside else {}
    plain, ours = copies(
        lambda: nn.Sequential(Sometimes(), Sometimes()), fully_shard, mp_policy=policy, **options
    )
    ours[1].fails = True
    with pytest.raises(MemoryError, match="as planned"):
        ours(batch_of(0))
    assert all(isinstance(each, DTensor) for each in ours.parameters())  # at once
    ours[1].fails = False
    for model in (plain, ours):
        model(batch_of(1)).double().square().mean().backward()
    assert_mean_gradients(plain, ours, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("verb", ["fully_shard", "replicate"])
@spmd(ranks=2)
def test_a_rank_without_data_follows_calls_inside_of_calls(verb: str) -> None:
    plain, ours = copies(Recursive, VERBS[verb])
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    with join(ours, optimizer, divide_by_initial_world_size=False):
        for step in range(1 + dist.get_rank()):
            optimizer.zero_grad()
            ours(batch_of(step), 2).square().mean().backward()
            optimizer.step()
    for step in range(2):
        there = [rank for rank in range(2) if step <= rank]
        reference.zero_grad()
        for rank in there:
            generator = torch.Generator().manual_seed(100 * step + rank)
            x = torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)
            (plain(x.to(current_device()), 2).square().mean() / len(there)).backward()
        reference.step()
    for ours_now, expected in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(ours_now), expected, rtol=1e-9, atol=1e-11)


class Retries(nn.Module):
    """`generate` calls the module again where its forward raised."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y

    def generate(self, x: Tensor) -> Tensor:
        try:
            y: Tensor = self(x)
        except MemoryError:
            y = self(x[:1])
        return y


@spmd(ranks=2)
def test_a_call_that_could_not_begin_leaves_the_one_around_it() -> None:
    model = Retries().to(current_device())
    fully_shard(model)
    register_forward_method(model, "generate")
    x = torch.ones(2, WIDTH, device=current_device())
    with torch.no_grad():
        expected = model(x[:1])
    enters = Root.pre_forward
    calls: list[int] = []

    def second_raises(self: Root, *args: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError
        enters(self, *args)

    with mock.patch.object(Root, "pre_forward", second_raises), torch.no_grad():
        found = model.generate(x)
    assert torch.equal(found, expected)
    model(x).sum().backward()
    assert not registry(model)["fully_shard"].state.step.calls
