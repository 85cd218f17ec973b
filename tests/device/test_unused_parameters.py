"""What ranks write about who has a gradient, added up, tells which parameters nobody used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

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
        assert [flags.unused(here, row.tolist()) for here in missing] == [[5], [5], [5]]
        assert flags.unused(flags.parameters, row.tolist()) == [5]


def test_who_misses_nothing_writes_what_was_made_once() -> None:
    flags = UseFlags((0, 1), torch.float32, _CPU)
    assert flags.without(()) is flags.without([])
    assert flags.without([1]).tolist() == [1.0, 0.0]
    assert flags.without(()).tolist() == [1.0, 1.0]


class _Operations(TorchDispatchMode):
    """The names of the operations in its body."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rows", [None, 3])
def test_what_is_missing_goes_to_the_device_as_numbers_and_not_as_an_index(rows: int | None) -> None:
    """An index that is a list is copied from memory that is not pinned: the host would wait for all that was launched."""
    flags = UseFlags((7, 2, 5), torch.float32, _CPU, rows)
    with _Operations() as operations:
        found = flags.without([7, 5])
    assert "index_put_" not in operations.seen
    assert found.tolist() == ([0.0, 1.0, 0.0] if rows is None else [[0.0, 1.0, 0.0]] * 3)
