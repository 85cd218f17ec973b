"""float8 linears and 4-bit weights of torchao, sharded, against one process and FSDP2."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp

from composable import (
    EMA,
    Streamed,
    export,
    full_state_dict,
    fully_shard,
    remove,
    replicate,
    reshard,
    stream_full,
    summon_full_params,
    unshard,
)
from composable.errors import AnnotationError, ForeignParameterError
from tests.extensions.test_protocol import gathered_bytes
from tests.helpers.compare import full
from tests.helpers.world import spmd

pytestmark = [
    pytest.mark.beyond_sim("FSDP2 does not know the device"),
    pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed"),
]


def _train(
    model: nn.Module, steps: int, after: Callable[[nn.Module], None], *, alone: bool = False
) -> list[Tensor]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(8, 64, generator=generator)).square().mean()
        loss.backward()
        for parameter in model.parameters() if alone else ():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
        after(model)
        losses.append(loss.detach())
    return losses


def _nothing(model: nn.Module) -> None:
    pass


def _annotate(verb: Any, model: nn.Sequential, **options: Any) -> nn.Sequential:
    for index in (0, 2):
        verb(model[index], **options)
    verb(model, **options)
    return model


@spmd(ranks=2)
def test_float8_linears_train_as_one_process_and_as_fsdp2() -> None:
    from torchao.float8 import (  # noqa: PLC0415 - seconds
        Float8LinearConfig,
        convert_to_float8_training,
        precompute_float8_dynamic_scale_for_fsdp,
    )
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor  # noqa: PLC0415

    def made(*, gathers: bool = True) -> Any:
        torch.manual_seed(0)
        # with biases: FSDP2 over gloo cannot send a message of fp8 alone
        layers = nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16)
        config = Float8LinearConfig(enable_fsdp_float8_all_gather=gathers, emulate=True)
        return convert_to_float8_training(nn.Sequential(*layers), config=config)

    for after in (_nothing, precompute_float8_dynamic_scale_for_fsdp):
        alone = _train(made(gathers=False), 3, _nothing, alone=True)
        model = _annotate(fully_shard, made())
        if after is _nothing:
            model[2].compile(backend="aot_eager", fullgraph=True)
        found = _train(model, 3, after)
        torch.testing.assert_close(found, alone)
        theirs = _train(_annotate(fsdp.fully_shard, made()), 3, after)
        torch.testing.assert_close(found, theirs, rtol=0, atol=0)
    x = torch.ones(2, 64)
    before = model(x)
    for module in (model, model[2], model[0]):
        remove(module, fully_shard)
    assert type(model[0].weight.data) is WeightWithDynamicFloat8CastTensor
    torch.testing.assert_close(model(x), before)


@spmd(ranks=2)
def test_gathers_of_float8_weights_send_half_the_bytes_of_bfloat16() -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # noqa: PLC0415

    def made(*, fp8: bool) -> Callable[[], nn.Module]:
        def make() -> nn.Module:
            model: Any = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
            config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
            if fp8:
                convert_to_float8_training(model, config=config)
            return fully_shard(model, policy={nn.Linear}, mp_policy="bf16")

        return make

    found, bf16 = gathered_bytes(made(fp8=True)), gathered_bytes(made(fp8=False))
    assert len(found) == len(bf16)
    # Bytes of weights, and biases in bfloat16 in the same messages.
    assert sum(bf16) == len(bf16) * (256 * 256 + 256)
    assert sum(found) == len(found) * (256 * 256 // 2 + 256)


@spmd(ranks=2)
def test_adapters_train_beside_4_bit_weights_as_one_process_and_as_fsdp2() -> None:
    from torchao.quantization import NF4Tensor  # noqa: PLC0415 - seconds
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4  # noqa: PLC0415

    class WithAdapter(nn.Module):
        def __init__(self, columns: int, rows: int) -> None:
            super().__init__()
            weight = to_nf4(torch.randn(rows, columns) / 8, 64, 16)
            self.weight = nn.Parameter(weight, requires_grad=False)
            self.down = nn.Parameter(torch.randn(4, columns) / 8)
            self.up = nn.Parameter(torch.randn(rows, 4))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.weight) + x @ self.down.t() @ self.up.t()

    def made() -> Any:
        torch.manual_seed(0)
        return nn.Sequential(WithAdapter(64, 128), nn.ReLU(), WithAdapter(128, 64))

    model = _annotate(fully_shard, made())
    found = _train(model, 3, _nothing)
    torch.testing.assert_close(found, _train(made(), 3, _nothing, alone=True))
    torch.testing.assert_close(found, _train(_annotate(fsdp.fully_shard, made()), 3, _nothing))
    low = {"mp_policy": fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    found, theirs = (
        _train(_annotate(verb, made(), **low), 3, _nothing)
        for verb in (fully_shard, fsdp.fully_shard)
    )
    torch.testing.assert_close(found, theirs)
    assert type(model[0].weight._local_tensor) is NF4Tensor
    x = torch.ones(2, 64)
    before = model(x)
    for state in (model.state_dict(), full_state_dict(model, rank0_only=False)):
        for assign in (False, True):
            model.load_state_dict(state, assign=assign)
            torch.testing.assert_close(model(x), before)
    torch.testing.assert_close(copy.deepcopy(model)(x), before)
    unshard(model)
    reshard(model)
    for module in (model, model[2], model[0]):
        remove(module, fully_shard)
    assert type(model[0].weight.data) is NF4Tensor
    torch.testing.assert_close(model(x), before)


def _adapted(block: int) -> Any:
    """With blocks of scales other than those that torchao's own `clone` makes, or the same."""
    from torchao.quantization import NF4Tensor  # noqa: PLC0415 - seconds

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = NF4Tensor.from_tensor(torch.randn(128, 128) / 8, 64, block)
            self.weight = nn.Parameter(weight, requires_grad=False)
            self.up = nn.Parameter(torch.randn(128) / 8)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.weight) + x * self.up

    torch.manual_seed(0)
    return nn.Sequential(Adapted(), nn.Tanh(), Adapted())


