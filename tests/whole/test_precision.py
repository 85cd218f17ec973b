"""Mixed precision: modules compute, and gradients are summed, in other dtypes than parameters rest in, as written by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable import MixedPrecisionPolicy, checkpoint, fully_shard
from composable.plan.scaling import division_factors
from tests.helpers.compare import full_gradients, full_parameters
from tests.helpers.world import Pool

WIDTH: Final = 12


class Block(nn.Module):
    """Parameters of several dtypes, cut and whole, large enough to travel alone and small, some of them never used."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 7)
        self.down = nn.Linear(7, WIDTH)
        self.low = nn.Parameter(torch.randn(WIDTH).to(torch.bfloat16))
        self.scale = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
        self.unused = nn.Parameter(torch.ones(3))
        self.calls = nn.Parameter(torch.tensor([3]), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.low + self.scale * self.down(torch.relu(self.up(self.norm(x))))
        return x.float()  # whoever comes next has to cast it


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8192, WIDTH)  # travels by itself
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(tokens)).to(self.head.weight.dtype))


def model_of(seed: int) -> Model:
    torch.manual_seed(seed)
    return Model()


def loss_of(output: Tensor) -> Tensor:
    return output.float().square().mean()


def tokens_of(step: int, rank: int) -> Tensor:
    return torch.randint(0, 9, (3, 4), generator=torch.Generator().manual_seed(100 * step + rank))


# --- the same arithmetic, written out ---------------------------------------------------------------------------------


def _lowered(model: Model, param: torch.dtype | None) -> Model:
    """A copy whose parameters are cast: what modules compute with."""
    low = copy.deepcopy(model)
    if param is None:
        return low
    for parameter in low.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(param)
    for block in low.blocks:
        block.register_forward_pre_hook(lambda _, args: (args[0].to(param),))
    return low


def _mean(terms: Sequence[Tensor], reduce: torch.dtype) -> Tensor:
    """In the order of ranks, divided as `reduce` is."""
    before, after = division_factors(str(reduce).removeprefix("torch."), len(terms))
    terms = [(term / before if before != 1.0 else term).to(reduce) for term in terms]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total * (1.0 / after)


def by_hand(model: Model, policy: MixedPrecisionPolicy, ranks: int, step: int) -> None:
    """One forward and backward of every rank; gradients are added to the parameters of `model`."""
    gradients: list[list[Tensor | None]] = []
    for rank in range(ranks):
        low = _lowered(model, policy.param_dtype)
        loss_of(low(tokens_of(step, rank))).backward()
        gradients.append([parameter.grad for parameter in low.parameters()])
    for parameter, *of_ranks in zip(model.parameters(), *gradients, strict=True):
        terms = [gradient for gradient in of_ranks if gradient is not None]
        if not terms:
            continue
        assert len(terms) == ranks
        mean = _mean(terms, policy.reduce_dtype or policy.param_dtype or terms[0].dtype).to(parameter.dtype)
        parameter.grad = mean if parameter.grad is None else parameter.grad + mean


# --- training ---------------------------------------------------------------------------------------------------------

Annotate = Callable[[Model, MixedPrecisionPolicy], Any]


def _in_units(model: Model, policy: Any, **options: Any) -> None:
    fully_shard(model, policy={Block}, mp_policy=policy, **options)


def _in_two(model: Model, policy: Any) -> None:
    """Each of one kind of module alone, by hand, and what is left over."""
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard([model.embedding, model.head], mp_policy=policy)


def _recomputed(model: Model, policy: Any) -> None:
    checkpoint(model, policy={Block})
    _in_units(model, policy)


def _recomputed_around(model: Model, policy: Any) -> None:
    _in_units(model, policy)
    checkpoint(model.blocks)


def _recomputed_within(model: Model, policy: Any) -> None:
    for block in model.blocks:
        checkpoint(block.up)
    _in_units(model, policy)


SCHEMES: Final[dict[str, Annotate]] = {
    "units": _in_units,
    "by hand": _in_two,
    "kept after forward": partial(_in_units, reshard_after_forward=False),
    "recomputed": _recomputed,
    "recomputed around": _recomputed_around,
    "recomputed within": _recomputed_within,
}

POLICIES: Final = {
    "bf16": MixedPrecisionPolicy("bf16"),
    "bf16, summed in float32": MixedPrecisionPolicy("bf16", "fp32"),
    "summed in bf16": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16),
    "fp16, summed in fp16": MixedPrecisionPolicy("float16", "float16"),
    "fp64": MixedPrecisionPolicy("float64"),
}


def _seat() -> tuple[int, int]:
    return (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)


def _assert_equal(expected: dict[str, Tensor | None], actual: dict[str, Tensor | None]) -> None:
    assert list(expected) == list(actual)
    for name, wanted in expected.items():
        found = actual[name]
        if wanted is None or found is None:
            assert wanted is found, name
        else:
            torch.testing.assert_close(found, wanted, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")


def _trains_as_written(annotate: Annotate, policy: MixedPrecisionPolicy) -> None:
    ranks, rank = _seat()
    expected, model = model_of(0), model_of(0)
    annotate(model, policy)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5, momentum=0.5) for each in (expected, model)]
    for step in range(2):
        for backwards in range(2):  # the second one adds to the first one's gradients
            by_hand(expected, policy, ranks, 2 * step + backwards)
            loss_of(model(tokens_of(2 * step + backwards, rank))).backward()
        wanted = {name: parameter.grad for name, parameter in expected.named_parameters()}
        _assert_equal(wanted, full_gradients(model))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    _assert_equal(dict(expected.named_parameters()), full_parameters(model))


def _all_train_as_written() -> None:
    if _seat()[0] == 4:  # what two ranks cannot tell: neighbours, and sums of more than two terms
        _trains_as_written(partial(_in_units, reshard_after_forward=2), POLICIES["bf16"])
        _trains_as_written(_recomputed, POLICIES["bf16, summed in float32"])
        _trains_as_written(_in_two, POLICIES["fp16, summed in fp16"])
        return
    for annotate in SCHEMES.values():
        _trains_as_written(annotate, POLICIES["bf16, summed in float32"])
    for policy in POLICIES.values():
        _trains_as_written(_in_units, policy)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_training_is_bit_by_bit_what_the_casts_mean_written_out(pool: Pool, ranks: int) -> None:
    pool.run(ranks, _all_train_as_written)


def test_one_process_without_a_group_casts_as_a_rank_among_others_does() -> None:
    _all_train_as_written()
