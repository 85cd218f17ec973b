"""Mixed precision, and what rests: it keeps all its bits, is saved, and comes back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn
from torch.distributed import fsdp

from composable import (
    MixedPrecisionPolicy,
    clip_grad_norm_,
    fully_shard,
    keep_unsharded,
    remove,
    replicate,
    step_on_shards,
)
from tests.helpers.compare import full, full_gradients
from tests.helpers.world import Pool
from tests.whole.precision.test_precision import Block, loss_of, model_of, tokens_of

BF16: Final = torch.bfloat16


# --- what rests, and what comes back ------------------------------------------------------------


def _what_rests_is_as_it_was() -> None:
    reference, model = model_of(1), model_of(1)
    originals = dict(model.named_parameters())
    fully_shard(model, policy={Block}, mp_policy="bf16")
    before = {name: (p.dtype, p.shape) for name, p in reference.named_parameters()}
    assert {name: (p.dtype, p.shape) for name, p in model.named_parameters()} == before
    assert {name: (v.dtype, v.shape) for name, v in model.state_dict().items()} == before
    loss_of(model(tokens_of(0, 0))).backward()
    gradients = full_gradients(model)
    remove(model, fully_shard)
    for name, parameter in model.named_parameters():
        assert parameter is originals[name]
        torch.testing.assert_close(parameter, reference.get_parameter(name), rtol=0, atol=0)
        expected = gradients[name]
        assert expected is None or torch.equal(parameter.grad, expected), name  # type: ignore[arg-type]
    assert nn.Linear.forward(model.head, torch.ones(1, 12)).dtype is torch.float32


@pytest.mark.parametrize("ranks", [1, 2])
def test_removal_gives_every_parameter_back_with_all_its_bits(pool: Pool, ranks: int) -> None:
    pool.run(ranks, _what_rests_is_as_it_was)


def test_removal_gives_parameters_back_where_there_is_no_group() -> None:
    _what_rests_is_as_it_was()


def _gradients_stay_in_the_dtype_of_the_sum(verb: Callable[..., Any]) -> None:
    rank = dist.get_rank()
    kept, landed = (
        verb(
            model_of(6).to(BF16),
            policy={Block},
            mp_policy=MixedPrecisionPolicy("bf16", "fp32", **kept),
        )
        for kept in ({"keep_grads_in_reduce_dtype": True}, {})
    )
    for model in (kept, landed):
        for _ in range(2):
            loss_of(model(tokens_of(0, rank))).backward()
    twice_rounded = full_gradients(landed)
    for name, gradient in full_gradients(kept).items():
        if gradient is not None:
            assert gradient.dtype is torch.float32
            torch.testing.assert_close(
                gradient.to(BF16), twice_rounded[name], rtol=2**-7, atol=1e-6
            )
    torch.optim.SGD(kept.parameters(), lr=0.1).step()
    remove(kept, verb)
    for parameter in kept.parameters():
        assert parameter.grad is None or parameter.grad.dtype is BF16
        parameter.grad = torch.zeros_like(parameter)


@pytest.mark.parametrize("verb", [fully_shard, replicate])
def test_gradients_stay_in_the_dtype_of_the_sum_where_that_is_asked_for(
    pool: Pool, verb: Callable[..., Any]
) -> None:
    pool.run(2, _gradients_stay_in_the_dtype_of_the_sum, verb)


def _clipping_and_steps_on_shards() -> None:
    rank = dist.get_rank()
    models = [
        fully_shard(model_of(7), policy={Block}, mp_policy=MixedPrecisionPolicy("bf16", "fp32"))
        for _ in range(2)
    ]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    step_on_shards(optimizers[0])
    step_on_shards(optimizers[1], enabled=False)
    for _ in range(2):
        norms = []
        for model, optimizer in zip(models, optimizers, strict=True):
            loss_of(model(tokens_of(0, rank))).backward()
            norms.append(clip_grad_norm_(model, 0.01))
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(*norms)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(full(one), full(other))


def test_clipping_and_steps_on_shards_see_the_parameters_at_rest(pool: Pool) -> None:
    pool.run(2, _clipping_and_steps_on_shards)


def _cast_anew() -> None:
    model = fully_shard(nn.Linear(4, 4, bias=False), mp_policy="bf16")
    ones = torch.ones(1, 4)
    with keep_unsharded(model), torch.no_grad():
        for value in (1.0, 2.0, 3.0):
            model.weight.fill_(value)
            assert model(ones).tolist() == [[4 * value] * 4]


def test_parameters_that_are_kept_unsharded_are_cast_anew_after_a_step(pool: Pool) -> None:
    pool.run(2, _cast_anew)


def _torchs_own_fully_shard_brings_the_same_gradients_bit_by_bit() -> None:
    policies = [
        fsdp.MixedPrecisionPolicy(BF16, torch.float32),
        fsdp.MixedPrecisionPolicy(torch.float16, torch.float32),
    ]
    # Sums of more terms in a low precision depend on their order, and float32 holds these exactly.
    if dist.get_world_size() == 2:
        policies += [fsdp.MixedPrecisionPolicy(BF16), fsdp.MixedPrecisionPolicy(reduce_dtype=BF16)]
        policies += [fsdp.MixedPrecisionPolicy(torch.float16)]
    for policy in policies:
        torch.manual_seed(0)
        ours = nn.Sequential(
            *(nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 12)) for _ in range(3))
        )
        theirs = copy.deepcopy(ours)
        fully_shard(ours, policy={nn.Sequential}, mp_policy=policy)
        for unit in (*theirs, theirs):
            fsdp.fully_shard(unit, mp_policy=policy)
        for step in range(2):  # the second backward adds to the first one's gradients
            x = torch.randn(
                4, 12, generator=torch.Generator().manual_seed(10 * step + dist.get_rank())
            )
            outputs = ours(x), theirs(x)
            assert torch.equal(*outputs)
            for output in outputs:
                output.float().square().mean().backward()
        for one, other in zip(
            full_gradients(ours).values(), full_gradients(theirs).values(), strict=True
        ):
            assert one is not None
            assert other is not None
            assert torch.equal(one, other)


@pytest.mark.parametrize("ranks", [2, 4])
def test_torchs_own_fully_shard_brings_the_same_gradients_bit_by_bit(
    pool: Pool, ranks: int
) -> None:
    pool.run(ranks, _torchs_own_fully_shard_brings_the_same_gradients_bit_by_bit)


def test_gradients_that_were_there_are_kept_in_the_dtype_that_is_asked_for_and_back_where_there_is_no_group() -> None:  # fmt: skip  # noqa: E501
    module, ones = nn.Linear(2, 2, bias=False), torch.ones(1, 2)
    module(ones).sum().backward()
    fully_shard(module, mp_policy=MixedPrecisionPolicy("bf16", keep_grads_in_reduce_dtype=True))
    for dtype, value in ((BF16, 2.0), (torch.float32, 3.0)):
        module(ones).sum().backward()
        assert module.weight.grad is not None
        assert module.weight.grad.dtype is dtype
        assert module.weight.grad.tolist() == [[value, value]] * 2
        if dtype is BF16:
            remove(module, fully_shard)


def test_users_may_do_to_their_own_parameters_what_they_like_where_there_is_no_group() -> None:
    module = fully_shard(nn.Linear(4, 4, bias=False), mp_policy="bf16")
    ones = torch.ones(1, 4)
    seen: list[torch.dtype] = []
    module.register_forward_pre_hook(lambda module, _: seen.append(module.weight.dtype))

    def computes_with(value: float) -> None:
        assert torch.equal(module(ones), torch.full((1, 4), 4 * value, dtype=BF16))

    with torch.no_grad():
        module.weight.fill_(1.0)
    computes_with(1.0)
    module.weight.data = torch.full((4, 4), 2.0)
    computes_with(2.0)
    module.weight = nn.Parameter(torch.full((4, 4), 3.0))
    computes_with(3.0)
    module.double()
    computes_with(3.0)
    assert module.weight.dtype is torch.float64
    module.bfloat16()  # nothing is cast any more
    computes_with(3.0)
    module.float()
    module(ones).sum().backward()
    assert module.weight.grad is not None
    assert module.weight.grad.dtype is torch.float32
    assert dict.fromkeys(seen) == {BF16: None}
    tensors = {"weight": torch.full((4, 4), 5.0, dtype=BF16)}
    assert torch.equal(
        torch.func.functional_call(module, tensors, ones), torch.full((1, 4), 20.0, dtype=BF16)
    )
    computes_with(3.0)
