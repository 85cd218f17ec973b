"""The documentation is true: programs print what pages say, links lead somewhere, and quoted
messages exist.
"""

from __future__ import annotations

import ast
import enum
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from composable.engine.gradients import reduction
from composable.engine.gradients.reduction import ReductionState
from composable.engine.params import param_group
from composable.engine.params.param_group import ShardedState
from composable.engine.step import root
from composable.engine.step.root import Phase
from docs.generate import (
    ROOT,
    Outputs,
    Program,
    execute,
    pages,
    programs_in,
    regenerated,
    transitions,
)
from tests.helpers.world import Pool

PAGES = pages()
_FENCE = re.compile(r"^(```+)[^\n]*\n.*?^\1\s*$", re.M | re.S)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _on_this_rank(programs: Sequence[Program]) -> Outputs:
    return execute(programs)


def _without_ranks(ranks: int, programs: Sequence[Program]) -> list[Outputs]:
    raise AssertionError(f"a program of this page wants {ranks} ranks")


def _prose(text: str) -> str:
    """The page without its code."""
    return re.sub(r"`[^`\n]*`", "", _FENCE.sub("", text))


def _anchors(text: str) -> list[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ +(.+)$", _FENCE.sub("", text), re.M)
    anchors: list[str] = []
    for title in titles:
        words = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower())
        anchors.append(words.strip().replace(" ", "-"))
    return anchors


