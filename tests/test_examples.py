"""The examples run as their first lines say, and README shows them as they are; knows nothing of what they train."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

from docs.generate import ROOT

TRAIN = ROOT / "examples" / "train.py"


def run_on_two_ranks(example: Path) -> str:
    """What an example prints on rank 0."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(example)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_first_example_learns_and_describes_its_model() -> None:
    printed = run_on_two_ranks(TRAIN)
    losses = [float(loss) for loss in re.findall(r"^step +\d+: loss ([\d.]+)", printed, re.M)]
    assert len(losses) == 4
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.7 * losses[0]
    assert printed.count("fully_shard + checkpoint") == 4


def test_readme_shows_the_example_as_it_is() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    assert any(textwrap.indent(block, "    ") in TRAIN.read_text() for block in blocks if "init_process_group" in block)
