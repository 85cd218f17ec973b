"""The demo's forecast of its own step is what the step then does."""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch
from torch import Tensor

from composable import materialize
from composable.comm import comms_wrapped_by
from composable.demo.memory import measure_step
from composable.demo.model import initialise, loss_of, optimizer_of, shapes, train_step
from composable.demo.options import OneLineParser, Options, add_arguments
from composable.demo.prediction import Counting, Measured, prediction_table
from composable.demo.train import annotate
from composable.memory.elastic import release_idle_memory
from tests.helpers.world import Pool


def options() -> Options:
    """The demo's defaults."""
    parser = OneLineParser()
    add_arguments(parser)
    return parser.parse_args([], Options())


def a_step() -> Measured:
    before = [
        thing
        for thing in gc.get_objects()
        if isinstance(thing, Tensor) and thing.layout is torch.strided
    ]
    release_idle_memory()
    sizes: list[int] = []
    demo = options()
    with comms_wrapped_by(partial(Counting, sizes=sizes)):
        model = annotate(shapes(demo))
    materialize(model, initialise)
    optimizer = optimizer_of(model)
    idx = torch.zeros(demo.batch_size // demo.ranks, demo.context, dtype=torch.int64)
    train_step(model, optimizer, idx, idx, peak=1e-3, step=0)
    sizes.clear()
    trace = measure_step(model, optimizer, lambda: loss_of(model, idx, idx), ignore=[*before, idx])
    return Measured(trace, sizes)


def test_the_demo_uses_the_memory_and_sends_the_messages_that_it_forecast(pool: Pool) -> None:
    measured = pool.run(2, a_step)[0]
    table = prediction_table(options(), annotate, measured)
    rows = zip(*(list(column.cells) for column in table.columns), strict=True)
    for name, forecast, found in rows:
        exact = "messages" in name
        assert float(forecast) == pytest.approx(float(found), rel=0 if exact else 0.02), name
