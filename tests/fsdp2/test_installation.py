"""`install()` and `python -m composable.fsdp2`: scripts and trainers for FSDP2, unchanged."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch.distributed as dist
from torch.distributed import fsdp
from torch.distributed._composable import fsdp as older
from torch.distributed.fsdp._fully_shard import _fully_shard as internals

from composable import fsdp2
from composable.errors import ClashError
from composable.fsdp2 import installation
from composable.fsdp2.__main__ import main
from docs.generate import ROOT
from tests.helpers.launched import launched
from tests.helpers.world import Pool

PROGRAMS: Final = Path(__file__).parent / "programs"
_NAMES: Final = ("fully_shard", "FSDPModule", "register_fsdp_forward_method", "share_comm_ctx")
_TORCHS: Final = {name: getattr(fsdp, name) for name in _NAMES}


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module that has imported FSDP2's names, in a process that has not used them."""
    monkeypatch.setattr(installation, "classes_of_fsdp2", list)
    module = types.ModuleType("a_trainer")
    vars(module).update(_TORCHS, alias=_TORCHS["fully_shard"], other=print)
    monkeypatch.setitem(sys.modules, "a_trainer", module)
    yield module
    if installation._installed is not None:
        installation._installed.remove()


def test_names_are_replaced_wherever_they_were_imported_and_put_back(
    trainer: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = dict(vars(trainer))
    handle = fsdp2.install()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert re.match(
        r"composable\.fsdp2: fully_shard, FSDPModule, register_fsdp_forward_method, share_comm_ctx"
        r" of torch\.distributed\.fsdp are composable's now, in \d+ modules: a_trainer, ",
        lines[0],
    )
    for name in _NAMES:
        assert getattr(fsdp, name) is getattr(trainer, name) is getattr(fsdp2, name)
        assert getattr(internals, name) is _TORCHS[name]  # FSDP2 itself
    assert trainer.alias is fsdp2.fully_shard
    assert trainer.other is print
    assert older.fully_shard is fsdp2.fully_shard
    later = types.ModuleType("imported_later")
    vars(later).update({name: getattr(fsdp, name) for name in _NAMES})
    monkeypatch.setitem(sys.modules, "imported_later", later)
    handle.remove()
    handle.remove()
    assert dict(vars(trainer)) == before
    for name in _NAMES:
        assert getattr(fsdp, name) is getattr(later, name) is _TORCHS[name]
        assert getattr(fsdp2, name) is not _TORCHS[name]


def test_a_module_that_imports_from_composable_keeps_its_names(
    trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = types.ModuleType("mine")
    vars(mine).update(fully_shard=fsdp2.fully_shard)
    monkeypatch.setitem(sys.modules, "mine", mine)
    fsdp2.install().remove()
    assert vars(mine)["fully_shard"] is fsdp2.fully_shard


def test_a_second_call_returns_the_same_handle_and_replaces_what_came_since(
    trainer: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = fsdp2.install()
    capsys.readouterr()
    assert fsdp2.install() is handle
    assert capsys.readouterr().err == ""
    later = types.ModuleType("imported_later")
    vars(later).update(_TORCHS)
    monkeypatch.setitem(sys.modules, "imported_later", later)
    assert fsdp2.install() is handle
    assert capsys.readouterr().err.endswith("in 1 modules: imported_later\n")
    handle.remove()
    assert fsdp2.install() is not handle


def test_only_rank_0_prints(
    trainer: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    fsdp2.install()
    assert capsys.readouterr().err == ""
    assert trainer.fully_shard is fsdp2.fully_shard


def _refused_after_fsdp2() -> str:
    from torch import nn  # noqa: PLC0415

    fsdp.fully_shard(nn.Linear(2, 2))
    with pytest.raises(ClashError) as refused:
        fsdp2.install()
    assert fsdp.fully_shard is _TORCHS["fully_shard"]
    assert dist.is_initialized()
    return str(refused.value)


def test_a_process_in_which_fsdp2_has_sharded_modules_is_refused(pool: Pool) -> None:
    said = pool.run(2, _refused_after_fsdp2, device="cpu")
    assert re.match(
        r"composable\.fsdp2\.install: torch's FSDP2 has sharded modules of this process already"
        r" \(FSDP\w+\), .*; nothing was replaced$",
        said[0],
    )


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "no script to run; call it as python -m composable.fsdp2 [--cpu] script.py [args]"),
        (["-m"], "no script to run; call it as"),
        (["--help"], "no script to run; call it as"),
        (["--cpu"], "no script to run; call it as"),
        (["--cpu", "nowhere.py"], "there is no script 'nowhere.py'"),
        (["nowhere.py", "x"], "there is no script 'nowhere.py'"),
        (["-m", "no_such_module"], "there is no module named 'no_such_module'"),
        (["-m", "no_such.module"], "there is no module named 'no_such.module'"),
    ],
)
def test_the_runner_says_in_one_line_what_it_cannot_run(
    arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"composable.fsdp2: {why}")
    assert said.count("\n") == 1
    assert fsdp.fully_shard is _TORCHS["fully_shard"]


def test_with_cpu_accelerate_shards_on_cpus_until_the_handle_is_removed(
    trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = pytest.importorskip("accelerate.state")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "no")
    theirs = state.AcceleratorState
    handle = fsdp2.install(cpu=True)
    assert fsdp2.install(cpu=True) is handle
    assert state.AcceleratorState is not theirs
    assert issubclass(state.AcceleratorState, theirs)
    assert os.environ["ACCELERATE_USE_CPU"] == "true"
    handle.remove()
    assert state.AcceleratorState is theirs
    assert os.environ["ACCELERATE_USE_CPU"] == "no"


_NOT_CALLED: Final = (
    "nothing has called fully_shard of torch.distributed.fsdp, or of composable. docs/"
)


@pytest.mark.parametrize(
    ("kind", "asked", "world", "version", "why"),
    [
        (None, False, "2", 2, _NOT_CALLED),
        ("MULTI_GPU", False, "2", 2, "accelerate was not asked for FSDP. docs/guides/trainers.md"),
        ("NO", True, "1", 2, "there is one process. Start several by torchrun"),
        ("NO", True, "2", 2, "accelerate offers FSDP on accelerators only, and found none: each"),
        ("MULTI_CPU", True, "2", 2, "accelerate offers FSDP on accelerators only, and its ranks"),
        ("FSDP", True, "2", 1, "accelerate was asked for FSDP1. Ask for FSDP2"),
        ("FSDP", True, "2", 2, _NOT_CALLED),
    ],
)
def test_the_runner_says_why_nothing_was_sharded(
    kind: str | None, asked: bool, world: str, version: int, why: str, trainer: Any,
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    partial = types.SimpleNamespace(_shared_state={"distributed_type": kind} if kind else {})
    plugin = types.SimpleNamespace(fsdp_version=version)
    state = types.SimpleNamespace(_shared_state={"fsdp_plugin": plugin})
    accelerate = types.SimpleNamespace(PartialState=partial, AcceleratorState=state)
    monkeypatch.setitem(sys.modules, "accelerate.state", accelerate)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", str(asked))
    monkeypatch.setenv("WORLD_SIZE", world)
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.setattr(sys, "path", [*sys.path])
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit(3)")
    with pytest.raises(SystemExit):
        main([str(script)])
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"composable.fsdp2: nothing was sharded: {why}")


# --- whole programs ------------------------------------------------------------------------------

_INSTALLED: Final = re.compile(r"^composable\.fsdp2: .* in \d+ modules: .*$", re.M)


def _losses(printed: str) -> list[str]:
    return re.findall(r"^loss .*$", printed, re.M)


def _assert_runs_as_fsdp2(printed: str, theirs: str) -> None:
    assert len(_losses(theirs)) == 6
    assert _losses(printed) == _losses(theirs)
    assert "class FSDPSequential\n" in theirs  # FSDP2 swaps it, composable does not
    assert "class Sequential\n" in printed
    assert len(_INSTALLED.findall(printed)) == 1
    assert re.search(
        r"^composable\.fsdp2: \d+ units with [\d,]+ parameters sharded over 2 ranks, last"
        r" Sequential$",
        printed,
        re.M,
    )


def test_the_runner_runs_a_script_with_its_arguments(pool: Pool) -> None:
    script = PROGRAMS / "plain.py"
    theirs = launched(pool, 2, script, "6")  # first: then other ranks take over
    ours = launched(pool, 2, "composable.fsdp2", str(script), "6", stderr=True)
    _assert_runs_as_fsdp2(ours, theirs)


@pytest.mark.in_full_only
def test_torchrun_runs_the_runner(pool: Pool) -> None:
    script = PROGRAMS / "plain.py"
    ours = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         "-m", "composable.fsdp2", str(script), "6"],
        capture_output=True, text=True, timeout=240, check=False, cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert ours.returncode == 0, ours.stdout + ours.stderr
    _assert_runs_as_fsdp2(ours.stdout + ours.stderr, launched(pool, 2, script, "6"))


@pytest.mark.parametrize("schedule", ["Schedule1F1B", "ScheduleZBVZeroBubble"])
def test_a_pipeline_has_the_gradients_of_one_process(pool: Pool, schedule: str) -> None:
    pool.stop()  # FSDP2 may have sharded modules in these processes
    printed = launched(pool, 4, "composable.fsdp2", "-m", "tests.fsdp2.programs.staged", schedule)
    assert printed == f"{schedule}: gradients of one process, as Sequential\n"
