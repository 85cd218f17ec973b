"""`load`: folders of safetensors into models of every plan, each rank its own rows."""

from __future__ import annotations

import io
import json
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from composable import (
    export,
    full_state_dict,
    fully_shard,
    keep_unsharded,
    load,
    materialize,
    replicate,
)
from composable.errors import (
    PhaseError,
    RanksDisagreeError,
    StateError,
)
from composable.state import folder as folder_module
from composable.state.folder import Files
from tests.helpers.compare import full
from tests.helpers.world import current_device, spmd
from tests.state.models import PLANS, Block, Net, initialise, plain, tokens


def _agrees(model: nn.Module, expected: dict[str, Tensor]) -> None:
    found = full_state_dict(model, rank0_only=False)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value.cpu().to(found[name].dtype)), name


def _written_by_rank_0(write: Callable[[], object]) -> None:
    if dist.get_rank() == 0:
        write()
    dist.barrier()


@pytest.mark.parametrize("plan", PLANS)
@spmd(ranks=[2, 4])
def test_it_is_the_inverse_of_export(plan: str, tmp_path: Path) -> None:
    one, other = plain(0), plain(1)
    PLANS[plan](one)
    PLANS[plan](other)
    export(one, tmp_path / "model")
    other(tokens(0)).sum().backward()
    assert load(other, tmp_path / "model") == ([], [])
    _agrees(other, plain(0).state_dict())
    before = plain(0)
    with torch.no_grad():
        assert torch.equal(other(tokens(0)), one(tokens(0)))
        if plan != "mixed precision":
            assert torch.allclose(other(tokens(0)), before(tokens(0)))


@spmd(ranks=2)
def test_a_model_that_is_kept_unsharded_computes_with_what_was_read(tmp_path: Path) -> None:
    model, expected = plain(1), plain(0)
    fully_shard(model, policy={Block})
    _written_by_rank_0(lambda: save_file(_without_ties(expected), tmp_path / "any.safetensors"))
    with torch.no_grad(), keep_unsharded(model):
        model(tokens(0))
        load(model, tmp_path)
        assert torch.equal(model(tokens(0)), expected(tokens(0)))


def _without_ties(model: Net) -> dict[str, Tensor]:
    state = model.state_dict()
    del state["head.weight"]
    return {name: value.cpu() for name, value in state.items()}


@spmd(ranks=2)
def test_of_tied_tensors_a_folder_has_one_or_the_same_values_for_all(tmp_path: Path) -> None:
    expected, model = plain(0).state_dict(), plain(1)
    fully_shard(model, policy={Block})
    broken = {name: value.clone() for name, value in expected.items()}
    for name in ("head.weight", "embed.weight"):
        broken[name][0, 0] = torch.nan  # which is no other value than itself
        broken[name][-1, -1] = 0.0 if name == "head.weight" else -0.0
    small = {
        name: value.to(torch.float8_e4m3fn) if value.is_floating_point() else value.clone()
        for name, value in broken.items()
    }
    for saved in (broken, small, {name: value.clone() for name, value in expected.items()}):
        _written_by_rank_0(lambda saved=saved: save_file(saved, tmp_path / "both.safetensors"))  # type: ignore[misc]
        load(model, tmp_path)
        dist.barrier()
        found = full_state_dict(model, rank0_only=False)
        for name, value in saved.items():
            read = value.to(found[name].dtype)
            assert torch.equal(found[name].nan_to_num(7), read.nan_to_num(7)), name
    expected["head.weight"] = expected["head.weight"].clone()
    expected["head.weight"][-1, -1] += 1  # on the last rank
    _written_by_rank_0(lambda: save_file(expected, tmp_path / "both.safetensors"))
    before = full_state_dict(model, rank0_only=False)
    with pytest.raises((StateError, RanksDisagreeError), match=r"'head\.weight' are one tensor in"):
        load(model, tmp_path)
    _agrees(model, before)


