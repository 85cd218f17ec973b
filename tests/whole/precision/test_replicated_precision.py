"""Mixed precision of replicated modules: as the casts mean written out, and parameters rest as they
were.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composable import MixedPrecisionPolicy, fully_shard, remove, replicate
from composable.errors import ForeignParameterError
from tests.helpers import compiled
from tests.helpers.compare import full_gradients
from tests.helpers.logged import logged
from tests.helpers.world import Pool, current_device, spmd
from tests.whole.precision.test_precision import (
    POLICIES,
    Block,
    Model,
    recomputed,
    trains_as_written,
    unfreezes_between_steps,
)
from tests.whole.precision.test_precision_of_parts import KEPT, Part, numbers, parts

BF16: Final = torch.bfloat16
F32: Final = torch.float32


# --- as it is by hand ---------------------------------------------------------------------------


def _plainly(model: Model, policy: Any) -> None:
    replicate(model, mp_policy=policy)
    for block in model.blocks:
        block.register_forward_pre_hook(
            lambda _, args: (args[0].to(policy.param_dtype or args[0].dtype),)
        )


def _in_units(model: Model, policy: Any, **options: Any) -> None:
    replicate(model, policy={Block}, mp_policy=policy, **options)


SCHEMES: Final[dict[str, Callable[[Model, Any], Any]]] = {
    "plainly": _plainly,
    "units": _in_units,
    "small buckets": partial(_in_units, bucket_cap_mb=0.0001),
    **recomputed(_in_units),
}


def _in_place(policy: MixedPrecisionPolicy, wanted: Tensor) -> float:
    """Where nothing is cast, the mean of before is added up with the new terms, and rounded once
    more.
    """
    sums = policy.reduce_dtype or policy.param_dtype
    return torch.finfo(sums).eps if wanted.dtype is sums and dist.is_initialized() else 0.0


def _all_train_as_written() -> None:
    def trains(annotate: Callable[[Model, Any], Any], name: str, *, held: bool = False) -> None:
        trains_as_written(
            annotate, POLICIES[name], held=held, near=partial(_in_place, POLICIES[name])
        )

    # what two ranks cannot tell: sums of more than two terms
    if dist.is_initialized() and dist.get_world_size() == 4:
        trains(_in_units, "bf16, summed in float32")
        trains(_in_units, "bf16, summed in float32", held=True)
        return
    for annotate in SCHEMES.values():
        trains(annotate, "bf16, summed in float32")
    for name in POLICIES:
        trains(_in_units, name)
    for name in ("bf16", "bf16, summed in float32"):
        trains(_in_units, name, held=True)


@pytest.mark.parametrize("ranks", [2, 4])
def test_training_is_bit_by_bit_what_the_casts_mean_written_out(pool: Pool, ranks: int) -> None:
    pool.run(ranks, _all_train_as_written)


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_unfrozen_between_steps_is_summed_bit_by_bit_in_dtypes_of_its_own(
    pool: Pool, ranks: int
) -> None:
    pool.run(ranks, unfreezes_between_steps, _in_units, POLICIES["bf16, summed in float32"])


def test_one_process_without_a_group_casts_as_a_rank_among_others_does() -> None:
    _all_train_as_written()


# --- what is cast -------------------------------------------------------------------------------


class Reads(nn.Module):
    """A module that reads others' parameters, a tied one, one that never runs, one that is frozen,
    and one of integers.
    """

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
        self.seen = (
            self.head.weight is self.embedding.weight,
            self.calls.dtype,
            self.frozen.weight.dtype,
            x.dtype,
        )
        self.iterated = {p.dtype for p in self.parameters()}
        return self.head(self.frozen(x))


def _all_parameters_are_cast_in_a_forward_and_rest_as_they_were() -> None:
    torch.manual_seed(0)
    model = Reads()
    model.ignored = nn.Linear(8, 8)
    parameters, state = (
        list(model.parameters()),
        {name: value.clone() for name, value in model.state_dict().items()},
    )
    replicate(
        model,
        mp_policy=MixedPrecisionPolicy("bf16", buffer_dtype="bf16"),
        ignored_params=["ignored"],
    )
    tokens = torch.arange(6).reshape(2, 3)
    model(tokens).float().sum().backward()
    assert model.seen == (True, torch.int64, BF16, BF16)
    assert model.iterated == {BF16, F32, torch.int64}
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


def _a_unit_that_was_evaluated_first_trains() -> None:
    model = replicate(nn.Linear(4, 4), mp_policy="bf16")
    for evaluated in (torch.no_grad, torch.inference_mode):
        with evaluated():
            model(torch.ones(1, 4))
        model(torch.ones(1, 4)).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[2.0] * 4] * 4


def _transforms_and_calls_with_other_tensors_work() -> None:
    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            other = torch.func.functional_call(
                self.linear, {"weight": torch.full((4, 4), 2.0, dtype=BF16)}, (x,)
            )
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
    inside = {"linear.weight": torch.full((4, 4), 3.0, dtype=BF16, requires_grad=True)}
    torch.func.functional_call(model, inside, (torch.ones(1, 4),)).sum().backward()
    assert inside["linear.weight"].grad is not None
    assert model.linear.weight is weight


def _recurrent_modules_and_parameters_in_another_order_compute_with_casts_and_are_their_own_again() -> None:  # fmt: skip  # noqa: E501
    torch.manual_seed(0)
    images = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    models: list[tuple[nn.Module, Tensor]] = [
        (nn.LSTM(4, 4), torch.randn(3, 2, 4)),
        (images, torch.randn(2, 3, 5, 5)),
    ]
    for model, x in models:
        low = copy.deepcopy(model).to(BF16)
        replicate(model, mp_policy="bf16")
        for _ in range(2):
            model.zero_grad()
            output, expected = model(x)[0], low(x.to(BF16))[0]
            assert torch.equal(output, expected)
            output.sum().backward()
        expected.sum().backward()
        for own, other in zip(model.parameters(), low.parameters(), strict=True):
            assert torch.equal(own.grad, other.grad.float())  # type: ignore[union-attr, arg-type]
            assert own.grad.stride() == own.stride()  # type: ignore[union-attr]
        remove(model, replicate)
        assert model(x)[0].dtype is F32


@pytest.mark.parametrize(
    "body",
    [
        _all_parameters_are_cast_in_a_forward_and_rest_as_they_were,
        _a_unit_that_was_evaluated_first_trains,
        _transforms_and_calls_with_other_tensors_work,
        _recurrent_modules_and_parameters_in_another_order_compute_with_casts_and_are_their_own_again,
    ],
)
def test_casts_of_replicated_modules(pool: Pool, body: Callable[[], None]) -> None:
    body()
    pool.run(2, body)


# --- compiled, and with errors ------------------------------------------------------------------

LOW: Final = MixedPrecisionPolicy("bf16", "fp32", buffer_dtype="bf16")
_COMPILED: Final[dict[str, tuple[Callable[[nn.Module], Any], bool]]] = {
    "parts of a replica": (lambda model: replicate(model, mp_policy=LOW), False),
    "a replica": (lambda model: replicate(model, mp_policy=LOW), True),
    "units": (lambda model: fully_shard(model, policy={Part}, mp_policy=KEPT), False),
    "a sharded model": (
        lambda model: fully_shard(model, policy={Part}, mp_policy=replace(LOW, output_dtype=F32)),
        True,
    ),
}


def _compiled_cast_too(how: str) -> None:
    annotate, whole = _COMPILED[how]
    rank = dist.get_rank() if dist.is_initialized() else 0
    with compiled.fresh_compiler():
        eager, other = (annotate(parts()) for _ in range(2))
        called: Any = other
        if whole:
            called = torch.compile(other, backend="aot_eager")
        else:
            for part in other[:2]:
                part.compile(backend="aot_eager")
        for step in range(3):
            # Norms that keep their dtype inside of a compiled part are given casts; Dynamo compiles
            # anew when these are gone.
            torch._dynamo.config.error_on_recompile = step == 2 and how != "units"
            outputs = [model(numbers(step, rank)) for model in (eager, called)]
            torch.testing.assert_close(*outputs, rtol=2e-2, atol=2e-2)
            for output in outputs:
                output.float().square().mean().backward()
        assert other[0].seen == eager[0].seen
        for one, two in zip(
            full_gradients(eager).values(), full_gradients(other).values(), strict=True
        ):
            assert two is not None
            assert two.dtype is F32
            torch.testing.assert_close(two, one, rtol=5e-2, atol=5e-2)
        assert compiled.ours_compiled() == []


@pytest.mark.parametrize("how", _COMPILED)
def test_compiled_modules_cast_as_others_do(pool: Pool, how: str) -> None:
    pool.run(2, _compiled_cast_too, how)


@pytest.mark.parametrize("how", ["parts of a replica", "a replica"])
def test_compiled_modules_cast_as_others_do_where_there_is_no_group(how: str) -> None:
    _compiled_cast_too(how)


def test_a_forward_that_raises_leaves_the_parameters_that_were_there() -> None:
    model = parts()
    replicate(model, policy={Part}, mp_policy=LOW)
    weight = model[0].up.weight
    with model[1].register_forward_pre_hook(lambda *_: 1 / 0), pytest.raises(ZeroDivisionError):
        model(numbers(0))
    assert model[0].up.weight is weight
    model(numbers(0)).float().square().mean().backward()
    assert weight.grad is not None


class Router(nn.Module):
    """Casts itself while it computes, as routers of some mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.casts = False

    def forward(self, x: Tensor) -> Tensor:
        if self.casts:
            self.layer.to(torch.float32)
        y: Tensor = self.layer(x.to(self.layer.weight.dtype))
        return y


