"""A bad value gets one clear line and exit status 2, before any rank is started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from expecttest import assert_expected_inline

import composable
from examples.demo.__main__ import main


def answer(capsys: pytest.CaptureFixture[str], *command_line: str) -> str:
    """What the command prints when it refuses; both ways of refusing end with status 2."""
    try:
        status = main([*command_line])
    except SystemExit as stop:
        status = stop.code
    printed = capsys.readouterr()
    assert status == 2
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    return printed.err.strip()


_REFUSED = {
    "no number": (
        "--steps many",
        "--steps: needs a whole number of at least 1, got 'many'"
        " (see python -m examples.demo --help)",
    ),
    "out of range": (
        "--ranks 0",
        "--ranks: needs a whole number from 1 to 64, got '0' (see python -m examples.demo --help)",
    ),
    "no learning rate": (
        "--learning-rate nan",
        "--learning-rate: needs a number from 1e-06 to 1, got 'nan'"
        " (see python -m examples.demo --help)",
    ),
    "ranks that cannot share a batch": (
        "--batch-size 16 --ranks 3",
        "--batch-size 16 cannot be divided among 3 ranks; 15 or 18 can",
    ),
    "more ranks than rows": (
        "--batch-size 1 --ranks 4",
        "--batch-size 1 cannot be divided among 4 ranks; 4 can",
    ),
    "a part of a head": (
        "--width 100",
        "--width 100 must be a multiple of 32, the width of an attention head",
    ),
}


@pytest.mark.parametrize("what", _REFUSED)
def test_a_bad_value_is_refused_in_one_line(capsys: pytest.CaptureFixture[str], what: str) -> None:
    options, text = _REFUSED[what]
    assert answer(capsys, *options.split()) == f"python -m examples.demo: {text}"


def test_resuming_where_nothing_was_saved_is_refused_and_leaves_no_folder_behind(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_expected_inline(
        answer(capsys, "--resume", "--out", "new"),
        """python -m examples.demo: --resume: there is no checkpoint in new""",
    )
    assert not (tmp_path / "new").exists()


def test_an_output_folder_that_cannot_be_made_is_refused_with_the_reason(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("taken").write_text("a file")
    assert_expected_inline(
        answer(capsys, "--out", "taken"),
        """python -m examples.demo: --out taken: File exists""",
    )


def without_extras(program: str, *command_lines: str) -> str:
    """What a program prints for each of these, where packages of extras are missing."""
    code = f"""
import sys
sys.modules.update(rich=None, matplotlib=None, numpy=None)
from {program} import main
for command_line in sys.argv[1:]:
    try:
        main(command_line.split())
    except SystemExit as end:
        assert not end.code
    print("---")
"""
    command = [sys.executable, "-W", "ignore", "-c", code, *command_lines]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_help_version_and_doctor_need_none_of_the_extras() -> None:
    printed = without_extras("composable.__main__", "--help", "--version", "doctor")
    commands, version, report, _ = printed.split("---\n")
    assert "forecast" in commands
    assert version == f"composable {composable.__version__}\n"
    assert report.startswith("composable ")
    assert "--resume" in without_extras("examples.demo.__main__", "--help")


def test_the_missing_extra_is_named_with_what_brings_it() -> None:
    code = (
        "import sys; sys.modules.update(rich=None); from examples.demo.__main__ import main;"
        " main([])"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert_expected_inline(
        done.stderr.strip(),
        """python -m examples.demo: rich is missing; pip install -e '.[demo]' in a checkout brings it""",  # noqa: E501
    )