@contextmanager
def _noting_reads() -> Iterator[list[int]]:
    """How many elements of the folder's tensors are read, one number for each time."""
    read: list[int] = []
    original = Files.read

    def noted(self: Files, *args: Any) -> Tensor:
        tensor = original(self, *args)
        read.append(tensor.numel())
        return tensor

    with mock.patch.object(Files, "read", noted):
        yield read


def _on_this_rank(model: nn.Module) -> int:
    return sum(
        (each.to_local() if isinstance(each, DTensor) else each).numel()
        for each in model.parameters()
    )


@spmd(ranks=[2, 3])
def test_a_rank_reads_its_rows_and_no_more(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 63), nn.Linear(63, 1))
    fully_shard(model, policy={nn.Linear})
    export(model, tmp_path / "model")
    with _noting_reads() as read:
        load(model, tmp_path / "model")
    assert sum(read) == _on_this_rank(model)
    with _noting_reads() as read:
        load(replicate(nn.Sequential(nn.Linear(64, 63), nn.Linear(63, 1))), tmp_path / "model")
    assert sum(read) == 64 * 63 + 63 + 63 + 1, "what is seen where a rank has all"


@pytest.mark.parametrize("verb", [fully_shard, replicate])
@spmd(ranks=2)
def test_a_model_is_cast_first(verb: Callable[..., nn.Module], tmp_path: Path) -> None:
    expected, model = plain(0), plain(1)
    verb(model)
    model(tokens(0)).sum().backward()
    _written_by_rank_0(lambda: save_file(_without_ties(expected), tmp_path / "any.safetensors"))
    load(model, tmp_path, dtype=torch.bfloat16)
    for each in model.parameters():
        assert each.dtype is torch.bfloat16
        assert each.grad is not None
        assert each.grad.dtype is torch.bfloat16
    assert model.blocks[0].table.dtype is torch.float32, "it is in no state dict"
    _agrees(model, expected.bfloat16().state_dict())
    model(tokens(0)).sum().backward()


class Pair(nn.Module):
    """Widths that no number of ranks here divides."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(x).relu())
        return y


@pytest.mark.parametrize("verb", ["fully_shard", "replicate"])
@spmd(ranks=4)
def test_tensor_parallel_parameters(verb: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    expected = Pair().state_dict()
    torch.manual_seed(1)
    model = Pair().to(current_device())
    mesh = init_device_mesh(current_device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if verb == "fully_shard":
        fully_shard(model, mesh=mesh["dp"])
    else:
        replicate(model, mesh=mesh["dp"])
    _written_by_rank_0(lambda: save_file(expected, tmp_path / "model.safetensors"))
    with _noting_reads() as read:
        load(model, tmp_path)
    _agrees(model, expected)
    assert sum(read) == _on_this_rank(model), "also where two dimensions of the mesh cut one"


# --- on the meta device -------------------------------------------------------------------------


@pytest.mark.parametrize("verb", [load, materialize])
@pytest.mark.parametrize("plan", PLANS)
@spmd(ranks=[2, 4])
def test_on_meta_a_model_gets_memory_and_buffers_that_no_folder_has(
    plan: str, verb: Callable[..., Any], tmp_path: Path
) -> None:
    expected = plain(0)
    _written_by_rank_0(lambda: save_file(_without_ties(expected), tmp_path / "model.safetensors"))
    with torch.device("meta"):
        model = Net()
    PLANS[plan](model)
    torch.manual_seed(dist.get_rank())  # nothing random is left
    assert verb(model, folder=tmp_path) == ([], [])
    _agrees(model, expected.state_dict())
    assert model.head.weight is model.embed.weight
    for block in model.blocks:
        assert torch.equal(block.table, torch.arange(5.0, device=block.table.device))
    model(tokens(0)).sum().backward()


class Scale(nn.Module):
    """Has no initialiser: what the folder has needs none."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def _wrapped() -> nn.Sequential:
    """As a trainer leaves it that checkpoints activations: names have a part that is in no state
    dict.
    """
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(5, 5), Scale()) for _ in range(2)]
    blocks[1][0].weight = blocks[0][0].weight  # type: ignore[union-attr]
    return nn.Sequential(*map(checkpoint_wrapper, blocks))


