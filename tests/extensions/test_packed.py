"""4-bit weights of bitsandbytes, and of a class of the same shape, under both verbs: as in one
process.
"""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from composable import (
    EMA,
    average_parameters,
    checkpoint,
    export,
    full_state_dict,
    fully_shard,
    keep_unsharded,
    load,
    no_sync,
    remove,
    replicate,
    stream_full,
    summon_full_params,
)
from composable.errors import AnnotationError, ForeignParameterError
from tests.extensions.packing import KINDS, Adapted, Linear4bit, Packed, linear, net, packed
from tests.extensions.rows import Rows
from tests.extensions.test_protocol import gathered_bytes
from tests.helpers.compare import full
from tests.helpers.world import spmd

pytestmark = pytest.mark.beyond_sim("4-bit kernels do not know the device")
_STORAGES: Final = [torch.uint8, torch.bfloat16, torch.float32]


def _sharded(model: nn.Sequential, **options: Any) -> nn.Sequential:
    return fully_shard(model, policy={Adapted}, **options)


def _beside(model: nn.Sequential) -> nn.Sequential:
    replicate(model[0])
    return _sharded(model)


_ANNOTATED: Final[dict[str, Callable[[nn.Sequential], nn.Sequential]]] = {
    "shards": _sharded,
    "kept shards": lambda model: _sharded(model, reshard_after_forward=False),
    "replicas": replicate,
    "replicas beside shards": _beside,
}


def _inputs() -> Tensor:
    return torch.randn(5, 10, generator=torch.Generator().manual_seed(7))


