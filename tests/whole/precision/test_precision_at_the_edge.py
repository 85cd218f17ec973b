"""Mixed precision at the edges of a unit: inputs, outputs, buffers; and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed import fsdp

from composable import (
    CustomPolicy,
    MixedPrecisionPolicy,
    NamePolicy,
    checkpoint,
    describe,
    fully_shard,
    register_forward_method,
    remove,
)
from composable.errors import ForeignParameterError
from tests.helpers.world import Pool
from tests.whole.precision.test_precision import Block, loss_of, model_of, tokens_of

BF16: Final = torch.bfloat16


# --- what goes in and comes out -----------------------------------------------------------------


class Pair(NamedTuple):
    one: Any
    other: Any


class Echo(nn.Module):
    """Returns what its forward got, and uses its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.got = args, kwargs
        return {"out": args[0] * self.weight, "given": args, "named": kwargs}

    def generate(self, x: Tensor) -> Tensor:
        return x * self.weight


def test_floating_point_inputs_are_cast_wherever_they_are_and_nothing_else_is() -> None:
    module = fully_shard(Echo(), mp_policy="bf16")
    numbers, log = torch.arange(3), ["nothing"]
    x, y = torch.ones(4, requires_grad=True), torch.ones(2, dtype=torch.float64)
    module(
        x,
        [numbers, (y, "text")],
        log,
        names={"pair": Pair(y, None)},
        complex=torch.ones(1, dtype=torch.complex64),
    )
    (first, (second, (third, text)), fourth), named = module.got
    assert (first.dtype, second.dtype, third.dtype, text) == (BF16, torch.int64, BF16, "text")
    assert second is numbers
    assert fourth is log, "forward may put something into it"
    assert named["names"]["pair"].one.dtype is BF16
    assert named["complex"].dtype is torch.complex64
    module(x)["out"].sum().backward()
    assert x.grad is not None
    assert x.grad.dtype is torch.float32


def test_inputs_stay_as_they_are_where_the_policy_says_so() -> None:
    module = fully_shard(Echo(), mp_policy=MixedPrecisionPolicy("bf16", cast_forward_inputs=False))
    assert module(torch.ones(4))["out"].dtype is torch.float32
    assert module.got[0][0].dtype is torch.float32


def test_outputs_are_cast_wherever_they_are_and_methods_called_as_forward_is_cast_too() -> None:
    module = fully_shard(Echo(), mp_policy=MixedPrecisionPolicy("bf16", output_dtype="float64"))
    output = module(torch.ones(4), torch.arange(2), key=torch.ones(1))
    assert output["out"].dtype is torch.float64
    assert [tensor.dtype for tensor in output["given"]] == [torch.float64, torch.int64]
    assert output["named"]["key"].dtype is torch.float64
    output["out"].sum().backward()
    assert module.weight.grad is not None
    register_forward_method(module, "generate")
    assert module.generate(torch.ones(4)).dtype is torch.float64


def test_a_module_that_computes_under_autocast_does() -> None:
    module = fully_shard(nn.Linear(4, 4), mp_policy="bf16")
    with torch.autocast("cpu", dtype=torch.float16):
        output = module(torch.ones(2, 4))
    assert output.dtype is torch.float16
    output.float().sum().backward()
    assert module.weight.grad is not None
    assert module.weight.grad.dtype is torch.float32


def test_a_policy_gives_modules_a_precision_of_their_own() -> None:
    model = model_of(0)
    own = {id(model.blocks[1]): {"mp_policy": None}, id(model.blocks[2]): {"mp_policy": "float16"}}
    chosen = CustomPolicy(lambda module: own.get(id(module), isinstance(module, Block)))
    fully_shard(model, policy=chosen, mp_policy=MixedPrecisionPolicy("bf16", output_dtype="fp32"))
    seen: list[torch.dtype] = []
    for block in model.blocks:
        block.up.register_forward_hook(lambda module, *_: seen.append(module.weight.dtype))
    output = model(tokens_of(0, 0))
    assert seen == [BF16, torch.float32, torch.float16]
    assert output.dtype is torch.float32, "the annotated module's own, and not that of those inside"
    loss_of(output).backward()
    assert all(p.grad is None or p.grad.dtype is p.dtype for p in model.parameters())


@pytest.mark.parametrize(
    "recomputed", [lambda model: checkpoint(model, policy={Block}), lambda model: checkpoint(model)]
)
def test_what_is_recomputed_is_cast_at_both_edges_again(
    recomputed: Callable[[nn.Module], object],
) -> None:
    models = [model_of(8) for _ in range(2)]
    recomputed(models[1])
    edges = MixedPrecisionPolicy("bf16", output_dtype="fp64")
    for model in models:
        fully_shard(model, policy=NamePolicy({"blocks.*": {"mp_policy": edges}}), mp_policy="fp32")
        loss_of(model(tokens_of(0, 0))).backward()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert (one.grad is None and other.grad is None) or torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "policy",
    [
        fsdp.MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32),
        MixedPrecisionPolicy("bf16", output_dtype="fp32"),
    ],
)
def test_torchs_own_policy_means_the_same(policy: Any) -> None:
    module = fully_shard(Echo(), mp_policy=policy)
    assert module(torch.ones(4))["out"].dtype is torch.float32
    assert module.got[0][0].dtype is BF16


