"""`weighted_gradients`: what ranks with different numbers of tokens train on together is what one process trains on."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from composable import (
    MixedPrecisionPolicy,
    clip_grad_norm_,
    fully_shard,
    no_sync,
    reduce_gradients,
    replicate,
    weighted_gradients,
)
from tests.helpers.compare import full_gradients
from tests.helpers.world import Pool, current_device, need_devices


class Model(nn.Module):
    """Its `spare` is used for some tokens only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 1)
        self.scale, self.spare = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.rand(7, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh() * self.scale
        return self.last(x + self.spare.sum(1) * (x[:, :1] > 0))  # type: ignore[no-any-return]


def _model(dtype: torch.dtype = torch.float32) -> Model:
    torch.manual_seed(0)
    return Model().to(current_device(), dtype)


def tokens(rank: int, number: int) -> int:
    """How many there are in a rank's micro-batch; of its second one rank 0 has none."""
    return [2, 0, 5][number] if rank == 0 else (3 * rank + 2 * number) % 6 + 1


def batch(rank: int, number: int) -> Tensor:
    torch.manual_seed(100 + 10 * number + rank)
    return torch.randn(tokens(rank, number), 5).to(current_device())


def mean_loss(model: nn.Module, x: Tensor) -> Tensor:
    """A mean over its tokens: NaN where there are none."""
    return model(x).square().mean()  # type: ignore[no-any-return]


def expected(ranks: int, numbers: range, make: Callable[[], nn.Module] = _model) -> dict[str, Tensor]:
    """One process that has all tokens."""
    model = make()
    mean_loss(model, torch.cat([batch(rank, number) for rank in range(ranks) for number in numbers])).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


# --- annotations and programs -----------------------------------------------------------------------------------------


def by_policy(model: Model) -> None:
    fully_shard(model, policy={nn.Linear})


def hybrid(model: Model) -> None:
    mesh = init_device_mesh(current_device().type, (2, dist.get_world_size() // 2))
    fully_shard(model, policy={nn.Linear}, mesh=mesh)


def replicated(model: Model) -> None:
    replicate(model)


def small_buckets_and_sums(model: Model) -> None:
    replicate(model, policy={nn.Linear}, bucket_cap_mb=0.0001, grad_reduce="sum")


def mixed_and_divided(model: Model) -> None:
    replicate(model.last, grad_reduce=8.0)
    fully_shard(model, policy={nn.Linear}, grad_reduce="sum")


SCHEMES: Final = (by_policy, hybrid, replicated, small_buckets_and_sums, mixed_and_divided)


def once(model: nn.Module, rank: int) -> range:
    with weighted_gradients(model, weight=tokens(rank, 0)):
        mean_loss(model, batch(rank, 0)).backward()
    return range(1)


def none_on_one_rank(model: nn.Module, rank: int) -> range:
    loss = mean_loss(model, batch(rank, 1))
    assert loss.isnan() == (rank == 0)
    with weighted_gradients(model, weight=torch.tensor([tokens(rank, 1)])):
        loss.backward()
    return range(1, 2)


def averaged_each_time(model: nn.Module, rank: int) -> range:
    for number in range(3):
        with weighted_gradients(model, weight=tokens(rank, number), more=number < 2):
            mean_loss(model, batch(rank, number)).backward()
    return range(3)


def held(model: nn.Module, rank: int) -> range:
    for number in range(3):
        with no_sync(model, enabled=number < 2), weighted_gradients(model, weight=tokens(rank, number), more=number < 2):
            mean_loss(model, batch(rank, number)).backward()
    return range(3)


def held_and_reduced(model: nn.Module, rank: int) -> range:
    with no_sync(model):
        for number in range(3):
            with weighted_gradients(model, weight=tokens(rank, number), more=number < 2):
                mean_loss(model, batch(rank, number)).backward()
    reduce_gradients(model)
    return range(3)


def over_shards(model: nn.Module, rank: int) -> range:
    for number, level in enumerate(("replicate", "all", "replicate")):
        scope = no_sync(model, level=level, enabled=number < 2)
        with weighted_gradients(model, weight=tokens(rank, number), more=number < 2), scope:
            mean_loss(model, batch(rank, number)).backward()
    return range(3)


def two_backwards(model: nn.Module, rank: int) -> range:
    """In one scope: each brings half of the loss."""
    with weighted_gradients(model, weight=tokens(rank, 0)):
        for _ in range(2):
            (mean_loss(model, batch(rank, 0)) / 2).backward()
    return range(1)


def begun_again(model: nn.Module, rank: int) -> range:
    """A step that was given up: cleared gradients weigh nothing."""
    with weighted_gradients(model, weight=tokens(rank, 2), more=True):
        mean_loss(model, batch(rank, 2)).backward()
    model.zero_grad()
    return once(model, rank)


PROGRAMS: Final = (
    once, none_on_one_rank, averaged_each_time, held, held_and_reduced, over_shards, two_backwards, begun_again
)  # fmt: skip


def _assert_close(model: nn.Module, wanted: dict[str, Tensor], said: str) -> int:
    found = full_gradients(model)
    assert [name for name, gradient in found.items() if gradient is not None] == list(wanted), said
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=2e-5, atol=1e-6, msg=f"{said}, '{name}'")
    return len(wanted)


def _compare() -> int:
    ranks, rank, compared = dist.get_world_size(), dist.get_rank(), 0
    for scheme in SCHEMES:
        model = _model()
        scheme(model)
        for program in PROGRAMS:
            numbers = program(model, rank)
            compared += _assert_close(model, expected(ranks, numbers), f"{scheme.__name__}, {program.__name__}")
            model.zero_grad()
        mean_loss(model, batch(0, 0)).backward()  # after the scopes as before
        factor = {"small_buckets_and_sums": ranks, "mixed_and_divided": ranks / 8}.get(scheme.__name__, 1)
        alone = {name: gradient * factor for name, gradient in expected(1, range(1)).items() if "last" in name}
        for name, gradient in alone.items():
            torch.testing.assert_close(full_gradients(model)[name], gradient, rtol=2e-5, atol=1e-6)
    return compared


@pytest.mark.parametrize("ranks", [2, 4])
def test_gradients_are_those_of_one_process_that_has_all_tokens(pool: Pool, ranks: int, device: str) -> None:
    need_devices(device, ranks)
    assert pool.run(ranks, _compare, device=device) == [len(SCHEMES) * len(PROGRAMS) * 6] * ranks


def test_without_a_process_group_micro_batches_weigh_what_they_weigh_elsewhere() -> None:
    for annotate in (by_policy, replicated, lambda model: fully_shard(model, mp_policy="fp64")):
        for program in (averaged_each_time, held, held_and_reduced, two_backwards, begun_again):
            model = _model()
            annotate(model)
            numbers = program(model, 1)
            alone = _model()
            mean_loss(alone, torch.cat([batch(1, number) for number in numbers])).backward()
            wanted = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
            _assert_close(model, wanted, program.__name__)


# --- low precision ----------------------------------------------------------------------------------------------------


def _in_bf16(verb: str) -> tuple[list[dict[str, Tensor]], dict[str, Tensor | None]]:
    """Each rank's own gradients by a plain model, and what came of them."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    terms = []
    for other in range(ranks):
        plain = _model(torch.bfloat16)
        mean_loss(plain, batch(other, 2).bfloat16()).backward()
        terms.append({name: p.grad for name, p in plain.named_parameters() if p.grad is not None})
    model = _model(torch.float32 if verb.startswith("cast") else torch.bfloat16)
    if verb.startswith("cast"):
        with torch.no_grad():  # so that casting loses nothing
            for parameter in model.parameters():
                parameter.copy_(parameter.bfloat16())
        fully_shard(model, mp_policy=MixedPrecisionPolicy("bf16", "fp32" if "summed" in verb else None))
    else:
        (replicate if verb == "replicate" else fully_shard)(model)
    with weighted_gradients(model, weight=tokens(rank, 2)):
        mean_loss(model, batch(rank, 2).bfloat16()).backward()
    found = {name: None if g is None else g.cpu() for name, g in full_gradients(model).items()}
    return [{name: term.cpu() for name, term in each.items()} for each in terms], found


@pytest.mark.parametrize("verb", ["fully_shard", "cast", "cast, summed in float32", "replicate"])
def test_bfloat16_is_the_same_arithmetic_by_hand_bit_by_bit(pool: Pool, verb: str, device: str) -> None:
    need_devices(device, 2)
    weights = [float(tokens(rank, 2)) for rank in range(2)]
    for terms, found in pool.run(2, _in_bf16, verb, device=device):
        for name in terms[0]:
            summed_in = torch.float32 if "summed" in verb else torch.bfloat16
            shares = [2 * weight / sum(weights) for weight in weights]
            first, second = (term[name].to(summed_in) * share for term, share in zip(terms, shares, strict=True))
            mean = (first + second) / 2
            assert found[name] is not None
            assert torch.equal(found[name], mean.to(found[name].dtype)), name


def _in_float16(weights: list[float]) -> list[float]:
    model = nn.Linear(1, 1, bias=False, dtype=torch.float16).to(current_device())
    fully_shard(model)
    x = torch.full((1, 1), 2.0**14, dtype=torch.float16, device=current_device())
    with weighted_gradients(model, weight=weights[dist.get_rank()]):
        model(x).sum().backward()
    (gradient,) = full_gradients(model).values()
    assert gradient is not None
    return gradient.flatten().tolist()  # type: ignore[no-any-return]


def test_weights_of_thousands_of_tokens_neither_overflow_nor_lose_in_float16(pool: Pool, device: str) -> None:
    need_devices(device, 4)
    for weights in ([4096.0] * 4, [1e9] * 4, [1e-9] * 4, [0.0, 8192.0, 8192.0, 0.0]):
        assert pool.run(4, _in_float16, weights, device=device) == [[2.0**14]] * 4


# --- other meshes -----------------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """The experts of one pair of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.expert = nn.Linear(5, 5), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.expert(self.dense(x).tanh())  # type: ignore[no-any-return]


def _experts(pair: int) -> Experts:
    torch.manual_seed(0)
    model = Experts()
    torch.manual_seed(1 + pair)
    model.expert.reset_parameters()
    return model.to(current_device())


def _on_two_meshes(verb: str) -> int:
    rank = dist.get_rank()
    pair = rank // 2
    mesh = init_device_mesh(current_device().type, (2, 2))
    model = _experts(pair)
    if verb == "fully_shard":
        fully_shard(model.expert, mesh=mesh.get_group(1), grad_reduce=4.0)
        fully_shard(model.dense)
    else:
        replicate(model.expert, mesh=mesh.get_group(1))
        fully_shard(model.dense)
    with weighted_gradients(model, weight=tokens(rank, 2)):
        mean_loss(model, batch(rank, 2)).backward()
    # What every rank's tokens bring to one mean over all of them, to whichever parameters they went through.
    models, total = [_experts(0), _experts(1)], sum(tokens(other, 2) for other in range(4))
    for other in range(4):
        (mean_loss(models[other // 2], batch(other, 2)) * tokens(other, 2) / total).backward()
    with torch.no_grad():
        for one, two in zip(models[0].dense.parameters(), models[1].dense.parameters(), strict=True):
            assert one.grad is not None
            assert two.grad is not None
            one.grad += two.grad
            two.grad.copy_(one.grad)
    wanted = {name: p.grad for name, p in models[pair].named_parameters() if p.grad is not None}
    return _assert_close(model, wanted, verb)


@pytest.mark.parametrize("verb", ["fully_shard", "replicate"])
def test_units_on_different_meshes_have_one_total(pool: Pool, verb: str, device: str) -> None:
    need_devices(device, 4)
    assert pool.run(4, _on_two_meshes, verb, device=device) == [4] * 4


class _Swap(torch.autograd.Function):
    """Every rank computes with the next one's tokens, as experts do with those that are sent to them."""

    @staticmethod
    def forward(ctx: object, x: Tensor, shift: int) -> Tensor:
        ctx.shift = shift  # type: ignore[attr-defined]
        rows = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, x.contiguous())
        return rows[(dist.get_rank() + shift) % len(rows)]

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _Swap.apply(gradient, -ctx.shift), None  # type: ignore[attr-defined, no-untyped-call, return-value]


def _tokens_of_other_ranks() -> int:
    rank, weights = dist.get_rank(), [1.0, 3.0]
    x = [torch.full((1, 5), 0.1), torch.full((1, 5), -0.7)]
    model = _model()
    fully_shard(model, policy={nn.Linear})
    with weighted_gradients(model, weight=weights[rank], scale="loss") as factor:
        loss = _Swap.apply(model(_Swap.apply(x[rank], 1)), -1)  # type: ignore[no-untyped-call]
        (loss.square().mean() * factor).backward()
    plain = _model()
    for own, weight in zip(x, weights, strict=True):
        (mean_loss(plain, own) * weight / 4).backward()
    return _assert_close(model, {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}, "mixed tokens")


def test_losses_can_be_scaled_where_forward_mixes_tokens_of_ranks(pool: Pool) -> None:
    assert pool.run(2, _tokens_of_other_ranks) == [6, 6]


# --- with others ------------------------------------------------------------------------------------------------------


def _clipped_and_scaled() -> tuple[float, float]:
    rank = dist.get_rank()
    model = _model()
    fully_shard(model, policy={nn.Linear})
    scaler = torch.amp.GradScaler(current_device().type, init_scale=256.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with weighted_gradients(model, weight=tokens(rank, 1)):
        scaler.scale(mean_loss(model, batch(rank, 1))).backward()
    scaler.unscale_(optimizer)
    norm = clip_grad_norm_(model.parameters(), 1e9)
    scaler.step(optimizer)
    scaler.update()
    wanted = torch.stack([g.norm() for g in expected(dist.get_world_size(), range(1, 2)).values()]).norm()
    return float(norm), float(wanted)


def test_clipping_and_scalers_see_weighted_gradients_and_no_nan_of_a_rank_without_tokens(pool: Pool, device: str) -> None:
    need_devices(device, 2)
    for norm, wanted in pool.run(2, _clipped_and_scaled, device=device):
        assert math.isclose(norm, wanted, rel_tol=1e-4)
