"""Mixed precision of replicated modules: as the casts mean written out, cast when read, and nobody else need know."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from composable import (
    MixedPrecisionPolicy,
    checkpoint,
    describe,
    fully_shard,
    no_sync,
    reduce_gradients,
    remove,
    replicate,
)
from tests.helpers import compiled
from tests.helpers.compare import full_gradients, full_parameters
from tests.helpers.refusals import refusal, refused
from tests.helpers.world import Pool
from tests.whole.test_precision import POLICIES, Block, Model, by_hand, loss_of, model_of, tokens_of
from tests.whole.test_precision_of_parts import EVAL, KEPT, Part, numbers, parts

BF16: Final = torch.bfloat16
F32: Final = torch.float32


def _seat() -> tuple[int, int]:
    return (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)


# --- as it is by hand -------------------------------------------------------------------------------------------------


def _plainly(model: Model, policy: Any) -> None:
    replicate(model, mp_policy=policy)
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, args: (args[0].to(policy.param_dtype or args[0].dtype),))


def _in_units(model: Model, policy: Any, **options: Any) -> None:
    replicate(model, policy={Block}, mp_policy=policy, **options)


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


SCHEMES: Final[dict[str, Callable[[Model, Any], Any]]] = {
    "plainly": _plainly,
    "units": _in_units,
    "small buckets": partial(_in_units, bucket_cap_mb=0.0001),
    "recomputed": _recomputed,
    "recomputed around": _recomputed_around,
    "recomputed within": _recomputed_within,
}


def _trains_as_written(annotate: Callable[[Model, Any], Any], policy: MixedPrecisionPolicy, *, held: bool = False) -> None:
    """Two steps of two backwards each: the second adds to the first one's gradients, or they are reduced together."""
    ranks, rank = _seat()
    expected, model = model_of(0), model_of(0)
    annotate(model, policy)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5, momentum=0.5) for each in (expected, model)]
    for step in range(2):
        first, second = 2 * step, 2 * step + 1
        for steps in ((first, second),) if held and dist.is_initialized() else ((first,), (second,)):
            by_hand(expected, policy, ranks, steps)
        with no_sync(model, enabled=held):
            loss_of(model(tokens_of(first, rank))).backward()
        with no_sync(model, enabled=held and step == 0):
            loss_of(model(tokens_of(second, rank))).backward()
        reduce_gradients(model)
        for (name, own), other in zip(expected.named_parameters(), model.parameters(), strict=True):
            assert other.dtype is own.dtype
            if own.grad is None or other.grad is None:
                assert own.grad is other.grad, name
            else:
                # What rests in the dtype of the sum lives in a bucket, where the mean of before is added up with the new terms.
                near = 2**-7 if own.dtype is BF16 is (policy.reduce_dtype or policy.param_dtype) else 0.0
                if policy.param_dtype is torch.float64:  # each term is rounded to the parameter's dtype before the sum
                    near = 2**-7 if own.dtype is BF16 else 1e-6
                torch.testing.assert_close(
                    other.grad, own.grad, rtol=near, atol=near / 10, msg=lambda text, name=name: f"{name}: {text}"
                )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for own, other in zip(expected.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(own, other, rtol=2**-7 if own.dtype is BF16 else 1e-6, atol=1e-7)
            own.data.copy_(other)


def _all_train_as_written() -> None:
    if _seat()[0] == 4:  # what two ranks cannot tell: sums of more than two terms
        _trains_as_written(_in_units, POLICIES["bf16, summed in float32"])
        _trains_as_written(_in_units, POLICIES["bf16, summed in float32"], held=True)
        return
    for annotate in SCHEMES.values():
        _trains_as_written(annotate, POLICIES["bf16, summed in float32"])
    for name in ("bf16", "summed in bf16", "fp64") if dist.is_initialized() else ("bf16", "fp64"):  # one rank sums nothing
        _trains_as_written(_in_units, POLICIES[name])
    for name in ("bf16", "bf16, summed in float32"):
        _trains_as_written(_in_units, POLICIES[name], held=True)


@pytest.mark.parametrize("ranks", [2, 4])
def test_training_is_bit_by_bit_what_the_casts_mean_written_out(pool: Pool, ranks: int) -> None:
    pool.run(ranks, _all_train_as_written)


def test_one_process_without_a_group_casts_as_a_rank_among_others_does() -> None:
    _all_train_as_written()


# --- who is cast, and when --------------------------------------------------------------------------------------------


class Reads(nn.Module):
    """A module that reads others' parameters, a tied one, one that never runs, one that is frozen, and one of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.unused = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.calls = nn.Parameter(torch.tensor([3]), requires_grad=False)
        self.register_buffer("scale", torch.full((8,), 1 / 3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * self.scale
        x, _ = self.attention(x, x, x, need_weights=False)
        self.seen = (self.head.weight is self.embedding.weight, self.calls.dtype, self.frozen.weight.dtype, x.dtype)
        self.iterated = {p.dtype for p in self.parameters()}
        return self.head(self.frozen(x))


def _counted_casts(act: Callable[[], object]) -> list[tuple[int, ...]]:
    """The shapes of what is cast from float32 to bfloat16 under `act`."""

    class Casts(TorchDispatchMode):
        shapes: list[tuple[int, ...]] = []  # noqa: RUF012

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") is BF16:
                self.shapes.append(tuple(args[0].shape))
            return function(*args, **(kwargs or {}))

    casts = Casts()
    casts.shapes = []
    with casts:
        act()
    return casts.shapes


def _what_is_read_is_cast_once_and_nothing_else_is() -> None:
    torch.manual_seed(0)
    model = Reads()
    ignored = nn.Linear(8, 8)
    model.ignored = ignored
    parameters, state = list(model.parameters()), {name: value.clone() for name, value in model.state_dict().items()}
    replicate(model, mp_policy=MixedPrecisionPolicy("bf16", buffer_dtype="bf16"), ignored_params=["ignored"])
    tokens = torch.arange(6).reshape(2, 3)
    for _ in range(2):
        shapes = _counted_casts(lambda: model(tokens))
        # The buffer, twice; the tied weight; the attention's two, its projection's two, and the frozen module's two.
        assert sorted(shapes) == sorted([(8,), (8,), (7, 8), (24, 8), (24,), (8, 8), (8,), (8, 8), (8,)])
    assert model.seen == (True, torch.int64, BF16, BF16)
    assert model.iterated == {F32, torch.int64}
    output = model(tokens)
    output.float().sum().backward()
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {F32}
    assert model.unused.weight.grad is None
    assert model.frozen.weight.grad is None
    assert model.embedding.weight.grad is not None
    for name, value in model.state_dict().items():
        assert value.dtype is state[name].dtype
        assert torch.equal(value, state[name])
    remove(model, replicate)
    assert model(tokens).dtype is F32


def _a_cast_brings_gradients_whoever_reads_it_first() -> None:
    module = nn.Linear(4, 4)

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = module

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.linear(x)
            with torch.inference_mode():
                self.linear(x)
            return self.linear(x)

    model = replicate(Reader(), mp_policy="bf16")
    model(torch.ones(1, 4)).sum().backward()
    assert module.weight.grad is not None
    with torch.inference_mode():
        model(torch.ones(1, 4))
    model(torch.ones(1, 4)).sum().backward()
    assert module.weight.grad.tolist() == [[2.0] * 4] * 4


def _transforms_and_calls_with_other_tensors_work() -> None:
    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            other = torch.func.functional_call(self.linear, {"weight": torch.full((4, 4), 2.0, dtype=BF16)}, (x,))
            slope = torch.func.grad(lambda y: self.linear(y).sum())(x)
            return self.linear(x) + other + slope

    model = Calls()
    weight = model.linear.weight
    nn.init.ones_(weight)
    replicate(model, mp_policy="bf16")
    for _ in range(2):
        output = model(torch.ones(1, 4))
        assert output.tolist() == [[4.0 + 8.0 + 4.0] * 4]
        assert model.linear.weight is weight
    output.sum().backward()
    assert weight.grad is not None
    inside = {"linear.weight": torch.full((4, 4), 3.0, requires_grad=True)}
    torch.func.functional_call(model, inside, (torch.ones(1, 4),)).sum().backward()
    assert inside["linear.weight"].grad is not None
    assert model.linear.weight is weight


def _recurrent_modules_compute_with_casts_and_hold_their_own_again() -> None:
    torch.manual_seed(0)
    model = nn.LSTM(4, 4)
    low = copy.deepcopy(model).to(BF16)
    replicate(model, mp_policy="bf16")
    x = torch.randn(3, 2, 4)
    for _ in range(2):
        model.zero_grad()
        output, expected = model(x)[0], low(x.to(BF16))[0]
        assert torch.equal(output, expected)
        output.sum().backward()
    expected.sum().backward()
    for own, other in zip(model.parameters(), low.parameters(), strict=True):
        assert torch.equal(own.grad, other.grad.float())  # type: ignore[union-attr, arg-type]
    remove(model, replicate)
    assert model(x)[0].dtype is F32


@pytest.mark.parametrize(
    "body",
    [
        _what_is_read_is_cast_once_and_nothing_else_is,
        _a_cast_brings_gradients_whoever_reads_it_first,
        _transforms_and_calls_with_other_tensors_work,
        _recurrent_modules_compute_with_casts_and_hold_their_own_again,
    ],
)
def test_there_is_no_group(body: Callable[[], None]) -> None:
    body()


@pytest.mark.parametrize("body", [_what_is_read_is_cast_once_and_nothing_else_is])
def test_two_ranks(pool: Pool, body: Callable[[], None]) -> None:
    pool.run(2, body)


# --- with all the rest ------------------------------------------------------------------------------------------------


def _classes_keep_their_dtype() -> None:
    """As `fully_shard` has it, which is compared with the same arithmetic by hand."""
    _, rank = _seat()
    for policy in (None, {Part}, {nn.LayerNorm}):
        one, other = parts(), parts()
        fully_shard(one, policy={Part}, mp_policy=KEPT)
        replicate(other, policy=policy, mp_policy=KEPT, broadcast_buffers=False)
        for step in range(2):
            one.zero_grad()
            other.zero_grad()
            outputs = one(numbers(step, rank)), other(numbers(step, rank))
            assert torch.equal(*outputs)
            assert other[0].seen == (BF16, F32, BF16, F32)
            for output in outputs:
                output.float().square().mean().backward()
        for (name, gradient), own in zip(full_gradients(one).items(), other.parameters(), strict=True):
            assert torch.equal(gradient, own.grad), name  # type: ignore[arg-type]
        remove(other, replicate)
        assert not other[0].norm._forward_hooks
        assert other(numbers(0)).dtype is F32


def _evaluation_is_exact() -> None:
    _, rank = _seat()
    reference, model = parts(1), parts(1)
    replicate(model, policy={Part}, mp_policy=EVAL, broadcast_buffers=False)
    for step in range(2):
        assert model(numbers(step, rank)).dtype is BF16
        assert model[0].seen == (BF16, BF16, BF16, BF16)
        reference.load_state_dict(model.state_dict())
        with torch.no_grad():
            assert torch.equal(model.eval()(numbers(9)), reference.eval()(numbers(9)))
        assert model[0].seen == (F32, F32, F32, F32)
        model.train()
        reference.train()


def _next_to_shards_both_compute_in_the_low_dtype() -> None:
    _, rank = _seat()
    expected, model = parts(2), parts(2)
    low = MixedPrecisionPolicy("bf16", "fp32", buffer_dtype="bf16")
    fully_shard(expected, policy={Part}, mp_policy=low)
    replicate(model[0], mp_policy=low, broadcast_buffers=False)
    fully_shard(model, policy={Part}, mp_policy=low)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (expected, model)]
    for step in range(2):
        for each, optimizer in zip((expected, model), optimizers, strict=True):
            for number in (step, step + 5):
                with no_sync(each, enabled=number == step):
                    each(numbers(number, rank)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert model[0].seen[:3] == (BF16, BF16, BF16)
    for one, other in zip(full_parameters(expected).values(), full_parameters(model).values(), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)


def _compiled_modules_cast_too() -> None:
    with compiled.fresh_compiler():
        for whole in (False, True):
            eager, other = (replicate(parts(), mp_policy=EVAL) for _ in range(2))
            called: Any = other
            if whole:
                called = torch.compile(other, backend="aot_eager")
            else:
                for part in other[:2]:
                    part.compile(backend="aot_eager")
            for step in range(3):
                outputs = [model(numbers(step, _seat()[1])) for model in (eager, called)]
                assert [output.dtype for output in outputs] == [BF16, BF16]
                torch.testing.assert_close(*outputs, rtol=2e-2, atol=2e-2)
                for output in outputs:
                    output.float().square().mean().backward()
            for one, two in zip(eager.parameters(), other.parameters(), strict=True):
                assert two.grad is not None
                assert two.grad.dtype is F32
                torch.testing.assert_close(two.grad, one.grad, rtol=5e-2, atol=5e-2)


def _what_fails_leaves_the_parameters_that_were_there() -> None:
    model = parts()
    replicate(model, policy={Part}, mp_policy=EVAL)
    weight = model[0].up.weight
    for error in (ValueError, KeyboardInterrupt):
        handle = model[1].register_forward_pre_hook(partial(_fails, error))
        with pytest.raises(error, match="as planned"):
            model(numbers(0))
        handle.remove()
        assert type(model.state_dict()["0.up.weight"]) is Tensor
        assert model[0].up.weight is weight
    loss_of(model(numbers(0))).backward()
    assert weight.grad is not None
    twin = copy.deepcopy(model)
    twin(numbers(0)).sum().backward()
    assert twin[0].seen[:3] == (BF16, BF16, BF16)
    assert type(twin[0]._parameters) is dict
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)


def _fails(error: type[BaseException], *_: object) -> None:
    raise error("as planned")


@pytest.mark.parametrize(
    "body",
    [
        _classes_keep_their_dtype,
        _evaluation_is_exact,
        _next_to_shards_both_compute_in_the_low_dtype,
        _compiled_modules_cast_too,
    ],
)
def test_with_all_the_rest_on_two_ranks(pool: Pool, body: Callable[[], None]) -> None:
    pool.run(2, body)


@pytest.mark.parametrize(
    "body", [_evaluation_is_exact, _compiled_modules_cast_too, _what_fails_leaves_the_parameters_that_were_there]
)
def test_with_the_rest_where_there_is_no_group(body: Callable[[], None]) -> None:
    body()


def test_a_write_to_a_cast_is_refused_and_the_rest_goes_on() -> None:
    model = nn.Linear(4, 4)
    replicate(model, mp_policy="bf16")
    handle = model.register_forward_pre_hook(_writes)
    text = refusal(lambda: model(torch.ones(1, 4)))
    assert text == (
        "PhaseError: parameter 'weight' of a Linear in unit '(root)' was written to in place while its modules computed with a "
        "cast of it; such a write is lost. Compute a new tensor, or write to the parameter outside of forward"
    )
    handle.remove()
    assert model(torch.ones(1, 4)).dtype is BF16
    normed = replicate(nn.Embedding(4, 4, max_norm=0.1), mp_policy="bf16")
    normed(torch.arange(4))


def _writes(module: nn.Linear, _: object) -> None:
    with torch.no_grad():
        module.weight.mul_(2.0)


def test_the_table_of_units_says_so() -> None:
    model = parts()
    replicate(model, mp_policy=KEPT)
    row = describe(model).rows[0]
    assert (row.dtypes, row.computes_in, row.reduces_in) == (("float32",), ("float32", "bfloat16"), ("float32",))


def test_parameters_that_no_cast_can_stand_for_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].__dict__["_parameters"] = MappingProxyType(model[0]._parameters)  # somebody else's registry, as TorchScript has
    assert refusal(lambda: replicate(model, mp_policy="bf16")) == (
        "AnnotationError: replicate: parameter 'weight' of a Linear cannot be cast: it is not registered as torch.nn.Module "
        "does it; parameters of TorchScript modules are not. Leave mp_policy out for it"
    )


def test_what_only_shards_have_is_refused() -> None:
    model = nn.Linear(4, 4)
    policy = MixedPrecisionPolicy("bf16", keep_grads_in_reduce_dtype=True)
    assert refused(model, lambda: replicate(model, mp_policy=policy)) == (
        "AnnotationError: replicate: keep_grads_in_reduce_dtype is for fully_shard: gradients of replicated ones have the "
        "parameter's dtype, and are cast to reduce_dtype for the sum alone. Leave it out"
    )
