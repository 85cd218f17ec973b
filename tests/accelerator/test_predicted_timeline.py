"""What is exposed of communication, predicted on virtual clocks by benchmarks/timeline.py, where
links are slow.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.whole.memory.test_predicted_memory import BENCHMARKS


def test_a_step_over_slow_links_exposes_no_more_than_fsdp2s_and_needs_no_more_memory(
    tmp_path: Path,
) -> None:
    """Links are busy all the time there, with both: a wait too many at either end is seen."""
    options = ("--models", "7B", "--bandwidths", "50", "--out", str(tmp_path))
    command = [sys.executable, "-W", "ignore", str(BENCHMARKS / "timeline.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    figures = json.loads(line)["figures"]
    ours, rival = figures["7B, 50, composable"], figures["7B, 50, fsdp2"]
    assert ours["step"] <= rival["step"]
    assert ours["peak"] <= 1.01 * rival["peak"], "shards, activations and all"
