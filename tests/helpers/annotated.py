"""Ways to annotate the model of four units in `tests.helpers.leaving`; knows no step."""

from __future__ import annotations

from typing import Any, Final

from torch import nn

from composable import fully_shard, replicate
from tests.helpers.leaving import Layer, Layers

# Seconds: nobody should wait for as long; a test that does takes all of it and fails.
PATIENCE: Final = 45.0


def sharded(model: nn.Module, **options: Any) -> None:
    fully_shard(model, policy={Layer}, **options)


def replicated(model: nn.Module, **options: Any) -> None:
    replicate(model, **options)


def next_to_shards(model: Layers, **options: Any) -> None:
    replicate(model[1], **options)
    fully_shard(model, policy={Layer}, **options)
