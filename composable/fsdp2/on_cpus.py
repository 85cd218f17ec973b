"""For `install(cpu=True)`: let accelerate shard on CPUs, where it does not offer FSDP itself."""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

USE_CPU: Final = "ACCELERATE_USE_CPU"  # accelerate, too, takes CPUs for ranks if it is "true"


def pairs_of_accelerate() -> list[tuple[Any, Any]]:
    """Return accelerate's class, and one that takes CPU ranks, too; none if it is missing."""
    return [] if find_spec("accelerate") is None else [_pair()]


@cache
def _pair() -> tuple[Any, Any]:
    state = import_module("accelerate.state")
    theirs = state.AcceleratorState
    kinds = import_module("accelerate.utils").DistributedType

    def __init__(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        theirs.__init__(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if self.distributed_type != kinds.MULTI_CPU or not asks_for_fsdp() or fsdp_plugin is None:
            return
        # what AcceleratorState does on accelerators
        if self._mixed_precision != "no":
            fsdp_plugin.set_mixed_precision(self._mixed_precision)
        self.distributed_type, self.fsdp_plugin = kinds.FSDP, fsdp_plugin
        state.PartialState._shared_state["distributed_type"] = kinds.FSDP

    # a subclass: they share their state by an attribute of the class
    return theirs, type(theirs.__name__, (theirs,), {"__init__": __init__})


def asks_for_fsdp() -> bool:
    """Whether accelerate was asked for FSDP in this process; it says so in the environment."""
    return os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
