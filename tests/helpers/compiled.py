"""A model, the ways to annotate and to compile it, and what is seen of the compiler; knows no
test.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

import composable
from composable import (
    checkpoint,
    fully_shard,
    replicate,
)
from tests.helpers.battery import Case
from tests.helpers.battery.case import mean_square, rows
from tests.helpers.compare import (
    differences_in_training,
    distributed_training,
    joined_training,
)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.twice(self.norm(x))

    def twice(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(torch.nn.functional.gelu(self.up(x)))
        return 2 * hidden


class Model(nn.Module):
    """Two units in a row, and parameters of the root before and behind them."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.first = Block(width)
        self.second = Block(width)
        self.head = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.embed(x))
        x = self.first(x)
        x = self.second(x.sin())
        out: Tensor = self.head(x)
        return out


CASE: Final = Case("two blocks", Model, rows(5, 12), mean_square, (Block,))
STEPS: Final = 3
ARMED_FROM: Final = 2  # steps after which nothing may be compiled any more


# --- how to annotate ----------------------------------------------------------------------------


def blocks_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, Block)]


def _shard(model: nn.Module) -> None:
    fully_shard(model, policy={Block})


def shard_and_keep(model: nn.Module) -> None:
    fully_shard(model, policy={Block}, reshard_after_forward=False)


def shard_and_checkpoint(model: nn.Module) -> None:
    checkpoint(model, policy={Block})
    fully_shard(model, policy={Block})


def replicate_and_checkpoint(model: nn.Module) -> None:
    replicate(model, policy={Block})
    checkpoint(model, policy={Block})


def replicate_around_shards(model: nn.Module) -> None:
    for block in blocks_of(model):
        fully_shard(block)
    replicate(model)


SCHEMES: Final[dict[str, Callable[[nn.Module], None]]] = {
    "fully_shard": _shard,
    "fully_shard without resharding": shard_and_keep,
    "fully_shard and checkpoint": shard_and_checkpoint,
    "replicate and checkpoint": replicate_and_checkpoint,
    "replicate around fully_shard": replicate_around_shards,
}

# --- how to compile ------------------------------------------------------------------------------

# gets the model and torch.compile's options; returns what to call
Compiler = Callable[..., nn.Module]


def each_block(model: nn.Module, **options: Any) -> nn.Module:
    for block in blocks_of(model):
        block.compile(fullgraph=True, **options)
    return model


def wrap_each_block(model: nn.Module, **options: Any) -> nn.Module:
    for name, child in list(model.named_children()):
        if isinstance(child, Block):
            setattr(model, name, torch.compile(child, fullgraph=True, **options))
    return model


def _in_place(model: nn.Module, **options: Any) -> nn.Module:
    model.compile(**options)
    return model


def _wrap(model: nn.Module, **options: Any) -> nn.Module:
    wrapped: nn.Module = torch.compile(model, **options)
    return wrapped


COMPILERS: Final[dict[str, Compiler]] = {
    "each block": each_block,
    "each block, wrapped": wrap_each_block,
    "the model": _wrap,
    "the model, in place": _in_place,
}


# --- what is seen of the compiler ---------------------------------------------------------------


@contextmanager
def fresh_compiler() -> Iterator[None]:
    """Nothing compiled before, nor left behind; inductor starts no processes of its own."""
    with torch._dynamo.config.patch(error_on_recompile=False), warnings.catch_warnings():
        # the compiler's, about what it does itself
        warnings.filterwarnings("ignore", module=r"torch\..*")
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        torch._inductor.config.compile_threads = 1
        # takes longer than these graphs
        torch._inductor.config.cpp_cache_precompile_headers = False
        try:
            yield
        finally:
            torch.compiler.reset()


def graphs_made() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def ours_compiled() -> list[str]:
    """Functions of the library that Dynamo was asked about."""
    here = str(Path(composable.__file__).parent)
    seen = [reference() for reference in torch._dynamo.convert_frame.input_codes.seen]
    return [
        code.co_qualname for code in seen if code is not None and code.co_filename.startswith(here)
    ]


def assert_trains_as_one_process(model: nn.Module, called: nn.Module) -> int:
    """Train the annotated `model` by calling `called`; returns the number of graphs."""
    losses = 0
    graphs = []

    def loss(_: nn.Module, *inputs: Tensor) -> Tensor:
        nonlocal losses
        torch._dynamo.config.error_on_recompile = losses >= ARMED_FROM
        losses += 1
        graphs.append(graphs_made())
        return mean_square(called, *inputs)

    seen = distributed_training(replace(CASE, loss=loss), model, STEPS, seed=0)
    for value in seen.losses:
        dist.all_reduce(value)
        value /= dist.get_world_size()
    with torch._dynamo.compiled_autograd._disable():
        expected = joined_training(CASE, dist.get_world_size(), STEPS, seed=0)
    seen.gradients = [_plain_names(step) for step in seen.gradients]
    seen.parameters = _plain_names(seen.parameters)
    found = differences_in_training(expected, seen)
    assert not found, "\n  ".join(found[:12])
    assert graphs[ARMED_FROM] == graphs_made(), "something was compiled after the second step"
    assert ours_compiled() == []
    return graphs_made()


def _plain_names(tensors: dict[str, Any]) -> dict[str, Any]:
    """The names without torch.compile's wrappers around modules inside the model."""
    return {name.replace("._orig_mod", ""): tensor for name, tensor in tensors.items()}
