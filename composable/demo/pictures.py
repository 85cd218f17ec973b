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
LOOKS: Final = {  # from the bottom up: name and colour
    Kind.PARAMETERS: ("parameters, buffers", "#1f4e5f"),
    Kind.OPTIMIZER: ("optimizer state", "#5b8e9c"),
    Kind.GRADIENTS: ("gradients", "#e0a03c"),
    Kind.UNSHARDED: ("unsharded parameters", "#7b5ea7"),
    Kind.COMMUNICATION: ("messages, other buffers", "#c9b8e0"),
    Kind.ACTIVATIONS: ("activations, temporaries", "#d9795d"),
}
STYLE: Final[Any] = {
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


@matplotlib.rc_context(STYLE)
def draw_losses(
    path: Path,
    losses: Sequence[float],
    validation: Sequence[tuple[int, float]],
    baseline: Sequence[float],
    ranks: int,
) -> None:
    """Training and validation loss; beside it the steps that `baseline` covers, if any, and how far
    apart they are.
    """
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    if baseline:
        grid = figure.add_gridspec(2, 2, width_ratios=[1.7, 1], height_ratios=[1.5, 1])
        _draw_check(
            figure.add_subplot(grid[0, 1]), figure.add_subplot(grid[1, 1]), losses, baseline
        )
        axes = figure.add_subplot(grid[:, 0])
    else:
        axes = figure.add_subplot()
    axes.plot(
        np.arange(1, len(losses) + 1),
        losses,
        color=OURS,
        linewidth=1.3,
        label=f"training, annotated, {ranks} ranks",
    )
    if validation:
        at, value = zip(*validation, strict=True)
        axes.plot(
            at,
            value,
            "s--",
            color=INK,
            markersize=4,
            linewidth=1,
            label=f"validation, {value[-1]:.3f} at the end",
        )
    axes.set_title("A small language model learns Python's standard library")
    axes.set(xlabel="step", ylabel="loss, nats per byte", xlim=(0, len(losses) * 1.02 + 1))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.legend()
    figure.savefig(path)


def _draw_check(
    above: Axes, below: Axes, losses: Sequence[float], baseline: Sequence[float]
) -> None:
    count = min(len(losses), len(baseline))
    steps = np.arange(1, count + 1)
    ours, theirs = np.array(losses[:count]), np.array(baseline[:count])
    above.plot(steps, theirs, "o", color=THEIRS, markersize=5, label="un-annotated, 1 process")
    above.plot(steps, ours, color=OURS, linewidth=1.3, label="annotated")
    above.set_title(f"The first {count} steps, side by side")
    above.set_ylabel("loss")
    above.legend()
    difference = np.abs(ours - theirs) / theirs
    apart = difference > 0  # an exact zero has no place on a logarithmic axis
    below.semilogy(steps[apart], difference[apart], "o", color=INK, markersize=3.5)
    below.text(
        count,
        1.5e-9,
        f"{count - apart.sum()} of {count} exactly equal",
        ha="right",
        color=FAINT,
        size=9,
    )
    below.axhline(1e-4, color=THEIRS, linewidth=1, linestyle="--")
    below.text(1, 8e-5, "allowed", color=THEIRS, va="top")
    below.set(
        xlabel="step", ylabel="relative difference", ylim=(1e-9, 1e-3), xlim=(0.3, count + 0.7)
    )
    for axes in (above, below):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))


@matplotlib.rc_context(STYLE)
def draw_memory(path: Path, traces: Sequence[tuple[str, MemoryTrace]]) -> None:
    """What lives in memory during one step, by kind: one panel for each named trace, all to the
    same scale.
    """
    figure = Figure(figsize=(5.4 * len(traces) + 1.2, 5.2), layout="constrained")
    panels = figure.subplots(1, len(traces), sharey=True, squeeze=False)[0]
    top = max(sum(total) for _, trace in traces for total in trace.totals) / MIB
    for axes, (name, trace) in zip(panels, traces, strict=True):
        _draw_trace(axes, name, trace, top)
    panels[0].set_ylabel("live bytes of tensors, MiB")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside lower center", ncols=3 * len(traces))
    figure.suptitle("Memory over one training step", x=0.01, ha="left", weight="bold", size=13)
    figure.savefig(path)


def _draw_trace(axes: Axes, name: str, trace: MemoryTrace, top: float) -> None:
    # Every phase gets the same width, because its number of operations says nothing about how long
    # it takes; only the last one, in which nothing happens, is narrow.
    starts = [start for _, start in trace.phases]
    edges = [*range(len(starts)), len(starts) - 1 + LAST_WIDTH]
    where = np.interp(
        np.arange(starts[0], len(trace.totals)), [*starts, len(trace.totals) - 1], edges
    )
    totals = np.array(trace.totals, dtype=float)[starts[0] :] / MIB
    labels, colors = zip(*LOOKS.values(), strict=True)
    axes.stackplot(
        where, totals[:, list(LOOKS)].T, labels=labels, colors=colors, step="post", linewidth=0
    )
    whole = totals.sum(axis=1)
    peak = int(whole.argmax())
    axes.plot(where[peak], whole[peak], "o", color=INK, markersize=4)
    axes.text(
        where[peak] + 0.05, whole[peak] + top * 0.02, f"peak {whole[peak]:.1f} MiB", weight="bold"
    )
    for left, right, (phase, _) in zip(edges, edges[1:], trace.phases, strict=False):
        if left:
            axes.axvline(left, color="white", linewidth=1.5)
            axes.axvline(left, color=FAINT, linewidth=0.8, linestyle=":")
        axes.text((left + right) / 2, top * 1.13, phase, ha="center", va="top", color=FAINT)
    axes.set_title(name)
    axes.set(xlim=(0, edges[-1]), ylim=(0, top * 1.16), xticks=[])
    axes.grid(visible=False, axis="x")
