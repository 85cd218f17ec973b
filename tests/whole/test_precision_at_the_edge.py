"""Mixed precision at the edges of a unit: inputs, outputs, buffers; what rests, is saved and comes back; what is refused."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed import fsdp

from composable import (
    CustomPolicy,
    MixedPrecisionPolicy,
    NamePolicy,
    checkpoint,
    clip_grad_norm_,
    describe,
    fully_shard,
    keep_unsharded,
    register_forward_method,
    remove,
    replicate,
    step_on_shards,
)
from tests.helpers import compiled
from tests.helpers.compare import full, full_gradients
from tests.helpers.refusals import refusal, refused
from tests.helpers.world import Pool
from tests.whole.test_precision import Block, loss_of, model_of, tokens_of

BF16: Final = torch.bfloat16


# --- what goes in and comes out ---------------------------------------------------------------------------------------


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
    module(x, [numbers, (y, "text")], log, names={"pair": Pair(y, None)}, complex=torch.ones(1, dtype=torch.complex64))
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


@pytest.mark.parametrize("recomputed", [lambda model: checkpoint(model, policy={Block}), lambda model: checkpoint(model)])
def test_what_is_recomputed_is_cast_at_both_edges_again(recomputed: Callable[[nn.Module], object]) -> None:
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
    [fsdp.MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32), MixedPrecisionPolicy("bf16", output_dtype="fp32")],
)
def test_torchs_own_policy_means_the_same(policy: Any) -> None:
    module = fully_shard(Echo(), mp_policy=policy)
    assert module(torch.ones(4))["out"].dtype is torch.float32
    assert module.got[0][0].dtype is BF16


# --- buffers ----------------------------------------------------------------------------------------------------------


class Buffered(nn.Module):
    """Two names for one buffer, one that forward writes to, one that it replaces, one of integers, and none."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("table", torch.full((4,), 1 / 3))
        self.inner.register_buffer("table", self.table)
        self.register_buffer("sums", torch.zeros(4))
        self.register_buffer("last", torch.zeros(4))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor, fail: type[BaseException] | None = None) -> Tensor:
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
        assert {buffer.dtype for buffer in module.state_dict().values()} == {torch.float32, torch.int64}
    for fail in (ValueError, KeyboardInterrupt):
        with pytest.raises(fail, match="as planned"):
            module(torch.ones(2, 4), fail=fail)
        assert {buffer.dtype for buffer in module.state_dict().values()} == {torch.float32, torch.int64}
        assert module.table is table
        module.zero_grad()
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


# --- what rests, and what comes back ----------------------------------------------------------------------------------


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


def _whole_state_dicts_load_and_what_was_loaded_is_computed_with() -> None:
    source, model = model_of(2), model_of(3)
    fully_shard(model, policy={Block}, mp_policy=MixedPrecisionPolicy("bf16", output_dtype="fp32"))
    model(tokens_of(0, 0))
    for assign in (False, True):
        state = {name: value * (2 if assign else 1) for name, value in source.state_dict().items()}
        model.load_state_dict(state, assign=assign)
        for name, parameter in model.named_parameters():
            assert torch.equal(full(parameter), state[name])
        twin = model_of(4)
        twin.load_state_dict(state)
        fully_shard(twin, policy={Block}, mp_policy=MixedPrecisionPolicy("bf16", output_dtype="fp32"))
        assert torch.equal(model(tokens_of(1, 0)), twin(tokens_of(1, 0)))


def _frozen_parameters_are_cast_and_those_that_are_unfrozen_get_gradients_of_their_own_dtype() -> None:
    rank = dist.get_rank()
    model = model_of(5)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    fully_shard(model, policy={Block}, mp_policy=MixedPrecisionPolicy("bf16", "fp32"))
    assert model(tokens_of(0, rank)).dtype is BF16
    for name in ("blocks.0.low", "blocks.0.scale", "head.weight"):
        model.get_parameter(name).requires_grad_()
    loss_of(model(tokens_of(0, rank))).backward()
    brought = {name: p.grad.dtype for name, p in model.named_parameters() if p.grad is not None}
    assert brought == {"blocks.0.low": BF16, "blocks.0.scale": torch.float64, "head.weight": torch.float32}


