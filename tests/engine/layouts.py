"""Strategies for the shapes of parameters, and the layouts that are planned for them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from composable.engine.params.layout import GatherLayout, ParamShape, plan_layout

SETTINGS = settings(max_examples=60, deadline=None)


@st.composite
def shapes(draw: Callable[..., Any], max_numel: int = 400) -> list[ParamShape]:
    """One to six parameters with odd, empty and one-element shapes, each cut along any of its
    dimensions, or not at all.
    """
    sizes = (
        st.lists(st.integers(0, 9), max_size=4)
        .map(tuple)
        .filter(lambda shape: math.prod(shape) <= max_numel)
    )
    found = []
    for index in range(draw(st.integers(1, 6))):
        shape = draw(sizes)
        dim = draw(st.one_of(st.none(), st.integers(0, len(shape) - 1))) if shape else None
        found.append(ParamShape(f"p{index}", shape, dim))
    return found


@dataclass(frozen=True)
class Planned:
    """A layout and what it was made from."""

    shapes: list[ParamShape]
    options: dict[str, Any]
    layout: GatherLayout

    def __getattr__(self, name: str) -> Any:
        return self.options[name]


@st.composite
def planned(draw: Callable[..., Any]) -> Planned:
    """Layouts for 1 to 7 ranks with every mixture of routes and alignments."""
    found = draw(shapes())
    align = draw(st.sampled_from([1, 3, 4, 16]))
    options = {
        "num_shards": draw(st.integers(1, 7)),
        "align": align,
        "packed_align": draw(
            st.sampled_from([divisor for divisor in (1, 2, 3, 4, 16) if align % divisor == 0])
        ),
        "direct_numel": draw(st.sampled_from([0, 1, 8, 40, 10**9])),
        "max_direct": draw(st.sampled_from([0, 1, 10**9])),
        "late": draw(st.booleans()),
    }
    return Planned(found, options, plan_layout(found, **options))
