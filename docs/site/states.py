"""Diagrams of states as pictures: GitHub draws them by Mermaid, which would take a program of Node.

States are lines from top to bottom, and each change of state is an arrow between two of them.
"""

from __future__ import annotations

import re
from html import escape
from typing import Final

_CHANGE: Final = re.compile(r"^\s*(\w+) --> (\w+): (.*)$", re.M)
_WIDE, _HIGH = 143, 34  # between two states, and between two changes


def picture(source: str) -> str:
    """A diagram `stateDiagram-v2` of Mermaid as SVG."""
    changes = _CHANGE.findall(source)
    states = list(dict.fromkeys(name for first, second, _ in changes for name in (first, second)))
    at = {name: 71 + _WIDE * index for index, name in enumerate(states)}
    width, height = 142 + _WIDE * (len(states) - 1), 50 + _HIGH * len(changes)
    parts = [
        f'<svg viewBox="0 0 {width} {height}" width="{width}" role="img" class="states"'
        f' xmlns="http://www.w3.org/2000/svg"><title>{escape(", ".join(states))}</title>'
    ]
    for name, x in at.items():
        parts.append(
            f'<line x1="{x}" y1="28" x2="{x}" y2="{height}" class="state"/>'
            f'<rect x="{x - 69}" y="2" width="138" height="26" rx="5"/>'
            f'<text x="{x}" y="20" class="name">{escape(name)}</text>'
        )
    for index, (first, second, event) in enumerate(changes):
        start, end, y = at[first], at[second], 62 + _HIGH * index
        way = 1 if end > start else -1
        tip = end - 7 * way
        parts.append(
            f'<circle cx="{start}" cy="{y}" r="3"/>'
            f'<line x1="{start}" y1="{y}" x2="{tip}" y2="{y}"/>'
            f'<path d="M{end} {y}l{-8 * way} -4v8z"/>'
            f'<text x="{(start + end) / 2}" y="{y - 6}">{escape(event)}</text>'
        )
    return "".join([*parts, "</svg>"])