def _gradients_stay_in_the_dtype_of_the_sum_where_that_is_asked_for() -> None:
    rank = dist.get_rank()
    kept, landed = (
        fully_shard(model_of(6).to(BF16), policy={Block}, mp_policy=MixedPrecisionPolicy("bf16", "fp32", **kept))
        for kept in ({"keep_grads_in_reduce_dtype": True}, {})
    )
    for model in (kept, landed):
        for _ in range(2):
            loss_of(model(tokens_of(0, rank))).backward()
    twice_rounded = full_gradients(landed)
    for name, gradient in full_gradients(kept).items():
        if gradient is not None:
            assert gradient.dtype is torch.float32
            torch.testing.assert_close(gradient.to(BF16), twice_rounded[name], rtol=2**-7, atol=1e-6)
    torch.optim.SGD(kept.parameters(), lr=0.1).step()
    remove(kept, fully_shard)
    for parameter in kept.parameters():
        assert parameter.grad is None or parameter.grad.dtype is BF16
        parameter.grad = torch.zeros_like(parameter)


def _clipping_and_steps_on_shards_see_the_parameters_at_rest() -> None:
    rank = dist.get_rank()
    models = [fully_shard(model_of(7), policy={Block}, mp_policy=MixedPrecisionPolicy("bf16", "fp32")) for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    step_on_shards(optimizers[0])
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


def _a_gradient_that_overflows_in_float16_is_infinite_at_rest_and_its_step_is_left_out() -> None:
    model = fully_shard(nn.Linear(4, 4, bias=False), mp_policy="float16")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**17)
    before = full(model.weight)
    for scale in (2.0**17, 2.0**16):
        assert scaler.get_scale() == scale
        scaler.scale(model(torch.ones(1, 4)).float().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert torch.equal(full(model.weight), before)


def _parameters_that_are_kept_unsharded_are_cast_anew_after_a_step() -> None:
    model = fully_shard(nn.Linear(4, 4, bias=False), mp_policy="bf16")
    ones = torch.ones(1, 4)
    with keep_unsharded(model), torch.no_grad():
        for value in (1.0, 2.0, 3.0):
            model.weight.fill_(value)
            assert model(ones).tolist() == [[4 * value] * 4]


def _compiled_modules_cast_as_others_do_and_nothing_of_ours_is_compiled() -> None:
    precision = MixedPrecisionPolicy("bf16", "fp32", buffer_dtype="bf16", output_dtype="fp32")
    with compiled.fresh_compiler():
        for compiler in ("each block", "the model"):
            models = []
            for _ in range(2):
                torch.manual_seed(0)
                models.append(fully_shard(compiled.Model(), policy={compiled.Block}, mp_policy=precision))
            eager, other = models
            called = compiled.COMPILERS[compiler](other, backend="aot_eager")
            for step in range(3):
                torch._dynamo.config.error_on_recompile = step == 2
                x = torch.randn(3, 12, generator=torch.Generator().manual_seed(step))
                outputs = [eager(x), called(x)]
                torch.testing.assert_close(*outputs, rtol=2e-2, atol=2e-2)
                for output in outputs:
                    output.square().mean().backward()
            torch._dynamo.config.error_on_recompile = False
            for one, two in zip(eager.parameters(), other.parameters(), strict=True):
                assert one.grad is not None
                assert two.grad is not None
                torch.testing.assert_close(full(two.grad), full(one.grad), rtol=5e-2, atol=5e-2)
        assert compiled.ours_compiled() == []


def _torchs_own_fully_shard_brings_the_same_gradients_bit_by_bit() -> None:
    for policy in (
        fsdp.MixedPrecisionPolicy(BF16, torch.float32),
        fsdp.MixedPrecisionPolicy(BF16),
        fsdp.MixedPrecisionPolicy(reduce_dtype=BF16),
        fsdp.MixedPrecisionPolicy(torch.float16),
    ):
        torch.manual_seed(0)
        ours = nn.Sequential(*(nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 12)) for _ in range(3)))
        theirs = copy.deepcopy(ours)
        fully_shard(ours, policy={nn.Sequential}, mp_policy=policy)
        for unit in (*theirs, theirs):
            fsdp.fully_shard(unit, mp_policy=policy)
        for step in range(2):  # the second backward adds to the first one's gradients
            x = torch.randn(4, 12, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            outputs = ours(x), theirs(x)
            assert torch.equal(*outputs)
            for output in outputs:
                output.float().square().mean().backward()
        for one, other in zip(full_gradients(ours).values(), full_gradients(theirs).values(), strict=True):
            assert one is not None
            assert other is not None
            assert torch.equal(one, other)


@pytest.mark.parametrize(
    "body",
    [
        _torchs_own_fully_shard_brings_the_same_gradients_bit_by_bit,
        _compiled_modules_cast_as_others_do_and_nothing_of_ours_is_compiled,
        _whole_state_dicts_load_and_what_was_loaded_is_computed_with,
        _frozen_parameters_are_cast_and_those_that_are_unfrozen_get_gradients_of_their_own_dtype,
        _gradients_stay_in_the_dtype_of_the_sum_where_that_is_asked_for,
        _clipping_and_steps_on_shards_see_the_parameters_at_rest,
        _a_gradient_that_overflows_in_float16_is_infinite_at_rest_and_its_step_is_left_out,
        _parameters_that_are_kept_unsharded_are_cast_anew_after_a_step,
    ],
)
def test_two_ranks(pool: Pool, body: Callable[[], None]) -> None:
    pool.run(2, body)


@pytest.mark.parametrize("make", [copy.deepcopy, lambda model: torch.load(_saved(model), weights_only=False)])
def test_copies_compute_as_the_original_does_where_there_is_no_group(make: Callable[[nn.Module], nn.Module]) -> None:
    model = fully_shard(Buffered(), mp_policy=MixedPrecisionPolicy("bf16", buffer_dtype="bf16", output_dtype="fp32"))
    twin = make(model)
    assert torch.equal(model(torch.ones(1, 4)), twin(torch.ones(1, 4)))
    assert twin.seen["table"] is BF16
    assert twin.inner.weight is not model.inner.weight
    assert twin.inner.weight.dtype is torch.float32


def _saved(model: nn.Module) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return file


def test_gradients_that_were_there_are_kept_in_the_dtype_that_is_asked_for_and_back_where_there_is_no_group() -> None:
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
    assert torch.equal(torch.func.functional_call(module, tensors, ones), torch.full((1, 4), 20.0, dtype=BF16))
    computes_with(3.0)


# --- words ------------------------------------------------------------------------------------------------------------


def test_the_table_of_units_says_in_which_dtypes_they_compute() -> None:
    model = model_of(0)
    fully_shard(model, policy={Block}, mp_policy=MixedPrecisionPolicy("bf16", "fp32"))
    rows = describe(model).rows
    assert rows[0].dtypes == ("float32",)
    assert (rows[0].computes_in, rows[0].reduces_in) == (("bfloat16",), ("float32",))
    assert rows[1].dtypes == ("bfloat16", "float64", "float32", "int64")
    assert "float32 as bfloat16" in str(describe(model))


_REFUSED: Final[dict[str, tuple[Callable[[], Any], str]]] = {
    "a dtype of integers": (
        lambda: fully_shard(nn.Linear(2, 2), mp_policy=torch.int8),
        "AnnotationError: MixedPrecisionPolicy: param_dtype must be one of torch.float64, float32, bfloat16 and float16, or "
        "its name, e.g. 'bf16'; got torch.int8",
    ),
    "a name that is none": (
        lambda: MixedPrecisionPolicy(reduce_dtype="bf61"),
        "AnnotationError: MixedPrecisionPolicy: reduce_dtype must be one of torch.float64, float32, bfloat16 and float16, or "
        "its name, e.g. 'bf16'; got 'bf61'",
    ),
    "a flag that is none": (
        lambda: MixedPrecisionPolicy("bf16", cast_forward_inputs="no"),  # type: ignore[arg-type]
        "AnnotationError: MixedPrecisionPolicy: cast_forward_inputs must be True or False, got 'no'",
    ),
}


@pytest.mark.parametrize("case", _REFUSED)
def test_a_dtype_that_nothing_can_be_cast_to_is_refused_where_it_is_said(case: str) -> None:
    act, expected = _REFUSED[case]
    assert refusal(act) == expected


def test_a_policy_that_is_none_is_refused_and_names_what_would_be_one() -> None:
    model = nn.Linear(2, 2)
    assert (
        refused(model, lambda: fully_shard(model, mp_policy=True))
        == "AnnotationError: fully_shard: mp_policy must be a MixedPrecisionPolicy (composable's or torch's), or a "
        "floating-point dtype or its name, e.g. 'bf16'; got True"
    )
    assert (
        refused(model, lambda: fully_shard(model, mixed_precision="bf16"))
        == "UnknownArgumentError: fully_shard() has no argument 'mixed_precision'; use mp_policy= instead"
    )
    assert (
        refused(model, lambda: replicate(model, mp_policy="bf16"))
        == "UnknownArgumentError: replicate() has no argument 'mp_policy'; only fully_shard has mixed precision so far; leave "
        "it out, and the parameters keep the dtype that they have, or compute under torch.autocast"
    )


def test_gradients_in_another_dtype_are_refused_where_torch_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("composable.api.mp_policy.CAN_KEEP", False)
    model = nn.Linear(2, 2)
    policy = MixedPrecisionPolicy("bf16", keep_grads_in_reduce_dtype=True)
    text = refused(model, lambda: fully_shard(model, mp_policy=policy))
    assert text == (
        "AnnotationError: fully_shard: keep_grads_in_reduce_dtype needs a torch in which a gradient may have another dtype "
        f"than its parameter (Tensor.grad_dtype); this is torch {torch.__version__}. Leave it out, and gradients have the "
        "parameter's dtype"
    )
