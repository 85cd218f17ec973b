"""A unit that a backward enters twice is reduced twice, though its first message was given back in between."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from composable import fully_shard
from composable.device.collectives import Communicator, communicators_wrapped_by
from composable.runtime.reduction import Reduction
from tests.helpers.communicators import all_accelerators
from tests.helpers.compare import full_gradients
from tests.helpers.world import Pool, current_device, need_devices


class _Layers(nn.Module):
    """Takes part of its gradients along in a second message, if reductions are divided."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x).tanh()


class _Recomputed(nn.Module):
    """A unit that is called twice, and each time computed again in backward by a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.between = _Layers(), _Layers(), _Layers()

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.shared, self.first(x), use_reentrant=True)
        x = checkpoint(self.shared, self.between(x), use_reentrant=True)
        return x


def _accelerators(communicator: Communicator, *, divided: bool) -> Communicator:
    twin: Any = all_accelerators(communicator) if current_device().type == "cpu" else communicator
    twin.capabilities = replace(twin.capabilities, direct_bytes=64, divided_bytes=64 if divided else 1 << 30)
    return twin


def _train(divided: bool) -> None:
    torch.manual_seed(0)
    model = _Recomputed().to(current_device())
    alone = copy.deepcopy(model)
    with communicators_wrapped_by(partial(_accelerators, divided=divided)):
        fully_shard(model, policy={_Layers})
    unit = fully_shard.state(model.shared)
    assert unit is not None
    seen: list[str] = []
    launch, give_back = Reduction.launch, Reduction.give_back

    def note(what: str, reduction: Reduction) -> None:
        if any(reduction in group.reductions.values() for group in unit.handle.gradients.groups):
            seen.append(what)

    def launched(reduction: Reduction, *args: Any) -> None:
        note("launched", reduction)
        launch(reduction, *args)

    def given_back(reduction: Reduction) -> None:
        note("given back", reduction)
        assert reduction.divided == divided
        give_back(reduction)

    batches = torch.randn(3, dist.get_world_size(), 2, 8).to(current_device())
    for batch in batches:
        seen.clear()
        with mock.patch.object(Reduction, "launch", launched), mock.patch.object(Reduction, "give_back", given_back):
            model(batch[dist.get_rank()].clone().requires_grad_()).square().mean().backward()
        assert seen == ["launched", "given back", "launched"]
        for share in batch:
            (alone(share.clone().requires_grad_()).square().mean() / len(batch)).backward()
    for name, gradient in full_gradients(model).items():
        torch.testing.assert_close(gradient, alone.get_parameter(name).grad, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("divided", [False, True])
def test_both_reductions_of_a_unit_that_a_backward_enters_twice_are_in_its_gradients(
    pool: Pool, divided: bool, device: str
) -> None:
    need_devices(device, 2)
    pool.run(2, _train, divided, device=device)
