"""Memory over a step, and what each stream does meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from composable.forecast.devices import amount, unit_for
from composable.forecast.machine import KINDS
from composable.forecast.plans import Comparison
from composable.forecast.result import Forecast, milliseconds

INK: Final = "#22303c"
FAINT: Final = "#8a97a3"
COLORS: Final = ("#1f4e5f", "#5b8e9c", "#e0a03c", "#7b5ea7", "#c9b8e0", "#d9795d", "#e6eaed")
STREAMS: Final = {
    "compute": "#1f6f8b",
    "all_gather": "#7b5ea7",
    "reduce_scatter": "#e0a03c",
    "all_reduce": "#d1622b",
}
STYLE: Final = {
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


@matplotlib.rc_context(STYLE)  # type: ignore[arg-type]
def draw(path: Path, found: Forecast) -> None:
    """See the top of this file."""
    figure = Figure(figsize=(10, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    moments = np.array([moment for moment, _ in found.memory]) * 1e3
    size, unit = unit_for(found.peak)
    totals = np.array([sizes for _, sizes in found.memory], dtype=float) / size
    for kind, (name, color) in enumerate(zip(KINDS.values(), COLORS, strict=True)):
        if totals[:, kind].any():
            below_it = totals[:, :kind].sum(axis=1)
            above.fill_between(
                moments, below_it, below_it + totals[:, kind], label=name, color=color,
                step="post", linewidth=0,
            )  # fmt: skip
    whole = totals.sum(axis=1)
    peak = int(whole.argmax())
    above.plot(moments[peak], whole[peak], "o", color=INK, markersize=4)
    above.annotate(
        f"peak {amount(found.peak)}, {found.where}", (moments[peak], whole[peak]),
        xytext=(0, 6), textcoords="offset points", ha="center", weight="bold",
    )  # fmt: skip
    capacity = found.device.capacity / size
    top = max(whole.max() * 1.15, 0.01)
    if capacity < 1.5 * top:
        above.axhline(capacity, color="#d1622b", linestyle="--", linewidth=1)
        above.text(0, capacity, f"memory of {found.device.name}", va="bottom", color="#d1622b")
        top = max(top, capacity * 1.1)
    above.set(ylabel=f"memory, {unit}", ylim=(0, top))
    handles, labels = above.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside lower center", ncols=3)
    figure.suptitle(
        f"One step on {found.place}: {milliseconds(found.seconds, found.seconds)} ms",
        x=0.01, ha="left", weight="bold",
    )  # fmt: skip
    above.set_title(str(found.subject), loc="left", fontsize=9, wrap=True)
    names = [name for name in STREAMS if any(span.stream == name for span in found.streams)]
    for row, name in enumerate(names):
        bars = _joined([(s.start, s.end) for s in found.streams if s.stream == name])
        below.broken_barh(
            [(start * 1e3, (end - start) * 1e3) for start, end in bars],
            (len(names) - row - 0.85, 0.7), color=STREAMS[name],
        )  # fmt: skip
    below.set_yticks(
        [len(names) - row - 0.5 for row in range(len(names))],
        [name.replace("_", "-") for name in names],
    )
    below.set(xlabel="ms", xlim=(0, found.seconds * 1e3))
    figure.savefig(path)


def _joined(bars: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Bars that touch as one: thousands of operations are too many to draw."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(bars):
        if found and start - found[-1][1] < 1e-6:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


@matplotlib.rc_context(STYLE)  # type: ignore[arg-type]
def draw_comparison(path: Path, comparison: Comparison) -> None:
    """Draw peak and time of each plan; the best one is dark, what does not fit is pale."""
    names = list(comparison.forecasts)
    figure = Figure(figsize=(10, 1.6 + 0.45 * len(names)), layout="constrained")
    peaks, times = figure.subplots(1, 2, sharey=True)
    fits = [each.fits for each in comparison.forecasts.values()]
    colors = [
        COLORS[0] if name == comparison.best else COLORS[1] if fit else "#d9dfe3"
        for name, fit in zip(names, fits, strict=True)
    ]
    found = list(comparison.forecasts.values())
    size, unit = unit_for(max(each.peak for each in found))
    peaks.barh(names, [each.peak / size for each in found], color=colors)
    usable = found[0].device.usable / size
    near = usable * size < 1.5 * max(each.peak for each in found)  # else bars would be invisible
    if near:
        peaks.axvline(usable, color="#d1622b", linestyle="--", linewidth=1)
    peaks.set(xlabel=f"peak of memory, {unit}{' (dashed: what fits)' if near else ''}")
    figure.suptitle(f"{found[0].subject}\n", x=0.01, ha="left", fontsize=9)
    peaks.invert_yaxis()
    times.barh(names, [each.seconds * 1e3 for each in found], color=colors)
    times.barh(names, [each.exposed * 1e3 for each in found], color="#d1622b", height=0.3)
    times.set(xlabel="step, ms (narrow: waiting for messages)")
    figure.savefig(path)