@pytest.mark.parametrize("verb", [fully_shard, replicate])
@spmd(ranks=2)
def test_of_modules_with_a_wrapper_around_them_nothing_is_initialised(
    verb: Callable[..., Any], tmp_path: Path
) -> None:
    expected = _wrapped().state_dict()
    assert "0.1.weight" in expected
    saved = {name: value for name, value in expected.items() if name != "1.0.weight"}
    _written_by_rank_0(lambda: save_file(saved, tmp_path / "model.safetensors"))
    with torch.device("meta"):
        model = _wrapped()
    verb(model, policy={nn.Sequential} if verb is fully_shard else None)
    torch.manual_seed(dist.get_rank())
    assert load(model, tmp_path) == ([], [])
    for name, value in model.state_dict().items():
        assert torch.equal(full(value), expected[name]), name


@spmd(ranks=2)
def test_tensor_parallel_parameters_on_meta(tmp_path: Path) -> None:
    expected = Pair().state_dict()
    _written_by_rank_0(lambda: save_file(expected, tmp_path / "model.safetensors"))
    with torch.device("meta"):
        model = Pair()
    mesh = init_device_mesh(current_device().type, (1, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    load(model, tmp_path)
    dist.barrier()
    found = full_state_dict(model, rank0_only=False)
    if dist.get_rank() == 0:
        saved = load_file(tmp_path / "model.safetensors")
        assert all(torch.equal(found[name], value) for name, value in saved.items())


@spmd(ranks=2)
def test_initialisers_run_only_around_what_the_folder_does_not_have(tmp_path: Path) -> None:
    expected = plain(0)
    saved = {name: t for name, t in _without_ties(expected).items() if "blocks.1.norm" not in name}
    _written_by_rank_0(lambda: save_file(saved, tmp_path / "model.safetensors"))
    with torch.device("meta"):
        model = Net()
    fully_shard(model, policy={Block})
    called: list[str] = []

    def init(module: nn.Module) -> None:
        called.append(type(module).__name__)
        initialise(module)

    left = materialize(model, init, folder=tmp_path, strict=False)
    assert left == (["blocks.1.norm.weight", "blocks.1.norm.bias"], [])
    assert called == ["Block", "LayerNorm", "Block", "Block", "ModuleList", "Net"]
    wanted = expected.state_dict()
    assert torch.equal(wanted["blocks.1.norm.weight"], torch.ones_like(model.blocks[1].table))
    _agrees(model, wanted)


class WithHead(nn.Module):
    """A head of random values beside a body that a folder has."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.body(x))
        return y


@spmd(ranks=[2, 4])
def test_a_head_that_the_folder_does_not_have_is_that_of_one_process(tmp_path: Path) -> None:
    body = {"body.weight": torch.rand(6, 4), "body.bias": torch.rand(6)}
    _written_by_rank_0(lambda: save_file(body, tmp_path / "model.safetensors"))
    body = load_file(tmp_path / "model.safetensors")

    def on_meta() -> nn.Module:
        with torch.device("meta"):
            model = WithHead()
        return fully_shard(model, policy={nn.Linear})

    with pytest.raises(StateError, match=r"the folder has no 'head\.weight', 'head\.bias'"):
        load(on_meta(), tmp_path)
    torch.manual_seed(dist.get_rank())
    with pytest.raises(RanksDisagreeError, match="random states of the ranks differ"):
        load(on_meta(), tmp_path, strict=False)
    torch.manual_seed(3)
    model = on_meta()
    assert load(model, tmp_path, strict=False) == (["head.weight", "head.bias"], [])
    torch.manual_seed(3)
    head = nn.Linear(6, 3, device=current_device())
    _agrees(model, {**body, **{f"head.{name}": t for name, t in head.state_dict().items()}})


class Computed(nn.Module):
    """Its constructor computes a buffer, and nothing else does."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


@spmd(ranks=2)
def test_a_buffer_that_neither_folder_nor_initialiser_has_is_named_and_a_second_call_mends_it(
    tmp_path: Path,
) -> None:
    _written_by_rank_0(
        lambda: save_file({"scale": torch.full((4,), 2.0)}, tmp_path / "model.safetensors")
    )
    with torch.device("meta"):
        model = Computed()
    fully_shard(model)
    with pytest.raises(PhaseError, match="no initialiser wrote to 'table'"):
        load(model, tmp_path)

    def init(module: Any) -> None:
        module.table.copy_(torch.arange(4))

    materialize(model, init, folder=tmp_path)
    assert torch.equal(model.table.cpu(), torch.arange(4.0))
    _agrees(model, {"scale": torch.full((4,), 2.0)})


# --- models of transformers ---------------------------------------------------------------------


def _llama() -> transformers.PreTrainedModel:
    sizes: dict[str, Any] = {
        "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True,
    }  # fmt: skip
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


def _mixtral() -> transformers.PreTrainedModel:
    sizes: dict[str, Any] = {
        "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4,
    }  # fmt: skip
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes))


