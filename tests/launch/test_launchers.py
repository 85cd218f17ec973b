"""Every launcher of docs/guides/launch.md starts its program, and the losses are those of one
process. A row of the page without a test here is one that needs what this machine has not.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final
from unittest import mock

import pytest
import torch
from torch import nn

from docs.generate import ROOT

PROGRAMS: Final = ROOT / "examples" / "launch"
TORCHRUN: Final = (sys.executable, "-m", "torch.distributed.run")


def losses_of_one_process(steps: int) -> list[str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        batch = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(f"{loss:.4f}")
    return losses


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return str(found.getsockname()[1])


def clean(**more: str) -> dict[str, str]:
    """The environment, without what a launcher sets."""
    named = re.compile(r"(RANK|WORLD_SIZE|MASTER_|LOCAL_|GROUP_|ROLE_|TORCHELASTIC|PET_|SLURM_)")
    own = {name: value for name, value in os.environ.items() if not named.match(name)}
    return {**own, "OMP_NUM_THREADS": "1", **more}


# What torch's threads say now and then as an interpreter ends, behind all that a program does.
_AT_EXIT: Final = "terminate called without an active exception"


def started(*commands: list[str], env: list[dict[str, str]]) -> str:
    """What programs print that run side by side, in their order."""
    said, errors, codes = _started(commands, env)
    if any(codes) and _AT_EXIT in errors:
        said, errors, codes = _started(commands, env)
    assert codes == [0] * len(codes), (said, errors)
    return said


def _started(
    commands: Sequence[list[str]], env: list[dict[str, str]]
) -> tuple[str, str, list[int]]:
    with ExitStack() as stack:
        running = [
            stack.enter_context(
                subprocess.Popen(
                    command,
                    env=each,
                    cwd=ROOT,
                    text=True,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                )
            )
            for command, each in zip(commands, env, strict=True)
        ]
        for each in running:
            stack.callback(each.kill)
        printed = [each.communicate(timeout=240) for each in running]
    said, errors = ("".join(each) for each in zip(*printed, strict=True))
    return said, errors, [each.returncode for each in running]


def losses_in(printed: str) -> list[str]:
    return re.findall(r"^step \d+: loss ([\d.]+)", printed, re.MULTILINE)


def test_torchrun_on_one_host() -> None:
    command = [*TORCHRUN, "--standalone", "--nproc-per-node=2", str(PROGRAMS / "train.py")]
    printed = started(command, env=[clean()])
    assert losses_in(printed) == losses_of_one_process(4)
    assert "mesh [0, 1]" in printed


def test_torchrun_on_two_hosts_shards_inside_of_each() -> None:
    command = [
        *TORCHRUN,
        "--nnodes=2",
        "--nproc-per-node=2",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=localhost:{free_port()}",
        str(PROGRAMS / "train.py"),
        "hybrid",
    ]
    printed = started(command, command, env=[clean(), clean()])  # two agents on the loopback
    assert losses_in(printed) == losses_of_one_process(4)
    assert "mesh [[0, 1], [2, 3]]" in printed


def test_spawn() -> None:
    command = [sys.executable, str(PROGRAMS / "spawn.py")]
    printed = started(command, env=[clean(MASTER_PORT=free_port())])
    assert losses_in(printed) == losses_of_one_process(4)


@pytest.mark.parametrize("path", ["launch/notebook.ipynb", "adapters.ipynb"])
def test_a_notebook_prints_what_it_shows(path: str) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    notebook = nbformat.read(ROOT / "examples" / path, as_version=4)
    shown = printed_in(notebook)
    with mock.patch.dict(os.environ, clean(PYTHONPATH=str(ROOT)), clear=True):
        nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3").execute()
    assert printed_in(notebook) == shown
    assert shown
    assert losses_in(shown) in (losses_of_one_process(4), [])


def printed_in(notebook: Any) -> str:
    outputs = [each for cell in notebook.cells for each in cell.get("outputs", ())]
    return "".join(each.text for each in outputs if each.get("name") == "stdout")


def test_ray_train_resumes_on_another_number_of_workers() -> None:
    pytest.importorskip("ray.train.torch")
    printed = started(
        [sys.executable, str(PROGRAMS / "ray_train.py")], env=[clean(PYTHONPATH=str(ROOT))]
    )
    assert losses_in(printed) == losses_of_one_process(4)[2:]  # the last one of each


def test_slurm_without_torchrun() -> None:
    shared = {"SLURM_NTASKS": "2", "SLURM_JOB_ID": "7", "MASTER_ADDR": "localhost"}
    port = free_port()
    ranks = [
        clean(SLURM_PROCID=rank, SLURM_LOCALID=rank, MASTER_PORT=port, **shared) for rank in "01"
    ]
    command = [sys.executable, str(PROGRAMS / "slurm.py")]
    printed = started(command, command, env=ranks)
    assert losses_in(printed) == losses_of_one_process(4)
    assert "mesh [[0, 1]]" in printed


def test_without_srun_the_missing_variables_are_named() -> None:
    command = [sys.executable, str(PROGRAMS / "slurm.py")]
    done = subprocess.run(
        command, env=clean(), cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 1
    assert done.stderr == (
        "SLURM_PROCID, SLURM_LOCALID, SLURM_NTASKS: not set; start this by srun, or train.py by"
        " torchrun\n"
    )


def test_the_command_of_the_pytorchjob_runs_with_what_the_operator_sets() -> None:
    job = (PROGRAMS / "pytorchjob.yaml").read_text()
    line = re.search(r"command: (\[.*\])", job)
    assert line is not None
    program, *arguments = json.loads(line[1])
    assert program == "torchrun"
    port = free_port()
    operator = {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "2",
        "PET_MASTER_ADDR": "localhost",
        "PET_MASTER_PORT": port,
    }
    env = [clean(PET_NODE_RANK=str(node), **operator) for node in range(2)]
    command = [*TORCHRUN, *arguments]
    printed = started(command, command, env=env)
    assert losses_in(printed) == losses_of_one_process(4)
    assert "mesh [[0, 1], [2, 3]]" in printed


# A store of its own for each life: a shared one holds the addresses of the life before.
_RESTARTED: Final = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def assert_resumed(printed: str) -> None:
    found = re.findall(r"^step (\d+): loss ([\d.]+)", printed, re.MULTILINE)
    # the second life begins behind step 2, or at it: rank 0 may have been stopped before it wrote
    # down that the checkpoint was whole
    assert [step for step, _ in found].count("0") == 1
    assert [loss for _, loss in sorted(set(found))] == losses_of_one_process(6)


def test_a_killed_rank_ends_one_life_of_the_job_and_the_next_resumes(tmp_path: Path) -> None:
    command = [
        *TORCHRUN,
        "--standalone",
        "--nproc-per-node=2",
        "--max-restarts=3",
        str(PROGRAMS / "restart.py"),
        str(tmp_path),
    ]
    # rank 1 is killed behind step 2, in the first life
    assert_resumed(started(command, env=[clean(DIES_AT="1:2:0", **_RESTARTED)]))


def test_a_rank_killed_on_the_second_host_restarts_both(tmp_path: Path) -> None:
    command = [
        *TORCHRUN,
        "--nnodes=2",
        "--nproc-per-node=2",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=localhost:{free_port()}",
        "--max-restarts=3",
        str(PROGRAMS / "restart.py"),
        str(tmp_path),
    ]
    env = clean(DIES_AT="3:2:0", **_RESTARTED)
    assert_resumed(started(command, command, env=[env, env]))
