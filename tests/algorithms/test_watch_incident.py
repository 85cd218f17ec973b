"""An incident is written to a folder, and one process runs its unit again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from composable import (
    apply_optimizer_in_backward,
    clip_grad_norm_,
    fully_shard,
    no_sync,
    replicate,
    watch,
)
from composable.comm.backends import comms_wrapped_by
from composable.errors import ReplayError
from composable.extras.watch.incident import FORMAT
from composable.extras.watch.replay import COLUMNS, replay
from tests.algorithms.test_watch_agreement import Planted, Spoiling
from tests.algorithms.test_watch_programs import Spoiled
from tests.algorithms.watched import PROGRAMS, Fault, spoil_at_rest
from tests.helpers.world import Pool, current_device


def _with_fault(name: str, fault: Fault, folder: str) -> None:
    program = PROGRAMS[name]
    model, plant = program.build(fault)
    optimizer = SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    with watch(model, agree=1, folder=folder):
        for plant.step in range(2):
            if fault.kind == "at rest" and plant.step == fault.step:
                spoil_at_rest(model, fault)
            program.backward(model, plant)
            optimizer.step()
            optimizer.zero_grad()


def _with_planted(planted: Planted, folder: str) -> None:
    program = PROGRAMS["shards"]
    with comms_wrapped_by(lambda comm: comm if comm.size == 1 else Spoiling(comm, planted)):  # type: ignore[arg-type,return-value]
        model, plant = program.build()
    optimizer = SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    with watch(model, agree=1, folder=folder):
        for plant.step in range(2):
            planted.now, planted.calls = plant.step, 0
            program.backward(model, plant)
            optimizer.step()
            optimizer.zero_grad()


def _cells(text: str) -> dict[int, dict[str, str]]:
    """The table of a replay."""
    lines = text.splitlines()
    head = next(index for index, line in enumerate(lines) if line.startswith("rank  "))
    starts = [lines[head].index(column) for column in COLUMNS]
    rows = {}
    for line in lines[head + 1 :]:
        if not line:
            break
        ends = [*starts[1:], len(line)]
        cells = [line[start:end].strip() for start, end in zip(starts, ends, strict=True)]
        rows[int(line[:6])] = dict(zip(COLUMNS, cells, strict=True))
    return rows


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["shards", "hybrid", "replicate", "checkpoint", "bfloat16"])
@pytest.mark.parametrize(
    ("kind", "first"),
    [
        ("forward", "forward of rank 1: output 0 is not finite"),
        ("backward", "backward of rank 1: "),
        ("weight", "backward of rank 1: gradient of up.weight is not finite"),
        ("at rest", "shard of rank "),
        ("batch", "inputs of rank 1: input 0 is not finite"),
    ],
)
def test_replay_says_where_it_begins(
    pool: Pool, tmp_path: Path, name: str, kind: str, first: str, ranks: int
) -> None:
    block = 0 if kind == "batch" else 1
    pool.run(ranks, _with_fault, name, Fault(kind, rank=1, step=1, block=block), str(tmp_path))
    text = replay(tmp_path / "not-finite-step-1")
    assert text.splitlines()[-1].startswith(f"first: {first}"), text
    other = _cells(text)[0]
    if kind in ("forward", "weight", "backward"):
        assert [other[column] for column in COLUMNS[:5]] in (
            ["sound"] * 5,
            ["sound", "-", *["sound"] * 3],
        ), text


def test_replay_names_a_gather_that_was_wrong(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _with_planted, Planted("bit", rank=1, step=1, block=1), str(tmp_path))
    text = replay(tmp_path / "ranks-differ-step-1")
    assert text.startswith("watch: step 1, rank 1: gathered rows are not those of the rank")
    cells = _cells(text)
    assert (cells[0]["gather"], cells[0]["shard"]) == ("sound", "sound")
    assert cells[1]["gather"].startswith("other rows of ")
    assert "than rank 0 has" in cells[1]["gather"]


def test_the_command_prints_the_table_and_runs_on_a_host(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _with_fault, "shards", Fault("forward", rank=1, step=1, block=1), str(tmp_path))
    command = [sys.executable, "-m", "composable", "replay"]
    done = subprocess.run(
        [*command, str(tmp_path / "not-finite-step-1")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "first: forward of rank 1: output 0 is not finite"
    done = subprocess.run(
        [*command, str(tmp_path / "nothing")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)


_SCRIPT = """
import sys
import torch
from torch import nn
from composable import fully_shard, watch