def _bert() -> transformers.PreTrainedModel:
    sizes: dict[str, Any] = {
        "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "max_position_embeddings": 32,
    }  # fmt: skip
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes))


def _t5() -> transformers.PreTrainedModel:
    sizes: dict[str, Any] = {
        "vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2,
    }  # fmt: skip
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))


MODELS: Final[dict[str, Callable[[], transformers.PreTrainedModel]]] = {
    "llama, tied": _llama,
    "mixtral, whose experts a folder has one by one": _mixtral,
    "bert": _bert,
    "t5, which keeps a part in float32": _t5,
}


def _saved(name: str, folder: Path) -> type[transformers.PreTrainedModel]:
    """Write a folder of several files, and say of which class it is."""
    torch.manual_seed(0)
    model = MODELS[name]()
    _written_by_rank_0(lambda: model.save_pretrained(folder, max_shard_size="10kB"))
    return type(model)


def _agrees_with_buffers(model: nn.Module, expected: nn.Module) -> None:
    """In values and dtypes, and buffers that are in no state dict, too."""
    _agrees(model, expected.state_dict())
    for (name, tensor), (_, other) in zip(
        (*model.named_parameters(), *model.named_buffers()),
        (*expected.named_parameters(), *expected.named_buffers()),
        strict=True,
    ):
        assert tensor.dtype is other.dtype, name
        if not isinstance(tensor, DTensor):
            assert torch.equal(tensor.cpu(), other), name


@pytest.mark.parametrize("name", MODELS)
@spmd(ranks=[2, 4])
def test_what_save_pretrained_wrote(name: str, tmp_path: Path) -> None:
    saved = _saved(name, tmp_path)
    torch.manual_seed(1)
    model = MODELS[name]().to(current_device())
    fully_shard(model)
    assert load(model, tmp_path) == ([], [])
    _agrees_with_buffers(model, saved.from_pretrained(tmp_path))


@spmd(ranks=2)
def test_a_part_of_what_a_folder_has(tmp_path: Path) -> None:
    saved = _saved("llama, tied", tmp_path).from_pretrained(tmp_path)
    body = _llama().base_model.to(current_device())
    fully_shard(body)
    left = load(body, tmp_path, strict=False)
    assert left.missing_keys == []
    _agrees(body, saved.base_model.state_dict())


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MODELS)
@spmd(ranks=[2, 4])
def test_on_meta_a_model_becomes_what_from_pretrained_gives(
    name: str, dtype: torch.dtype | None, tmp_path: Path
) -> None:
    saved = _saved(name, tmp_path)
    expected = saved.from_pretrained(tmp_path, dtype=dtype or torch.float32)
    with torch.device("meta"):
        model = MODELS[name]()
    fully_shard(model)
    torch.manual_seed(dist.get_rank())
    assert load(model, tmp_path, dtype=dtype) == ([], [])
    _agrees_with_buffers(model, expected)
    again = fully_shard(saved.from_pretrained(tmp_path, device_map="meta"))
    assert load(again, tmp_path, dtype=dtype) == ([], [])
    _agrees_with_buffers(again, expected)


