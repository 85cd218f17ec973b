"""The two pictures: losses, and memory over one step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from composable.demo.memory import Kind, MemoryTrace

MIB: Final = float(1 << 20)
LAST_WIDTH: Final = 0.35
INK: Final = "#22303c"
FAINT: Final = "#8a97a3"
OURS: Final = "#1f6f8b"
THEIRS: Final = "#d1622b"
COLOURS: Final = {
    Kind.PARAMETERS: "#1f4e5f",
    Kind.OPTIMIZER: "#5b8e9c",
    Kind.GRADIENTS: "#e0a03c",
    Kind.UNSHARDED: "#7b5ea7",
    Kind.COMMUNICATION: "#c9b8e0",
    Kind.ACTIVATIONS: "#d9795d",
}
STYLE: Final[Any] = {
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6eaed",
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "savefig.dpi": 160,
}


def draw_losses(
    path: Path, losses: Sequence[float], validation: Sequence[tuple[int, float]], baseline: Sequence[float], ranks: int
) -> None:
    """Training and validation loss; beside it the steps that `baseline` covers, if any, and how far apart they are."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10, 4.6), layout="constrained")
        if baseline:
            grid = figure.add_gridspec(2, 2, width_ratios=[1.7, 1], height_ratios=[1.5, 1])
            _draw_check(figure.add_subplot(grid[0, 1]), figure.add_subplot(grid[1, 1]), losses, baseline)
            axes = figure.add_subplot(grid[:, 0])
        else:
            axes = figure.add_subplot()
        steps = np.arange(1, len(losses) + 1)
        axes.plot(steps, losses, color=OURS, linewidth=1.3, label=f"training, annotated, {ranks} ranks")
        if baseline:
            axes.plot(
                steps[: len(baseline)],
                baseline,
                "o",
                color=THEIRS,
                markersize=3,
                label="training, un-annotated, 1 process",
            )
        if validation:
            at, value = zip(*validation, strict=True)
            axes.plot(at, value, "s--", color=INK, markersize=4, linewidth=1, label="validation")
            axes.annotate(
                f"{value[-1]:.3f}",
                (at[-1], value[-1]),
                xytext=(0, -14),
                textcoords="offset points",
                ha="center",
                weight="bold",
            )
        axes.set_title("A small language model learns Python's standard library")
        axes.set(xlabel="step", ylabel="loss, nats per byte", xlim=(0, len(losses) * 1.02 + 1))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        axes.legend()
        figure.savefig(path)


def _draw_check(above: Axes, below: Axes, losses: Sequence[float], baseline: Sequence[float]) -> None:
    count = min(len(losses), len(baseline))
    steps = np.arange(1, count + 1)
    ours, theirs = np.array(losses[:count]), np.array(baseline[:count])
    above.plot(steps, theirs, "o", color=THEIRS, markersize=5, label="un-annotated")
    above.plot(steps, ours, color=OURS, linewidth=1.3, label="annotated")
    above.set_title(f"The first {count} steps, side by side")
    above.set_ylabel("loss")
    above.legend()
    difference = np.abs(ours - theirs) / theirs
    apart = difference > 0  # an exact zero has no place on a logarithmic axis
    below.semilogy(steps[apart], difference[apart], "o", color=INK, markersize=3.5)
    below.text(count, 1.5e-9, f"{count - apart.sum()} of {count} exactly equal", ha="right", color=FAINT, size=9)
    below.axhline(1e-4, color=THEIRS, linewidth=1, linestyle="--")
    below.annotate("allowed", (1, 1e-4), xytext=(0, -4), textcoords="offset points", color=THEIRS, va="top")
    below.set(xlabel="step", ylabel="relative difference", ylim=(1e-9, 1e-3), xlim=(0.3, count + 0.7))
    for axes in (above, below):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))


def draw_memory(path: Path, traces: Sequence[tuple[str, MemoryTrace]]) -> None:
    """What lives in memory during one step, by kind: one panel for each named trace, all to the same scale."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.4 * len(traces) + 1.2, 5.2), layout="constrained")
        panels = figure.subplots(1, len(traces), sharey=True, squeeze=False)[0]
        top = max(trace.peak() for _, trace in traces) / MIB
        for axes, (name, trace) in zip(panels, traces, strict=True):
            _draw_trace(axes, name, trace, top)
        panels[0].set_ylabel("live bytes of tensors, MiB")
        handles, labels = panels[0].get_legend_handles_labels()
        columns = len(labels) if len(traces) > 1 else len(labels) // 2
        figure.legend(handles[::-1], labels[::-1], loc="outside lower center", ncols=columns)
        figure.suptitle("Memory over one training step", x=0.01, ha="left", weight="bold", size=13)
        figure.savefig(path)


def _draw_trace(axes: Axes, name: str, trace: MemoryTrace, top: float) -> None:
    bounds = [start for _, start in trace.phases] + [len(trace.totals)]
    # Every phase gets the same width, because its number of operations says nothing about how long it takes; only the
    # last one, in which nothing happens, is narrow.
    edges = np.append(np.arange(len(trace.phases)), len(trace.phases) - 1 + LAST_WIDTH)
    where = np.concatenate(
        [
            np.linspace(edges[i], edges[i + 1], bounds[i + 1] - bounds[i], endpoint=i == len(trace.phases) - 1)
            for i in range(len(trace.phases))
        ]
    )
    totals = np.array(trace.totals, dtype=float)[bounds[0] :] / MIB
    order = sorted(Kind, reverse=True)
    axes.stackplot(
        where,
        [totals[:, kind] for kind in order],
        colors=[COLOURS[kind] for kind in order],
        labels=[kind.label for kind in order],
        step="post",
        linewidth=0,
    )
    whole = totals.sum(axis=1)
    peak = int(whole.argmax())
    axes.plot(where[peak], whole[peak], "o", color=INK, markersize=4)
    axes.annotate(
        f"peak {whole[peak]:.1f} MiB",
        (where[peak], whole[peak]),
        xytext=(6, 4),
        textcoords="offset points",
        weight="bold",
    )
    for i, (phase, _) in enumerate(trace.phases):
        if i:
            axes.axvline(i, color="white", linewidth=1.5)
            axes.axvline(i, color=FAINT, linewidth=0.8, linestyle=":")
        axes.text(edges[i : i + 2].mean(), top * 1.13, phase, ha="center", va="top", color=FAINT)
    resident = [r for r in trace.rss if r]
    note = ""
    if resident:
        note = f"process: {max(resident) / MIB:.0f} MiB resident, {trace.resident_before / MIB:.0f} before the model"
    if trace.idle:
        note += f"; {trace.idle / MIB:.1f} in idle blocks"
    axes.set_title(f"{name}\n", pad=2)
    axes.text(0, 1.015, note, transform=axes.transAxes, color=FAINT, size=9)
    axes.set(xlim=(0, edges[-1]), ylim=(0, top * 1.16), xticks=[])
    axes.grid(visible=False, axis="x")
