"""Ranks that leave a step at different places and go on end with an error that names the collective, never with numbers."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from datetime import timedelta
from itertools import product
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable import fully_shard, replicate
from composable.device.collectives import communicators_wrapped_by
from composable.errors import CommunicationError
from tests.helpers.communicators import all_shared, all_sockets
from tests.helpers.world import Pool, set_timeout

# Seconds; every program below ends by it. gloo takes this long for connecting, too, the other way only when all is set up.
_TIMEOUTS: Final = {"shared memory": 0.5, "sockets": 3.0}

# What rank 0 does, and what rank 1 does, a letter per batch.
#   t: trains    s: skips the backward    r: catches what forward raises    e: evaluates
_PROGRAMS: Final = {
    "a caught exception": ("trttt", "ttttt"),
    "a skipped backward": ("tsttt", "ttttt"),
    "one batch less, then evaluation": ("tteee", "ttteee"),
}


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("scale", torch.full((8,), 2.0))
        self.raises = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x)) * self.scale
        if self.raises:
            raise MemoryError("as planned")
        return self.second(hidden)


def _train(model: _Model, program: str, found: list[float]) -> None:
    """Append the losses to `found`, as they come."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    for letter in program:
        x = torch.randn(4, 8, generator=generator)
        model.raises = letter == "r"
        try:
            with torch.set_grad_enabled(letter != "e"):
                loss = model(x).square().mean()
        except MemoryError:
            continue
        found.append(loss.item())
        if letter == "t":
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def _shard(**options: Any) -> Callable[[nn.Module, dist.ProcessGroup], None]:
    return lambda model, group: fully_shard(model, mesh=group, policy={nn.Linear}, **options)


_VERBS: Final[dict[str, Callable[[nn.Module, dist.ProcessGroup], None]]] = {
    "fully_shard": _shard(),
    "fully_shard without resharding": _shard(reshard_after_forward=False),
    "replicate": lambda model, group: replicate(model, mesh=group),
}
_WAYS: Final = {"shared memory": all_shared, "sockets": all_sockets}


def _diverge(way: str, cases: list[tuple[str, str]]) -> dict[str, tuple[str, list[float], list[float]]]:
    """By case: the error that this rank ended with, the losses that it saw, and those of one process."""
    ended: dict[str, tuple[str, list[float], list[float]]] = {}
    for verb, name in cases:
        group = dist.new_group(timeout=timedelta(seconds=_TIMEOUTS[way])) if way == "sockets" else dist.new_group()
        torch.manual_seed(0)
        model = _Model()
        plain = copy.deepcopy(model)
        with communicators_wrapped_by(_WAYS[way]):
            _VERBS[verb](model, group)
        if way != "sockets":
            set_timeout(group, _TIMEOUTS[way])
        program = _PROGRAMS[name][dist.get_rank()]
        seen: list[float] = []
        expected: list[float] = []
        error = "none"
        _train(plain, program, expected)
        dist.barrier()
        try:
            _train(model, program, seen)
        except CommunicationError as caught:
            error = str(caught)
        ended[f"{verb}, {name}"] = error, seen, expected
        dist.barrier()
    return ended


_SHARED = pytest.param("shared memory", marks=pytest.mark.host)
_SOCKETS = pytest.param("sockets", marks=pytest.mark.beyond_sim("its launches fail in the background, as those of NCCL"))


@pytest.mark.parametrize("way", [_SHARED, _SOCKETS])
def test_ranks_that_go_on_from_different_places_wait_and_compute_nothing_wrong(pool: Pool, way: str) -> None:
    cases = list(product(_VERBS if way == "shared memory" else ("fully_shard",), _PROGRAMS))
    for rank, ended in enumerate(pool.run(2, _diverge, way, cases, spoils=True)):
        assert len(ended) == len(cases)
        for case, (error, seen, expected) in ended.items():
            told = rf"rank {rank}: the [a-z- ]+ of unit '(first|second|\(root\))'.* failed: "
            assert re.match(told, error), f"{case}: {error}"
            for number, right in zip(seen, expected, strict=False):
                assert number == pytest.approx(right, rel=1e-5), f"rank {rank}, {case}: {seen}, not {expected}"