@spmd(ranks=[2, 4])
def test_a_rank_reads_the_experts_that_it_holds(tmp_path: Path) -> None:
    _saved("mixtral, whose experts a folder has one by one", tmp_path)
    with torch.device("meta"):
        model = _mixtral()
    fully_shard(model)
    with _noting_reads() as read:
        load(model, tmp_path)
    assert sum(read) == _on_this_rank(model)


@spmd(ranks=2)
def test_what_a_folder_puts_together_in_another_way_is_read_whole_and_right(tmp_path: Path) -> None:
    """As where experts are cut within each of them."""
    saved = _saved("mixtral, whose experts a folder has one by one", tmp_path)
    model = _mixtral().to(current_device())
    fully_shard(model, shard_placement_fn=lambda p: Shard(1) if p.ndim == 3 else Shard(0))
    load(model, tmp_path)
    _agrees(model, saved.from_pretrained(tmp_path).state_dict())


@spmd(ranks=2)
def test_a_new_head_on_a_folder_of_another_model_of_transformers(tmp_path: Path) -> None:
    _saved("llama, tied", tmp_path)
    config = transformers.LlamaConfig.from_pretrained(tmp_path, num_labels=3)
    with torch.device("meta"):
        model = transformers.LlamaForSequenceClassification(config)
    fully_shard(model)
    torch.manual_seed(5)
    left = load(model, tmp_path, strict=False)
    assert left.missing_keys == ["score.weight"]
    torch.manual_seed(5)
    head = torch.empty(3, 16).normal_(std=config.initializer_range)
    expected = transformers.LlamaModel.from_pretrained(tmp_path).state_dict()
    _agrees(model, {**{f"model.{n}": t for n, t in expected.items()}, "score.weight": head})


@spmd(ranks=2)
def test_names_of_former_buffers_are_not_unknown(tmp_path: Path) -> None:
    saved = _saved("llama, tied", tmp_path)
    expected = saved.from_pretrained(tmp_path).state_dict()
    state = {name: t for name, t in expected.items() if name != "lm_head.weight"}
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    _written_by_rank_0(lambda: save_file(state, tmp_path / "model.safetensors"))
    model = fully_shard(_llama().to(current_device()))
    assert load(model, tmp_path) == ([], [])
    _agrees(model, expected)


def _pair() -> nn.Module:
    torch.manual_seed(1)
    return fully_shard(Pair().to(current_device()))


# --- which files --------------------------------------------------------------------------------


def _save(folder: Path, file: str = "model.safetensors", **changes: Tensor | None) -> None:
    state: dict[str, Any] = {name.replace(".", "_"): t for name, t in Pair().state_dict().items()}
    state |= changes
    tensors = {name.replace("_", ".", 1): t for name, t in state.items() if t is not None}
    save_file(tensors, folder / file)


def _index(folder: Path, **files: str) -> None:
    """Of the names with their files, and of all others in `whole.safetensors`."""
    at = {
        name: files.get(name.replace(".", "_"), "whole.safetensors") for name in Pair().state_dict()
    }
    at |= {name.replace("_", ".", 1): file for name, file in files.items()}
    (folder / folder_module.INDEX).write_text(json.dumps({"weight_map": at}))


@spmd(ranks=2)
def test_an_index_says_which_file_is_meant(tmp_path: Path) -> None:
    def write() -> None:
        _save(tmp_path, "whole.safetensors", up_bias=torch.zeros(10))
        save_file({"up.bias": torch.ones(10)}, tmp_path / "more.safetensors")
        _index(tmp_path, up_bias="more.safetensors")

    _written_by_rank_0(write)
    model = _pair()
    assert load(model, tmp_path) == ([], [])
    assert torch.equal(full_state_dict(model, rank0_only=False)["up.bias"], torch.ones(10))


