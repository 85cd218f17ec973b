"""Mixed precision of replicated modules: as the casts mean written out, cast when read, and nobody else need know."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from composable import (
    MixedPrecisionPolicy,
    checkpoint,
    no_sync,
    reduce_gradients,
    remove,
    replicate,
)
from composable.device.streams import has_streams
from tests.helpers.world import Pool
from tests.whole.test_precision import (
    POLICIES,
    Block,
    Model,
    by_hand,
    loss_of,
    model_of,
    tokens_of,
    unfreezes_between_steps,
)

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
            torch.testing.assert_close(
                own, other, rtol=2**-6 if own.dtype is BF16 else 1e-6, atol=1e-3 if own.dtype is BF16 else 1e-7
            )
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


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_unfrozen_between_steps_is_summed_bit_by_bit_in_dtypes_of_its_own(pool: Pool, ranks: int) -> None:
    pool.run(ranks, unfreezes_between_steps, _in_units, POLICIES["bf16, summed in float32"])


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


class Launches(TorchDispatchMode):
    """Notes the shapes of what is cast from float32 to bfloat16, and, as None, products."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, ...] | None] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        ahead = function is torch.ops.aten.copy_.default and args[0].dtype is BF16 and args[1].dtype is F32
        if (ahead or (function is torch.ops.aten._to_copy.default and kwargs.get("dtype") is BF16)) and args[0].ndim <= 2:
            self.seen.append(tuple(args[0].shape))
        if function is torch.ops.aten.addmm.default:
            self.seen.append(None)
        return function(*args, **kwargs)


def _launches(act: Callable[[], object]) -> list[tuple[int, ...] | None]:
    with Launches() as launches:
        act()
    return launches.seen


def _what_is_read_is_cast_once_and_nothing_else_is() -> None:
    torch.manual_seed(0)
    model = Reads()
    ignored = nn.Linear(8, 8)
    model.ignored = ignored
    parameters, state = list(model.parameters()), {name: value.clone() for name, value in model.state_dict().items()}
    replicate(model, mp_policy=MixedPrecisionPolicy("bf16", buffer_dtype="bf16"), ignored_params=["ignored"])
    tokens = torch.arange(6).reshape(2, 3)
    for _ in range(2):
        shapes = [shape for shape in _launches(lambda: model(tokens)) if shape is not None]
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


def _on_devices_with_streams_casts_run_ahead_in_the_order_of_the_forward_before() -> None:
    class Backwards(nn.Module):
        """Uses its modules in another order than it registers them, and one of them never."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(size, size + 1) for size in range(1, 5)] + [nn.Linear(9, 9)])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers[3::-1]:
                x = layer(x[:, : layer.in_features])
            return x

    model = replicate(Backwards(), mp_policy=MixedPrecisionPolicy("bf16", cast_forward_inputs=False))
    x = torch.ones(2, 4, dtype=BF16)
    in_turn = [each for size in (4, 3, 2, 1) for each in ((size + 1, size), (size + 1,), None)]
    for step in range(3):
        seen = _launches(lambda: model(x))
        if has_streams(x.device) and step:
            assert [each for each in seen if each] == [each for each in in_turn if each]
            assert None not in seen[:8], "all eight are on their way before the first of them is used"
        else:
            assert seen == in_turn
        model(x).float().sum().backward()
    assert model.layers[4].weight.grad is None
    assert all(layer.weight.grad is not None for layer in model.layers[:4])


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


@pytest.mark.parametrize(
    "body",
    [
        _what_is_read_is_cast_once_and_nothing_else_is,
        _on_devices_with_streams_casts_run_ahead_in_the_order_of_the_forward_before,
    ],
)
def test_two_ranks(pool: Pool, body: Callable[[], None]) -> None:
    pool.run(2, body)
