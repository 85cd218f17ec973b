"""`grad_reduce`: means, sums and sums divided by a number of the user's, against plain models whose
gradients are added up.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from composable import (
    MixedPrecisionPolicy,
    describe,
    fully_shard,
    no_sync,
    reduce_gradients,
    registry,
    remove,
    replicate,
)
from tests.helpers.compare import full_gradients
from tests.helpers.world import current_device, spmd

VALUES: Final = ("sum", 6.0)  # means are what all other tests are about


class Model(nn.Module):
    """Its `spare` is used where the caller says so."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 1)
        self.scale, self.spare = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.rand(7, 3))

    def forward(self, x: Tensor, spare: bool = False) -> Tensor:
        x = self.first(x).tanh() * self.scale
        return self.last(x + self.spare.sum(1) if spare else x)  # type: ignore[no-any-return]


def _model() -> Model:
    torch.manual_seed(0)
    return Model().double().to(current_device())


def by_policy(model: Model, value: str | float) -> None:
    fully_shard(model, policy={nn.Linear}, grad_reduce=value)


def hybrid(model: Model, value: str | float) -> None:
    mesh = init_device_mesh(current_device().type, (2, dist.get_world_size() // 2))
    fully_shard(model, policy={nn.Linear}, mesh=mesh, grad_reduce=value)


def replicated(model: Model, value: str | float) -> None:
    replicate(model, grad_reduce=value)


def small_buckets(model: Model, value: str | float) -> None:
    replicate(model, policy={nn.Linear}, bucket_cap_mb=0.0001, grad_reduce=value)


def mixed(model: Model, value: str | float) -> None:
    replicate(model.last, grad_reduce=value)
    fully_shard(model, policy={nn.Linear}, grad_reduce=value)


SCHEMES: Final[tuple[Callable[[Model, str | float], None], ...]] = (
    by_policy,
    hybrid,
    replicated,
    small_buckets,
    mixed,
)


def batch(rank: int, number: int) -> Tensor:
    torch.manual_seed(100 + 10 * number + rank)
    return torch.rand(3, 5, dtype=torch.float64).to(current_device())


def once(model: Model, rank: int) -> None:
    model(batch(rank, 0)).sum().backward()


def twice(model: Model, rank: int) -> None:
    """What is there already is neither summed again nor divided again, also of what one rank, or
    none, uses later.
    """
    model(batch(rank, 0), spare=True).sum().backward()
    model(batch(rank, 1), spare=rank == 0).sum().backward()
    model(batch(rank, 2)).sum().backward()


def _held(model: Model, **options: Any) -> AbstractContextManager[None]:
    """`no_sync`, of an annotated model."""
    return no_sync(model, **options) if _annotated(model) else nullcontext()


def _annotated(model: Model) -> bool:
    return any(registry(module) for module in model.modules())


def held(model: Model, rank: int) -> None:
    """After a gradient that was reduced."""
    model(batch(rank, 0)).sum().backward()
    for number in (1, 2):
        with _held(model, enabled=number == 1):
            model(batch(rank, number), spare=number == 1).sum().backward()


def over_shards(model: Model, rank: int) -> None:
    with _held(model, level="replicate"):
        model(batch(rank, 0)).sum().backward()
    with _held(model):
        model(batch(rank, 1), spare=rank == 0).sum().backward()
    if _annotated(model):
        reduce_gradients(model)


PROGRAMS: Final = (once, held, over_shards, twice)


def _expected(value: str | float, program: Callable[[Model, int], None]) -> dict[str, Tensor]:
    model = _model()
    for rank in range(dist.get_world_size()):
        program(model, rank)
    divisor = 1.0 if value == "sum" else float(value)
    return {name: p.grad / divisor for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("program", PROGRAMS)
@spmd(ranks=[2, 4])
def test_sums_are_divided_as_asked_for(
    program: Callable[[Model, int], None], value: str | float
) -> None:
    expected = _expected(value, program)
    for scheme in SCHEMES:
        model = _model()
        scheme(model, value)
        program(model, dist.get_rank())
        found = full_gradients(model)
        assert {
            name for name, gradient in found.items() if gradient is not None
        } == expected.keys(), scheme.__name__
        for name, wanted in expected.items():
            torch.testing.assert_close(
                found[name], wanted, rtol=1e-9, atol=1e-11, msg=f"{scheme.__name__}, '{name}'"
            )


def test_on_one_process_there_is_nothing_to_sum_and_a_number_divides_all_the_same() -> None:
    found = {}
    for verb, options in ((fully_shard, {}), (fully_shard, {"mp_policy": "bf16"}), (replicate, {})):
        for value in ("mean", "sum", 4.0):
            model = nn.Linear(1, 1, bias=False)
            verb(model, grad_reduce=value, **options)
            for _ in range(2):
                model(torch.ones(1, 1)).sum().backward()
            found[verb.__name__, str(options), value] = model.weight.grad.item()
    assert list(found.values()) == [2.0, 2.0, 0.5] * 3


@pytest.mark.parametrize("verb", [fully_shard, replicate])
def test_what_was_removed_is_divided_no_longer_and_what_is_unfrozen_is(
    verb: Callable[..., nn.Module],
) -> None:
    model = nn.Linear(1, 1)
    model.bias.requires_grad_(False)
    verb(model, grad_reduce=4.0)
    model(torch.ones(1, 1)).sum().backward()
    model.bias.requires_grad_(True)
    model(torch.ones(1, 1)).sum().backward()
    remove(model, verb)
    assert [p.grad.item() for p in model.parameters() if p.grad is not None] == [0.5, 0.25]
    model(torch.ones(1, 1)).sum().backward()
    assert [p.grad.item() for p in model.parameters() if p.grad is not None] == [1.5, 1.25]


def test_a_policy_gives_units_their_own_and_describe_shows_what_is_not_a_mean() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1))
    replicate(model[2], grad_reduce="sum")
    fully_shard(model, policy=lambda module: {"grad_reduce": 8.0} if module is model[0] else False)
    assert [row.grad_reduce for row in describe(model).rows] == ["mean", "sum / 8", "sum"]
    assert "grad_reduce: sum / 8" in str(describe(model))
    assert "mean" not in str(describe(model))


@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("verb", [fully_shard, replicate])
@spmd(ranks=2)
def test_a_divisor_is_not_rounded_to_a_low_dtype(
    verb: Callable[..., Any], reduce_dtype: torch.dtype
) -> None:
    """100 ranks' worth of batches: 0.02 in bfloat16 is 0.02002, 0.1 % more than it should be."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    model = verb(nn.Linear(64, 1, bias=False), mp_policy=policy, grad_reduce=100.0)
    x = (torch.arange(64.0) + 1).expand(1, 64).to(current_device())
    model(x).sum().backward()
    (gradient,) = full_gradients(model).values()
    terms = x.bfloat16() * 0.02 if reduce_dtype is torch.bfloat16 else x * 0.02
    torch.testing.assert_close(gradient, terms.to(gradient.dtype), rtol=1e-6, atol=0.0)
