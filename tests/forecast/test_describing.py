"""`python -m composable describe`: how a model would rest on ranks that are not there."""

# Tables are compared word for word, each row on one line.
# ruff: noqa: E501

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline as assert_text
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composable import MixedPrecisionPolicy, describe, fully_shard
from composable.__main__ import main
from docs.generate import ROOT
from tests.forecast.test_command import Block, config, status  # noqa: F401 - a fixture
from tests.helpers.world import Pool

HERE = __name__


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(16, 5))


def make_layer() -> nn.Module:
    return nn.Linear(3, 2)


def annotate(model: nn.Module, mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, policy={Block}, mesh=mesh, mp_policy=policy)


def _said(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["describe", *options]) == 0
    return capsys.readouterr().out


def test_parameters_are_shown_as_rank_0_of_the_world_has_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = _said(capsys, f"{HERE}:make_model", "--ranks", "6", "--policy", "Block")
    assert_text(
        "\n".join(said.splitlines()[:3] + said.splitlines()[-2:]),
        """\
parameter      unit    shape    at rest       dtype    computes in  reduced in  this rank  on ranks
---------------------------------------------------------------------------------------------------------------------------------
0.up.weight    0       64 x 16  DTensor S(0)  float32  float32      float32     [0:11]     0: [0:11]  1: [11:22]  ...  5: [55:64]
2.weight       (root)  5 x 16   DTensor S(0)  float32  float32      float32     [0:1]      0: [0:1]  1: [1:2]  ...  5: none
2.bias         (root)  5        DTensor S(0)  float32  float32      float32     [0:1]      0: [0:1]  1: [1:2]  ...  5: none""",
    )
    assert not dist.is_initialized()


def test_the_users_own_annotation_gets_the_mesh(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--ranks", "8", "--mesh", "replicate=2", "shard=4", "--annotate", HERE]
    said = _said(capsys, f"{HERE}:make_model", *options)
    assert_text(
        said.splitlines()[-1],
        """2.bias         (root)  5        DTensor R, S(0)  float32  bfloat16     float32     [0:2]      0,4: [0:2]  1,5: [2:4]  2,6: [4:5]  3,7: none""",
    )


def test_units_are_shown_on_demand(capsys: pytest.CaptureFixture[str]) -> None:
    said = _said(capsys, f"{HERE}:make_model", "--ranks", "4", "--by", "unit", "--dtype", "float16")
    assert_text(
        said.splitlines()[2],
        """(root)  Sequential  fully_shard       2     85     170 B      68 B  float16  S(0)       keep last  SHARDED""",
    )


def _really() -> str:
    model = make_model()
    annotate(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    return str(describe(model, by="parameter"))


def test_the_table_is_that_of_real_ranks(pool: Pool, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--ranks", "4", "--mesh", "replicate=2", "shard=2", "--annotate", HERE]
    said = _said(capsys, f"{HERE}:make_model", *options)
    assert said == pool.run(4, _really, device="cpu")[0] + "\n"


def test_a_model_in_which_nothing_repeats_is_one_unit(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(_said(capsys, f"{HERE}:make_layer", "--ranks", "3", "--json"))
    weight, bias = found["parameters"]
    assert (weight["unit"], weight["shape"], weight["dtype"]) == ("", [2, 3], "float32")
    assert bias["parts"] == [
        {"ranks": [0], "slices": [[0, 1]]},
        {"ranks": [1], "slices": [[1, 2]]},
        {"ranks": [2], "slices": [[2, 2]]},
    ]


def test_a_configuration_of_transformers_needs_no_inputs(
    config: Any,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    vit = config("vit")[1:]
    found = json.loads(_said(capsys, *vit, "--json"))
    assert {row["dtype"] for row in found["parameters"]} == {"bfloat16"}
    assert len({row["unit"] for row in found["parameters"]}) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ranks", "2", "--mesh", "shard"], "--mesh: 'shard': write a name and a size"),
        (["--ranks", "2", "--mesh", "shard=3"], "mesh={'shard': 3} has 3 ranks, not ranks=2"),
        (["--ranks", "2", "--policy", "Bloc"], "--policy Bloc: the model has Block"),
        (["--ranks", "2", "--policy", "Block", "--annotate", HERE], "leave --policy out"),
        (["--ranks", "2", "--annotate", "./own.py"], "as in own:annotate, from the directory"),
        (["--ranks", "2", "--by", "layer"], "--by: invalid choice: 'layer'"),
        (["--ranks", "2", "--hf", "nowhere.json"], "name a function that makes the model, or --hf"),
    ],
)
def test_options_that_make_no_sense_are_refused_in_a_line(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(["describe", f"{HERE}:make_model", *options]) in (1, 2)
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


class _Terminal:
    """The standard output, as if a person looked at it."""

    def __init__(self, captured: Any) -> None:
        self._captured = captured

    def __getattr__(self, name: str) -> Any:
        return getattr(self._captured, name)

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("installed", [True, False])
def test_a_terminal_gets_a_table_of_rich_where_it_is_installed(
    installed: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr(sys, "stdout", _Terminal(sys.stdout))
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    if not installed:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    said = _said(capsys, f"{HERE}:make_layer", "--ranks", "2")
    assert ("─" in said) is installed
    assert "0: [0:1]  1: [1:2]" in said


def test_a_reader_that_leaves_is_no_error() -> None:
    command = [sys.executable, "-m", "composable", "describe", f"{HERE}:make_layer", "--ranks", "2"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
    assert "BrokenPipeError" not in said
    assert process.returncode == 0