@spmd(ranks=2)
def test_after_a_refused_cast_in_forward_the_corrected_model_trains() -> None:
    model = replicate(
        Router().to(current_device()),
        mp_policy=MixedPrecisionPolicy(torch.bfloat16),
        sync_module_states="broadcast",
    )
    x = torch.ones(2, 4, device=current_device())
    for _ in range(2):  # the order of gradients is agreed
        model(x).sum().backward()
        model.zero_grad()
    model.casts = True
    with torch.no_grad():
        model(x)
    model.casts = False
    with pytest.raises(ForeignParameterError):
        model(x)
    for _ in range(2):
        model(x).sum().backward()
        assert model.layer.bias.grad is not None
        assert model.layer.bias.grad.tolist() == [2.0] * 4
        model.zero_grad()


# --- outside of the call of a unit ---------------------------------------------------------------


def _reported(verb: str, how: str) -> list[str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).to(current_device())
    policy = MixedPrecisionPolicy(param_dtype=BF16) if "cast" in verb else MixedPrecisionPolicy()
    (replicate if "replicate" in verb else fully_shard)(model, mp_policy=policy)
    x = torch.full((2, 4), 1.0 + dist.get_rank(), device=current_device())
    with logged() as lines:
        for _ in range(2):
            loss = model(x).float().sum() if how != "forward()" else model.forward(x).sum()
            if how == "penalty":
                loss.backward()
                loss = sum(  # type: ignore[assignment]
                    (p.full_tensor() if isinstance(p, DTensor) else p).square().sum()
                    for p in model.parameters()
                )
            loss.backward()
    return lines