_ANNOTATED: dict[str, Callable[[nn.Sequential], object]] = {
    "plain": _nothing,
    "shards": lambda model: _annotate(fully_shard, model),
    "replicas": replicate,
}


@spmd(ranks=2)
@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("kind", _ANNOTATED)
def test_averages_beside_4_bit_weights_leave_these_as_they_are(kind: str, block: int) -> None:
    model, x = _adapted(block), torch.randn(4, 128)
    _ANNOTATED[kind](model)
    before, average = model(x), EMA(model, decay=0.5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(1.0)
    after = model(x)
    with average.swap():
        torch.testing.assert_close(model(x), before, rtol=0, atol=0)
    torch.testing.assert_close(model(x), after, rtol=0, atol=0)
    average.update()
    average.load_state_dict(average.state_dict())
    with average.swap():
        torch.testing.assert_close(full(model[0].up), _adapted(block)[0].up.detach() + 0.5)
    torch.testing.assert_close(model(x), after, rtol=0, atol=0)
    model[2].weight.requires_grad_()
    with pytest.raises(ForeignParameterError, match=r"'2\.weight' trains and has no average"):
        EMA(model, decay=0.5)


@spmd(ranks=2)
def test_4_bit_weights_are_streamed_if_they_changed_and_exported_as_what_they_stand_for() -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    for kind in ("shards", "replicas"):
        model, seen = _adapted(128), Streamed()
        _ANNOTATED[kind](model)
        reported = [tempfile.mkdtemp()]
        dist.broadcast_object_list(reported)
        folder = Path(reported[0])
        assert len(list(stream_full(model, since=seen))) == 4
        assert not list(stream_full(model, since=seen))
        state = {"0.weight": _adapted(128)[2].weight.detach()}
        model.load_state_dict(state, strict=False)
        assert [name for name, _ in stream_full(model, since=seen)] == ["0.weight"]
        with pytest.raises(AnnotationError, match=r"'0\.weight' is an NF4Tensor.*Pass dtype="):
            export(model, folder / "out")
        assert not list(folder.iterdir())
        dist.barrier()
        export(model, folder / "out", dtype=torch.float32)
        written = safetensors.load_file(folder / "out" / "model.safetensors")
        state = full_state_dict(model, rank0_only=False)
        torch.testing.assert_close(written["2.weight"], state["2.weight"].get_original_weight())


@spmd(ranks=2)
@pytest.mark.parametrize("kind", ["shards", "replicas"])
def test_one_rank_edits_4_bit_weights_and_adapters_for_all(kind: str) -> None:
    model, x = _adapted(128), torch.randn(4, 128, generator=torch.Generator().manual_seed(1))
    _ANNOTATED[kind](model)
    before = model(x)
    with summon_full_params(model, rank0_only=True):
        pass
    torch.testing.assert_close(model(x), before, rtol=0, atol=0)
    plain = _adapted(128)
    with summon_full_params(model, rank0_only=True), torch.no_grad():
        if dist.get_rank() == 0:
            model[0].weight.copy_(plain[2].weight)
            model[2].up.mul_(2.0)
    with torch.no_grad():
        plain[0].weight.copy_(plain[2].weight)
        plain[2].up.mul_(2.0)
    torch.testing.assert_close(model(x), plain(x))


@spmd(ranks=2)
def test_copies_of_4_bit_weights_share_no_memory() -> None:
    model, x = _annotate(fully_shard, _adapted(64)), torch.randn(4, 128)
    before, clone = model(x), copy.deepcopy(model)
    other = _adapted(64)
    for name, value in other.state_dict().items():
        other.load_state_dict({name: value.to(torch.float32) * 3.0}, strict=False)
    clone.load_state_dict(other.state_dict())
    assert not torch.equal(clone(x), before)
    torch.testing.assert_close(model(x), before, rtol=0, atol=0)
