"""Memory over a step, and what each stream does meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from composable.forecast.devices import Device, amount, unit_for
from composable.forecast.machine import KINDS, Span

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
def draw(
    path: Path,
    memory: Sequence[tuple[float, Sequence[int]]],
    streams: Sequence[Span],
    *,
    seconds: float,
    peak: int,
    where: str,
    device: Device,
    title: str,
    subject: str,
) -> None:
    """See the top of this file.

    Args:
        memory: moments of the step, and bytes of each kind from then on.
        where: the peak is.
    """
    figure = Figure(figsize=(10, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    moments = np.array([moment for moment, _ in memory]) * 1e3
    size, unit = unit_for(peak)
    totals = np.array([sizes for _, sizes in memory], dtype=float) / size
    for kind, (name, color) in enumerate(zip(KINDS.values(), COLORS, strict=True)):
        if totals[:, kind].any():
            below_it = totals[:, :kind].sum(axis=1)
            above.fill_between(
                moments, below_it, below_it + totals[:, kind], label=name, color=color,
                step="post", linewidth=0,
            )  # fmt: skip
    whole = totals.sum(axis=1)
    top_at = int(whole.argmax())
    above.plot(moments[top_at], whole[top_at], "o", color=INK, markersize=4)
    above.annotate(
        f"peak {amount(peak)}, {where}", (moments[top_at], whole[top_at]),
        xytext=(0, 6), textcoords="offset points", ha="center", weight="bold",
    )  # fmt: skip
    capacity = device.capacity / size
    top = max(whole.max() * 1.15, 0.01)
    if capacity < 1.5 * top:
        above.axhline(capacity, color="#d1622b", linestyle="--", linewidth=1)
        above.text(0, capacity, f"memory of {device.name}", va="bottom", color="#d1622b")
        top = max(top, capacity * 1.1)
    above.set(ylabel=f"memory, {unit}", ylim=(0, top))
    handles, labels = above.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside lower center", ncols=3)
    figure.suptitle(title, x=0.01, ha="left", weight="bold")
    above.set_title(subject, loc="left", fontsize=9, wrap=True)
    names = [name for name in STREAMS if any(span.stream == name for span in streams)]
    for row, name in enumerate(names):
        bars = _joined([(s.start, s.end) for s in streams if s.stream == name])
        below.broken_barh(
            [(start * 1e3, (end - start) * 1e3) for start, end in bars],
            (len(names) - row - 0.85, 0.7), color=STREAMS[name],
        )  # fmt: skip
    below.set_yticks(
        [len(names) - row - 0.5 for row in range(len(names))],
        [name.replace("_", "-") for name in names],
    )
    below.set(xlabel="ms", xlim=(0, seconds * 1e3))
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
def draw_comparison(
    path: Path,
    plans: Mapping[str, tuple[float, float, float, bool]],
    best: str | None,
    usable: float,
    subject: str,
) -> None:
    """Draw peak and time of each plan; the best one is dark, what does not fit is pale.

    Args:
        plans: peak, seconds, seconds of waiting for messages, and whether it fits.
        usable: bytes of the device.
    """
    peaks, times, exposed, fits = zip(*plans.values(), strict=True)
    figure = Figure(figsize=(10, 1.6 + 0.45 * len(plans)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    colors = [
        COLORS[0] if name == best else COLORS[1] if fit else "#d9dfe3"
        for name, fit in zip(plans, fits, strict=True)
    ]
    size, unit = unit_for(max(peaks))
    left.barh([*plans], [peak / size for peak in peaks], color=colors)
    near = usable < 1.5 * max(peaks)  # else bars would be invisible
    if near:
        left.axvline(usable / size, color="#d1622b", linestyle="--", linewidth=1)
    left.set(xlabel=f"peak of memory, {unit}{' (dashed: what fits)' if near else ''}")
    figure.suptitle(f"{subject}\n", x=0.01, ha="left", fontsize=9)
    left.invert_yaxis()
    right.barh([*plans], [each * 1e3 for each in times], color=colors)
    right.barh([*plans], [each * 1e3 for each in exposed], color="#d1622b", height=0.3)
    right.set(xlabel="step, ms (narrow: waiting for messages)")
    figure.savefig(path)
