"""What a step needs above the shards on an accelerator, predicted on a device without memory:
benchmarks/peak.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"

if not BENCHMARKS.is_dir():  # a copy of the tests, without them
    pytest.skip("there are no benchmarks here", allow_module_level=True)


_TOGETHER = ("composable", "fsdp2")  # in one run: to start one takes longer than to measure


@cache
def _rows(ranks: int, contenders: tuple[str, ...]) -> list[dict[str, Any]]:
    command = [
        sys.executable,
        "-W",
        "ignore",
        str(BENCHMARKS / "peak.py"),
        "--json",
        "--contenders",
        ",".join(contenders),
    ]
    done = subprocess.run(
        [*command, "--ranks", str(ranks)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def measured(ranks: int, contender: str = "composable") -> dict[bool, dict[str, Any]]:
    """Six blocks of Llama 7B, by whether they are kept after forward. A host that reads a tensor
    would have ended the run.
    """
    rows = _rows(ranks, _TOGETHER if contender in _TOGETHER else (contender,))
    return {row["keep"]: row for row in rows if row["contender"] == contender}


def test_a_step_that_frees_units_needs_three_of_them_in_forward_and_four_in_backward() -> None:
    found = measured(128)[False]
    assert found["forward"] <= 3.0
    assert found["backward"] <= 4.1, "sharded gradients included"


def test_a_step_that_keeps_units_needs_one_more_than_there_are() -> None:
    found = measured(128)[True]
    assert found["forward"] <= 8.0
    assert found["backward"] <= 7.05, "sharded gradients included"
    assert found["backward"] <= measured(128, "fsdp2")[True]["backward"] + 0.01


def test_a_host_reads_nothing_where_all_gradients_are_there() -> None:
    """What it asks for besides who had gradients ends the run."""
    assert [found["reads"] for found in measured(128).values()] == [0, 0]


def test_a_gather_takes_one_collective_and_one_copy_and_a_reduction_one_of_each() -> None:
    found = measured(128)[False]["operations"]
    collectives = {
        phase: sum(n for name, n in found[phase].items() if name.startswith("c10d"))
        for phase in found
    }
    copies = {
        phase: sum(n for name, n in found[phase].items() if "split_with_sizes_copy" in name)
        for phase in found
    }
    assert collectives == {
        "forward": 6,
        "backward": 5 + 6,
    }, "the block that ran last is not gathered again"
    assert copies == {"forward": 6, "backward": 5}
    assert not any("_foreach_copy_" in name for phase in found for name in found[phase]), (
        "it takes a kernel per parameter"
    )
    assert found["backward"]["aten::_chunk_cat.out"] == 6


def test_to_annotate_takes_what_the_shards_take_and_no_unit_once_more() -> None:
    """Views of what a unit gathers are made without memory for it. What was registered stays until
    the annotation is whole.
    """
    ours, rival = measured(128)[False], measured(128, "fsdp2")[False]
    assert ours["annotating"] <= ours["gradients"] + 0.02, "all shards beside the model"
    assert rival["annotating"] <= 0.03, "the shard of one parameter"


def test_at_rest_nothing_is_left_beside_the_shards() -> None:
    assert [found["resting"] for found in measured(128).values()] == [0, 0]
