"""The demo's forecast of its own step is what the step then does, and README shows both."""

from __future__ import annotations

import gc
import re
from pathlib import Path

import pytest
from rich.table import Table
from torch import Tensor, nn

from composable import checkpoint, replicate
from examples.demo.memory import measure_step
from examples.demo.model import Block, loss_of
from examples.demo.options import OneLineParser, Options, add_arguments
from examples.demo.prediction import MIB, Measured, forecast_of, prediction_table
from examples.demo.train import Run, annotate
from tests.helpers.world import Pool

README = Path(__file__).parents[2] / "README.md"


def options(out: Path) -> Options:
    """The demo's defaults, but for how long it trains."""
    parser = OneLineParser()
    add_arguments(parser)
    few = ["--steps=1", "--no-baseline", "--sample-bytes=1", "--quiet", f"--out={out}"]
    return parser.parse_args(few, Options())


def a_run(out: Path) -> Measured:
    before = [each for each in gc.get_objects() if isinstance(each, Tensor)]
    run = Run(options(out))
    run.train([])  # and validates, and exports
    run.generate()
    run.sizes.clear()
    rows = run._rows(run.corpus.train, 1)
    trace = measure_step(
        run.model,
        run.optimizer,
        lambda: loss_of(run.model, *rows),
        ignore=[*run.corpus[:2], *before],
    )
    return Measured(trace, run.sizes)


def figures(table: Table) -> dict[str, list[str]]:
    rows = zip(*(list(column.cells) for column in table.columns), strict=True)
    return {str(name): [str(cell) for cell in cells] for name, *cells in rows}


def test_the_demo_takes_the_memory_and_sends_the_messages_that_it_forecast_and_that_readme_shows(
    pool: Pool, tmp_path: Path
) -> None:
    measured = pool.run(2, a_run, tmp_path)[0]
    said = figures(prediction_table(options(tmp_path), annotate, measured))
    assert said["messages"][0] == said["messages"][1]
    for name, (forecast, found) in said.items():
        assert float(forecast) == pytest.approx(float(found), rel=0.002), name
    for name, cells in said.items():
        check(name, cells)


def check(name: str, cells: list[str]) -> None:
    """README's line that begins with `name` has these figures."""
    shown = README.read_text().splitlines()
    (line,) = [line for line in shown if line.startswith(f"{name}  ") or f"| {name}" in line]
    in_readme = re.findall(r"\d+(?:\.\d+)?(?=\s|$)", line.removeprefix(name))
    for figure, cell in zip(in_readme, cells, strict=True):
        # storages are rounded, and those of small tensors differ between releases of torch
        assert float(figure) == pytest.approx(float(cell), rel=0.001, abs=0.011), (line, cells)


def test_readme_says_what_each_part_takes_off_the_memory_of_a_step(tmp_path: Path) -> None:
    def recomputed(model: nn.Module) -> None:
        checkpoint(model, policy={Block})
        replicate(model)

    given = options(tmp_path)
    for name, verbs, ranks in (
        ("un-annotated, the whole batch", lambda model: replicate(model), 1),
        ("half of the batch on each of two ranks", lambda model: replicate(model), 2),
        ("`checkpoint`", recomputed, 2),
        ("`fully_shard`", annotate, 2),
    ):
        given.ranks = ranks
        found = forecast_of(given, verbs)
        rests = sum(found.at_rest.values())
        check(name, [f"{size / MIB:.2f}" for size in (found.peak, rests)])