def broken_links(page: Path, text: str) -> list[str]:
    """The relative links of a page that lead nowhere, anchors included."""
    broken = []
    for link in _LINK.findall(_prose(text)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        inside = target == ROOT or ROOT in target.parents
        missing = not (inside and target.exists())
        if missing or (
            anchor
            and target.suffix == ".md"
            and anchor not in _anchors(text if target == page else target.read_text())
        ):
            broken.append(link)
    return broken


def _ranked(page: Path) -> bool:
    return any(program.ranks for program in programs_in(page.read_text()))


@pytest.mark.parametrize("page", [page for page in PAGES if not _ranked(page)], ids=_name)
def test_a_page_without_ranks_is_up_to_date(page: Path) -> None:
    text = page.read_text()
    assert regenerated(text, _without_ranks) == text, "run python -m docs.generate"


@pytest.mark.parametrize("page", [page for page in PAGES if _ranked(page)], ids=_name)
def test_a_page_with_ranks_is_up_to_date(page: Path, pool: Pool) -> None:
    def on_pool(ranks: int, programs: Sequence[Program]) -> list[Outputs]:
        # Programs may leave groups, hooks and half-finished steps behind: the next test gets
        # workers of its own.
        outputs: list[Outputs] = pool.run(ranks, _on_this_rank, list(programs), spoils=True)
        return outputs

    text = page.read_text()
    assert regenerated(text, on_pool) == text, "run python -m docs.generate"


# Programs of guides that need more than a page has: how many there are, and the tests that run
# them.
_RUN_ELSEWHERE = {
    "docs/guides/adapters.md": (1, "tests/extensions/test_packed.py"),
    "docs/guides/experts.md": (2, "tests/tensor_parallel/test_transformers.py"),
    "docs/guides/forecast.md": (1, "tests/forecast/test_forecast.py"),
    "docs/guides/offload.md": (1, "tests/accelerator/test_offloaded_parameters.py"),
    "docs/guides/lost_steps.md": (2, "tests/trainers/test_annotated_models.py"),
    "docs/guides/pipelines.md": (1, "tests/whole/with_torch/test_pipelines.py"),
    "docs/guides/trainers.md": (
        13,
        "tests/trainers/test_beside_fsdp2.py",
    ),
    "docs/guides/rollouts.md": (1, "tests/state/test_rollouts.py"),
    "docs/guides/whole_script.md": (1, "tests/test_examples.py"),
}


def test_every_program_of_a_guide_is_run() -> None:
    left_out = {}
    for page in PAGES:
        if page.parent.name == "guides":
            text = page.read_text()
            # one is about options; what the others show is run by tests/launch, tests/test_examples
            elsewhere = page.name in ("together.md", "launch.md", "whole_script.md")
            assert programs_in(text) or elsewhere, f"{page.name} has no program"
            if shown := len(re.findall(r"^```python *$", text, re.M)):
                left_out[_name(page)] = shown
    assert left_out == {name: number for name, (number, *_) in _RUN_ELSEWHERE.items()}
    assert all((ROOT / test).exists() for _, *tests in _RUN_ELSEWHERE.values() for test in tests)


_LINKED = [*PAGES, *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md"))]


@pytest.mark.parametrize("page", _LINKED, ids=_name)
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    assert broken_links(page, page.read_text()) == []


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_measurements_are_programs_with_their_figures_below(page: Path) -> None:
    for program in programs_in(page.read_text(), "measure"):
        compile(program.source, _name(page), "exec")
        assert program.output is not None
        assert program.output[0] < program.output[1], "run python -m docs.generate --measure"


def test_every_decision_says_what_it_should_and_is_on_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    decisions = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    assert [path.name[:4] for path in decisions] == [
        f"{number:04}" for number in range(1, len(decisions) + 1)
    ]
    for path in decisions:
        headings = re.findall(r"^## (.+)$", path.read_text(), re.M)
        assert headings == ["Context", "Decision", "Measurement", "Consequences"], path.name
        assert f"(decisions/{path.name})" in index


def test_the_architecture_names_every_folder_and_every_file_of_the_engine() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    package = ROOT / "composable"
    folders = [f"`{path.name}/`" for path in package.iterdir() if (path / "__init__.py").exists()]
    files = [
        f"`{path.name}`" for path in (package / "engine").glob("*.py") if path.name != "__init__.py"
    ]
    assert [name for name in (*folders, *files) if name not in page] == []


@pytest.mark.parametrize(
    ("module", "states"),
    [(root, Phase), (param_group, ShardedState), (reduction, ReductionState)],
    ids=["steps", "params", "gradients"],
)
def test_a_state_table_has_the_states_of_its_enum(module: object, states: type[enum.Enum]) -> None:
    found = transitions(module)  # type: ignore[arg-type]
    assert {state for state, _, _ in found} | {after for _, after, _ in found} == {
        state.name for state in states
    }


@cache
def _messages() -> str:
    """All texts in the package's code, one a line, with `…` in place of what is filled in."""

    def text(node: ast.AST) -> str:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value.replace("\n", " ")
        if isinstance(node, ast.JoinedStr):
            return "".join(
                text(part) if isinstance(part, ast.Constant) else "…" for part in node.values
            )
        return ""

    files = sorted((ROOT / "composable").rglob("*.py"))
    return "\n".join(
        filter(
            None, (text(node) for path in files for node in ast.walk(ast.parse(path.read_text())))
        )
    )


def unknown_messages(page: str) -> list[str]:
    """The messages in the first column of tables that the code does not have. Those of torch are
    not looked for.
    """
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    quoted = [re.findall(r"`([^`]+)`", row.split(" | ")[0]) for row in rows]
    found = []
    for message in (messages[0] for messages in quoted):
        # a wildcard in front makes the search slow
        pattern = "[^\\n]*".join(map(re.escape, message.strip("…").split("…")))
        if not re.search(pattern, _messages()):
            found.append(message)
    return found


def test_every_message_in_the_tables_of_errors_is_one_of_the_code() -> None:
    assert unknown_messages((ROOT / "docs" / "errors.md").read_text()) == []


def test_a_message_that_is_in_no_code_is_noticed() -> None:
    page = (
        "| `…() has no argument '…'` | x |\n| `…() has no such thing` | y |\n| torch: `z` | z |\n"
    )
    assert unknown_messages(page) == ["…() has no such thing"]


def test_a_wrong_output_and_an_old_diagram_are_noticed() -> None:
    wrong = "```python run\nprint(1 + 1)\n```\n\n```text output\n3\n```\n"
    assert regenerated(wrong, _without_ranks) == wrong.replace("3", "2")
    old = "<!-- states:begin -->\nSHARDED --> GONE\n<!-- states:end -->"
    assert "GONE" not in regenerated(old, _without_ranks)
    file = "<!-- file examples/train.py:begin -->\nGONE\n<!-- file:end -->"
    assert "GONE" not in regenerated(file, _without_ranks)


def test_a_program_that_should_raise_and_does_not_is_noticed() -> None:
    with pytest.raises(AssertionError, match="ended without an error"):
        regenerated("```python run raises\npass\n```\n", _without_ranks)


def test_a_broken_link_is_noticed() -> None:
    page = ROOT / "docs" / "index.md"
    text = (
        "# Top\n[a](nowhere.md) [b](#top) [c](#bottom) [d](tour.md#the-states) [e](tour.md#no)"
        " `[f](g.md)` [h](../../x)\n"
    )
    assert broken_links(page, text) == ["nowhere.md", "#bottom", "tour.md#no", "../../x"]


def test_every_row_of_what_works_names_its_tests() -> None:
    rows = re.findall(r"^\| ([^|]+?) \|", (ROOT / "docs/features.md").read_text(), re.M)
    tested = re.findall(r"^\| (.*?) \| (.*) \|$", (ROOT / "tests/README.md").read_text(), re.M)[1:]
    assert [row for row, _ in tested] == [row for row in rows if row != "Not there yet"]
    for _, files in tested:
        folder = ROOT / "tests"
        for name in re.findall(r"`([\w/]+(?:/|\.py))`", files):
            # a file without a folder is in that of the one before
            found = ROOT / "tests" / name if "/" in name else folder / name
            assert found.exists(), name
            folder = found if found.is_dir() else found.parent


def test_every_figure_of_readme_beside_fsdp2_is_one_of_the_benchmarks() -> None:
    """In the row of a claim that the same benchmark measures."""
    rows = re.findall(
        r"^\| (.+) \| (.+) \| `python benchmarks/(\w+\.py).*` \|$",
        (ROOT / "README.md").read_text(),
        re.M,
    )
    assert len(rows) >= 6
    claims = (ROOT / "benchmarks" / "README.md").read_text().splitlines()
    for what, figures, benchmark in rows:
        said = [line for line in claims if line.startswith("|") and f"`{benchmark}" in line]
        for figure in re.findall(r"\d\.\d+", figures):
            assert any(figure in line for line in said), (what, figure)


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