def _train(model: nn.Module, x: Callable[[int], Tensor], **held: Any) -> list[Tensor]:
    """Losses, and the gradients of every step."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    seen = []
    for step in range(3):
        loss = model(x(step)).float().square().mean()
        loss.backward()
        seen.append(loss.detach())
        for parameter in model.parameters():
            assert (parameter.grad is not None) == parameter.requires_grad
            if parameter.grad is not None:
                seen.append(full(parameter.grad).clone())
        optimizer.step()
        optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("storage", _STORAGES, ids=str)
@pytest.mark.parametrize("annotated", _ANNOTATED)
@pytest.mark.parametrize("kind", KINDS)
@spmd(ranks=[2, 4])
def test_losses_and_gradients_have_the_bits_of_one_process(
    kind: str, annotated: str, storage: torch.dtype
) -> None:
    # Means of equal numbers of a power of two of ranks are exact.
    alone = _train(net(kind, storage), lambda _: _inputs())
    found = _train(_ANNOTATED[annotated](net(kind, storage)), lambda _: _inputs())
    torch.testing.assert_close(found, alone, rtol=0, atol=0)


@pytest.mark.parametrize("verb", [_sharded, replicate])
@pytest.mark.parametrize("kind", KINDS)
@spmd(ranks=4)
def test_ranks_train_on_their_own_batches_as_one_process_on_all(
    kind: str, verb: Callable[[nn.Module], nn.Module]
) -> None:
    def batches(step: int) -> Tensor:
        return torch.randn(8, 10, generator=torch.Generator().manual_seed(step))

    def own(step: int) -> Tensor:
        return batches(step).chunk(4)[dist.get_rank()]

    alone, found = net(kind), verb(net(kind))
    _train(alone, batches)
    _train(found, own)
    torch.testing.assert_close(full_state_dict(found, rank0_only=False), alone.state_dict())


@pytest.mark.parametrize("kind", KINDS)
@spmd(ranks=2)
def test_double_quantisation_computes_the_same_bits(kind: str) -> None:
    model = _sharded(net(kind, double=True))
    assert torch.equal(model(_inputs()), net(kind, double=True)(_inputs()))


@pytest.mark.parametrize("kind", KINDS)
@spmd(ranks=2)
def test_blocks_are_computed_again_and_gradients_accumulated(kind: str) -> None:
    alone, model = net(kind), _sharded(net(kind))
    for block in model:
        checkpoint(block)
    for each in (alone, model):
        x = _inputs().requires_grad_()
        with no_sync(model):
            each(x).square().sum().backward()
        each(2 * x).square().sum().backward()
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(full(mine.grad), theirs.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("storage", _STORAGES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@spmd(ranks=2)
def test_mixed_precision_leaves_the_bytes_alone(kind: str, storage: torch.dtype) -> None:
    alone = net(kind, storage)
    for name, parameter in alone.named_parameters():
        if not name.endswith("base.weight"):
            parameter.data = parameter.data.bfloat16()
    model = _sharded(net(kind, storage), mp_policy="bf16")
    assert torch.equal(model(_inputs()), alone(_inputs().bfloat16()))
    assert model[0].base.weight.dtype == storage


@pytest.mark.parametrize("annotated", _ANNOTATED)
@pytest.mark.parametrize("kind", KINDS)
@spmd(ranks=2)
def test_a_bias_that_a_forward_casts_in_place_is_as_it_was_and_computes_as_in_one_process(
    kind: str, annotated: str
) -> None:
    def made(*, trains: bool) -> nn.Sequential:
        model = net(kind)
        for block in model:
            block.base.bias.data = block.base.bias.data.bfloat16()
            block.base.bias.requires_grad_(trains)
        return model

    alone = _train(made(trains=False), lambda _: _inputs())
    model = _ANNOTATED[annotated](made(trains=False))
    torch.testing.assert_close(_train(model, lambda _: _inputs()), alone, rtol=0, atol=0)
    # torch's copies of plain parameters have no attributes
    copies = [] if "replicas" in annotated else [copy.deepcopy(model).eval()]
    for each in (model, *copies):
        expected = each(_inputs().requires_grad_())
        assert {block.base.bias.dtype for block in each} == {torch.bfloat16}  # type: ignore[union-attr]
        full_state_dict(each)
    # what is learned is not lost with the cast
    model = _ANNOTATED[annotated](made(trains=True))
    before = full(model[1].base.bias).clone()  # type: ignore[union-attr, arg-type]
    _train(model, lambda _: _inputs())
    assert not torch.equal(full(model[1].base.bias), before)  # type: ignore[union-attr, arg-type]
    # the next legal call after one that failed
    with pytest.raises((RuntimeError, AttributeError)):
        model(None)
    assert model(_inputs()).shape == expected.shape


@pytest.mark.parametrize("annotated", _ANNOTATED)
@pytest.mark.parametrize("kind", KINDS[1:])
@spmd(ranks=2)
def test_dora_over_packed_weights_trains_as_in_one_process(kind: str, annotated: str) -> None:
    """On hosts PEFT registers the weight anew in each forward."""
    alone, model = _adapted(use_dora=True), _adapted(use_dora=True)
    base: Any = model.base_model.model
    if annotated == "replicas beside shards":
        replicate(base[0])
    if annotated == "replicas":
        replicate(model)
    else:
        kept = annotated == "kept shards"
        fully_shard(model, policy={_Block}, reshard_after_forward=not kept)
    torch.testing.assert_close(
        _train(model, lambda _: _inputs()), _train(alone, lambda _: _inputs())
    )
    if annotated != "replicas":
        with keep_unsharded(model):
            for _ in range(2):
                found = model(_inputs())
        torch.testing.assert_close(found, alone(_inputs()))


@spmd(ranks=2)
def test_a_gather_sends_half_a_byte_per_weight() -> None:
    def made() -> nn.Module:
        base = fully_shard(linear("stand-in", 256, 256).requires_grad_(False))
        return nn.Sequential(base, nn.Linear(256, 2))

    half_of_the_bias = 256 * 4 // 2
    assert {*gathered_bytes(made)} == {256 * 256 // 2 // 2, half_of_the_bias}


@pytest.mark.parametrize("kind", KINDS)
@spmd(ranks=2)
def test_modules_compute_with_their_class_and_rest_with_the_attributes(kind: str) -> None:
    model = net(kind)
    given = model[0].base.weight
    original, attributes = type(given), {**vars(given)}
    seen = []
    model[0].base.register_forward_pre_hook(lambda base, _: seen.append(base.weight))
    _sharded(model)(_inputs())
    rests = model[0].base.weight
    assert isinstance(rests, DTensor)
    assert type(seen[0]) is original
    for parameter in (rests, seen[0]):
        for name, value in attributes.items():
            assert vars(parameter)[name] is value


@pytest.mark.parametrize("annotate", [_sharded, replicate])
@pytest.mark.parametrize("kind", KINDS)
@spmd(ranks=2)
def test_evaluation_between_steps_packs_nothing_anew(
    kind: str, annotate: Callable[[nn.Module], nn.Module]
) -> None:
    model = annotate(net(kind))
    expected = model(_inputs()).detach()
    model.eval()
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(model(_inputs()), expected)
    model.train()
    x = _inputs().requires_grad_()
    out = model(x)
    assert torch.equal(out, expected)
    out.sum().backward()
    assert x.grad is not None
    before = net(kind)[0].base.support_avx512bf16_for_cpu
    for module in (*model, model) if annotate is _sharded else (model,):
        remove(module, fully_shard if annotate is _sharded else replicate)
    assert model[0].base.support_avx512bf16_for_cpu == before


@contextmanager
def _folder() -> Iterator[Path]:
    """One of all ranks."""
    reported: list[Any] = [None]
    with tempfile.TemporaryDirectory() as own:
        reported = [own]
        dist.broadcast_object_list(reported)
        yield Path(reported[0])
        dist.barrier()


def _same(state: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(state) == list(expected)
    for name, value in state.items():
        # NaNs among floating-point numbers are equal bytes
        assert torch.equal(
            value.contiguous().view(-1).view(torch.uint8),
            expected[name].contiguous().view(-1).view(torch.uint8),
        ), name


@pytest.mark.parametrize("storage", _STORAGES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@spmd(ranks=2)
def test_whole_state_dicts_are_those_of_one_process_and_load(
    kind: str, storage: torch.dtype
) -> None:
    alone = net(kind, storage)
    # torch assigns plain parameters to replicas, as in one process
    for annotate, assign in ((_sharded, False), (_sharded, True), (replicate, False)):
        state = full_state_dict(annotate(net(kind, storage)), rank0_only=False)
        _same(state, alone.state_dict())
        # quantised from other values, with other scales
        other = annotate(net(kind, storage, seed=1))
        assert not torch.equal(other(_inputs()), alone(_inputs()))
        other.load_state_dict(copy.deepcopy(state), assign=assign)
        assert torch.equal(other(_inputs()), alone(_inputs()))
        _same(full_state_dict(other, rank0_only=False), alone.state_dict())


@pytest.mark.parametrize("kind", KINDS)
@spmd(ranks=2)
def test_distributed_checkpoints_are_loaded(kind: str) -> None:
    expected = net(kind)(_inputs())
    for annotate in (_sharded, replicate):
        model = annotate(net(kind))
        with _folder() as folder:
            dcp.save(get_model_state_dict(model), checkpoint_id=folder / "a")
            other = annotate(net(kind, seed=1))
            state = get_model_state_dict(other)
            dcp.load(state, checkpoint_id=folder / "a")
            set_model_state_dict(other, state)
        assert torch.equal(other(_inputs()), expected)


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("storage", _STORAGES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@spmd(ranks=2)
def test_exports_cast_neither_bytes_nor_scales(
    kind: str, storage: torch.dtype, double: bool
) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    alone = net(kind, storage, double=double)
    expected = {
        name: value.bfloat16() if ".base.weight" not in name else value
        for name, value in alone.state_dict().items()
    }
    for annotate in (_sharded, replicate):
        model = annotate(net(kind, storage, double=double))
        _same(dict(stream_full(model, dtype=torch.bfloat16)), expected)
        _same(full_state_dict(model, rank0_only=False, dtype=torch.bfloat16), expected)
        with _folder() as folder:
            export(model, folder / "low", dtype=torch.bfloat16)
            written = safetensors.load_file(folder / "low" / "model.safetensors")
            _same({name: written[name] for name in expected}, expected)
            export(model, folder / "out")
            other = annotate(net(kind, storage, double=double, seed=1))
            load(other, folder / "out")
            assert torch.equal(other(_inputs()), alone(_inputs()))


@pytest.mark.parametrize("storage", _STORAGES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@spmd(ranks=2)
def test_a_folder_read_in_another_dtype_leaves_the_bytes_alone(
    kind: str, storage: torch.dtype
) -> None:
    pytest.importorskip("safetensors")
    alone = net(kind, storage)
    with _folder() as folder:
        export(_sharded(net(kind, storage)), folder / "out")
        for annotate in (_sharded, replicate):
            model = annotate(net(kind, storage, seed=1))
            load(model, folder / "out", dtype=torch.float16)
            state = full_state_dict(model, rank0_only=False)
            packed_ones = {name: v for name, v in state.items() if name.endswith("base.weight")}
            assert packed_ones
            _same(packed_ones, {name: alone.state_dict()[name] for name in packed_ones})


@pytest.mark.parametrize("storage", _STORAGES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@spmd(ranks=2)
def test_averages_over_steps_keep_the_newest_bytes(kind: str, storage: torch.dtype) -> None:
    alone = net(kind, storage).state_dict()
    for annotate in (_sharded, replicate):
        model = annotate(net(kind, storage))
        average = EMA(model, decay=0.3)
        average.update()
        with average.swap():
            _same(
                {n: v for n, v in full_state_dict(model, rank0_only=False).items() if "base" in n},
                {n: v for n, v in alone.items() if "base" in n},
            )
        assert torch.equal(model(_inputs()), net(kind, storage)(_inputs()))


@spmd(ranks=2)
def test_averages_over_replicas_leave_bytes_alone_and_refuse_them_among_real_numbers() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = _sharded(net("stand-in"), mesh=mesh)
    average_parameters(model)
    torch.testing.assert_close(model(_inputs()), net("stand-in")(_inputs()))
    model = _sharded(net("stand-in", torch.bfloat16), mesh=mesh)
    with pytest.raises(AnnotationError, match=r"'base\.weight'.*Quantise with quant_storage="):
        average_parameters(model)


@pytest.mark.parametrize("kind", KINDS)
@spmd(ranks=2)
def test_copies_compute_the_same_and_removal_gives_the_class_back(kind: str) -> None:
    expected = net(kind)(_inputs())
    for keeps in (True, False):
        model = net(kind)
        given = model[0].base.weight
        original, attributes = type(given), {*vars(given)}
        if not keeps:
            given = None
        _sharded(model)
        clone = copy.deepcopy(model)
        assert torch.equal(clone(_inputs()), expected)
        assert clone[0].base.weight.quant_state is not model[0].base.weight.quant_state
        for each in (clone, model):
            for module in (*each, each):
                remove(module, fully_shard)
            weight = each[0].base.weight
            assert type(weight) is original
            assert attributes <= {*vars(weight)}
            assert torch.equal(each(_inputs()), expected)
        if keeps:
            assert model[0].base.weight is given
        alone = {f"{name}.": value for name, value in net(kind).state_dict().items()}
        _same({f"{name}.": value for name, value in model.state_dict().items()}, alone)


@spmd(ranks=2)
def test_weights_that_are_quantised_anew_between_steps_are_followed() -> None:
    model, alone = _sharded(net("stand-in")), net("stand-in")
    model(_inputs())
    other = torch.randn(7, 10, generator=torch.Generator().manual_seed(1))
    alone[0].base.weight = packed(other, torch.uint8)
    with summon_full_params(model):
        assert type(model[0].base.weight) is Packed
        model[0].base.weight = packed(other, torch.uint8)
    assert torch.equal(model(_inputs()), alone(_inputs()))
    model[0].base.weight = nn.Parameter(other, requires_grad=False)
    with pytest.raises(ForeignParameterError, match="by a Parameter; only a Packed can be sharded"):
        model(_inputs())


@spmd(ranks=2)
def test_they_may_share_a_unit_with_parameters_in_a_form_of_their_own() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = Linear4bit(10, 7, torch.uint8).requires_grad_(False)
            self.rows = nn.Linear(7, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.rows(self.base(x))  # type: ignore[no-any-return]

    def made() -> Both:
        torch.manual_seed(0)
        model = Both()
        model.rows.weight = nn.Parameter(Rows(model.rows.weight.detach()), requires_grad=False)
        return model

    model, alone = fully_shard(made()), made()
    model(_inputs()).sum().backward()
    base = alone.base(_inputs())
    torch.testing.assert_close(
        model(_inputs()),
        base @ alone.rows.weight.values.t() + alone.rows.bias,
        rtol=0.02,
        atol=0.02,
    )  # type: ignore[union-attr]


@spmd(ranks=2)
def test_what_is_not_quantised_or_packed_anew_is_refused_by_name() -> None:
    model = net("stand-in")
    whole = model[1].base.weight
    model[1].base.weight = Packed(whole.detach(), None)
    with pytest.raises(
        AnnotationError, match=r"'1\.base\.weight' of class Packed is not quantised"
    ):
        _sharded(model)
    _sharded(model, ignored_params=[model[1].base.weight])
    model = net("stand-in")
    model.eval()
    with torch.no_grad():
        model(_inputs())
    with pytest.raises(AnnotationError, match=r"'0\.base\.weight' of class Packed is packed for"):
        _sharded(model)
    replicate(model)


@pytest.mark.parametrize("kind", KINDS[1:])
@spmd(ranks=2)
def test_8_bit_weights_are_replicated_and_refused_where_they_would_be_cut(kind: str) -> None:
    bitsandbytes = pytest.importorskip(kind)

    def made() -> nn.Sequential:
        torch.manual_seed(0)
        eight = bitsandbytes.nn.Linear8bitLt(8, 8, has_fp16_weights=False)
        return nn.Sequential(nn.Linear(10, 8), eight.requires_grad_(False)).to("cpu")

    with pytest.raises(AnnotationError, match=r"'1\.weight' is of class Int8Params; only a plain"):
        fully_shard(made())
    for model in (
        replicate(made()),
        fully_shard(whole := made(), ignored_params=[whole[1].weight]),
    ):
        alone = made()
        for each in (model, alone, model, alone):
            each(_inputs()).sum().backward()
        torch.testing.assert_close(full(model[0].weight.grad), alone[0].weight.grad)


class _Block(nn.Module):
    def __init__(self, columns: int, rows: int) -> None:
        super().__init__()
        self.proj = linear("bitsandbytes", columns, rows)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).tanh()  # type: ignore[no-any-return]


class _Base(nn.Sequential):
    """What PEFT is to adapt."""

    is_loaded_in_4bit = True


def _base() -> _Base:
    torch.manual_seed(0)
    return _Base(_Block(10, 8), _Block(8, 9), _Block(9, 8))


@contextmanager
def _quiet() -> Iterator[None]:
    """PEFT, and what it imports, warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _adapted(seed: int = 0, **options: Any) -> Any:
    base = _base()
    torch.manual_seed(seed)
    with _quiet():
        import peft  # noqa: PLC0415 - seconds

        config = peft.LoraConfig(r=3, target_modules=["proj"], init_lora_weights=False, **options)
        return peft.get_peft_model(base, config)


