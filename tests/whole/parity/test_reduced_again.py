"""A unit that a backward enters twice is reduced twice."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from composable import fully_shard
from composable.comm.backends import comms_wrapped_by
from composable.comm.base import Comm
from tests.helpers.communicators import Log, Recording, all_accelerators
from tests.helpers.compare import full_gradients
from tests.helpers.world import Pool, current_device, need_devices


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x).tanh()


class _Recomputed(nn.Module):
    """A unit that is called twice, and each time computed again in backward by a backward of its
    own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.between = _Layers(), _Layers(), _Layers()

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.shared, self.first(x), use_reentrant=True)
        x = checkpoint(self.shared, self.between(x), use_reentrant=True)
        return x


def _train(accelerators: bool) -> None:
    torch.manual_seed(0)
    model = _Recomputed().to(current_device())
    alone = copy.deepcopy(model)
    log = Log()

    def wrapped(comm: Comm) -> Comm:
        return Recording(all_accelerators(comm) if accelerators else comm, log)

    with comms_wrapped_by(wrapped):
        fully_shard(model, policy={_Layers})
    batches = torch.randn(3, dist.get_world_size(), 2, 8).to(current_device())
    for batch in batches:
        log.events.clear()
        model(batch[dist.get_rank()].clone().requires_grad_()).square().mean().backward()
        assert log.labels().count("gradient reduction of unit 'shared'") == 2
        for share in batch:
            (alone(share.clone().requires_grad_()).square().mean() / len(batch)).backward()
    for name, gradient in full_gradients(model).items():
        torch.testing.assert_close(
            gradient, alone.get_parameter(name).grad, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("accelerators", [False, True])
def test_both_reductions_of_a_unit_that_a_backward_enters_twice_are_in_its_gradients(
    pool: Pool, accelerators: bool, device: str
) -> None:
    need_devices(device, 2)
    if accelerators and device != "cpu":
        pytest.skip("the device has an accelerator's comm")
    pool.run(2, _train, accelerators, device=device)
