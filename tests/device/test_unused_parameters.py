"""What ranks write about who has a gradient, added up, tells which parameters nobody used."""

from __future__ import annotations

import pytest
import torch

from composable.device.unused_parameters import UseFlags

_CPU = torch.device("cpu")


@pytest.mark.parametrize("rows", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_parameter_that_one_rank_used_was_used(rows: int | None, dtype: torch.dtype) -> None:
    flags = UseFlags((7, 2, 5), dtype, _CPU, rows)
    missing = ([7, 5], [5], [7, 5])  # on each of three ranks
    written = [flags.without(here) for here in missing]
    summed = torch.stack(written).sum(0)
    for row in [summed] if rows is None else summed:
        assert [flags.unused(here, row) for here in missing] == [[5], [5], [5]]
        assert flags.unused(flags.parameters, row) == [5]


def test_who_misses_nothing_writes_what_was_made_once() -> None:
    flags = UseFlags((0, 1), torch.float32, _CPU)
    assert flags.without(()) is flags.without([])
    assert flags.without([1]).tolist() == [1.0, 0.0]
    assert flags.without(()).tolist() == [1.0, 1.0]