def _sharded_adapted(seed: int = 0) -> Any:
    return fully_shard(_adapted(seed), policy={_Block})


@pytest.mark.parametrize("kind", KINDS[1:])
@spmd(ranks=2)
def test_adapters_of_peft_train_resume_and_merge_as_in_one_process(kind: str) -> None:
    alone, model = _adapted(), _sharded_adapted()
    import peft  # noqa: PLC0415 - imported above, without its warnings

    torch.testing.assert_close(
        _train(model, lambda _: _inputs()), _train(alone, lambda _: _inputs()), rtol=0, atol=0
    )
    expected = alone(_inputs())

    adapters = {name: full(p) for name, p in model.named_parameters() if p.requires_grad}
    with _folder() as folder:
        model.save_pretrained(folder, state_dict=adapters, is_main_process=dist.get_rank() == 0)
        dist.barrier()
        loaded = peft.PeftModel.from_pretrained(_base(), folder, is_trainable=True)
        assert torch.equal(loaded(_inputs()), expected)
        assert torch.equal(fully_shard(loaded, policy={_Block})(_inputs()), expected)
    whole = full_state_dict(model, rank0_only=False)
    resumed = _sharded_adapted(seed=1)
    assert not torch.equal(resumed(_inputs()), expected)
    peft.set_peft_model_state_dict(resumed, peft.get_peft_model_state_dict(model, state_dict=whole))
    assert torch.equal(resumed(_inputs()), expected)

    with _quiet():
        alone.merge_adapter()
        with summon_full_params(resumed):
            resumed.merge_adapter()
    assert torch.equal(resumed(_inputs()), alone(_inputs()))

    for block in _blocks_of(model):
        remove(block, fully_shard)
    with _quiet():
        merged = remove(model, fully_shard).merge_and_unload()
    assert torch.equal(merged(_inputs()), alone(_inputs()))
    assert not [name for name, _ in merged.named_parameters() if "lora" in name]


def _blocks_of(model: nn.Module) -> list[nn.Module]:
    return [each for each in model.modules() if isinstance(each, _Block)]
