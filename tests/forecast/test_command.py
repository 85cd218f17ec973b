"""`python -m composable forecast`: tables for models by name, and one line for what is refused."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable.__main__ import main
from composable.forecast import forecast, suggest

SMALL: dict[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
        "vocab_size": 100, "num_attention_heads": 4, "num_hidden_layers": 3,
        "num_key_value_heads": 2, "dtype": "float32", "tie_word_embeddings": True,
    },
    "t5": {
        "architectures": ["T5ForConditionalGeneration"], "d_model": 64, "d_ff": 128, "d_kv": 16,
        "num_heads": 4, "num_layers": 2, "vocab_size": 100, "decoder_start_token_id": 0,
    },
    "bert": {
        "architectures": ["BertForMaskedLM"], "hidden_size": 64, "intermediate_size": 128,
        "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 100,
    },
    "vit": {
        "architectures": ["ViTForImageClassification"], "hidden_size": 64,
        "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2,
        "image_size": 32, "patch_size": 8,
    },
    "whisper": {
        "architectures": ["WhisperForConditionalGeneration"], "d_model": 64, "vocab_size": 100,
        "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
        "num_mel_bins": 16, "max_source_positions": 30, "max_target_positions": 20,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    },
}  # fmt: skip


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.up(x).relu())
        return out


class Pixels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cut, self.blocks = nn.Conv2d(3, 16, 4), nn.Sequential(Block(), Block())

    def forward(self, pixels: Tensor) -> Tensor:
        out: Tensor = self.blocks(self.cut(pixels).flatten(2).mT).sum()
        return out


def wants(width: int) -> nn.Module:
    return nn.Linear(width, width)


HERE = __name__


@pytest.fixture
def config(tmp_path: Path) -> Any:
    """Writes a configuration of transformers, and returns the options that name it."""
    pytest.importorskip("transformers")

    def write(kind: str, **changed: Any) -> list[str]:
        path = tmp_path / f"{kind}.json"
        path.write_text(json.dumps({"model_type": kind, **SMALL[kind], **changed}))
        return ["forecast", "--hf", str(path), "--ranks", "8"]

    return write


def status(command_line: list[str]) -> int:
    try:
        return main(command_line)
    except SystemExit as error:
        return int(error.code or 0)


def test_a_configuration_of_transformers_is_forecast_as_the_model_that_it_names(
    config: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = [*config("llama"), "--tokens", "32"]
    assert main([*shared, "--memory", "0.1MB"]) == 0
    first, second = capsys.readouterr().out.splitlines()[:2]
    assert first == (
        "LlamaForCausalLM, 117,440 parameters in float32, AdamW with state in float32; a rank's"
        " batch: input_ids, labels 1 x 32"
    )
    assert second == "H100, 8 ranks: DOES NOT FIT"
    assert main([*shared, "--dtype", "bfloat16"]) == 0
    first, second = capsys.readouterr().out.splitlines()[:2]
    assert first.startswith("LlamaForCausalLM, 117,440 parameters in bfloat16, AdamW with state in")
    assert second == "H100, 8 ranks: fits"
    assert main([*shared, "--policy", "Block"]) == 2
    assert "--policy Block: the model has" in capsys.readouterr().err
    assert main([*config("bert"), "--batch", "2"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("BertForMaskedLM, ")
    assert "in bfloat16" in said
    assert "input_ids, labels 2 x 512\n" in said  # it has no more positions
    assert main([*config("t5"), "--tokens", "16"]) == 0
    assert capsys.readouterr().out.startswith("T5ForConditionalGeneration, ")


def test_a_model_that_takes_no_tokens_is_refused_in_a_line_or_forecast_by_inputs(
    config: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind, what, batch in (
        ("vit", "ViTForImageClassification", "pixel_values 8 x 3 x 32 x 32; labels 8"),
        ("whisper", "WhisperForConditionalGeneration", "input_features 8 x 16 x 60; labels 8 x 20"),
    ):
        command = config(kind)
        assert main(command) == 2
        said = capsys.readouterr().err
        assert f"{what} takes no input_ids: say by --inputs" in said
        assert said.count("\n") == 1
        example = said.partition("e.g. ")[2].partition(". It takes")[0].split()
        assert main([*command, *example]) == 0  # as it is asked to
        assert f"a rank's batch: {batch}\n" in capsys.readouterr().out
    # the dtype that parameters have
    assert main(["forecast", f"{HERE}:Pixels", "--ranks", "2", "--inputs", "pixels=2x3x8x8"]) == 0
    assert capsys.readouterr().out.startswith("Pixels, ")
    assert main(config("vit", architectures=None)) == 2
    said = capsys.readouterr().err
    assert "transformers has no model ViTConfig that predicts tokens; name the class" in said
    assert len(said) < 300
    assert main([*config("bert"), "--inputs", "input_ids=1x4000:int64"]) == 1
    assert "the model does not run: The expanded size of" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["bert", "llama"])  # by positions that it learns, and by angles
def test_more_tokens_than_a_model_is_made_for_are_refused(
    kind: str, config: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    command = config(kind, max_position_embeddings=48)
    assert main([*command, "--tokens", "48"]) == 0
    capsys.readouterr()
    assert main([*command, "--tokens", "49"]) == 2
    said = capsys.readouterr().err
    assert "--tokens 49: the model is made for 48 tokens (max_position_embeddings" in said
    assert said.count("\n") == 1


def test_a_name_on_a_hub_stands_for_its_configuration(
    config: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    here = config("llama")[2]
    read = transformers.AutoConfig.from_pretrained

    def from_hub(name: str) -> Any:
        if name != "someone/a-model":
            raise OSError(f"{name} is not cached\nand more")
        return read(here)

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", from_hub)
    command = ["forecast", "--ranks", "8", "--tokens", "32", "--hf"]
    assert main([*command, "someone/a-model"]) == 0
    assert capsys.readouterr().out.startswith("LlamaForCausalLM, 117,440 parameters")
    for name, why in (
        (
            "someone/another",
            "no such file or folder is here, and the hub did not give it: someone/",
        ),
        ("nowhere.json", "there is no such file"),
        ("/nowhere/at/all", "there is no such file"),
    ):
        assert main([*command, name]) == 2
        said = capsys.readouterr().err
        assert f"--hf {name}: {why}" in said
        assert said.count("\n") == 1


def test_a_suggestion_ends_and_says_what_it_has_not_tried(
    config: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*config("bert"), "--tokens", "32", "--suggest"]) == 0
    printed = capsys.readouterr()
    *_, last = printed.out.splitlines()
    assert last == (
        "not tried: tensor parallel, for which the model has no plan (tp_plan=); pipelines, an"
        " offload_policy, and other batches"
    )

    def make() -> nn.Module:
        return nn.Sequential(Block(), Block())

    tried: list[str] = []
    ask = {"ranks": 16, "progress": tried.append}
    found = suggest(make, lambda: torch.zeros(2, 16), most=1, **ask)  # type: ignore[arg-type]
    assert len(found.comparison.forecasts) == 1
    assert found.not_tried[-2:] == (
        "plans beyond most=1 forecasts", "pipelines, an offload_policy, and other batches",
    )  # fmt: skip
    with pytest.raises(ValueError, match="most must be a whole number of at least 1"):
        suggest(make, lambda: torch.zeros(2, 16), ranks=16, most=0)


def test_code_of_a_suggestion_for_a_model_of_transformers_runs_as_pasted(
    config: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*config("llama"), "--tokens", "64", "--suggest", "--memory", "0.8MB"]) == 0
    code, _, tried = capsys.readouterr().out.partition("\n\nLlamaForCausalLM, ")
    assert "import LlamaDecoderLayer\n" in code
    assert "best" in tried
    transformers = pytest.importorskip("transformers")

    def make() -> Any:
        named = transformers.LlamaConfig(**SMALL["llama"], use_cache=False)
        return transformers.LlamaForCausalLM._from_config(named)

    def make_batch() -> dict[str, Tensor]:
        tokens = torch.zeros(1, 64, dtype=torch.int64)
        return {"input_ids": tokens, "labels": tokens}

    found = forecast(make, lambda model: exec(code, {"model": model}), make_batch, ranks=8)
    assert f" {found.peak / 2**20:.1f} " in next(
        each for each in tried.splitlines() if "best" in each
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ranks", "0"], "--ranks: needs a whole number of at least 1, got '0'"),
        (["--batch", "0"], "--batch: needs a whole number of at least 1, got '0'"),
        (["--tokens", "-5"], "--tokens: needs a whole number of at least 1, got '-5'"),
        (["--dtype", "int8"], "--dtype: invalid choice: 'int8' (choose from"),
        (["--memory", "0GB"], "--memory: '0GB': write a size like 80GB or 40GiB"),
        (["--device", "h1000"], "--device: invalid choice: 'h1000' (choose from"),
        (["--inputs", "x=0x3"], "--inputs: 'x=0x3': write a name, sizes"),
        (["--inputs", "x=3:foo"], "--inputs: 'x=3:foo': write a name, sizes"),
        (["--inputs", "x=3", "--batch", "2"], "leave --batch and --tokens out"),
        (["--plot", "step.xyz"], "--plot step.xyz: the name must end like .png; known are"),
        (["--plot", "/nowhere/step.png"], "--plot /nowhere/step.png: there is no directory"),
        (["--policy", "Bloc"], "--policy Bloc: the model has Block, Conv2d"),
        (["--hf", "nowhere.json"], "name a function that makes the model, or --hf config.json"),
    ],
)
def test_options_that_make_no_sense_are_refused_in_a_line(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(["forecast", f"{HERE}:Pixels", "--ranks", "2", *options]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./own.py:GPT", "name the module as Python imports it, as in own:GPT"),
        ("nowhere:make", "No module named 'nowhere'"),
        (f"{HERE}:nothing", "has no attribute 'nothing'"),
        (f"{HERE}:HERE", "is no function that makes the model"),
        (f"{HERE}:wants", "is called without arguments, and there is missing a required argument"),
    ],
)
def test_a_name_that_makes_no_model_is_refused_in_a_line(
    name: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main(["forecast", name, "--ranks", "2"]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_a_class_inside_of_a_function_is_not_imported() -> None:
    class Inner(Block):
        pass

    def make() -> nn.Module:
        return nn.Sequential(Inner(), Inner())

    found = suggest(make, lambda: torch.zeros(2, 16), ranks=2, block=Inner)
    assert "Inner" in replace(found.plan, verb="fully_shard").code(2)
    assert "import Inner" not in replace(found.plan, verb="fully_shard").code(2)
