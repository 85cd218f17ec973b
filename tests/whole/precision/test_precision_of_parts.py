"""Mixed precision, and what keeps its own dtype: modules of some classes, and buffers that are not
named.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from composable import (
    MixedPrecisionPolicy,
    checkpoint,
    describe,
    fully_shard,
    remove,
    replicate,
)
from tests.helpers.compare import full_gradients
from tests.helpers.world import Pool, current_device
from tests.whole.precision.test_precision import seat

BF16: Final = torch.bfloat16
F32: Final = torch.float32
KEPT: Final = MixedPrecisionPolicy(
    "bf16", "fp32", full_precision_classes=(nn.LayerNorm, nn.modules.batchnorm._BatchNorm)
)


class Part(nn.Module):
    """Notes what it computes in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 8)
        self.batch = nn.BatchNorm1d(8)
        self.down = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = (
            x.dtype,
            self.norm.weight.dtype,
            self.up.weight.dtype,
            self.batch.running_mean.dtype,
        )
        return x + self.down(self.batch(self.up(self.norm(x))))


def parts(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(Part(), Part(), nn.Linear(8, 3))


def numbers(step: int, rank: int = 0) -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(10 * step + rank))


class _Exactly(nn.Module):
    """What keeping a module's dtype means, written out."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    @property
    def weight(self) -> Tensor:
        return self.inner.weight

    @property
    def running_mean(self) -> Tensor:
        return self.inner.running_mean

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.float()).to(x.dtype)


def _lowered(model: nn.Sequential) -> nn.Sequential:
    """A copy that computes in bfloat16, but for its norms."""
    low = copy.deepcopy(model).to(BF16)
    for part, own in zip(low[:2], model[:2], strict=True):
        for name in ("norm", "batch"):
            setattr(part, name, _Exactly(copy.deepcopy(getattr(own, name))))
    return low


# --- classes that keep their dtype --------------------------------------------------------------


def _replicas(ranks: int, replicas: int) -> list[tuple[int, int]]:
    return [(first, first + ranks // replicas) for first in range(0, ranks, ranks // replicas)]


def _train_as_written(annotate: Callable[[nn.Module], object], replicas: int = 1) -> None:
    ranks, rank = seat()
    expected, model = parts(), parts()
    annotate(model)
    for step in range(2):
        lows = [_lowered(expected) for _ in range(ranks)]
        for low, other in zip(lows, range(ranks), strict=True):
            outputs = low(numbers(step, other).to(BF16))
            outputs.float().square().mean().backward()
            if other == rank:
                mine = outputs
        output = model(numbers(step, rank))
        assert torch.equal(output, mine)
        output.float().square().mean().backward()
        gradients = [[p.grad.float() for p in low.parameters()] for low in lows]  # type: ignore[union-attr]
        for parameter, *terms in zip(expected.parameters(), *gradients, strict=True):
            sums = [
                sum(terms[first:last], torch.zeros(()))
                for first, last in _replicas(ranks, replicas)
            ]
            parameter.grad = sum(sums, torch.zeros(())) / ranks
        for (name, found), parameter in zip(
            full_gradients(model).items(), expected.parameters(), strict=True
        ):
            assert torch.equal(found, parameter.grad), name  # type: ignore[arg-type]
        for each in (expected, model):
            torch.optim.SGD(each.parameters(), lr=0.5).step()
            each.zero_grad()
        for own, low in zip(expected.buffers(), lows[rank].buffers(), strict=True):
            own.copy_(low)
        for one, other in zip(model.buffers(), expected.buffers(), strict=True):
            assert torch.equal(one, other)
    assert model[0].seen == (BF16, F32, BF16, F32)


_SCHEMES: Final[dict[str, Callable[[nn.Module], object]]] = {
    "units": lambda model: fully_shard(model, policy={Part}, mp_policy=KEPT),
    "one unit": lambda model: fully_shard(model, mp_policy=KEPT),
    "norms are units": lambda model: fully_shard(
        model, policy={Part, nn.LayerNorm, nn.BatchNorm1d}, mp_policy=KEPT
    ),
    "recomputed": lambda model: fully_shard(
        checkpoint(model, policy={nn.Linear}), policy={Part}, mp_policy=KEPT
    ),
    "one replica": lambda model: _replicated(model),
    "replicas": lambda model: _replicated(model, policy={Part}),
    "norms are replicas": lambda model: _replicated(model, policy={nn.LayerNorm}),
}


def _replicated(model: nn.Module, **options: Any) -> None:
    replicate(model, mp_policy=KEPT, broadcast_buffers=False, **options)


def _classes_keep_their_dtype() -> None:
    for name, annotate in _SCHEMES.items():
        # sums of more than two terms depend on their order
        if seat()[0] < 4 or "replica" not in name:
            _train_as_written(annotate)
    if seat()[0] == 4:
        mesh = init_device_mesh(
            current_device().type, (2, 2), mesh_dim_names=("replicate", "shard")
        )
        _train_as_written(
            lambda model: fully_shard(model, policy={Part}, mesh=mesh, mp_policy=KEPT), replicas=2
        )


@pytest.mark.parametrize("ranks", [2, 4])
def test_classes_keep_their_dtype_inside_of_modules_that_do_not(pool: Pool, ranks: int) -> None:
    pool.run(ranks, _classes_keep_their_dtype)


def test_classes_keep_their_dtype_where_there_is_no_group() -> None:
    _classes_keep_their_dtype()


def test_modules_inside_of_such_a_class_keep_theirs_also_as_units() -> None:
    model = fully_shard(
        parts(),
        policy={nn.Linear},
        mp_policy=MixedPrecisionPolicy("bf16", buffer_dtype="bf16", full_precision_classes=Part),
    )
    assert model(numbers(0)).dtype is BF16
    assert model[0].seen == (F32, F32, F32, F32)
    assert [row.computes_in for row in describe(model).rows] == [("float32",)] * 5 + [("bfloat16",)]


@pytest.mark.parametrize("verb", [fully_shard, replicate])
def test_removal_takes_the_casts_away(verb: Any) -> None:
    model = verb(parts(), policy={Part}, mp_policy=KEPT)
    assert model(numbers(0)).dtype is BF16
    remove(model, verb)
    assert model(numbers(1)).dtype is F32
    assert not model[0].norm._forward_hooks


# --- buffers by name ----------------------------------------------------------------------------


class Table(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.full((4,), 1 / 3))
        self.register_buffer("other", torch.full((4,), 1 / 7))
        self.register_buffer("steps", torch.tensor(0))
        self.inner = Table(depth - 1) if depth else None

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.table.dtype, self.other.dtype, self.steps.dtype
        self.other += 1
        x = self.linear(x) * self.table
        return x if self.inner is None else self.inner(x.to(self.linear.weight.dtype))


def test_buffers_are_cast_by_name_at_any_depth_and_come_back_as_they_were() -> None:
    dtypes = {"table": "bf16", "inner.*table": "fp16", "inner.inner.other": "bf16"}
    for policy in (None, {Table}):
        model = Table(2)
        before = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
        fully_shard(
            model, policy=policy, mp_policy=MixedPrecisionPolicy("bf16", buffer_dtype=dtypes)
        )
        for step in (1, 2):
            model(torch.ones(2, 4)).float().sum().backward()
            assert model.seen == (BF16, F32, torch.int64)
            assert model.inner.seen == (torch.float16, F32, torch.int64)
            assert model.inner.inner.seen == (torch.float16, BF16, torch.int64)
            for name, buffer in model.named_buffers():
                was, value = before[name]
                assert buffer is was, name
                assert name.endswith("other") or torch.equal(buffer, value), name
            assert torch.equal(model.inner.other, before["inner.other"][1] + step)
        model.to(torch.float64)
        model(torch.ones(2, 4)).float().sum().backward()
        assert model.inner.seen == (torch.float16, torch.float64, torch.int64)
        assert model.inner.table.dtype is torch.float64


def test_names_that_one_buffer_has_twice_each_count() -> None:
    model = Table(1)
    model.inner.table = model.table
    fully_shard(
        model,
        mp_policy=MixedPrecisionPolicy("bf16", buffer_dtype={"*": "bf16", "inner.table": "fp16"}),
    )
    model(torch.ones(2, 4))
    assert (model.seen[0], model.inner.seen[0]) == (BF16, torch.float16)
    assert model.inner.table is model.table


# --- what does not go together ------------------------------------------------------------------


def _note(model: nn.Module, x: Tensor, error: str) -> list[str]:
    with pytest.raises(RuntimeError, match=error) as raised:
        model(x)
    return getattr(raised.value, "__notes__", [])


@pytest.mark.parametrize("verb", [fully_shard, replicate])
def test_what_has_another_dtype_is_named_where_a_forward_fails_for_it(verb: Any) -> None:
    ones = torch.ones(2, 3)
    cure = (
        "Buffers are cast by MixedPrecisionPolicy(buffer_dtype=...); full_precision_classes=({0},)"
        " keeps the module's dtype; ignored parameters are not cast"
    )
    model = verb(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), mp_policy="bf16")
    assert _note(model, ones, "BFloat16 but found Float") == [
        "'1.running_mean' of a BatchNorm1d is torch.float32, where unit '(root)' computes in"
        " torch.bfloat16. " + cure.format("BatchNorm1d")
    ]
    model = verb(
        nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), mp_policy="bf16", ignored_params=["1.*"]
    )
    assert _note(model, ones, "same dtype") == [
        "'1.weight' of a Linear is torch.float32, where unit '(root)' computes in torch.bfloat16. "
        + cure.format("Linear")
    ]
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    verb(model[0], mp_policy="bf16")
    verb(model)
    assert _note(model, ones, "same dtype") == [
        "unit '0' computes in torch.bfloat16, and unit '(root)' does not. What one returns to the"
        " other is cast by MixedPrecisionPolicy(output_dtype=...) of the unit that returns it"
    ]
    assert _note(verb(nn.Linear(3, 3), mp_policy="bf16"), torch.ones(2, 4), "shapes") == [], (
        "it has nothing to do with dtypes"
    )