WIDTH = 4


def scaled(x, model):  # `model` is no global here
    return x / model


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return scaled(self.linear(x) * 0, 0.0)


folder = sys.argv[1]
model = fully_shard(nn.Sequential(Block()), policy={Block})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1):
    with watch(model, folder=folder):
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
"""


def test_classes_of_the_script_itself_are_defined_without_running_it(tmp_path: Path) -> None:
    script, folder = tmp_path / "train.py", tmp_path / "incidents"
    script.write_text(_SCRIPT)
    subprocess.run([sys.executable, str(script), str(folder)], check=True)
    (incident,) = folder.iterdir()
    text = replay(incident)
    assert text.splitlines()[-1] == "first: forward of rank 0: output 0 is not finite"
    script.write_text(_SCRIPT.replace("0.0", "step"))  # a loop is not run for it
    assert "forward of rank 0: raised NameError" in replay(incident).splitlines()[-1]
    script.write_text(_SCRIPT.replace("class Block", "class Other"))
    with pytest.raises(
        ReplayError, match=r"Block cannot be made from the script .*train\.py: KeyE"
    ):
        replay(incident)
    script.unlink()
    with pytest.raises(ReplayError, match=r"has classes of the script .*train\.py, which is not"):
        replay(incident)


def _one_kind_once(folder: str) -> None:
    model = fully_shard(nn.Linear(2, 2).to(current_device()))
    optimizer = SGD(model.parameters(), lr=0.1)
    with watch(model, folder=folder):
        for _ in range(3):
            model(torch.full((1, 2), torch.nan, device=current_device())).sum().backward()
            optimizer.step()


def test_each_kind_is_written_once(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _one_kind_once, str(tmp_path))
    assert [each.name for each in tmp_path.iterdir()] == ["not-finite-step-0"]
    assert sorted(each.name for each in (tmp_path / "not-finite-step-0").iterdir()) == [
        "rank-0.pt",
        "rank-1.pt",
    ]


def _one_rank_cannot_write(folder: str, why: str) -> None:
    (Path(folder) / "file").touch()
    elsewhere = {"no folder": None, "no permission": Path(folder) / "file" / "below"}[why]
    model = fully_shard(nn.Linear(2, 2).to(current_device()))
    optimizer = SGD(model.parameters(), lr=0.1)
    with watch(model, folder=folder if dist.get_rank() == 0 else elsewhere) as watched:
        for _ in range(2):
            model(torch.full((1, 2), torch.nan, device=current_device())).sum().backward()
            optimizer.step()
    assert watched.step == 2


@pytest.mark.parametrize("why", ["no folder", "no permission"])
def test_a_rank_that_cannot_write_trains_on(pool: Pool, tmp_path: Path, why: str) -> None:
    pool.run(2, _one_rank_cannot_write, str(tmp_path), why)
    assert (tmp_path / "not-finite-step-0" / "rank-0.pt").exists()


# --- what a replay must not say ------------------------------------------------------------------


def _verdict(folder: Path) -> str:
    return replay(folder).splitlines()[-1]


def _other_learning_rates(folder: str) -> None:
    model = fully_shard(nn.Linear(2, 2).to(current_device()))
    optimizer = SGD(model.parameters(), lr=0.1 + dist.get_rank())
    with watch(model, folder=folder, agree=1):
        model(torch.ones(1, 2, device=current_device())).sum().backward()
        optimizer.step()


def test_a_finding_about_no_unit_is_not_called_sound(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _other_learning_rates, str(tmp_path))
    verdict = _verdict(tmp_path / "ranks-differ-step-0")
    assert verdict == "first: not looked for, since it is about no unit"


def _a_replica_drifts(folder: str, micro_batches: int, clip: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(current_device())
    for each in model:
        replicate(each)
    replicate(model)
    if dist.get_rank() == 1:
        model[1].weight.data[0, 0] += 1e-4
    optimizer = SGD(model.parameters(), lr=0.1)
    with watch(model, folder=folder, agree=1):
        for number in range(micro_batches):
            with no_sync(model, enabled=number < micro_batches - 1):
                model(torch.randn(2, 4, device=current_device())).square().sum().backward()
        clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


@pytest.mark.parametrize(("micro_batches", "cell"), [(1, "sound"), (2, "-")])
def test_clipped_and_accumulated_gradients_are_no_wrong_means(
    pool: Pool, tmp_path: Path, micro_batches: int, cell: str
) -> None:
    pool.run(2, _a_replica_drifts, str(tmp_path), micro_batches, 1e-3)
    text = replay(tmp_path / "ranks-differ-step-0")
    assert {row["reduction"] for row in _cells(text).values()} == {cell}, text
    if micro_batches == 2:
        assert text.endswith("in the one call of 2 that ran again"), text


def _doubled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


class Counts(nn.Linear):
    """A buffer that forward writes to, and reads."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x) * self.count


