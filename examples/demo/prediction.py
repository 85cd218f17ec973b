"""What `composable.extras.forecast` says of the demo's step, beside what was measured."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.table import Column, Table

from composable.comm.base import Comm, Work
from composable.comm.launch import Launch
from composable.forecast import Forecast, forecast
from examples.demo.memory import MemoryTrace
from examples.demo.model import ADAMW, loss_of, shapes
from examples.demo.options import Options

MIB = float(1 << 20)


class Counting:
    """A comm that passes everything on, and notes the bytes of each collective as a whole."""

    def __init__(self, inner: Comm, sizes: list[int]) -> None:
        self._inner = inner
        self._sizes = sizes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def all_gather(self, pairs: Any, launch: Launch) -> Work:
        self._sizes.append(sum(whole.nbytes for whole, _ in pairs))
        return self._inner.all_gather(pairs, launch)

    def reduce_scatter(self, pairs: Any, launch: Launch, scale: float = 1.0) -> Work:
        self._sizes.append(sum(whole.nbytes for _, whole in pairs))
        return self._inner.reduce_scatter(pairs, launch, scale)

    def all_reduce(self, tensors: Any, launch: Launch, scale: float = 1.0) -> Work:
        self._sizes.append(sum(tensor.nbytes for tensor in tensors))
        return self._inner.all_reduce(tensors, launch, scale)


@dataclass
class Measured:
    """One rank's step.

    Attributes:
        trace: of its memory.
        sizes: bytes of each collective.
    """

    trace: MemoryTrace
    sizes: list[int]


def forecast_of(options: Options, annotate: Any) -> Forecast:
    """The forecast of a rank's step. This process has no process group."""
    rows = options.batch_size // options.ranks
    return forecast(
        partial(shapes, options),
        annotate,
        lambda: tuple(torch.zeros(2, rows, options.context, dtype=torch.int64)),
        ranks=options.ranks,
        device="cpu",
        optimizer=partial(torch.optim.AdamW, **ADAMW),
        loss=lambda model, batch: loss_of(model, *batch),
    )


def prediction_table(options: Options, annotate: Any, measured: Measured) -> Table:
    """The forecast of a rank's step, beside the step."""
    found = forecast_of(options, annotate)
    totals = list(map(sum, measured.trace.totals))
    sent = sum(each.nbytes for each in found.collectives)
    table = table_of("", "forecast", "measured")
    for name, said, seen in (
        ("at rest, MiB", sum(found.at_rest.values()), totals[0]),
        ("peak of the step, MiB", found.peak, max(totals)),
        ("in messages, MiB", sent, sum(measured.sizes)),
    ):
        table.add_row(name, f"{said / MIB:.2f}", f"{seen / MIB:.2f}")
    table.add_row("messages", str(found.messages), str(len(measured.sizes)))
    return table


def table_of(first: str, *others: str) -> Table:
    """An empty table; all columns but the first hold numbers."""
    numbers = [Column(name, justify="right") for name in others]
    return Table(first, *numbers, box=None, pad_edge=False)
