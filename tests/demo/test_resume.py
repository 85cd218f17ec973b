"""A run that was saved and resumed goes on to the same losses, on as many ranks or on another
number of them.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.helpers.launched import launched
from tests.helpers.world import Pool

TINY = [
    "--layers",
    "2",
    "--width",
    "32",
    "--context",
    "16",
    "--batch-size",
    "4",
    "--sample-bytes",
    "4",
    "--quiet",
]


Run = tuple[Path, str]  # where it wrote, what it printed


def demo(out: Path, *options: str) -> str:
    """Run the demo as a person would; returns what it printed."""
    command = [sys.executable, "-m", "examples.demo", *TINY, "--out", str(out), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def demo_on(pool: Pool, ranks: int, out: Path, *options: str) -> str:
    """The same without a launcher: what the ranks do that it would have started."""
    return launched(pool, ranks, "examples.demo", *TINY, "--out", str(out), *options)


def record(out: Path) -> dict[str, Any]:
    return json.loads((out / "checkpoint" / "latest.json").read_text())


@pytest.fixture(scope="module")
def straight(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight steps in one go, all checked against the un-annotated model, though more were asked for
    than there are.
    """
    out = tmp_path_factory.mktemp("straight")
    printed = demo_on(pool, 2, out, "--steps", "8", "--baseline-steps", "9")
    assert "first 8 steps agree with the un-annotated model" in printed
    return out


def test_a_run_leaves_a_checkpoint_the_exported_model_and_both_pictures(straight: Path) -> None:
    assert sorted(path.name for path in straight.iterdir()) == [
        "checkpoint",
        "losses.png",
        "memory.png",
        "model-000008",
    ]
    exported = load_file(straight / "model-000008" / "model.safetensors")
    assert exported["blocks.1.mlp.2.weight"].shape == (32, 128)
    shards = sorted(
        path.name for path in (straight / "checkpoint" / "step-000008").glob("*.distcp")
    )
    # one file per rank: nobody gathers the model to save it
    assert [name[:4] for name in shards] == ["__0_", "__1_"]


@pytest.fixture(scope="module")
def replacing(pool: Pool, straight: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same run where that one has left its checkpoint, but ended after five steps."""
    out = shutil.copytree(straight, tmp_path_factory.mktemp("interrupted") / "run")
    return out, demo_on(pool, 2, out, "--steps", "5", "--no-baseline")


@pytest.fixture(scope="module")
def interrupted(replacing: Run) -> Path:
    """A run of five steps; tests resume copies of it."""
    return replacing[0]


def test_a_resumed_run_has_the_losses_of_one_that_was_never_interrupted(
    pool: Pool, straight: Path, interrupted: Path, tmp_path: Path
) -> None:
    out = shutil.copytree(interrupted, tmp_path / "run")
    printed = demo_on(pool, 2, out, "--steps", "8", "--resume")
    assert "resumed from step 5" in printed
    assert record(interrupted)["losses"] == record(straight)["losses"][:5]
    assert record(out)["losses"] == record(straight)["losses"]
    assert record(out)["validation"][-1] == record(straight)["validation"][-1]


def test_a_run_says_that_it_replaces_a_checkpoint(replacing: Run) -> None:
    out, printed = replacing
    assert (
        f"the checkpoint in {out} (step 8) will be replaced; --resume would continue from it"
        in printed
    )
    assert record(out)["step"] == 5


def test_an_interrupted_run_says_in_a_line_how_to_go_on(interrupted: Path, tmp_path: Path) -> None:
    out = shutil.copytree(interrupted, tmp_path / "run")
    command = [
        sys.executable,
        "-m",
        "examples.demo",
        *TINY[:-1],
        "--out",
        str(out),
        "--steps",
        "1000000",
        "--resume",
    ]
    # In a session of its own, so that the interrupt reaches what a terminal's would: the launcher
    # and all ranks.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        next(line for line in run.stdout if line.startswith("step "))
        os.killpg(run.pid, signal.SIGINT)
        said = run.stderr.read()
        run.stdout.read()
    assert run.returncode == 130
    step = record(out)["step"]
    assert (
        said
        == f"composable demo: interrupted; the checkpoint of step {step} is in {out}, and --resume"
        " continues from it\n"
    )


def test_a_checkpoint_of_two_ranks_is_resumed_by_one(
    straight: Path, interrupted: Path, tmp_path: Path
) -> None:
    out = shutil.copytree(interrupted, tmp_path / "run")
    assert "resumed from step 5" in demo(out, "--ranks", "1", "--steps", "8", "--resume")
    assert record(out)["losses"] == pytest.approx(record(straight)["losses"], rel=1e-5)