class Router(nn.Module):
    """Casts its parameters in forward, as routers of some mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer.to(torch.float64)(x.double()).to(x.dtype)


def test_a_forward_that_casts_parameters_finds_nothing_to_do_where_that_was_done_before() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Router())
    model[1].to(torch.float64)
    fully_shard(model)
    model(torch.ones(2, 4)).sum().backward()
    assert [p.grad.dtype for p in model.parameters()] == [torch.float32] * 2 + [torch.float64] * 2  # type: ignore[union-attr]


def _cast_in_forward() -> None:
    model, x = (
        fully_shard(nn.Sequential(nn.Linear(4, 4), Router()), policy={Router}),
        torch.ones(2, 4),
    )
    model(x).sum().backward()
    for _ in range(2):
        with pytest.raises(
            ForeignParameterError,
            match=r"gave parameter 'layer.weight' of unit '1' the dtype torch.float64",
        ):
            model(x)
        with torch.no_grad():
            model[1].layer.weight.fill_(1.0)
        model[1].forward = lambda x: model[1].layer(x)
        assert model(x).dtype is torch.float32
        del model[1].forward
        model(x)


def test_a_forward_that_casts_parameters_is_refused_at_the_next_one(pool: Pool) -> None:
    pool.run(2, _cast_in_forward)


# --- buffers ------------------------------------------------------------------------------------


class Buffered(nn.Module):
    """Two names for one buffer, one that forward writes to, one that it replaces, one of integers,
    and none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("table", torch.full((4,), 1 / 3))
        self.inner.register_buffer("table", self.table)
        self.register_buffer("sums", torch.zeros(4))
        self.register_buffer("last", torch.zeros(4))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor, fail: type[Exception] | None = None) -> Tensor:
        self.seen = {name: buffer.dtype for name, buffer in self.named_buffers()}
        self.is_one = self.inner.table is self.table
        self.sums += 1
        self.last = self.sums * 2
        self.steps += 1
        if fail is not None:
            raise fail("as planned")
        return self.inner(x) * self.table


def test_buffers_are_computed_with_in_their_dtype_and_rest_in_their_own() -> None:
    module = Buffered()
    table, sums = module.table, module.sums
    fully_shard(module, mp_policy=MixedPrecisionPolicy("bf16", buffer_dtype="bf16"))
    for step in (1, 2):
        module(torch.ones(2, 4)).float().sum().backward()
        assert module.seen == {"table": BF16, "sums": BF16, "last": BF16, "steps": torch.int64}
        assert module.is_one
        assert module.table is table
        assert module.inner.table is table
        assert module.table.tolist() == torch.full((4,), 1 / 3).tolist(), "not rounded to bfloat16"
        assert module.sums is sums
        assert (module.sums[0], module.last[0], module.steps) == (step, 2 * step, step)
        assert {buffer.dtype for buffer in module.state_dict().values()} == {
            torch.float32,
            torch.int64,
        }
    with pytest.raises(ValueError, match="as planned"):
        module(torch.ones(2, 4), fail=ValueError)
    assert {buffer.dtype for buffer in module.state_dict().values()} == {torch.float32, torch.int64}
    assert module.table is table
    module.to(torch.float64)
    module(torch.ones(2, 4)).float().sum().backward()
    assert module.seen["table"] is BF16
    assert module.table.dtype is torch.float64
    remove(module, fully_shard)
    module(torch.ones(2, 4, dtype=torch.float64))
    assert module.seen["table"] is torch.float64


def test_statistics_that_no_version_counter_tells_of_are_kept() -> None:
    module, plain = nn.BatchNorm1d(4), nn.BatchNorm1d(4).bfloat16()
    fully_shard(module, mp_policy=MixedPrecisionPolicy("bf16", buffer_dtype="bf16"))
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(module(x), plain(x.bfloat16()))
    for name in ("running_mean", "running_var"):
        assert torch.equal(module.get_buffer(name), plain.get_buffer(name).float())
    assert module.num_batches_tracked.item() == 1


def test_parts_of_a_unit_that_are_recomputed_by_themselves_find_the_buffers_cast() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.buffered = Buffered()

        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(self.buffered, x, use_reentrant=False)

    module = fully_shard(Outer(), mp_policy=MixedPrecisionPolicy("bf16", buffer_dtype="bf16"))
    output = module(torch.ones(2, 4, requires_grad=True))
    module.buffered.seen = {}
    output.float().sum().backward()
    assert module.buffered.seen["table"] is BF16
    assert module.buffered.table.dtype is torch.float32


# --- words --------------------------------------------------------------------------------------


def test_the_table_of_units_says_in_which_dtypes_they_compute() -> None:
    model = model_of(0)
    fully_shard(model, policy={Block}, mp_policy=MixedPrecisionPolicy("bf16", "fp32"))
    rows = describe(model).rows
    assert rows[0].dtypes == ("float32",)
    assert (rows[0].computes_in, rows[0].reduces_in) == (("bfloat16",), ("float32",))
    assert rows[1].dtypes == ("bfloat16", "float64", "float32", "int64")
    assert "float32 as bfloat16" in str(describe(model))
