"""Memory that is kept on the host for steps to come goes back on request, and the next step is right."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable import empty_host_cache, fully_shard, replicate
from composable.device.memory import HOST_MEMORY
from tests.helpers.compare import full
from tests.helpers.world import spmd

_VERBS: Final[dict[str, Callable[..., Any]]] = {"fully_shard": fully_shard, "replicate": replicate}


def _model(verb: str) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4)))
    return _VERBS[verb](model, policy={nn.Linear})  # type: ignore[no-any-return]


def _gradients(model: nn.Module, *, between: Callable[[], object]) -> list[torch.Tensor]:
    model.zero_grad()
    output = model(torch.full((2, 256), 1.0 + dist.get_rank()))
    between()
    output.square().mean().backward()
    return [full(parameter.grad) for parameter in model.parameters()]


@spmd(ranks=[2, 4])
@pytest.mark.parametrize("verb", _VERBS)
def test_what_is_in_use_stays_and_the_next_step_takes_it_anew(verb: str) -> None:
    model = _model(verb)
    expected = _gradients(model, between=lambda: None)
    for between in (lambda: None, empty_host_cache):
        empty_host_cache()
        assert HOST_MEMORY.idle_bytes == 0
        torch.testing.assert_close(_gradients(model, between=between), expected, rtol=0, atol=0)


@pytest.mark.host
@spmd(ranks=[2, 4])
@pytest.mark.parametrize("verb", _VERBS)
def test_messages_that_nobody_reads_give_their_memory_back(verb: str) -> None:
    model = _model(verb)
    _gradients(model, between=lambda: None)
    state: Any = _VERBS[verb].state(model)  # type: ignore[attr-defined]
    communicator = state.handle.mesh_info.all if verb == "fully_shard" else state.averaging.communicator
    descriptor = communicator.host_group.outbox._arena.identity.descriptor

    def taken() -> int:
        return os.fstat(descriptor).st_blocks * 512

    dist.barrier()
    before = taken()
    empty_host_cache()
    assert before >= 4 * 256 * 256  # a unit's message at least
    assert taken() <= 1 << 14  # boards and notes, which are no messages
    dist.barrier()
