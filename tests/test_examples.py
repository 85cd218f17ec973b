"""The examples run, and README's programs, the plain one and the annotated one, train alike; knows
nothing of what they train.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from docs.generate import ROOT
from examples.whole_script import ROWS, loss_of, make_data, make_model, schedule_of
from tests.helpers.launched import launched
from tests.helpers.world import Pool
from tests.launch.test_launchers import TORCHRUN, clean, started

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
RESUME, LORA, TRAIN_2D, WHOLE, *FROM_FOLDERS = (
    ROOT / "examples" / f"{name}.py"
    for name in ("resume", "lora", "train_2d", "whole_script", "finetune", "trainer")
)

TWO_RANKS = [*TORCHRUN, "--standalone", "--nproc-per-node=2"]


def losses_in(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step +\d+: loss ([\d.]+)", printed, re.M)]


@pytest.mark.parametrize(
    "example",
    [path for path in EXAMPLES if path not in (RESUME, TRAIN_2D, WHOLE)],
    ids=lambda path: path.stem,
)
def test_an_example_learns_and_describes_its_model(pool: Pool, example: Path) -> None:
    printed = launched(pool, 2, example)
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


def by_one_process(steps: int) -> list[float]:
    """What the whole script prints of losses, by a plain loop: the means of two steps each, and
    the loss over what is held out, behind steps 6 and 12.
    """
    model = make_model(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    schedule = schedule_of(optimizer, steps)
    data, held_out = make_data(200, seed=1), make_data(48, seed=2)
    losses, printed = [], []
    order: list[int] = []
    for step in range(steps):
        if len(order) < ROWS:
            epoch = torch.Generator().manual_seed(step // (200 // ROWS))  # the epoch
            order = torch.randperm(200, generator=epoch).tolist()
        rows, order = order[:ROWS], order[ROWS:]
        loss = loss_of(model, data.tensors[0][rows])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 2:
            printed.append(sum(losses[-2:]) / 2)
        if step % 6 == 5:
            with torch.no_grad():
                printed.append(loss_of(model, held_out.tensors[0]).item())
    return printed


def test_the_whole_script_trains_and_resumes_on_other_ranks_as_one_plain_process(
    pool: Pool, tmp_path: Path
) -> None:
    def run(ranks: int, out: str, **options: object) -> list[float]:
        words = [f"--{name}={value}" for name, value in {"dropout": 0.0, **options}.items()]
        printed = launched(pool, ranks, WHOLE, "--out", str(tmp_path / out), *words)
        assert ("goes on after step 6" in printed) == (out != "two")
        return [float(loss) for loss in re.findall(r": loss ([\d.]+)", printed)]

    expected = by_one_process(12)
    assert run(2, "two", dtype="float32") == pytest.approx(expected, abs=2e-4)
    for out in ("one", "four"):
        shutil.copytree(tmp_path / "two" / "step-000006", tmp_path / out / "step-000006")
    assert run(1, "one", dtype="float32") == pytest.approx(expected[4:], abs=2e-4)
    assert run(4, "four", dtype="bfloat16") == pytest.approx(expected[4:], rel=0.02)

    whole = torch.load(tmp_path / "two" / "model.pt")
    exported = load_file(tmp_path / "two" / "exported" / "model.safetensors")
    assert whole.keys() == exported.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in whole.items())
    model = make_model(dropout=0.0)
    model.load_state_dict(exported)
    held_out = loss_of(model, make_data(48, seed=2).tensors[0]).item()
    assert held_out == pytest.approx(expected[-1], abs=2e-4)


def test_the_whole_script_resumes_with_its_random_states(pool: Pool, tmp_path: Path) -> None:
    first = launched(pool, 2, WHOLE, "--out", str(tmp_path / "first"))
    shutil.copytree(tmp_path / "first" / "step-000006", tmp_path / "second" / "step-000006")
    second = launched(pool, 2, WHOLE, "--out", str(tmp_path / "second"))
    said, rest = second.split("\n", 1)
    assert said == "goes on after step 6, with 2 ranks"
    assert rest.startswith("step 8: ")
    assert first.endswith(rest)


def test_every_example_says_how_to_run_it() -> None:
    for path in EXAMPLES:
        assert (
            f"torchrun --standalone --nproc-per-node=2 examples/{path.name}" in path.read_text()
        ), path.name


def sides_of(diff: str) -> tuple[str, str]:
    """The program before, and the program after."""
    lines = diff.splitlines(keepends=True)
    before, after = (
        "".join(line[1:] or "\n" for line in lines if line[0] != left_out) for left_out in "+-"
    )
    return before, after


def test_readme_shows_a_diff_whose_two_programs_train_alike_and_print_what_it_shows(
    tmp_path: Path,
) -> None:
    page = (ROOT / "README.md").read_text()
    diff, shown = (
        re.search(rf"^```{kind}\n(.*?)^```$", page, re.M | re.S)[1] for kind in ("diff", "console")
    )
    printed = []
    for start, source in zip(([sys.executable], TWO_RANKS), sides_of(diff), strict=True):
        program = tmp_path / "train.py"
        program.write_text(source)
        printed.append(started([*start, str(program)], env=[clean()]))
    alone, ranks = (
        sorted(float(loss) for loss in re.findall(r"loss of the last step: (\d\.\d{4})", text))
        for text in printed
    )
    assert alone == pytest.approx([sum(ranks) / 2], abs=2e-4)
    in_readme = [float(loss) for loss in re.findall(r": ([\d.]+)$", shown, re.M)]
    assert in_readme == pytest.approx([*alone, *ranks], abs=2e-3)
    assert "train.py" in shown


def test_a_diff_has_two_sides() -> None:
    assert sides_of(" a\n+b\n\n-c\n") == ("a\n\nc\n", "a\nb\n\n")
