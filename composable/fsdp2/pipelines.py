"""Make annotated modules visible to torch's schedules that split backwards, without `install`.

Their stages check whether a module is an instance of FSDP2's class. If it is, they call the methods
of `FSDPModule` that accumulate or reduce gradients.
"""

from __future__ import annotations

from typing import Any, Final

from torch import nn
from torch.distributed import fsdp

from composable.features.split_backwards import ON_SPLIT
from composable.fsdp2.module import TORCHS, FSDPModule
from composable.fsdp2.verb import state
from composable.torch_private import exchange_in_pipelining

_VERB: Final[Any] = fsdp.fully_shard  # whatever torch.distributed.fsdp holds later on


class _OfBoth:
    """In place of torch's `fully_shard`, of which a stage reads `state` alone."""

    @staticmethod
    def state(module: nn.Module) -> Any:
        return state(module) or _VERB.state(module)


def _show_stages() -> None:
    """Let the stages see annotated modules."""
    exchange_in_pipelining("FSDPModule", TORCHS, FSDPModule)
    exchange_in_pipelining("fully_shard", _VERB, _OfBoth)


ON_SPLIT.append(_show_stages)
