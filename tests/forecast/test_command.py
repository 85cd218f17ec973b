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
    assert main([*shared, "--policy", "Block"]) == 1
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
    vit = config("vit")
    assert main(vit) == 2
    said = capsys.readouterr().err
    assert "ViTForImageClassification takes no input_ids: say by --inputs" in said
    assert said.count("\n") == 1
    assert main([*vit, "--inputs", "pixel_values=2x3x224x224", "labels=2:int64"]) == 0
    assert "a rank's batch: pixel_values 2 x 3 x 224 x 224; labels 2\n" in capsys.readouterr().out
    # the dtype that parameters have
    assert main(["forecast", f"{HERE}:Pixels", "--ranks", "2", "--inputs", "pixels=2x3x8x8"]) == 0
    assert capsys.readouterr().out.startswith("Pixels, ")
    assert main(config("vit", architectures=None)) == 2
    said = capsys.readouterr().err
    assert "transformers has no model ViTConfig that predicts tokens; name the class" in said
    assert len(said) < 300
    assert main([*config("bert"), "--tokens", "4000"]) == 1
    assert "the model does not run: The expanded size of" in capsys.readouterr().err


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
        (["--device", "h1000"], "no device 'h1000' is known, only a100"),
        (["--inputs", "x=0x3"], "--inputs: 'x=0x3': write a name, sizes"),
        (["--inputs", "x=3:foo"], "--inputs: 'x=3:foo': write a name, sizes"),
        (["--inputs", "x=3", "--batch", "2"], "leave --batch and --tokens out"),
        (["--plot", "step.xyz"], "--plot step.xyz: the name must end like .png; known are"),
        (["--plot", "/nowhere/step.png"], "--plot /nowhere/step.png: there is no directory"),
        (["--hf", "nowhere.json"], "name a function that makes the model, or --hf config.json"),
    ],
)
def test_options_that_make_no_sense_are_refused_in_a_line(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(["forecast", f"{HERE}:Pixels", "--ranks", "2", *options]) in (1, 2)
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
