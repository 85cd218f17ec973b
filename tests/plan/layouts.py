"""Strategies for parameters and their layouts; knows shapes and numbers of ranks, no tensor."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from composable.plan.layout import Layout, ParamSpec, plan_layout


def specs_with(max_numel: int = 400, sizes: st.SearchStrategy[int] | None = None) -> st.SearchStrategy[list[ParamSpec]]:
    """One to six parameters with odd, empty and one-element shapes, each cut along any of its dimensions, or not at all."""
    shapes = st.lists(sizes if sizes is not None else st.integers(0, 9), max_size=4).map(tuple)

    @st.composite
    def draw_specs(draw: Callable[..., Any]) -> list[ParamSpec]:
        count = draw(st.integers(1, 6))
        specs = []
        for index in range(count):
            shape = draw(shapes.filter(lambda s: math.prod(s) <= max_numel))
            dim = draw(st.one_of(st.none(), st.integers(0, len(shape) - 1))) if shape else None
            specs.append(ParamSpec(f"p{index}", shape, dim))
        return specs

    return draw_specs()


@dataclass(frozen=True)
class Planned:
    """A layout and what it was made from."""

    specs: list[ParamSpec]
    num_shards: int
    align: int
    layout: Layout
    packed_align: int = 0  # 0: as `align`
    multiple: int = 1  # elements of messages for each rank


@st.composite
def planned(draw: Callable[..., Any], *, copied: bool = False, align: int = 0) -> Planned:
    """Layouts for 1 to 7 ranks with every mixture of routes.

    Args:
        copied: for modules that compute in another dtype.
        align: of all slots, and messages are multiples of a divisor of it. 0: any alignment, and messages of any size.
    """
    specs = draw(specs_with())
    num_shards = draw(st.integers(1, 7))
    given = align
    align = given or draw(st.sampled_from([1, 3, 4, 16]))
    packed_align = draw(st.sampled_from([divisor for divisor in (1, 2, 3, 4, 16) if align % divisor == 0]))
    multiple = packed_align if given else 1
    direct = draw(st.sampled_from([0, 1, 8, 40, 10**9]))
    layout = plan_layout(
        specs,
        num_shards=num_shards,
        direct_numel=direct,
        align=align,
        packed_align=packed_align,
        copied=copied,
        direct_multiple=multiple,
    )
    return Planned(specs, num_shards, align, layout, packed_align, multiple)