class Unsound(nn.Module):
    """Its forward is sound. Its backward is not, where and when it is asked to."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.spoils = inner, False

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return Spoiled.apply(y) if self.spoils else y  # type: ignore[no-untyped-call]


def _unsound(folder: str, inner: str, in_backward: bool = False) -> None:
    torch.manual_seed(0)
    unit = Unsound(Counts() if inner == "buffer" else nn.Linear(4, 4))
    if inner == "hook":
        unit.inner.register_forward_hook(_doubled)
    model = nn.Sequential(nn.Linear(4, 4), unit, nn.Linear(4, 4)).to(current_device())
    fully_shard(model, policy={Unsound})
    optimizer = None if in_backward else SGD(model.parameters(), lr=0.1)
    if in_backward:
        apply_optimizer_in_backward(SGD, model.parameters(), {"lr": 0.1})
    with watch(model, folder=folder, agree=1):
        for number in range(2):
            unit.spoils = number == 1 and dist.get_rank() == 1
            model(torch.randn(2, 4, device=current_device())).square().sum().backward()
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize("inner", ["hook", "buffer"])
def test_calls_that_cannot_be_repeated_have_no_other_bits(
    pool: Pool, tmp_path: Path, inner: str
) -> None:
    pool.run(2, _unsound, str(tmp_path), inner)
    text = replay(tmp_path / "not-finite-step-1")
    assert text.splitlines()[-1].startswith("first: backward of rank 1: gradient of"), text


def test_parameters_that_backward_has_stepped_are_not_those_of_the_step(
    pool: Pool, tmp_path: Path
) -> None:
    pool.run(2, _unsound, str(tmp_path), "", True)
    verdict = _verdict(tmp_path / "not-finite-step-1")
    assert verdict == "first: not looked for, since backward has stepped the unit's parameters"


def test_files_of_a_run_on_more_ranks_are_refused(pool: Pool, tmp_path: Path) -> None:
    for ranks in (4, 2):
        pool.run(ranks, _one_kind_once, str(tmp_path))
    with pytest.raises(ReplayError, match="has files of several runs, on other numbers of ranks"):
        replay(tmp_path / "not-finite-step-0")


# --- folders that cannot be run again ------------------------------------------------------------


@pytest.fixture
def incident(pool: Pool, tmp_path: Path) -> Path:
    pool.run(2, _one_kind_once, str(tmp_path))
    return tmp_path / "not-finite-step-0"


def _rewrite(path: Path, **changes: Any) -> None:
    torch.save(torch.load(path, weights_only=True) | changes, path)


def test_a_folder_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match=r"has no file of a rank \(rank-0.pt\)"):
        replay(tmp_path)


def test_a_folder_that_is_not_whole_is_refused(incident: Path) -> None:
    (incident / "rank-1.pt").unlink()
    with pytest.raises(ReplayError, match="is not whole: rank 1 has no file there"):
        replay(incident)


def test_a_file_that_was_cut_off_is_refused(incident: Path) -> None:
    path = incident / "rank-0.pt"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ReplayError, match=r"rank-0.pt cannot be read: .*Copy it again"):
        replay(incident)


def test_another_version_is_refused(incident: Path) -> None:
    _rewrite(incident / "rank-0.pt", format=FORMAT + 1)
    with pytest.raises(ReplayError, match="was written by another version of composable"):
        replay(incident)


def test_a_model_that_cannot_be_imported_is_refused(incident: Path) -> None:
    content = torch.load(incident / "rank-0.pt", weights_only=True)
    _rewrite(incident / "rank-0.pt", module=content["module"].replace(b"linear", b"nowher"))
    with pytest.raises(ReplayError, match="the model cannot be imported: No module named"):
        replay(incident)
    replay_without = "it cannot be pickled: a lambda"
    _rewrite(incident / "rank-0.pt", module=replay_without)
    with pytest.raises(ReplayError, match="the model was not written: it cannot be pickled"):
        replay(incident)
