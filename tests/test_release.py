"""What a release is made of agrees with itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Final

import pytest

from composable.deprecation import renamed_argument
from docs.notes import notes

ROOT: Final = Path(__file__).resolve().parent.parent
PROJECT: Final = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_a_release_has_one_version() -> None:
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited is not None
    assert cited[1] == PROJECT["version"]


def test_the_wheel_needs_no_more_than_torch_and_typing_extensions() -> None:
    names = [re.match(r"[\w-]+", each)[0] for each in PROJECT["dependencies"]]
    assert names == ["torch", "typing-extensions"]


def test_notes_of_a_release_are_its_part_of_the_changelog() -> None:
    changelog = (
        "# Changes\n\n## Unreleased\n\n* new\n\n## 0.1.0 (2026-12-01)\n\n### Added\n\n* first\n"
    )
    assert notes(changelog, "0.1.0") == "## Added\n\n* first\n"
    assert notes(changelog, "Unreleased") == "* new\n"
    with pytest.raises(LookupError, match=r"has no part 0\.2\.0\. It has Unreleased, 0.1.0"):
        notes(changelog, "0.2.0")


def test_supported_versions_are_those_of_the_workflow_and_the_package() -> None:
    page = (ROOT / "docs/policy.md").read_text()
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    tested = re.findall(r'torch: "([\d.]+)"', workflow)
    assert [version for version in tested if version not in page] == []
    assert PROJECT["requires-python"] == ">=3.11"
    assert "torch>=2.11" in PROJECT["dependencies"]
    assert "| 2.11 and newer |" in page
    assert "| 3.11 and newer |" in page


def test_an_import_tells_of_the_other_project_with_this_name(tmp_path: Path) -> None:
    (tmp_path / "composable-1.2.dist-info").mkdir()
    (tmp_path / "composable-1.2.dist-info/METADATA").write_text("Name: composable\nVersion: 1.2\n")
    for folder, said in (
        (str(tmp_path), "the project 'composable' 1.2 is installed, too"),
        ("", ""),
    ):
        path = os.pathsep.join(each for each in (str(ROOT), folder) if each)
        ran = subprocess.run(
            [sys.executable, "-c", "import composable"],
            env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert ran.returncode == 0
        assert (said in ran.stderr) if said else ("composable" not in ran.stderr)


def test_a_renamed_argument_is_taken_under_both_names_and_the_old_one_warns() -> None:
    @renamed_argument("enable", "enabled", gone_in="0.3")
    def scope(name: str, *, enabled: bool = True) -> tuple[str, bool]:
        return name, enabled

    assert scope("a", enabled=False) == ("a", False)  # and no warning, which would be an error
    with pytest.warns(DeprecationWarning, match=r"scope\(enable=\) is now enabled=.* 0\.3"):
        assert scope("a", enable=False) == ("a", False)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="which are one argument"):
        scope("a", enable=False, enabled=False)  # type: ignore[call-arg]


@pytest.mark.parametrize("status", [0, 1])
def test_an_installation_names_its_packages_and_fails_with_pip(tmp_path: Path, status: int) -> None:
    python = tmp_path / "bin" / "python"  # of a virtual environment that is there already
    python.parent.mkdir()
    python.write_text(
        "#!/bin/sh\n"
        "echo '  Installing build dependencies: started'\n"
        "echo 'Processing /wheels/torch-2.13.0-cp311.whl'\n"
        "echo 'Collecting numpy>=1.26 (from torch-composable)'\n"
        "echo 'Requirement already satisfied: rich'\n"
        "echo 'Installing collected packages: torch, numpy'\n"
        f"exit {status}\n"
    )
    python.chmod(0o755)
    env = {**os.environ, "VENV": str(tmp_path), "PYTHON": "python3"}
    ran = subprocess.run(
        [ROOT / ".ci/install", "demo"], env=env, capture_output=True, text=True, check=False
    )
    assert ran.returncode == status, ran.stderr
    assert ran.stdout.splitlines() == [
        f"composable: installing into {tmp_path}, in pinned versions: torch numpy",
        "composable: unpacking",
        *(["composable: installed"] if status == 0 else []),
    ]
