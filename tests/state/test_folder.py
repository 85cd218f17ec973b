"""`load`: folders of safetensors into models of every plan, each rank its own rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from composable import export, full_state_dict, fully_shard, keep_unsharded, load, replicate
from composable.errors import NotAnnotatedError, PhaseError, StateError
from composable.state import folder as folder_module
from tests.helpers.world import current_device, spmd
from tests.state.models import PLANS, Block, Net, plain, tokens


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


@spmd(ranks=[2, 3])
def test_a_rank_reads_its_rows_and_no_more(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 63), nn.Linear(63, 1))
    fully_shard(model, policy={nn.Linear})
    export(model, tmp_path / "model")
    read: list[int] = []
    files = folder_module._Files
    original = files.read
    files.read = lambda self, *args: _noted(read, original(self, *args))  # type: ignore[method-assign]
    try:
        load(model, tmp_path / "model")
    finally:
        files.read = original  # type: ignore[method-assign]
    shards = [each.to_local().numel() for each in model.parameters()]
    assert sum(read) == sum(shards)


def _noted(read: list[int], tensor: Tensor) -> Tensor:
    read.append(tensor.numel())
    return tensor


@pytest.mark.parametrize("verb", [fully_shard, replicate])
@spmd(ranks=2)
def test_a_model_is_cast_first(verb: Callable[..., nn.Module], tmp_path: Path) -> None:
    expected, model = plain(0), plain(1)
    verb(model)
    _written_by_rank_0(lambda: save_file(_without_ties(expected), tmp_path / "any.safetensors"))
    load(model, tmp_path, dtype=torch.bfloat16)
    assert {each.dtype for each in model.parameters()} == {torch.bfloat16}
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
    load(model, tmp_path)
    _agrees(model, expected)


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


MODELS: Final[dict[str, Callable[[], transformers.PreTrainedModel]]] = {
    "llama, tied": _llama,
    "mixtral, whose experts a folder has one by one": _mixtral,
    "bert": _bert,
}


@pytest.mark.parametrize("name", MODELS)
@spmd(ranks=[2, 4])
def test_what_save_pretrained_wrote(name: str, tmp_path: Path) -> None:
    make = MODELS[name]
    torch.manual_seed(0)
    saved = make()
    _written_by_rank_0(lambda: saved.save_pretrained(tmp_path, max_shard_size="10kB"))
    expected = type(saved).from_pretrained(tmp_path).state_dict()
    torch.manual_seed(1)
    model = make().to(current_device())
    fully_shard(model)
    assert load(model, tmp_path) == ([], [])
    _agrees(model, expected)
    body = make().base_model.to(current_device())  # of which the folder has more
    fully_shard(body)
    left = load(body, tmp_path, strict=False)
    assert left.missing_keys == []
    _agrees(body, saved.base_model.state_dict())


# --- what does not fit --------------------------------------------------------------------------


def _save(folder: Path, **changes: Tensor | None) -> None:
    state: dict[str, Any] = {name.replace(".", "_"): t for name, t in Pair().state_dict().items()}
    state |= changes
    tensors = {name.replace("_", "."): t for name, t in state.items() if t is not None}
    save_file(tensors, folder / "model.safetensors")


def _cut_off(folder: Path) -> None:
    _save(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def _twice(folder: Path) -> None:
    _save(folder)
    save_file({"up.bias": torch.zeros(10)}, folder / "more.safetensors")


def _index_of_nothing(folder: Path) -> None:
    _save(folder)
    index = {"weight_map": {"up.bias": "model-00001-of-00002.safetensors"}}
    (folder / folder_module.INDEX).write_text(json.dumps(index))


MISFITS: Final[dict[str, tuple[Callable[[Path], object], str]]] = {
    "an empty folder": (lambda folder: None, "no file of safetensors"),
    "a name is missing": (lambda f: _save(f, up_bias=None), "the folder has no 'up.bias'"),
    "a name too many": (lambda f: _save(f, side=torch.zeros(1)), "the model has no 'side'"),
    "another shape": (lambda f: _save(f, up_bias=torch.zeros(9)), r"\[9\] there and \[10\] in"),
    "integers": (lambda f: _save(f, up_bias=torch.zeros(10).byte()), "of integers there"),
    "cut off": (_cut_off, "cannot be read"),
    "twice": (_twice, "in another file of the folder"),
    "an index of files that are not there": (_index_of_nothing, "which is not there"),
    "no index": (
        lambda f: (_save(f), (f / folder_module.INDEX).write_text("{}")),
        "is no index of safetensors",
    ),
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


@spmd(ranks=2)
def test_names_that_differ_are_told_or_renamed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    expected = Pair()
    state = {f"module.{name}": value for name, value in expected.state_dict().items()}
    _written_by_rank_0(lambda: save_file(state, tmp_path / "model.safetensors"))
    torch.manual_seed(1)
    model = Pair().to(current_device())
    fully_shard(model)
    before = full_state_dict(model, rank0_only=False)
    assert load(model, tmp_path, strict=False) == ([*before], [*sorted(state)])
    _agrees(model, before)
    with pytest.raises(StateError, match="would become one of the model"):
        load(model, tmp_path, strict=False, rename=lambda _: "up.bias")
    _agrees(model, before)
    assert load(model, tmp_path, rename=lambda name: name.removeprefix("module.")) == ([], [])
    _agrees(model, expected.state_dict())


@spmd(ranks=2)
def test_a_model_without_memory_or_annotation_is_refused(tmp_path: Path) -> None:
    _written_by_rank_0(lambda: _save(tmp_path))
    with pytest.raises(NotAnnotatedError):
        load(Pair(), tmp_path)
    with torch.device("meta"):
        model = Pair()
    fully_shard(model)
    with pytest.raises(PhaseError, match="on the meta device"):
        load(model, tmp_path)
