"""Names under which profilers show what the library does; knows neither who asks for one nor what is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from torch.profiler import record_function

from composable.device.private import profiled

PREFIX: Final = "composable: "


def labelled(label: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call `function`; a profiler that runs shows the call as `label`. Where it matters ask `profiled()` first."""
    with record_function(PREFIX + label):
        return function(*args)


__all__ = ["PREFIX", "labelled", "profiled"]
