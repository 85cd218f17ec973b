"""What a forecast says is what a real run does: messages exactly, memory within its limit."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composable import checkpoint, fully_shard, replicate
from composable.comm import Comm, comms_wrapped_by
from composable.demo.memory import measure_step
from composable.errors import ForecastError
from composable.forecast import DEVICES, Device, Forecast, forecast
from composable.forecast.machine import Kind
from tests.helpers.communicators import Around
from tests.helpers.world import Pool

TOKENS = (2, 64)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.mix(self.norm(x)).view(*x.shape[:2], 3, 4, -1).unbind(2)
        mixed = F.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (query, key, value)), is_causal=True
        )
        x = x + mixed.transpose(1, 2).reshape(x.shape)
        return x + self.down(F.gelu(self.up(x)))


class Decoder(nn.Module):
    def __init__(self, width: int = 96, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(250, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 250)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def sharded(model: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(model, policy={Block}, mesh=mesh)


def kept(model: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(model, policy={Block}, mesh=mesh, reshard_after_forward=False)


def recomputed(model: nn.Module, mesh: DeviceMesh) -> None:
    checkpoint(model, policy={Block})
    fully_shard(model, policy={Block}, mesh=mesh)


def replicated(model: nn.Module, mesh: DeviceMesh) -> None:
    replicate(model, mesh=mesh)


ANNOTATE: dict[str, tuple[Callable[..., None], dict[int, dict[str, int]]]] = {
    "sharded": (sharded, {2: {"ranks": 2}, 4: {"ranks": 4}}),
    "kept": (kept, {2: {"ranks": 2}}),
    "recomputed": (recomputed, {2: {"ranks": 2}}),
    "hybrid": (sharded, {4: {"replicate": 2, "shard": 2}}),
    "replicated": (replicated, {2: {"ranks": 2}}),
}
CASES = [(name, ranks) for name, (_, meshes) in ANNOTATE.items() for ranks in meshes]


def batch() -> Tensor:
    return torch.zeros(TOKENS, dtype=torch.int64)


# --- a real step --------------------------------------------------------------------------------


class Counting(Around):
    """Notes each collective: kind, label, ranks, and bytes of the whole."""

    def __init__(self, comm: Comm, seen: list[tuple[str, str, int, int]]) -> None:
        super().__init__(comm)
        self._seen = seen

    def _note(self, kind: str, label: str, wholes: Any) -> None:
        nbytes = sum(whole.nbytes for whole in wholes)
        self._seen.append((kind, label, self.size, nbytes))

    def all_gather(self, pairs: Any, label: str) -> Any:
        self._note("all-gather", label, [whole for whole, _ in pairs])
        return super().all_gather(pairs, label)

    def reduce_scatter(self, pairs: Any, label: str, scale: float = 1.0) -> Any:
        self._note("reduce-scatter", label, [whole for _, whole in pairs])
        return super().reduce_scatter(pairs, label, scale)

    def all_reduce(self, tensors: Any, label: str, scale: float = 1.0) -> Any:
        self._note("all-reduce", label, tensors)
        return super().all_reduce(tensors, label, scale)


def real_step(name: str, sizes: dict[str, int]) -> tuple[list[Any], int, int]:
    """Messages of the second step, its peak, and bytes at rest before it."""
    seen: list[tuple[str, str, int, int]] = []
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    torch.manual_seed(0)
    model, tokens = Decoder(), torch.randint(250, TOKENS)
    with comms_wrapped_by(partial(Counting, seen=seen)):
        ANNOTATE[name][0](model, mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model(tokens).backward()
    optimizer.step()
    seen.clear()
    trace = measure_step(model, optimizer, lambda: model(tokens), ignore=[tokens])
    peak = max(map(sum, trace.totals))
    return seen, peak, sum(trace.totals[0])


def told(name: str, ranks: int, device: str = "cpu", **options: Any) -> Forecast:
    annotate, meshes = ANNOTATE[name]
    return forecast(
        Decoder, annotate, batch, ranks=ranks, mesh=meshes[ranks], device=device, **options
    )


@pytest.mark.unsampled
@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_messages_are_those_of_a_real_run_and_memory_is_within_five_percent(
    pool: Pool, name: str, ranks: int
) -> None:
    seen, peak, rests = pool.run(ranks, real_step, name, ANNOTATE[name][1][ranks])[0]
    found = told(name, ranks)
    counts: dict[tuple[str, str, int], list[int]] = {}
    for kind, label, size, nbytes in seen:
        unit = label.partition("of unit '")[2].partition("'")[0]
        counts.setdefault((kind, unit, size), []).append(nbytes)
    expected = {key: (len(sizes), sum(sizes)) for key, sizes in counts.items()}
    assert {
        (each.kind, each.unit, each.ranks): (each.count, each.nbytes)
        for each in found.collectives
    } == expected
    # the meter does not see blocks that no buffer uses
    used = max(sum(sizes[: Kind.IDLE]) for _, sizes in found.memory)
    assert used == pytest.approx(peak, rel=0.05), found
    assert used <= found.peak
    assert sum(found.at_rest.values()) == pytest.approx(rests, rel=0.05)
