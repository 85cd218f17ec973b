"""A module that was annotated before its process had a group would be trained by each rank for
itself, and is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composable import fully_shard, remove, replicate
from composable.errors import MeshError
from tests.helpers.compare import full
from tests.helpers.world import current_device, spmd

_VERBS: Final[dict[str, Callable[..., Any]]] = {"fully_shard": fully_shard, "replicate": replicate}


def _before_there_is_a_group(verb: Callable[..., Any], model: nn.Module) -> None:
    with mock.patch.object(dist, "is_initialized", return_value=False):
        verb(model, policy={nn.Linear})


@spmd(ranks=[2, 4])
@pytest.mark.parametrize("verb", _VERBS)
def test_each_forward_is_refused_until_it_is_annotated_anew(verb: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5)).to(current_device())
    x = torch.full((2, 3), dist.get_rank() + 1.0, device=current_device())
    _before_there_is_a_group(_VERBS[verb], model)
    named = re.escape(
        f"was annotated before there was a process group: each of the {dist.get_world_size()} ranks"
    )
    for _ in range(2):
        with pytest.raises(MeshError, match=named):
            model(x)
    remove(model, _VERBS[verb])
    _VERBS[verb](model, policy={nn.Linear})
    model(x).sum().backward()
    mean = (dist.get_world_size() + 1) / 2
    expected = mean * 2 * full(model[1].weight).sum(0, keepdim=True).T.expand(4, 3)
    torch.testing.assert_close(full(model[0].weight.grad), expected)


@spmd(ranks=2)
@pytest.mark.parametrize("verb", _VERBS)
def test_a_unit_inside_is_refused_though_the_root_was_annotated_in_time(verb: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5)).to(current_device())
    _before_there_is_a_group(_VERBS[verb], model[1])
    _VERBS[verb](model)
    with pytest.raises(MeshError, match=r"unit '1' was annotated before there was a process group"):
        model(torch.ones(2, 3, device=current_device()))


@spmd(ranks=1)
@pytest.mark.parametrize("verb", _VERBS)
def test_one_rank_may_go_on(verb: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5)).to(current_device())
    _before_there_is_a_group(_VERBS[verb], model)
    model(torch.ones(2, 3, device=current_device())).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@spmd(ranks=2)
@pytest.mark.parametrize("verb", _VERBS)
def test_a_rank_may_train_by_itself_on_a_mesh_of_its_own(verb: str) -> None:
    model = nn.Linear(3, 4).to(current_device())
    _VERBS[verb](model, mesh=DeviceMesh(current_device().type, [dist.get_rank()]))
    model(torch.full((1, 3), dist.get_rank() + 1.0, device=current_device())).sum().backward()
    torch.testing.assert_close(
        full(model.weight.grad), torch.full((4, 3), dist.get_rank() + 1.0, device=current_device())
    )
