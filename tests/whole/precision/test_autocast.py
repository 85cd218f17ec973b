"""Annotated models compute under `torch.autocast` what plain ones do, and a policy what autocast
does where both cast alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from composable import MixedPrecisionPolicy, fully_shard, replicate
from tests.helpers.battery import Case
from tests.helpers.battery.case import mean_square, rows
from tests.helpers.compare import assert_mean_gradients, averaged_gradients, full_gradients
from tests.helpers.schemes import SCHEMES
from tests.helpers.world import current_device, spmd

BF16: Final = torch.bfloat16


class Block(nn.Module):
    """Of what autocast computes in a low precision, and of what it leaves in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).softmax(-1))


class Model(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 8), *(Block() for _ in range(3)), nn.Linear(8, 2))


_UNITS: Final = Case("blocks", Model, rows(4, 6), mean_square, (Block,))
_SCHEMES: Final = (
    "fully_shard by policy",
    "fully_shard without resharding",
    "checkpoint, then fully_shard",
    "replicate in small buckets",
    "replicate inside fully_shard",
)


def _batch(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    return torch.randn(4, 6, generator=generator).to(current_device())


def _pair(made: Callable[[], Any]) -> tuple[Any, Any]:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(made().to(current_device()))
    return models[0], models[1]


def _assert_equal(plain: nn.Module, model: nn.Module) -> None:
    """Bit by bit on two ranks of a host. More terms are summed in an order of the algorithm's, and
    a GPU's kernels round as the addresses of their tensors let them.
    """
    near = 0.0 if dist.get_world_size() == 2 and current_device().type == "cpu" else 1e-6
    assert_mean_gradients(plain, model, rtol=near, atol=near)


def _need_autocast() -> None:
    if current_device().type == "sim":
        pytest.skip("autocast does not know the simulated accelerator")


@pytest.mark.parametrize(
    ("ranks", "scheme"),
    [*((2, scheme) for scheme in _SCHEMES), (4, "fully_shard by policy"), (4, "hybrid")],
)
@spmd()
def test_training_under_autocast_is_that_of_the_plain_model(scheme: str) -> None:
    _need_autocast()
    plain, model = _pair(Model)
    if scheme == "hybrid":
        mesh = init_device_mesh(
            current_device().type, (2, 2), mesh_dim_names=("replicate", "shard")
        )
        fully_shard(model, policy={Block}, mesh=mesh)
    else:
        SCHEMES[scheme].annotate(model, _UNITS)
    optimizers = [
        torch.optim.SGD(each.parameters(), lr=0.5, foreach=False) for each in (plain, model)
    ]
    for step in range(2):
        for each in (plain, model):
            # one scope, so that both forwards read the same casts
            with torch.autocast(current_device().type, dtype=BF16):
                outputs = each(_batch(2 * step)), each(_batch(2 * step + 1))
            assert outputs[0].dtype is BF16
            for output in outputs:
                output.float().square().mean().backward()
        _assert_equal(plain, model)
        for parameter, gradient in zip(
            plain.parameters(), averaged_gradients(plain).values(), strict=True
        ):
            parameter.grad = gradient
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad(), torch.autocast(current_device().type, dtype=BF16):
        torch.testing.assert_close(model(_batch(9)), plain(_batch(9)), rtol=1e-2, atol=1e-2)


@spmd(ranks=[2, 4])
def test_a_policy_casts_as_autocast_does_where_both_should_agree() -> None:
    """Where all that casts is a linear map, both cast inputs and weights, and neither the rest."""
    _need_autocast()
    precision = MixedPrecisionPolicy("bf16", reduce_dtype="fp32")
    for verb in (fully_shard, replicate):
        scoped, asked = _pair(
            lambda: nn.Sequential(
                nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)
            )
        )
        verb(scoped, policy={nn.Linear})
        verb(asked, policy={nn.Linear}, mp_policy=precision)
        with torch.autocast(current_device().type, dtype=BF16):
            expected = scoped(_batch(0))
        output = asked(_batch(0))
        assert output.dtype is BF16
        assert torch.equal(output, expected)
        for each in (expected, output):
            each.float().square().mean().backward()
        found = full_gradients(asked)
        for name, wanted in full_gradients(scoped).items():
            assert wanted is not None
            assert wanted.dtype is torch.float32
            assert torch.equal(found[name], wanted), name  # type: ignore[arg-type]