@spmd(ranks=2)
def test_a_file_that_has_nothing_for_the_model_is_not_opened(tmp_path: Path) -> None:
    def write() -> None:
        _save(tmp_path, "whole.safetensors")
        (tmp_path / "vision.safetensors").write_text("not read")
        _index(tmp_path, vision_weight="vision.safetensors")

    _written_by_rank_0(write)
    model = _pair()
    assert load(model, tmp_path, strict=False) == ([], ["vision.weight"])


@spmd(ranks=2)
def test_other_files_beside_the_models_are_left_alone(tmp_path: Path) -> None:
    def write() -> None:
        _save(tmp_path)
        save_file({"up.bias": torch.ones(1)}, tmp_path / "adapter_model.safetensors")
        _index(tmp_path, up_bias="of an earlier save.safetensors")

    _written_by_rank_0(write)
    model = _pair()
    assert load(model, tmp_path) == ([], [])
    assert load(model, tmp_path / "model.safetensors") == ([], [])


# --- what does not fit --------------------------------------------------------------------------


def _cut_off(folder: Path) -> None:
    _save(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def _twice(folder: Path) -> None:
    _save(folder, "one.safetensors")
    save_file({"up.bias": torch.zeros(10)}, folder / "more.safetensors")


def _named_by_an_index_only(folder: Path) -> None:
    _save(folder, "whole.safetensors", up_bias=None)
    _index(folder)


def _remove(folder: Path) -> None:
    folder.rmdir()


def _four_bits(folder: Path) -> None:
    more = {"up_weight.absmax": torch.zeros(1), "up_weight.quant_map": torch.zeros(16)}
    _save(folder, up_weight=torch.zeros(30, 1).byte(), **more)


def _fp8(folder: Path) -> None:
    weight = torch.zeros(10, 6).to(torch.float8_e4m3fn)
    _save(folder, up_weight=weight, up_weight_scale_inv=torch.ones(1, 1))


def _gptq(folder: Path) -> None:
    more = {"up_scales": torch.zeros(1, 10), "up_g_idx": torch.zeros(6).int()}
    _save(folder, up_weight=None, up_qweight=torch.zeros(1, 10).int(), **more)


def _torchao(folder: Path) -> None:
    _save(folder, up_weight=None, up__weight_qdata=torch.zeros(1), up__weight_scale=torch.ones(1))


def _four_bit_floats(folder: Path) -> None:
    head = json.dumps({"up.bias": {"dtype": "F4", "shape": [10], "data_offsets": [0, 5]}}).encode()
    (folder / "one.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + bytes(5))
    _save(folder, "others.safetensors", up_bias=None)


QUANTISED: Final[dict[str, tuple[Callable[[Path], object], str]]] = {
    "4 bits of bitsandbytes": (_four_bits, r"quantised weights \('up\.weight\.absmax', "),
    "8 bits of bitsandbytes": (
        lambda f: _save(f, up_weight=torch.zeros(10, 6).char(), up_SCB=torch.ones(10)),
        r"quantised weights \('up\.SCB'\)",
    ),
    "GPTQ": (_gptq, r"quantised weights \('up\.qweight'\)"),
    "torchao": (_torchao, r"quantised weights \('up\._weight_qdata', 'up\._weight_scale'\)"),
    "fp8 with scales": (_fp8, r"quantised weights \('up\.weight_scale_inv'\)"),
}
MISFITS: Final[dict[str, tuple[Callable[[Path], object], str]]] = {
    "an empty folder": (lambda folder: None, r"no file of safetensors in .*, but nothing"),
    "no folder": (_remove, "there is no folder .* downloaded first"),
    "a folder of something else": (
        lambda folder: (folder / "pytorch_model.bin").touch(),
        r"no file of safetensors in .*, but pytorch_model\.bin",
    ),
    "a name is missing": (lambda f: _save(f, up_bias=None), "the folder has no 'up.bias'"),
    "a name too many": (lambda f: _save(f, side=torch.zeros(1)), "the model has no 'side'"),
    "another shape": (lambda f: _save(f, up_bias=torch.zeros(9)), r"\[9\] there and \[10\] in"),
    "integers": (lambda f: _save(f, up_bias=torch.zeros(10).byte()), "of integers there"),
    "complex numbers": (
        lambda f: _save(f, up_bias=torch.zeros(10, dtype=torch.complex64)),
        "of complex numbers there and of floating-point numbers in the model",
    ),
    "numbers that torch has not": (_four_bit_floats, "is of F4 there"),
    "cut off": (_cut_off, "cannot be read"),
    "of another format": (
        lambda folder: (folder / "model.safetensors").write_text("weights"),
        "cannot be read",
    ),
    "twice": (_twice, "in another file of the folder"),
    "an index of files that are not there": (
        lambda f: (_save(f, "whole.safetensors"), _index(f, up_bias="model-00002.safetensors")),
        "names model-00002.safetensors, which is not there",
    ),
    "an index of tensors that are not there": (
        _named_by_an_index_only,
        "whole.safetensors has no 'up.bias'",
    ),
    "no index": (
        lambda folder: (folder / folder_module.INDEX).write_text("{}"),
        "is no index of safetensors",
    ),
    "an index of something else": (
        lambda folder: (folder / folder_module.INDEX).write_text('{"weight_map": ["a"]}'),
        "is no index of safetensors",
    ),
    "names of another model": (
        lambda folder: save_file({"up": torch.zeros(1)}, folder / "model.safetensors"),
        "nothing in the folder has a name of the model: the folder has 'up', the model 'up.weight'",
    ),
    **QUANTISED,
}


@pytest.mark.parametrize("misfit", MISFITS)
@spmd(ranks=2)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    misfit: str, tmp_path: Path
) -> None:
    make, message = MISFITS[misfit]
    folder = tmp_path / str(dist.get_rank())  # as on file systems of their own
    folder.mkdir()
    make(folder) if dist.get_rank() == 1 else _save(folder)  # type: ignore[func-returns-value]
    torch.manual_seed(0)
    model = Pair().to(current_device())
    fully_shard(model)
    before = full_state_dict(model, rank0_only=False)
    with pytest.raises((StateError, FileNotFoundError, RuntimeError), match=message):
        load(model, folder)
    _agrees(model, before)
    with torch.device("meta"):
        model = Pair()
    fully_shard(model)
    with pytest.raises((StateError, FileNotFoundError, RuntimeError), match=message):
        materialize(model, folder=folder)
    assert all(each.is_meta for each in model.parameters())


@pytest.mark.parametrize("kind", QUANTISED)
@spmd(ranks=2)
def test_quantised_weights_are_refused_also_where_names_may_differ(
    kind: str, tmp_path: Path
) -> None:
    make, message = QUANTISED[kind]
    _written_by_rank_0(lambda: make(tmp_path))
    model = _pair()
    with pytest.raises(StateError, match=message):
        load(model, tmp_path, strict=False)


@spmd(ranks=2)
def test_scales_of_renamed_weights_are_seen(tmp_path: Path) -> None:
    state = {"body.up.weight": torch.zeros(10, 6), "body.up.weight_scale": torch.ones(1)}
    _written_by_rank_0(lambda: save_file(state, tmp_path / "model.safetensors"))
    with pytest.raises(StateError, match=r"quantised weights \('body\.up\.weight_scale'\)"):
        load(_pair(), tmp_path, strict=False, rename=lambda name: name.removeprefix("body."))


@spmd(ranks=2)
def test_fp8_without_scales_is_cast_and_scales_of_something_else_are_left_out(
    tmp_path: Path,
) -> None:
    weight = torch.arange(60.0).reshape(10, 6).to(torch.float8_e4m3fn)
    more = {"vision_weight_scale": torch.ones(1)}
    _written_by_rank_0(lambda: _save(tmp_path, up_weight=weight, **more))
    model = _pair()
    assert load(model, tmp_path, strict=False) == ([], ["vision.weight_scale"])
    found = full_state_dict(model, rank0_only=False)["up.weight"]
    assert torch.equal(found, weight.float())


class Quantised(nn.Module):
    """A model of its own kind of quantised weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 3, device=current_device()))
        self.weight_scale = nn.Parameter(torch.zeros(1, device=current_device()))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight * self.weight_scale


@spmd(ranks=2)
def test_scales_that_the_model_has_are_weights_as_others(tmp_path: Path) -> None:
    saved = {"weight": torch.ones(4, 3), "weight_scale": torch.ones(1)}
    _written_by_rank_0(lambda: save_file(saved, tmp_path / "model.safetensors"))
    model = fully_shard(Quantised())
    load(model, tmp_path)
    _agrees(model, saved)


@spmd(ranks=2)
def test_real_numbers_become_complex_ones(tmp_path: Path) -> None:
    saved = {"weight": torch.ones(3, 2), "bias": torch.ones(3)}
    _written_by_rank_0(lambda: save_file(saved, tmp_path / "model.safetensors"))
    torch.manual_seed(0)
    model = replicate(nn.Linear(2, 3, dtype=torch.complex64, device=current_device()))
    load(model, tmp_path)
    _agrees(model, saved)


@spmd(ranks=2)
def test_folders_that_differ_between_ranks_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / str(dist.get_rank())
    folder.mkdir()
    _save(folder, **({"up_bias": None} if dist.get_rank() else {}))
    model = _pair()
    before = full_state_dict(model, rank0_only=False)
    with pytest.raises(RanksDisagreeError, match=r"some ranks have 'up\.bias' in their folder"):
        load(model, folder, strict=False)
    _agrees(model, before)


@spmd(ranks=2)
def test_an_expert_that_is_missing_is_reported(tmp_path: Path) -> None:
    _saved("mixtral, whose experts a folder has one by one", tmp_path)

    def drop() -> None:
        index = json.loads((tmp_path / folder_module.INDEX).read_text())
        del index["weight_map"]["model.layers.0.block_sparse_moe.experts.3.w1.weight"]
        (tmp_path / folder_module.INDEX).write_text(json.dumps(index))

    _written_by_rank_0(drop)
    model = fully_shard(_mixtral().to(current_device()))
    with pytest.raises(StateError, match=r"'model\.layers\.0\.mlp\.experts\.gate_up_proj' cannot"):
        load(model, tmp_path)


@spmd(ranks=2)
def test_names_that_differ_are_reported_or_renamed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    expected = Pair()
    state = {f"module.{name}": value for name, value in expected.state_dict().items()}
    _written_by_rank_0(lambda: save_file(state, tmp_path / "model.safetensors"))
    torch.manual_seed(1)
    model = Pair().to(current_device())
    fully_shard(model)
    before = full_state_dict(model, rank0_only=False)
    with pytest.raises(StateError, match="nothing in the folder has a name of the model"):
        load(model, tmp_path, strict=False)
    with pytest.raises(StateError, match="would become one of the model"):
        load(model, tmp_path, strict=False, rename=lambda _: "up.bias")
    _agrees(model, before)
    left = load(model, tmp_path, strict=False, rename=lambda name: name.replace("module.up", "up"))
    assert left == (["down.weight", "down.bias"], ["module.down.bias", "module.down.weight"])
    assert load(model, tmp_path, rename=lambda name: name.removeprefix("module.")) == ([], [])
    _agrees(model, expected.state_dict())


# --- the bar ------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    """As if a person were there."""

    def isatty(self) -> bool:
        return True


@spmd(ranks=2)
def test_rank_0_alone_shows_how_far_it_is(tmp_path: Path) -> None:
    _written_by_rank_0(lambda: _save(tmp_path))
    model = _pair()
    for stderr, shown in ((Terminal(), dist.get_rank() == 0), (io.StringIO(), False)):
        with mock.patch.object(sys, "stderr", stderr):
            load(model, tmp_path)
        assert ("load" in stderr.getvalue()) == shown
    with (
        mock.patch.object(sys, "stderr", Terminal()) as stderr,
        mock.patch.dict(sys.modules, {"rich.console": None}),
    ):
        load(model, tmp_path)
    assert stderr.getvalue() == "", "rich is an extra"
