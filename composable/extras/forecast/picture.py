"""Draw the memory over a step, and the work of each stream."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from composable.extras.forecast.devices import amount, milliseconds, unit_for
from composable.extras.forecast.forecast import Forecast
from composable.extras.forecast.machine import KINDS, MemoryKind
from composable.extras.forecast.plans import Comparison

INK: Final = "#22303c"
FAINT: Final = "#8a97a3"
WARNING: Final = "#d1622b"
COLORS: Final = ("#1f4e5f", "#5b8e9c", "#e0a03c", "#7b5ea7", "#c9b8e0", "#d9795d", "#e6eaed")
STREAMS: Final = {
    "compute": "#1f6f8b",
    "all_gather": "#7b5ea7",
    "reduce_scatter": "#e0a03c",
    "all_reduce": WARNING,
    "send": FAINT,
    "receive": INK,
}
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


@matplotlib.rc_context(STYLE)
def draw(path: Path, found: Forecast) -> None:
    """Draw bytes of each kind over the step, with a point at the peak, and below it the streams."""
    figure = Figure(figsize=(10, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    moments, sizes = zip(*found.memory, strict=True)
    size, unit = unit_for(found.peak)
    at, totals = np.array(moments) * 1e3, np.array(sizes, dtype=float).T / size
    used = [kind for kind in MemoryKind if totals[kind].any()]
    names, colors = [KINDS[kind] for kind in used], [COLORS[kind] for kind in used]
    above.stackplot(at, totals[used], labels=names, colors=colors, step="post", linewidth=0)
    whole = totals.sum(axis=0)
    most = int(whole.argmax())
    above.plot(at[most], whole[most], "o", color=INK, markersize=4)
    above.annotate(
        f"peak {amount(found.peak)}, {found.where}", (at[most], whole[most]), xytext=(0, 6),
        textcoords="offset points", ha="center", weight="bold",
    )  # fmt: skip
    capacity, top = found.device.capacity / size, max(found.peak / size * 1.15, 0.01)
    if capacity < 1.5 * top:
        above.axhline(capacity, color=WARNING, linestyle="--", linewidth=1)
        above.text(0, capacity, f"memory of {found.device.name}", va="bottom", color=WARNING)
        top = max(top, capacity * 1.1)
    above.set(ylabel=f"memory, {unit}", ylim=(0, top))
    handles, labels = above.get_legend_handles_labels()  # the uppermost kind first
    figure.legend(handles[::-1], labels[::-1], loc="outside lower center", ncols=3)
    step = milliseconds(found.seconds, found.seconds)
    figure.suptitle(f"One step on {found.place}: {step} ms", x=0.01, ha="left", weight="bold")
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


@matplotlib.rc_context(STYLE)
def draw_comparison(path: Path, plans: Comparison) -> None:
    """Draw peak and time of each plan; the best one is dark, what does not fit is pale."""
    names, found = [*plans.forecasts], [*plans.forecasts.values()]
    figure = Figure(figsize=(10, 1.6 + 0.45 * len(names)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    colors = [COLORS[1] if each.fits else "#d9dfe3" for each in found]
    if plans.best is not None:
        colors[0] = COLORS[0]
    usable, most = found[0].device.usable, max(each.peak for each in found)
    size, unit = unit_for(most)
    left.barh(names, [each.peak / size for each in found], color=colors)
    near = usable < 1.5 * most  # else bars would be invisible
    if near:
        left.axvline(usable / size, color=WARNING, linestyle="--", linewidth=1)
    left.set(xlabel=f"peak of memory, {unit}{' (dashed: what fits)' if near else ''}")
    figure.suptitle(f"{found[0].subject}\n", x=0.01, ha="left", fontsize=9)
    left.invert_yaxis()
    seconds, exposed = zip(*map(plans.times, names), strict=True)
    right.barh(names, [each * 1e3 for each in seconds], color=colors)
    right.barh(names, [each * 1e3 for each in exposed], color=WARNING, height=0.3)
    right.set(xlabel="step, ms (narrow: waiting for messages)")
    figure.savefig(path)
