"""`python -m composable doctor`: what it says of the place where it runs."""

from __future__ import annotations

import platform
import re
from pathlib import Path
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist

from composable.__main__ import main
from composable.extras import doctor
from docs.generate import ROOT


def rows(**environment: str) -> dict[str, str]:
    """What the command says, by its row."""
    found: dict[str, str] = {}
    name = ""
    for line in doctor.report(environment).splitlines():
        assert len(line) <= 100
        if label := line[:12].strip():
            name = label
        found[name] = f"{found.get(name, '')} {line[12:]}".strip()
    return found


def test_it_says_what_a_bug_report_needs_and_starts_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert not dist.is_initialized()
    assert len(printed.splitlines()) < 24
    for expected in (platform.python_version(), torch.__version__, "gloo", str(ROOT)):
        assert expected in printed
    found = rows()
    assert [*found] == [
        *("composable", "Python", "torch", "packages", "backends", "devices", "launcher"),
        "settings",
    ]
    assert re.search(r"numpy \d.*; not installed: ", found["packages"])
    assert found["launcher"].startswith("none (host ")
    assert found["settings"] == "none"


RANK_1 = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
ADDRESS = {"MASTER_ADDR": "a", "MASTER_PORT": "1"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "2"}
POD = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "8"}
SRUN = {
    "SLURM_PROCID": "9", "SLURM_NTASKS": "16", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_STEP_NUM_NODES": "2",
}  # fmt: skip


@pytest.mark.parametrize(
    ("environment", "before", "after"),
    [
        (
            {**RANK_1, **ADDRESS, **TORCHRUN, **SRUN},
            "torchrun: rank 1 of 4, local rank 1 of 2, host 0 of 2",
            "meets at a:1",
        ),
        (
            SRUN,
            "srun: rank 9 of 16, local rank 1 of 8(x2), host 1 of 2",
            "init_process_group() lacks RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT",
        ),
        (
            {**POD, **ADDRESS},
            "PyTorchJob: rank ? of ?, local rank ? of 8, host 1 of 2",
            "meets at a:1; init_process_group() lacks RANK, WORLD_SIZE",
        ),
        (
            {**RANK_1, "MASTER_ADDR": "a"},
            "spawn, or variables set by hand: rank 1 of 4, local rank 1 of 2, host ? of ?",
            "meets at a:?; init_process_group() lacks MASTER_PORT",
        ),
    ],
    ids=["torchrun", "srun", "PyTorchJob", "spawn"],
)
def test_it_sees_the_launcher_and_what_it_did_not_set(
    environment: dict[str, str], before: str, after: str
) -> None:
    said = rows(**environment)["launcher"]
    start, _, rest = said.partition(" (")
    assert start == before
    assert rest.partition("); ")[2] == after


def test_it_names_settings_and_those_that_are_none() -> None:
    settings = {"COMPOSABLE_WATCH": "1", "NCCL_DEBUG": "WARN", "COMPOSABLE_DEBG": "1", "HOME": "/"}
    assert rows(**settings)["settings"] == (
        "COMPOSABLE_DEBG=1 (not a setting; did you mean 'COMPOSABLE_DEBUG'?), COMPOSABLE_WATCH=1,"
        " NCCL_DEBUG=WARN"
    )
    page = (ROOT / "docs" / "settings.md").read_text()
    assert re.findall(r"^\| `(COMPOSABLE_\w+)`", page, re.M) == [*doctor.SETTINGS]


def test_it_tells_of_the_other_project_with_this_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "composable-1.2.dist-info").mkdir()
    (tmp_path / "composable-1.2.dist-info/METADATA").write_text("Name: composable\nVersion: 1.2\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert rows()["conflict"].startswith("the project 'composable' 1.2 is installed, too")


def test_it_counts_devices_and_repeats_what_a_broken_driver_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "BA"[index > 0])
    assert rows()["devices"].endswith("; cuda: 1 x B, 2 x A")

    def broken(index: int) -> NoReturn:
        raise RuntimeError("no driver\nand more")

    monkeypatch.setattr(torch.cuda, "get_device_name", broken)
    assert rows()["devices"].endswith("; cuda: RuntimeError: no driver")
