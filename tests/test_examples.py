"""The examples run, one of them as its first lines say, and README shows it as it is; knows nothing
of what they train.
"""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from docs.generate import ROOT
from tests.helpers.launched import launched
from tests.helpers.world import Pool

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
TRAIN, RESUME, LORA, TRAIN_2D, *FROM_FOLDERS = (
    ROOT / "examples" / f"{name}.py"
    for name in ("train", "resume", "lora", "train_2d", "finetune", "trainer")
)


def by_torchrun(example: Path) -> str:
    """What it prints on rank 0, launched as a person would."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(example),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses_in(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step +\d+: loss ([\d.]+)", printed, re.M)]


@pytest.mark.parametrize(
    "example",
    [path for path in EXAMPLES if path not in (RESUME, TRAIN_2D)],
    ids=lambda path: path.stem,
)
def test_an_example_learns_and_describes_its_model(pool: Pool, example: Path) -> None:
    printed = by_torchrun(example) if example == TRAIN else launched(pool, 2, example)
    losses = losses_in(printed)
    assert len(losses) >= 3
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.85 * losses[0]
    assert "(root) " in printed
    assert ("read back, it computes the same: True" in printed) == (example in FROM_FOLDERS)


def test_the_example_with_peft_says_so_where_that_is_missing(pool: Pool, tmp_path: Path) -> None:
    program = tmp_path / "without_peft.py"
    program.write_text(
        "import runpy, sys\nsys.modules['peft'] = None\n"
        f"runpy.run_path({str(LORA)!r}, run_name='__main__')\n"
    )
    assert (
        launched(pool, 1, program)
        == "peft is not installed, so there are no adapters to train: pip install peft\n"
    )


def test_a_run_that_is_resumed_with_more_ranks_ends_as_one_that_is_not(
    pool: Pool, tmp_path: Path
) -> None:
    first, others = (
        losses_in(launched(pool, ranks, RESUME, str(tmp_path / "two"))) for ranks in (2, 4)
    )
    alone = [losses_in(launched(pool, 1, RESUME, str(tmp_path / "one")))[0] for _ in range(2)]
    assert others < first  # who watches it sees that it goes on
    assert [*first, *others] == pytest.approx(alone, rel=1e-3)


def test_a_run_that_is_resumed_with_other_parallel_sizes_ends_as_one_that_is_not(
    pool: Pool, tmp_path: Path
) -> None:
    printed = [
        launched(pool, 4, TRAIN_2D, str(tmp_path / "many"), "--tp", tp, "--steps", "10")
        for tp in ("2", "4")
    ]
    alone = launched(pool, 1, TRAIN_2D, str(tmp_path / "one"), "--tp", "1", "--steps", "20")
    assert losses_in("".join(printed)) == pytest.approx(losses_in(alone), rel=0.01)
    assert "begins after step 10: dp 1 x tp 4" in printed[1]
    assert "(root) " in printed[0]


def test_every_example_says_how_to_run_it() -> None:
    for path in EXAMPLES:
        assert (
            f"torchrun --standalone --nproc-per-node=2 examples/{path.name}" in path.read_text()
        ), path.name


def test_readme_shows_the_example_as_it_is() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    assert any(
        textwrap.indent(block, "    ") in TRAIN.read_text()
        for block in blocks
        if "init_process_group" in block
    )
