"""Mixed precision: modules compute, and gradients are summed, in other dtypes than parameters rest
in, as written by hand.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from functools import reduce as reduce_by
from operator import add
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composable import MixedPrecisionPolicy, checkpoint, fully_shard, no_sync, reduce_gradients
from composable.engine.gradients.reduction import division_factors
from tests.helpers.compare import full_gradients, full_parameters
from tests.helpers.world import Pool, current_device

WIDTH: Final = 12


class Block(nn.Module):
    """Parameters of several dtypes, cut and whole, large enough to travel alone and small, some of
    them never used.
    """

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


# --- the same arithmetic, written out -----------------------------------------------------------


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


def _mean(terms: Sequence[Tensor], reduce: torch.dtype, replicas: int) -> Tensor:
    """In the order of ranks, those of one replica first, divided as `reduce` is."""
    before, after = division_factors(reduce, len(terms))
    terms = [(term / before if before != 1.0 else term).to(reduce) for term in terms]
    ranks = len(terms) // replicas
    sums = [reduce_by(add, terms[first : first + ranks]) for first in range(0, len(terms), ranks)]
    return reduce_by(add, sums) * (1.0 / after)


def by_hand(
    model: Model, policy: MixedPrecisionPolicy, ranks: int, steps: Sequence[int], replicas: int = 1
) -> None:
    """Some forwards and backwards of every rank, reduced once; gradients are added to the
    parameters of `model`.
    """
    gradients: list[list[Tensor | None]] = []
    for rank in range(ranks):
        low = _lowered(model, policy.param_dtype)
        sums: list[Tensor | None] = [None] * len(list(model.parameters()))
        for step in steps:
            loss_of(low(tokens_of(step, rank))).backward()
            for index, (lowered, own) in enumerate(
                zip(low.parameters(), model.parameters(), strict=True)
            ):
                # One alone is summed as it comes, several are added up in the wider of the
                # parameters' own dtypes and that of the reduction.
                fresh, held = lowered.grad, sums[index]
                if fresh is not None:
                    reduced = policy.reduce_dtype or policy.param_dtype or fresh.dtype
                    wide = torch.promote_types(own.dtype, reduced)
                    first = fresh.to(fresh.dtype if len(steps) == 1 else wide)
                    sums[index] = first if held is None else held.add_(fresh)
            low.zero_grad()
        gradients.append(sums)
    for parameter, *of_ranks in zip(model.parameters(), *gradients, strict=True):
        terms = [gradient for gradient in of_ranks if gradient is not None]
        if not terms:
            continue
        assert len(terms) == ranks
        mean = _mean(
            terms, policy.reduce_dtype or policy.param_dtype or terms[0].dtype, replicas
        ).to(parameter.dtype)
        parameter.grad = mean if parameter.grad is None else parameter.grad + mean


# --- training -----------------------------------------------------------------------------------

Annotate = Callable[[Model, MixedPrecisionPolicy], Any]


def _in_units(model: Model, policy: Any, **options: Any) -> None:
    fully_shard(model, policy={Block}, mp_policy=policy, **options)


def recomputed(annotate: Annotate) -> dict[str, Annotate]:
    """Ways to have parts of an annotated model recomputed."""

    def itself(model: Model, policy: Any) -> None:
        checkpoint(model, policy={Block})
        annotate(model, policy)

    def around(model: Model, policy: Any) -> None:
        annotate(model, policy)
        checkpoint(model.blocks)

    def within(model: Model, policy: Any) -> None:
        for block in model.blocks:
            checkpoint(block.up)
        annotate(model, policy)

    return {"recomputed": itself, "recomputed around": around, "recomputed within": within}


def _in_two(model: Model, policy: Any) -> None:
    """Each of one kind of module alone, by hand, and what is left over."""
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard([model.embedding, model.head], mp_policy=policy)


SCHEMES: Final[dict[str, Annotate]] = {
    "units": _in_units,
    "by hand": _in_two,
    "kept after forward": partial(_in_units, reshard_after_forward=False),
    **recomputed(_in_units),
}

POLICIES: Final = {
    "bf16": MixedPrecisionPolicy("bf16"),
    "bf16, summed in float32": MixedPrecisionPolicy("bf16", "fp32"),
    "summed in bf16": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16),
    "fp16, summed in fp16": MixedPrecisionPolicy("float16", "float16"),
    "fp64": MixedPrecisionPolicy("float64"),
}


def seat() -> tuple[int, int]:
    return (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)


Near = Callable[[Tensor], float]  # how far a gradient may be from the expected one, relative to it


def _exactly(_: Tensor) -> float:
    return 0.0


def _assert_equal(
    expected: dict[str, Tensor | None], actual: dict[str, Tensor | None], near: Near = _exactly
) -> None:
    assert list(expected) == list(actual)
    for name, wanted in expected.items():
        found = actual[name]
        if wanted is None or found is None:
            assert wanted is found, name
        else:
            rtol = near(wanted)
            atol = rtol * float(wanted.detach().abs().max())
            torch.testing.assert_close(
                found, wanted, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
            )


def trains_as_written(
    annotate: Annotate,
    policy: MixedPrecisionPolicy,
    *,
    replicas: int = 1,
    held: bool = False,
    near: Near = _exactly,
) -> None:
    """Two steps of two backwards each: the second adds to the first one's gradients, or they are
    reduced together.

    Args:
        near: how far gradients that are added up may be from those written out.
        held: the latter. On one rank there is nothing to wait for, so it means nothing.
    """
    ranks, rank = seat()
    expected, model = model_of(0), model_of(0)
    annotate(model, policy)
    optimizers = [
        torch.optim.SGD(each.parameters(), lr=0.5, momentum=0.5) for each in (expected, model)
    ]
    for step in range(2):
        first, second = 2 * step, 2 * step + 1
        for steps in ((first, second),) if held and ranks > 1 else ((first,), (second,)):
            by_hand(expected, policy, ranks, steps, replicas)
        with no_sync(model, enabled=held):
            loss_of(model(tokens_of(first, rank))).backward()
        with no_sync(model, enabled=held and step == 0):
            loss_of(model(tokens_of(second, rank))).backward()
        reduce_gradients(model)  # where nothing is left to do, nothing happens
        wanted = {name: parameter.grad for name, parameter in expected.named_parameters()}
        _assert_equal(wanted, full_gradients(model), near if not held else _exactly)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        _assert_equal(
            dict(expected.named_parameters()),
            full_parameters(model),
            near if not held else _exactly,
        )
        expected.load_state_dict(full_parameters(model))


def _held_over_replicas(mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """Each backward is summed over the shards, the last one over the replicas: rounded once more
    than what is held whole.
    """
    ranks, rank = seat()
    expected, model = model_of(0), model_of(0)
    _in_units(model, policy, mesh=mesh)
    by_hand(expected, policy, ranks, (0, 1), replicas=2)
    with no_sync(model, level="replicate"):
        loss_of(model(tokens_of(0, rank))).backward()
    loss_of(model(tokens_of(1, rank))).backward()
    for parameter, found in zip(expected.parameters(), full_gradients(model).values(), strict=True):
        if parameter.grad is None or found is None:
            assert parameter.grad is found
        else:
            assert found.dtype is parameter.dtype
            torch.testing.assert_close(
                found, parameter.grad, rtol=0.02, atol=0.02 * float(parameter.grad.abs().max())
            )


def unfreezes_between_steps(
    annotate: Annotate, policy: MixedPrecisionPolicy, *, replicas: int = 1
) -> None:
    """Annotated with nothing to train; the dtypes of sums follow what each step trains."""
    ranks, rank = seat()
    expected, model = model_of(0), model_of(0)
    for each in (expected, model):
        each.requires_grad_(False)
    annotate(model, policy)
    for step, trained in enumerate(
        [
            (),
            ("blocks.1", "blocks.0.scale"),
            ("",),
            ("embedding", "blocks.2.low"),
            ("head", "blocks"),
        ]
    ):
        for each in (expected, model):
            for name, parameter in each.named_parameters():
                parameter.requires_grad_(parameter.is_floating_point() and name.startswith(trained))
        output = model(tokens_of(step, rank))
        assert output.requires_grad is bool(trained)
        if trained:
            by_hand(expected, policy, ranks, (step,), replicas)
            loss_of(output).backward()
        wanted = {name: parameter.grad for name, parameter in expected.named_parameters()}
        _assert_equal(wanted, full_gradients(model))
        for each in (expected, model):
            each.zero_grad()


def _all_train_as_written() -> None:
    if seat()[0] == 4:  # what two ranks cannot tell: neighbours, and sums of more than two terms
        trains_as_written(partial(_in_units, reshard_after_forward=2), POLICIES["bf16"])
        trains_as_written(SCHEMES["recomputed"], POLICIES["bf16, summed in float32"])
        trains_as_written(_in_two, POLICIES["fp16, summed in fp16"])
        hybrid = init_device_mesh(
            current_device().type, (2, 2), mesh_dim_names=("replicate", "shard")
        )
        for name in ("bf16", "bf16, summed in float32", "fp16, summed in fp16"):
            trains_as_written(partial(_in_units, mesh=hybrid), POLICIES[name], replicas=2)
            trains_as_written(
                partial(_in_units, mesh=hybrid), POLICIES[name], replicas=2, held=True
            )
            _held_over_replicas(hybrid, POLICIES[name])
            trains_as_written(_in_units, POLICIES[name], held=True)
        for after in (True, False, 2):
            regrouped = partial(_in_units, mesh=hybrid, reshard_after_forward=after)
            trains_as_written(regrouped, POLICIES["bf16, summed in float32"], replicas=2)
        return
    if seat()[0] == 2:
        for replicas in (1, 2):
            mesh = init_device_mesh(
                current_device().type,
                (replicas, 2 // replicas),
                mesh_dim_names=("replicate", "shard"),
            )
            for after in (None, True, False, 1):
                annotate = partial(_in_units, mesh=mesh, reshard_after_forward=after)
                trains_as_written(annotate, POLICIES["bf16, summed in float32"], replicas=replicas)
                trains_as_written(annotate, POLICIES["bf16"], replicas=replicas, held=True)
    for annotate in SCHEMES.values():
        trains_as_written(annotate, POLICIES["bf16, summed in float32"])
    for policy in POLICIES.values():
        trains_as_written(_in_units, policy)
    for name in ("bf16", "bf16, summed in float32", "fp16, summed in fp16"):
        trains_as_written(_in_units, POLICIES[name], held=True)


def _unfreezes() -> None:
    if seat()[0] == 4:
        hybrid = init_device_mesh(
            current_device().type, (2, 2), mesh_dim_names=("replicate", "shard")
        )
        unfreezes_between_steps(
            partial(_in_units, mesh=hybrid), POLICIES["bf16, summed in float32"], replicas=2
        )
        return
    for name in ("bf16", "bf16, summed in float32", "summed in bf16"):
        unfreezes_between_steps(_in_units, POLICIES[name])
    unfreezes_between_steps(SCHEMES["kept after forward"], POLICIES["bf16, summed in float32"])


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_unfrozen_between_steps_is_summed_bit_by_bit_in_dtypes_of_its_own(
    pool: Pool, ranks: int
) -> None:
    pool.run(ranks, _unfreezes)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_training_is_bit_by_bit_what_the_casts_mean_written_out(pool: Pool, ranks: int) -> None:
    pool.run(ranks, _all_train_as_written)


def test_one_process_without_a_group_casts_as_a_rank_among_others_does() -> None:
    _all_train_as_written()