@pytest.mark.parametrize(
    ("verb", "how", "reported"),
    [
        ("replicate and cast", "forward()", True),
        ("replicate and cast", "penalty", True),
        ("replicate and cast", "call", False),
        ("replicate", "forward()", False),
        ("replicate", "penalty", False),
        ("fully_shard and cast", "call", False),
        ("fully_shard and cast", "penalty", False),
    ],
)
def test_gradients_that_come_outside_of_the_units_forward_are_reported_once(
    pool: Pool, verb: str, how: str, reported: bool
) -> None:
    for lines in pool.run(2, _reported, verb, how):
        assert len(lines) == reported
        if reported:
            assert "gradient came to parameter" in lines[0]
            assert "register_forward_method" in lines[0]


class _Tied(nn.Module):
    """Reads the weight of a unit in its own forward, behind that unit's call."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, words: Tensor) -> Tensor:
        h = self.wte(words).float()
        for block in self.blocks:
            h = block(h).tanh()
        return nn.functional.linear(h.bfloat16(), self.wte.weight.bfloat16()).float()


def _reads_a_cast_weight(grad: bool) -> None:
    torch.manual_seed(0)
    model = _Tied().to(current_device())
    plain = copy.deepcopy(model)
    plain.wte.weight.data = plain.wte.weight.data.bfloat16().float()
    replicate(model.wte, mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    fully_shard(model, policy={nn.Linear})
    words = torch.arange(4, device=current_device())
    for _ in range(2):
        with torch.set_grad_enabled(grad):
            loss, expected = model(words).sum(), plain(words).sum()
        torch.testing.assert_close(loss, expected)
        if grad:
            loss.backward()


@pytest.mark.parametrize("grad", [True, False])
def test_a_root_reads_the_cast_weight_of_a_replicated_unit_next_to_shards(
    pool: Pool, grad: bool
) -> None:
    pool.run(2, _reads_a_cast_weight, grad)


def _memory_moves_before_a_functional_call() -> None:
    model = nn.Linear(4, 4).to(current_device())
    replicate(model, mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    x = torch.ones(2, 4, device=current_device())
    model(x)
    model.weight.data = torch.zeros_like(model.weight)
    theirs = {name: torch.ones_like(p, dtype=BF16) for name, p in model.named_parameters()}
    torch.func.functional_call(model, theirs, (x,))
    torch.testing.assert_close(model(x), model.bias.bfloat16().expand(2, 4))
    weight = theirs["weight"].requires_grad_()
    for trains in (False, True):
        model.bias.requires_grad_(trains)
        torch.func.functional_call(model, {"weight": weight}, (x,)).sum().backward()
        assert (model.bias.grad is not None) is trains


def test_memory_that_was_moved_before_a_functional_call_is_followed_after_it(pool: Pool) -> None:
    pool.run(2, _memory_moves_before_a_functional_call)
