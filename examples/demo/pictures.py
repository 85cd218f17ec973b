"""The two pictures: losses, and memory over one step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from examples.demo.memory import Kind, MemoryTrace

MIB: Final = 1 << 20
OURS: Final = "#1f6f8b"
INK: Final = "#22303c"
FAINT: Final = "#8a97a3"
WARNING: Final = "#d1622b"
STYLE: Final[Any] = {
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "savefig.dpi": 160,
}
KINDS: Final = {
    Kind.PARAMETERS: ("parameters, buffers", "#1f4e5f"),
    Kind.OPTIMIZER: ("optimizer state", "#5b8e9c"),
    Kind.GRADIENTS: ("gradients", "#e0a03c"),
    Kind.UNSHARDED: ("unsharded parameters", "#7b5ea7"),
    Kind.MESSAGES: ("messages", "#c9b8e0"),
    Kind.ACTIVATIONS: ("activations, temporaries", "#d9795d"),
    Kind.IDLE: ("idle blocks of the host", "#e6eaed"),
}


@matplotlib.rc_context(STYLE)
def draw_losses(
    path: Path,
    losses: Sequence[float],
    validation: Sequence[tuple[int, float]],
    baseline: Sequence[float],
    ranks: int,
) -> None:
    """Training and validation loss, and the steps that `baseline` covers, if any."""
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    axes = figure.add_subplot()
    if baseline:
        steps = range(1, len(baseline) + 1)
        axes.plot(steps, baseline, "o", color=WARNING, label="un-annotated, 1 process")
    steps = range(1, len(losses) + 1)
    axes.plot(steps, losses, color=OURS, linewidth=1.3, label=f"training, annotated, {ranks} ranks")
    if validation:
        at, value = zip(*validation, strict=True)
        label = f"validation, {value[-1]:.3f} at the end"
        axes.plot(at, value, "s--", color=INK, markersize=4, linewidth=1, label=label)
    axes.set_title("A small language model learns Python's standard library")
    axes.set(xlabel="step", ylabel="loss, nats per byte", xlim=(0, len(losses) * 1.02 + 1))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.legend()
    figure.savefig(path)


@matplotlib.rc_context(STYLE)
def draw_memory(path: Path, traces: Sequence[tuple[str, MemoryTrace]]) -> None:
    """What lives in memory during one step, by kind: one panel for each named trace, all to the
    same scale.
    """
    figure = Figure(figsize=(5.4 * len(traces) + 1.2, 5.2), layout="constrained")
    panels = figure.subplots(1, len(traces), sharey=True, squeeze=False)[0]
    for axes, (name, trace) in zip(panels, traces, strict=True):
        # Every phase gets the same width, because its number of operations says nothing about how
        # long it takes.
        phases, starts = zip(*trace.phases, strict=True)
        edges = range(len(starts) + 1)
        operations = np.arange(len(trace.totals))
        at = np.interp(operations, [*starts, len(trace.totals) - 1], edges)
        memory = np.array(trace.totals).T / MIB
        used = [kind for kind in Kind if memory[kind].any()]
        names, colors = zip(*map(KINDS.get, used), strict=True)
        axes.stackplot(at, memory[used], labels=names, colors=colors, step="post", linewidth=0)
        whole = memory.sum(axis=0)
        top = int(whole.argmax())
        axes.plot(at[top], whole[top], "o", color=INK, markersize=4)
        axes.annotate(
            f"peak {whole[top]:.1f} MiB", (at[top], whole[top]), xytext=(0, 6),
            textcoords="offset points", ha="center", weight="bold",
        )  # fmt: skip
        for edge in edges[1:-1]:
            axes.axvline(edge, color=FAINT, linewidth=0.8, linestyle=":")
        axes.set_xticks([edge + 0.5 for edge in edges[:-1]], phases)
        axes.tick_params("x", length=0)
        axes.set_title(name)
    panels[0].set(ylabel="live bytes of tensors, MiB", ylim=(0, panels[0].get_ylim()[1] * 1.1))
    handles, labels = panels[-1].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside lower center", ncols=3)
    figure.suptitle("Memory over one training step", x=0.01, ha="left", weight="bold")
    figure.savefig(path)
