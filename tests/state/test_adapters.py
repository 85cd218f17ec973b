"""New adapters of PEFT on the meta device: as PEFT makes them, or refused by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from composable import fully_shard, load, materialize, replicate
from composable.errors import PhaseError
from tests.helpers.compare import full
from tests.helpers.world import current_device, spmd

pytest.importorskip("peft")


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up = nn.Embedding(7, 4), nn.Linear(4, 5)
        self.norm, self.head = nn.LayerNorm(5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.norm(self.up(self.embed(x))))
        return result


def _base() -> Base:
    torch.manual_seed(0)
    with current_device():
        return Base()


def _on_meta(**options: Any) -> Any:
    import peft  # noqa: PLC0415 - seconds

    config = peft.LoraConfig(
        r=2, target_modules=["up", "embed"], modules_to_save=["norm", "head"], **options
    )
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.get_peft_model(Base(), config)


def _rename(model: nn.Module) -> Callable[[str], str]:
    names = {
        name.replace("base_model.model.", "")
        .replace(".base_layer.", ".")
        .replace(".original_module.", "."): name
        for name in model.state_dict()
        if "lora_" not in name and "modules_to_save" not in name
    }
    return lambda name: names.get(name, name)


_ANNOTATED: Final[dict[str, Callable[[nn.Module], object]]] = {
    "shards": fully_shard,
    "units": lambda model: fully_shard(model, policy={nn.Linear}),
    "replicas": replicate,
}


@pytest.mark.parametrize("annotated", _ANNOTATED)
@spmd(ranks=2)
def test_a_new_adapter_changes_nothing_that_the_folder_computes(
    annotated: str, tmp_path: Path
) -> None:
    alone = _base()
    if dist.get_rank() == 0:
        save_file(alone.state_dict(), tmp_path / "model.safetensors")
    dist.barrier()
    tokens = torch.arange(6, device=current_device())
    for init in (True, "gaussian"):
        model = _on_meta(init_lora_weights=init)
        _ANNOTATED[annotated](model)
        torch.manual_seed(1)
        load(model, tmp_path, strict=False, rename=_rename(model))
        torch.testing.assert_close(model(tokens), alone(tokens), rtol=0, atol=0)
        for name, parameter in model.named_parameters():
            assert parameter.requires_grad == ("lora_" in name or "modules_to_save" in name)
            if "lora_B" in name or "lora_embedding_A" in name:
                assert not full(parameter).any(), name
            elif "lora_" in name:
                assert full(parameter).std() > 0.1, name
    made = _on_meta()
    _ANNOTATED[annotated](made)
    materialize(made)
    found = dict(made.named_parameters())
    for name, parameter in found.items():
        if "modules_to_save.default" in name:
            original = found[name.replace("modules_to_save.default", "original_module")]
            assert torch.equal(full(parameter), full(original)), name
    for options, names in (
        ({"init_lora_weights": "pissa"}, "embed.lora_embedding_A.default'"),
        ({"use_dora": True}, "embed.lora_magnitude_vector.default.weight'"),
    ):
        model = _on_meta(**options)
        _ANNOTATED[annotated](model)
        with pytest.raises(PhaseError, match=rf"load: 'base_model\.model\.{names}.* adapter of"):
            load(model, tmp_path, strict=False, rename=_rename(model))
        assert all(parameter.is_meta for parameter in model.parameters())
        # what an initialiser of the user's fills is not asked for

        def fill(module: nn.Module) -> None:
            for each in module.parameters(recurse=False):
                nn.init.zeros_(each)

        materialize(model, fill, folder=tmp_path, strict=False, rename=_rename(model))


def _prompted(**options: Any) -> Any:
    import peft  # noqa: PLC0415 - seconds
    from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415

    with torch.device("meta"):
        base = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=4, vocab_size=16))
    kind = getattr(peft, options.pop("kind", "PromptTuningConfig"))
    config = kind(task_type="CAUSAL_LM", num_virtual_tokens=40, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.get_peft_model(base, config)


@pytest.mark.parametrize("annotated", ["shards", "replicas"])
@spmd(ranks=2)
def test_prompts_are_drawn_as_peft_does_and_those_that_are_made_of_something_refused(
    annotated: str,
) -> None:
    for kind in ("PromptTuningConfig", "PrefixTuningConfig"):
        model = _prompted(kind=kind)
        _ANNOTATED[annotated](model)
        torch.manual_seed(1)
        materialize(model)
        # an embedding's own, and not the model's around it, which are a fiftieth
        assert 0.8 < full(model.prompt_encoder.default.embedding.weight).std() < 1.2
    for options in (
        {"prompt_tuning_init": "SAMPLE_VOCAB"},
        {"kind": "PrefixTuningConfig", "init_weights": "zero"},
        {"kind": "CPTConfig", "cpt_token_ids": [1] * 40, "cpt_tokens_type_mask": [1] * 40,
         "cpt_mask": [1] * 40},
    ):  # fmt: skip
        model = _prompted(**options)
        _ANNOTATED[annotated](model)
        with pytest.raises(PhaseError, match=r"'prompt_encoder\.default\..* adapter of PEFT"):
            materialize(model)
        assert all(parameter.is_meta for parameter in model.parameters())
