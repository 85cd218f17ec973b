"""Draws what `timeline.py` found: waits by bandwidth, memory over time, streams side by side.

Must run nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from publish import ALONE, INK, OURS, THEIRS

COLOURS = {"composable": OURS, "fsdp2": THEIRS}
KINDS = {"all-gather": "#2563eb", "reduce-scatter": "#7c3aed"}
SHOWN = (0.26, 0.38)  # of the longest step: the end of forward and the start of backward


def draw(path: Path, title: str, runs: Mapping[tuple[str, int, str], Any]) -> None:
    import matplotlib.pyplot as plt

    models = list(dict.fromkeys(model for model, _, _ in runs))
    bandwidths = list(dict.fromkeys(bandwidth for _, bandwidth, _ in runs))
    middle = bandwidths[len(bandwidths) // 2]
    plt.rcParams.update(
        {"font.family": "DejaVu Sans", "font.size": 9, "text.color": INK, "axes.labelcolor": INK}
    )
    figure, axes = plt.subplots(
        len(models), 3, figsize=(14, 3.6 * len(models)), layout="constrained", squeeze=False
    )
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    for row, model in zip(axes, models, strict=True):
        for axis in row:
            axis.spines[["top", "right"]].set_visible(False)
            axis.set_axisbelow(True)
        _exposed(row[0], model, bandwidths, runs)
        _memory(row[1], model, middle, runs)
        _streams(row[2], model, middle, runs)
    axes[0][0].legend(frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _exposed(
    axis: Any, model: str, bandwidths: list[int], runs: Mapping[tuple[str, int, str], Any]
) -> None:
    for place, (contender, colour) in enumerate(COLOURS.items()):
        ms = [
            (runs[model, b, contender]["step"] - runs[model, b, "un-annotated"]["step"]) * 1e3
            for b in bandwidths
        ]
        at = [k + 0.38 * (place - 0.5) for k in range(len(bandwidths))]
        axis.bar(at, ms, 0.36, color=colour, label=contender)
        for x, value in zip(at, ms, strict=True):
            axis.text(x, value, f"{value:.0f}", ha="center", va="bottom", fontsize=8)
    axis.set_xticks(range(len(bandwidths)), [f"{b} GB/s" for b in bandwidths])
    axis.set_title(f"{model}: exposed communication of a step, ms")
    axis.grid(axis="y", color=ALONE, linewidth=0.5)


def _memory(
    axis: Any, model: str, bandwidth: int, runs: Mapping[tuple[str, int, str], Any]
) -> None:
    for contender, colour in COLOURS.items():
        points = runs[model, bandwidth, contender]["memory"]
        axis.plot(
            [t * 1e3 for t, _ in points],
            [size / 2**30 for _, size in points],
            color=colour,
            linewidth=1.2,
        )
    axis.set_title(f"{model}, {bandwidth} GB/s: GiB, by milliseconds")
    axis.set_ylim(bottom=0)
    axis.grid(color=ALONE, linewidth=0.5)


def _streams(
    axis: Any, model: str, bandwidth: int, runs: Mapping[tuple[str, int, str], Any]
) -> None:
    names = []
    longest = max(runs[model, bandwidth, contender]["step"] for contender in COLOURS)
    since, until = (longest * share for share in SHOWN)
    for contender, colour in COLOURS.items():
        sample = runs[model, bandwidth, contender]
        lanes = {
            "computes": ("compute",),
            "gathers": ("all-gather",),
            "reduces": ("reduce-scatter",),
        }
        for lane in lanes:
            names.append(f"{contender} {lane}")
            for stream, start, end, what in sample["spans"]:
                inside = stream == "compute" if lane == "computes" else what in lanes[lane]
                if inside and end > since and start < until:
                    begin, stop = max(start, since), min(end, until)
                    kind = colour if lane == "computes" else KINDS[what]
                    axis.barh(
                        len(names) - 1,
                        (stop - begin) * 1e3,
                        left=begin * 1e3,
                        color=kind,
                        height=0.7,
                    )
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.set_title(f"{model}, {bandwidth} GB/s: streams, by milliseconds")
