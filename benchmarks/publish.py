"""Shows what was measured: tables, one JSON line, charts; must not measure anything."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from harness import BEST, Rounds, ratios, series, spread

OURS = "#c2410c"
THEIRS = "#64748b"
ALONE = "#cbd5e1"
INK = "#1e293b"
SERIES = ("#c2410c", "#2563eb", "#0f766e", "#7c3aed", "#a16207", "#be185d", "#475569")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def machine(options: argparse.Namespace) -> dict[str, Any]:
    """What a reader must know to judge a figure; nothing that identifies the machine or its
    user.
    """
    facts: dict[str, Any] = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": platform.system(),
    }
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        facts["memory_gib"] = round(
            os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1
        )
    if hasattr(os, "getloadavg"):
        # above the ranks' own number: somebody else was at work too
        facts["load"] = round(os.getloadavg()[0], 1)
    if options.device == "cuda":
        facts["device"] = torch.cuda.get_device_name()
    return facts


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def command() -> str:
    """How to repeat this run from the repository's root, without this machine's paths."""
    arguments = list(sys.argv[1:])
    if "--out" in arguments:  # where the result is put is nobody else's concern
        del arguments[arguments.index("--out") : arguments.index("--out") + 2]
    return " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *arguments])


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table that is aligned in plain text too: the first column to the left, the others
    to the right.
    """
    cells = [list(header), *[list(row) for row in rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]

    def line(row: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if not i else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "| " + " | ".join(padded) + " |"

    rule = ["-" * widths[0], *["-" * (width - 1) + ":" for width in widths[1:]]]
    return "\n".join([line(header), line(rule), *[line(row) for row in rows]])


def times(
    rounds: Rounds, metrics: Sequence[str], *, scale: float = 1e3, unit: str = "ms", digits: int = 1
) -> str:
    """Per contender the first metric's median, minimum and maximum over the rounds, and the other
    metrics' medians.
    """
    first, *others = metrics
    header = ["contender", f"{first}, {unit}", "min", "max", *others]
    rows = []
    for contender in rounds:
        seen = spread(series(rounds, contender, first))
        values = [seen["median"], seen["min"], seen["max"]]
        values += [spread(series(rounds, contender, metric))["median"] for metric in others]
        rows.append([contender, *[f"{value * scale:.{digits}f}" for value in values]])
    return table(header, rows)


Claim = tuple[str, str, float | None]


def compared(
    rounds: Rounds, claims: Sequence[Claim], *, metric: str = "step"
) -> tuple[str, list[dict[str, Any]]]:
    """The ratio of each pair `(ours, theirs, limit)` that competed, round by round: a table and its
    data.

    The last ratio but one is that of the two fastest steps (rounds), which a busy machine disturbs
    least.
    """
    best = BEST if metric == "step" else metric
    rows, data = [], []
    for ours, theirs, limit in claims:
        if ours not in rounds or theirs not in rounds:
            continue
        seen = spread(ratios(rounds, ours, theirs, metric))
        seen["best"] = min(series(rounds, ours, best)) / min(series(rounds, theirs, best))
        verdict = "" if limit is None else ("yes" if seen["median"] <= limit else "no")
        figures = [f"{seen[name]:.2f}" for name in ("median", "min", "max", "best")]
        rows.append(
            [f"{ours} / {theirs}", *figures, "" if limit is None else f"{limit:.2f}", verdict]
        )
        data.append(
            {
                "ours": ours,
                "theirs": theirs,
                "limit": limit,
                **{k: round(v, 4) for k, v in seen.items()},
            }
        )
    if not rows:
        return "", data
    return (
        table(
            [f"ratio of {metric}", "median", "min", "max", "best/best", "limit", "reached"], rows
        ),
        data,
    )


def rounded(rounds: Rounds) -> dict[str, dict[str, list[float]]]:
    """All rounds, for the JSON line."""
    return {
        contender: {
            metric: [round(sample[metric], 7) for sample in samples] for metric in samples[0]
        }
        for contender, samples in rounds.items()
    }


def emit(
    name: str,
    options: argparse.Namespace,
    *,
    title: str,
    tables: Sequence[str],
    data: Mapping[str, Any],
    draw: Callable[[Path], None] | None = None,
) -> None:
    """Print the tables and one JSON line; write the tables, the line and the chart into
    `options.out`.
    """
    options.out.mkdir(parents=True, exist_ok=True)
    text = "\n\n".join(part for part in tables if part)
    line = {
        "benchmark": name,
        "title": title,
        "when": datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ"),
        "command": command(),
        "smoke": options.smoke,
        "device": options.device,
        "ranks": options.ranks if not options.fake_world else 1,
        "fake_world": options.fake_world,
        "machine": machine(options),
        "versions": versions(),
        **data,
    }
    print(f"\n{title}\n\n{text}\n")
    print(json.dumps(line), flush=True)
    (options.out / f"{name}.json").write_text(json.dumps(line) + "\n")
    (options.out / f"{name}.md").write_text(text + "\n")
    if draw is None:
        return
    try:
        import matplotlib
    except ImportError:
        print("no chart: matplotlib is not installed", file=sys.stderr)
        return
    matplotlib.use("Agg")
    draw(options.out / f"{name}.png")


def _figure(width: float, height: float, title: str, columns: int = 1) -> tuple[Any, list[Any]]:
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {"font.family": "DejaVu Sans", "font.size": 10, "text.color": INK, "axes.labelcolor": INK}
    )
    figure, axes = plt.subplots(
        1, columns, figsize=(width, height), layout="constrained", squeeze=False
    )
    figure.suptitle(
        "\n".join(textwrap.wrap(title, int(width * 11))),
        x=0.01,
        ha="left",
        fontsize=11,
        fontweight="bold",
    )
    for axis in axes[0]:
        axis.spines[["top", "right"]].set_visible(False)
        axis.spines[["left", "bottom"]].set_color(ALONE)
        axis.tick_params(colors=INK, length=0)
        axis.set_axisbelow(True)
    return figure, list(axes[0])


def _save(figure: Any, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure.savefig(path, dpi=120)
    plt.close(figure)


def bars(
    path: Path,
    title: str,
    label: str,
    values: Mapping[str, Mapping[str, float]],
    *,
    digits: int = 0,
) -> None:
    """Horizontal bars with medians, thin lines from minimum to maximum; composable in its own
    colour.
    """
    figure, (axis,) = _figure(8, 0.9 + 0.36 * len(values), title)
    names = list(values)
    medians = [values[name]["median"] for name in names]
    colours = [
        (
            OURS
            if name.startswith("composable")
            else ALONE
            if name in ("un-annotated", "floor")
            else THEIRS
        )
        for name in names
    ]
    below = [max(values[name]["median"] - values[name]["min"], 0) for name in names]
    above = [max(values[name]["max"] - values[name]["median"], 0) for name in names]
    axis.barh(names, medians, color=colours, height=0.66)
    axis.errorbar(medians, names, xerr=[below, above], fmt="none", ecolor=INK, elinewidth=1)
    right = max(values[name]["max"] for name in names)
    for row, name in enumerate(names):
        end = max(values[name]["max"], values[name]["median"])
        axis.text(end + right * 0.012, row, f"{medians[row]:.{digits}f}", va="center", fontsize=9)
    axis.set_xlim(min(0.0, *medians), right * 1.1)
    axis.invert_yaxis()
    axis.set_xlabel(label)
    axis.grid(axis="x", color=ALONE, linewidth=0.5)
    _save(figure, path)


def stacked(
    path: Path,
    title: str,
    label: str,
    values: Mapping[str, Mapping[str, float]],
    *,
    digits: int = 0,
) -> None:
    """Horizontal bars whose pieces add up: contender -> piece -> value."""
    figure, (axis,) = _figure(8, 1.3 + 0.36 * len(values), title)
    pieces = list(dict.fromkeys(piece for pieces in values.values() for piece in pieces))
    left = dict.fromkeys(values, 0.0)
    for index, piece in enumerate(pieces):
        widths = [values[name].get(piece, 0.0) for name in values]
        axis.barh(
            list(values),
            widths,
            left=list(left.values()),
            color=SERIES[index % len(SERIES)],
            height=0.66,
            label=piece,
        )
        for name, width in zip(values, widths, strict=True):
            left[name] += width
    for row, total in enumerate(left.values()):
        axis.text(
            total + max(left.values()) * 0.012, row, f"{total:.{digits}f}", va="center", fontsize=9
        )
    axis.set_xlim(0, max(left.values()) * 1.1)
    axis.invert_yaxis()
    axis.set_xlabel(label)
    axis.grid(axis="x", color=ALONE, linewidth=0.5)
    axis.legend(
        loc="upper center", bbox_to_anchor=(0.5, 1.16), ncols=len(pieces), frameon=False, fontsize=9
    )
    _save(figure, path)


STYLES = ("-", "--", ":")  # when the colours are used up


def curves(
    path: Path,
    title: str,
    panels: Mapping[str, Mapping[str, Mapping[float, float]]],
    *,
    x_label: str,
    y_label: str,
    log_y: bool = True,
) -> None:
    """One panel per key: name -> x -> y, on a logarithmic x axis."""
    figure, axes = _figure(max(6.5, 4.2 * len(panels)), 3.8, title, len(panels))
    names = list(dict.fromkeys(name for panel in panels.values() for name in panel))
    for axis, (panel, lines) in zip(axes, panels.items(), strict=True):
        for name, points in lines.items():
            rivals = [other for other in names if not other.startswith("composable")]
            lap, place = (
                divmod(rivals.index(name), len(SERIES) - 1)
                if name in rivals
                else (int(name != "composable"), -1)
            )
            colour, style = SERIES[1 + place] if place >= 0 else OURS, STYLES[lap % len(STYLES)]
            axis.plot(
                list(points),
                list(points.values()),
                style,
                color=colour,
                marker="o",
                markersize=3,
                linewidth=1.6,
                label=name,
            )
        axis.set_xscale("log", base=2)
        if log_y:
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=0)
        axis.set_title(panel, fontsize=10)
        axis.set_xlabel(x_label)
        axis.grid(color=ALONE, linewidth=0.5)
    axes[0].set_ylabel(y_label)
    axes[0].legend(frameon=False, fontsize=8, handlelength=3)
    _save(figure, path)
