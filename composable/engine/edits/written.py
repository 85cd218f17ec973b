"""Record that a call that all ranks make has written to at-rest parameters.

Such calls write to local tensors, for example to step shards. No version counter distinguishes
these writes from a write of one rank alone, and no message may depend on such a write
(`param_group.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from composable.compilation import untraced
from composable.engine.step.unit import Unit
from composable.torch_private import in_backward


@untraced
def written(units: Iterable[Unit]) -> None:
    """Tell `units` that their parameters at rest have new values, on all ranks.

    Whatever is gathered of them is out of date. Units that a scope keeps are gathered again at
    once, since each rank may call them in an order of its own there, and modules hold what the
    scope shows. So all ranks call this, with the same units.
    """
    units = list(units)
    for unit in units:
        unit.note_written()
    kept = [unit for unit in units if unit.kept_by]
    for unit in kept:
        unit.unshard()
    for unit in kept:
        unit.wait_for_unshard()
    show_again(kept)


@contextmanager
def at_rest(units: Sequence[Unit]) -> Iterator[None]:
    """Let modules hold parameters at rest inside, but for those of a forward or backward that is
    under way; then what scopes show.
    """
    for unit in units:
        if not unit.step.calls and not in_backward():
            unit.swap_out()
    try:
        yield
    finally:
        show_again(units)


def show_again(units: Iterable[Unit]) -> None:
    """Let modules hold again what scopes show, after a call that looked at parameters at rest."""
    for unit in units:
        unit.show_again()
