"""What a forecast says is what a real run does: messages exactly, memory within its limit."""

from __future__ import annotations

import ast
import gc
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.optim.optimizer as torch_optimizer
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import DataParallelMeshDims, FullyShardedDataParallel
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from composable import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    checkpoint,
    clip_grad_norm_,
    fsdp2,
    fully_shard,
    offload_activations,
    replicate,
    step_on_matrices,
)
from composable.comm.backends import comms_wrapped_by
from composable.comm.base import Comm
from composable.comm.launch import Launch
from composable.errors import ForecastError
from composable.extras.forecast import devices
from composable.extras.forecast.plans import _Search, repeated
from composable.forecast import (
    DEVICES,
    Collective,
    Forecast,
    Plan,
    compare,
    forecast,
    suggest,
)
from composable.torch_private import WRAPPERS, group_named
from examples.demo.memory import measure_step
from tests.helpers.communicators import Around
from tests.helpers.world import Pool

TOKENS = (2, 64)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def mixed(self, x: Tensor) -> Tensor:
        query, key, value = self.mix(self.norm(x)).view(*x.shape[:2], 3, 4, -1).unbind(2)
        mixed = F.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (query, key, value)), is_causal=True
        )
        return x + mixed.transpose(1, 2).reshape(x.shape)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mixed(x)
        return x + self.down(F.gelu(self.up(x)))


class Decoder(nn.Module):
    def __init__(self, width: int = 96, layers: int = 3, block: type[Block] = Block) -> None:
        super().__init__()
        self.embedding = nn.Embedding(250, width)
        self.layers = nn.ModuleList(block(width) for _ in range(layers))
        self.head = nn.Linear(width, 250)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class Gated(Block):
    """With the shapes of 7B models, and a part of their width."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.gate, self.up = (nn.Linear(width, 43 * width // 16, bias=False) for _ in range(2))
        self.down = nn.Linear(43 * width // 16, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mixed(x)
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class OfHalves(Block):
    """Without attention: computes with any part of a sequence."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        del self.mix

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Tied(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(96, 250, bias=False)
        self.head.weight = self.embedding.weight


class Clipping(torch.optim.AdamW):
    """An optimizer that clips."""

    def step(self, *_: Any) -> None:  # type: ignore[override]
        clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        super().step()


def optimizer_of(name: str) -> type[torch.optim.AdamW]:
    return Clipping if name.endswith("clipped") else torch.optim.AdamW


def model_of(name: str) -> Decoder:
    if name.startswith("tied"):
        return Tied()
    if name == "sequence parallel":
        return Decoder(block=OfHalves)
    return Decoder(256, 6, Gated).to(torch.bfloat16) if name.startswith("7B") else Decoder()


def sharded(model: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(model, policy={Block}, mesh=mesh)


def kept(model: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(model, policy={Block}, mesh=mesh, reshard_after_forward=False)


def recomputed(model: nn.Module, mesh: DeviceMesh) -> None:
    checkpoint(model, policy={Block})
    fully_shard(model, policy={Block}, mesh=mesh)


def replicated(model: nn.Module, mesh: DeviceMesh) -> None:
    replicate(model, mesh=mesh)


def half(model: nn.Module, mesh: DeviceMesh) -> None:
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, policy={Block}, mesh=mesh, mp_policy=bf16)


def recomputed_in_half(model: nn.Module, mesh: DeviceMesh) -> None:
    checkpoint(model, policy={Block})
    half(model, mesh)


def distribute(model: nn.Module, mesh: DeviceMesh) -> None:
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
        "layers.*.up": ColwiseParallel(),
        "layers.*.down": RowwiseParallel(),
    }
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, policy={Block}, mesh=mesh["dp"])


def distribute_sequences(model: nn.Module, mesh: DeviceMesh) -> None:
    cut = Shard(1)
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=cut),
        "head": ColwiseParallel(input_layouts=cut, output_layouts=Replicate()),
        "layers.*.norm": SequenceParallel(),
        "layers.*.up": ColwiseParallel(input_layouts=cut),
        "layers.*.down": RowwiseParallel(output_layouts=cut),
    }
    parallelize_module(model, mesh["tp"], plan)
    checkpoint(model, policy={Block})
    half(model, mesh["dp"])


def on_the_host(model: nn.Module, mesh: DeviceMesh) -> None:
    """Where everything is already."""
    offload_activations(model, policy={Block})
    fully_shard(model, policy={Block}, mesh=mesh, offload_policy=CPUOffloadPolicy())


# what annotates, and the meshes, by their ranks, over which it is compared with a real run
ANNOTATE: dict[str, tuple[Callable[..., None], dict[int, dict[str, int]]]] = {
    "sharded": (sharded, {4: {"ranks": 4}}),
    "kept": (kept, {2: {"ranks": 2}}),
    "recomputed": (recomputed, {2: {"ranks": 2}}),
    "replicated": (replicated, {2: {"ranks": 2}}),
    "half, hybrid": (half, {4: {"replicate": 2, "shard": 2}}),
    "7B, half, recomputed": (recomputed_in_half, {2: {"ranks": 2}}),
    "tied, clipped": (sharded, {2: {"ranks": 2}}),
    "tied, replicated": (replicated, {2: {"ranks": 2}}),
    "tensor parallel": (distribute, {4: {"dp": 2, "tp": 2}}),
    "sequence parallel": (distribute_sequences, {4: {"dp": 2, "tp": 2}}),
    "offloaded": (on_the_host, {2: {"ranks": 2}}),
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

    def _note(self, kind: str, text: str, wholes: Any) -> None:
        nbytes = sum(whole.nbytes for whole in wholes)
        self._seen.append((kind, text, self.size, nbytes))

    def all_gather(self, pairs: Any, launch: Launch) -> Any:
        self._note("all-gather", launch.text, [whole for whole, _ in pairs])
        return super().all_gather(pairs, launch)

    def reduce_scatter(self, pairs: Any, launch: Launch, scale: float = 1.0) -> Any:
        self._note("reduce-scatter", launch.text, [whole for _, whole in pairs])
        return super().reduce_scatter(pairs, launch, scale)

    def all_reduce(self, tensors: Any, launch: Launch, scale: float = 1.0) -> Any:
        self._note("all-reduce", launch.text, tensors)
        return super().all_reduce(tensors, launch, scale)


KINDS_OF_DTENSORS = {
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "all_reduce": "all-reduce",
}


class CountingDTensors(TorchDispatchMode):
    """Notes the collectives that DTensors launch, too; they have no unit."""

    def __init__(self, seen: list[tuple[str, str, int, int]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not WRAPPERS.isdisjoint(types):
            return NotImplemented
        made = func(*args, **(kwargs or {}))
        kind = KINDS_OF_DTENSORS.get(func.overloadpacket.__name__)
        if kind is not None:
            whole = made if kind == "all-gather" else args[0]
            self._seen.append((kind, "", group_named(args[-1]).size(), whole.nbytes))
        return made


def real_step(name: str, sizes: dict[str, int]) -> tuple[list[Any], int, int]:
    """Messages of the second step, its peak, and bytes at rest before it."""
    gc.collect()
    before = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter)]
    seen: list[tuple[str, str, int, int]] = []
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    torch.manual_seed(0)
    model, tokens = model_of(name), torch.randint(250, TOKENS)
    with comms_wrapped_by(partial(Counting, seen=seen)):
        ANNOTATE[name][0](model, mesh)
        optimizer = optimizer_of(name)(model.parameters())
        model(tokens).backward()
        optimizer.step()
        seen.clear()
        with CountingDTensors(seen):
            trace = measure_step(model, optimizer, lambda: model(tokens), ignore=[tokens, *before])
    peak = max(map(sum, trace.totals))
    return seen, peak, sum(trace.totals[0])


def forecast_for(name: str, ranks: int, device: str = "cpu", **options: Any) -> Forecast:
    annotate, meshes = ANNOTATE[name]
    make = partial(model_of, name)
    options |= {"mesh": meshes.get(ranks), "device": device, "optimizer": optimizer_of(name)}
    return forecast(make, annotate, batch, ranks=ranks, **options)


@pytest.mark.unsampled
@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_messages_are_those_of_a_real_run_and_memory_is_within_a_percent(
    pool: Pool, name: str, ranks: int
) -> None:
    seen, peak, rests = pool.run(ranks, real_step, name, ANNOTATE[name][1][ranks])[0]
    found = forecast_for(name, ranks)
    counts: dict[tuple[str, str, int], list[int]] = {}
    for kind, label, size, nbytes in seen:
        unit = label.partition("of unit '")[2].partition("'")[0]
        counts.setdefault((kind, unit, size), []).append(nbytes)
    expected = {key: (len(sizes), sum(sizes)) for key, sizes in counts.items()}
    sent: dict[tuple[str, str, int], tuple[int, int]] = {}
    for each in found.collectives:
        key = each.kind, "" if each.dimension == "tp" else each.unit, each.ranks
        count, nbytes = sent.get(key, (0, 0))
        sent[key] = count + each.count, nbytes + each.nbytes
    assert sent == expected
    assert found.peak == pytest.approx(peak, rel=0.01), found
    assert sum(found.at_rest.values()) == pytest.approx(rests, rel=0.01)


def test_a_table_says_whether_it_fits_where_the_peak_is_and_what_is_sent() -> None:
    found = forecast_for("sharded", 4, device="h100")
    said = str(found)
    assert said.startswith(
        "Decoder, 355,258 parameters in float32, AdamW with state in float32; a rank's batch:"
        " 2 x 64\nH100, 4 ranks: fits\npeak of memory"
    )
    assert "backward of unit" in found.where
    gathered = sum(each.nbytes for each in found.collectives if each.kind == "all-gather")
    assert f"all-gather of 4 ranks {gathered / 2**20:.1f} MiB" in " ".join(said.split())
    kept = json.loads(json.dumps(found.to_dict()))
    assert kept["peak"] == found.peak == sum(found.at_peak.values())
    assert found.exposed <= found.seconds
    assert found.computing <= found.seconds
    beyond = int(found.peak * DEVICES["h100"].margin)  # what was measured beyond forecasts
    assert f"not counted {beyond / 2**20:.1f} MiB at most" in " ".join(said.split())
    for capacity, verdict in ((found.peak + beyond // 2, "DOES NOT FIT"), (beyond * 22, "fits")):
        small = replace(DEVICES["h100"], name="Small", capacity=capacity)
        said = str(replace(found, device=small))
        assert said.splitlines()[1] == f"Small, 4 ranks: {verdict}"


def lora(model: nn.Module) -> None:
    model.requires_grad_(requires_grad=False)
    model.get_submodule("head").to(torch.bfloat16).requires_grad_()
    fully_shard(model, policy={Block})


def named_batch() -> dict[str, Tensor]:
    return {"tokens": batch()}


@pytest.mark.parametrize(
    ("annotate", "make_batch", "optimizer", "said"),
    [
        (
            lora,
            named_batch,
            torch.optim.AdamW,
            "Decoder, 355,258 parameters in float32 and bfloat16 (24,250 trained), AdamW with state"
            " in bfloat16; a rank's batch: tokens 2 x 64",
        ),
        (
            replicate,
            lambda: (batch(),),
            torch.optim.SGD,
            "Decoder, 355,258 parameters in float32, SGD; a rank's batch: 2 x 64",
        ),
        (
            replicate,
            batch,
            None,
            "Decoder, 355,258 parameters in float32, no optimizer; a rank's batch: 2 x 64",
        ),
    ],
)
def test_the_first_line_says_what_is_forecast(
    annotate: Any, make_batch: Any, optimizer: Any, said: str
) -> None:
    found = forecast(Decoder, annotate, make_batch, ranks=2, optimizer=optimizer)
    assert str(found).splitlines()[0] == said


def test_amounts_are_reported_in_units_of_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    small = forecast(lambda: nn.Linear(4, 4), fully_shard, lambda: torch.zeros(2, 4), ranks=2)
    assert re.search(r"^peak of memory +\d+\.\d KiB", str(small), re.M)
    assert not re.search(r"^step +0.0 ms", str(small), re.M)
    both = compare(Decoder, {"a": replicate, "b": ANNOTATE["sharded"][0]}, batch, ranks=2)
    assert "peak, MiB" in str(both)
    labels: list[str] = []

    def seen(figure: Figure, _: Path) -> None:
        labels.extend((figure.axes[0].get_ylabel(), figure.axes[0].get_xlabel()))
        labels.extend(text.get_text() for text in figure.axes[0].texts)

    monkeypatch.setattr(Figure, "savefig", seen)
    small.plot("-")
    both.plot("-")
    assert labels[0] == "memory, KiB"
    assert re.match(r"peak \d+\.\d KiB, backward", labels[2])
    assert labels[4] == "peak of memory, MiB"


@pytest.mark.parametrize(
    "annotate",
    [
        lambda _: None,
        replicate,
        lambda model: fully_shard(
            model, ignored_params=[model.head.weight, model.embedding.weight]
        ),
    ],
    ids=["alone", "replicated", "ignored"],
)
def test_tied_weights_count_once(annotate: Any) -> None:
    def untied() -> Decoder:
        model = Tied()
        model.head.weight = nn.Parameter(model.head.weight.clone())
        return model

    def with_memory() -> Decoder:
        with torch.device("cpu"):
            return Tied()

    once, also, twice = (
        sum(forecast(make, annotate, batch, ranks=2, optimizer=torch.optim.SGD).at_rest.values())
        for make in (Tied, with_memory, untied)
    )
    assert once == also
    assert twice - once == pytest.approx(250 * 96 * 4, abs=1024)


def test_what_saves_memory_costs_what_it_costs() -> None:
    plain, kept, recomputed = (
        forecast_for(n, 2, device="h100") for n in ("sharded", "kept", "recomputed")
    )
    assert kept.peak > plain.peak > recomputed.peak
    assert kept.messages < plain.messages == recomputed.messages
    assert recomputed.computing > plain.computing


def test_of_one_rank_no_value_is_read() -> None:
    def annotate(model: Decoder) -> None:
        replicate(model.embedding)
        fully_shard(model, policy={Block})

    # what a message would hold is memory that nobody wrote to: here it is NaN
    torch.use_deterministic_algorithms(True)
    try:
        found = forecast(
            Decoder, annotate, lambda: torch.zeros(TOKENS, dtype=torch.int64), ranks=1, device="cpu"
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert found.messages == 0


def test_links_between_nodes_are_slower_than_inside_of_them() -> None:
    h100 = DEVICES["h100"]
    assert h100.bandwidth(list(range(8))) == h100.links
    assert h100.bandwidth(list(range(0, 64, 8))) == h100.network
    assert h100.network < h100.bandwidth(list(range(64))) <= h100.links


def test_pictures_are_drawn(tmp_path: Path) -> None:
    plans = {name: ANNOTATE[name][0] for name in ("sharded", "replicated")}
    both = compare(Decoder, plans, batch, ranks=2, device="h100")
    for name, drawn in (("one", both.forecasts["sharded"]), ("both", both)):
        drawn.plot(tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000


def test_plans_that_fit_come_first_and_the_fastest_of_them_is_the_best() -> None:
    plans = {name: ANNOTATE[name][0] for name in ("replicated", "sharded", "recomputed")}
    options: dict[str, Any] = {"ranks": 2, "device": "h100"}
    both = compare(Decoder, plans, batch, **options)
    assert both.best == next(iter(both.forecasts))
    times = [each.seconds for each in both.forecasts.values()]
    assert times == sorted(times)
    limit = both.forecasts["sharded"].peak
    assert compare(Decoder, plans, batch, memory=limit, **options).best == "recomputed"
    tight = compare(Decoder, plans, batch, memory=int(limit * 1.06), **options)
    assert tight.best in ("sharded", "recomputed")
    assert "replicated" in str(tight).splitlines()[-1]
    assert str(tight).splitlines()[-1].endswith("does not fit")


STYLES = {
    "layers.*.up": ColwiseParallel(),
    "layers.*.down": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=Replicate()),
}

PLANS = [
    Plan("fully_shard", (Block,), tp=2, tp_plan=STYLES, recomputed=1, half=True),
    Plan("fully_shard", (Block,), tp=2, tp_plan=STYLES, shards=2, keep=True),
    Plan("replicate", (Block,), tp=2, tp_plan=STYLES),
    Plan("replicate", (Block,)),
    Plan("fully_shard", (Block,), keep=True, half=True),
    Plan("fully_shard", (Block,), shards=2, recomputed=2),
    Plan("fully_shard", (Block,), offloaded=2),
    Plan("fully_shard", (Block, nn.Embedding), recomputed=3, offloaded=3),
]


@pytest.mark.unsampled
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_code_to_paste_does_what_was_forecast(plan: Plan) -> None:
    """It knows the model, and what it imports by itself."""
    options: dict[str, Any] = {"ranks": 4, "mesh": plan.mesh(4)}

    def pasted(model: nn.Module) -> None:
        exec(plan.code(4, "cpu"), {"model": model, "tp_plan": STYLES})

    # one that is given its mesh makes none
    options_of_code = options if len(plan.mesh(4)) == 1 else {"ranks": 4}
    reported = forecast(Decoder, plan.annotate, large_batch, **options)
    found = forecast(Decoder, pasted, large_batch, **options_of_code)
    assert {**reported.to_dict(), "mesh": None} == {**found.to_dict(), "mesh": None}
    if plan.offloaded:
        assert reported.on_host > 1 << 20


def large_batch() -> Tensor:
    """Whose activations are large enough to be offloaded."""
    return torch.zeros(16, 256, dtype=torch.int64)


def test_a_suggestion_fits_and_is_code() -> None:
    ample = suggest(Decoder, batch, ranks=2)
    assert ample.plan.half
    assert not ample.plan.recomputed
    tight = suggest(Decoder, batch, ranks=2, memory=int(ample.forecast.peak * 0.8))
    assert tight.forecast.peak <= ample.forecast.peak * 0.8
    assert tight.forecast.seconds >= ample.forecast.seconds
    assert tight.code == tight.plan.code(2)
    with pytest.raises(ForecastError, match="nothing that was tried fits into"):
        suggest(Decoder, batch, ranks=2, memory=1000)


class Pretended:
    """What a forecast of a plan would say, by arithmetic: 20 blocks over 64 ranks."""

    def __init__(self, network: float, moves: float) -> None:
        self.network, self.moves, self.count = network, moves, 0

    def __call__(self, plan: Plan) -> Any:
        self.count += 1
        sharded = plan.verb == "fully_shard"
        rests = 6400 / (plan.shards or 64) if sharded else 6400
        stay = 20 - plan.recomputed - plan.offloaded * (plan.recomputed < 20)
        activations = 10 + 100 * stay + 5 * max(0, plan.recomputed - plan.offloaded)
        waits = self.network * (1 if plan.keep else 2 if sharded else 1.5)
        waits *= 0.5 if plan.shards else 1
        seconds = 1000 + waits + 20 * plan.recomputed + self.moves * plan.offloaded
        peak = rests + activations + (2000 if plan.keep or not sharded else 100)
        return SimpleNamespace(
            peak=peak, seconds=seconds, exposed=waits, at_rest={"parameters": rests}
        )


@pytest.mark.parametrize("limit", [200, 250, 450, 1000, 2300, 3000, 4000, 9000])
@pytest.mark.parametrize("network", [1.0, 300.0])
@pytest.mark.parametrize("moves", [15.0, 40.0])
def test_a_search_finds_nearly_the_best_plan_by_few_forecasts(
    limit: int, network: float, moves: float
) -> None:
    run = Pretended(network, moves)
    search, lean = _Search(run, limit, 20, most=24), Plan("fully_shard", (Block,))
    search.find(lean, 64, DEVICES["h100"].per_node, 2000)
    tried = run.count
    every = [
        replace(lean, shards=shards, keep=keep, recomputed=recomputed, offloaded=offloaded)
        for shards in (None, 8, 16, 32)
        for keep in (True, False)
        for recomputed in range(21)
        for offloaded in (range(21) if not recomputed else (0, 20) if recomputed == 20 else (0,))
    ]
    fitting = [
        each for each in map(run, [*every, replace(lean, verb="replicate")]) if each.peak <= limit
    ]
    assert tried < 25
    best = search.best
    assert (best is None) is (not fitting)
    if best is not None:
        assert run(best).seconds <= 1.05 * min(each.seconds for each in fitting)


class Both(nn.Module):
    """An encoder beside a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16) for _ in range(2))
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(8, 2, 16) for _ in range(2))
        self.embeddings = nn.ModuleList(nn.Embedding(99, 8) for _ in range(2))


def test_units_are_what_repeats_or_what_transformers_does_not_split() -> None:
    assert repeated(Decoder()) == (Block,)
    model = Both()
    assert repeated(model) == (nn.TransformerDecoderLayer, nn.TransformerEncoderLayer)
    model._no_split_modules = ["TransformerEncoderLayer"]  # type: ignore[assignment]
    assert repeated(model) == (nn.TransformerEncoderLayer,)


# --- what cannot be run without values ----------------------------------------------------------


class Reads(Decoder):
    def forward(self, tokens: Tensor) -> Tensor:
        loss = super().forward(tokens)
        return loss * loss.item()


class Router(nn.Module):
    """Goes by values, as experts do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.inner(x)
        return made * len(made.sum((0, 1)).argmax(0, keepdim=True).tolist())


class Routes(Decoder):
    def __init__(self) -> None:
        super().__init__()
        block = self.get_submodule("layers.1")
        block.up = Router(block.get_submodule("up"))


class ReadsAPart(Decoder):
    """Of something large that no operation gave a value."""

    def forward(self, tokens: Tensor) -> Tensor:
        loss = super().forward(tokens)
        return loss * (loss * self.head.weight)[0, 0].item()


class Counts(Decoder):
    """Goes by positions, as transformers look for packed sequences, and by the tokens."""

    def forward(self, tokens: Tensor) -> Tensor:
        packed = (torch.arange(5000, device=tokens.device).diff() != 1).cumsum(-1)
        assert packed[-1] == 0
        assert tokens.repeat(40, 1).sum() == 0
        return super().forward(tokens)


class Looks(Decoder):
    """By numbers, which is legal: the shape is that of the numbers."""

    def forward(self, tokens: Tensor) -> Tensor:
        loss = super().forward(tokens)
        return loss + self.head.weight[tokens.flatten()].sum()


class Masks(Decoder):
    """Without what is padded."""

    def forward(self, tokens: Tensor) -> Tensor:
        x, kept = self.embedding(tokens), tokens.cumsum(1) + torch.arange(64) < 40
        assert (x[kept].shape, x[:, kept[0]].shape) == ((80, 96), (2, 40, 96))
        x[kept[:, :], 0] *= 2
        selected = x.masked_select(kept[..., None])
        assert len(selected) == 80 * 96
        return F.cross_entropy(self.head(x[kept]), tokens[kept]) + selected.sum()


class Picks(Decoder):
    def forward(self, tokens: Tensor) -> Tensor:
        loss = super().forward(tokens)
        return loss + self.head.weight[self.head.weight > 0].sum()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Reads, r"reads a value \(_local_scalar_dense\) in forward of unit '\(root\)'"),
        (ReadsAPart, r"reads a value \(_local_scalar_dense\) in forward of unit"),
        (
            Picks,
            r"reads the shape of what aten::index.Tensor returns in forward of unit '\(root\)'",
        ),
        (
            Routes,
            r"in forward of unit 'layers.1', module 'layers.1.up', and tensors have no values",
        ),
    ],
)
def test_a_program_that_reads_values_is_refused_by_the_module_and_a_forecast_follows(
    model: type[nn.Module], message: str
) -> None:
    annotate = ANNOTATE["sharded"][0]
    with pytest.raises(ForecastError, match=message):
        forecast(model, annotate, batch, ranks=2)
    assert not dist.is_initialized()
    for legal in (Looks, Counts, Masks):
        assert forecast(legal, annotate, batch, ranks=2).fits


class Gate(Decoder):
    """Branches on a value of its own, or of the batch."""

    def __init__(self, read: Callable[[Gate], object]) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(1))
        self.register_buffer("limit", torch.ones(1))
        self.table = torch.arange(3, device="cpu")
        self.read = read

    def forward(self, tokens: Tensor) -> Tensor:
        loss = super().forward(tokens) + self.gate.sum()
        return loss if self.read(self) else -loss


def alone(model: nn.Module) -> None:
    """The root has nothing but the gate."""
    fully_shard(model, policy={Block, nn.Embedding, nn.Linear})


def gathered(_: Gate) -> Tensor:
    whole = torch.empty(8)
    dist.all_gather_into_tensor(whole, torch.ones(4))
    return whole.sum() > 0


OF_PARAMETERS: dict[str, tuple[Callable[[Gate], object], str]] = {
    "item": (lambda model: model.gate.item() > 0, ", parameter 'gate'"),
    "tolist": (lambda model: model.gate.tolist()[0] > 0, ", parameter 'gate'"),
    "numpy": (lambda model: np.asarray(model.gate.detach())[0] > 0, ", parameter 'gate'"),
    "allclose": (lambda model: torch.allclose(model.gate, model.gate + 1), ", parameter 'gate'"),
    "nonzero": (lambda model: len(model.gate.nonzero()), ", parameter 'gate'"),
    "a buffer": (lambda model: model.get_buffer("limit") > 0, ""),
    "a buffer's item": (lambda model: model.get_buffer("limit").item(), ", buffer 'limit'"),
    "compared": (lambda model: model.gate > 0, ""),
    "computed": (lambda model: float(model.gate.sigmoid()) > 0.5, ""),
    "repeated": (
        lambda model: len(torch.repeat_interleave(model.table, model.gate.long().expand(3))),
        "",
    ),
    "of a unit at rest": (lambda model: (model.get_parameter("layers.0.norm.bias") > 0).any(), ""),
    "gathered": (gathered, ""),
}


@pytest.mark.filterwarnings("ignore:.*all_gather_into_tensor.*:FutureWarning")
@pytest.mark.parametrize(("read", "named"), OF_PARAMETERS.values(), ids=OF_PARAMETERS)
def test_a_program_that_reads_a_small_parameter_is_refused_by_its_name(
    read: Callable[[Gate], object], named: str
) -> None:
    message = rf"forward of unit '\(root\)', module '\(root\)'{named}, and tensors have no values"
    with pytest.raises(ForecastError, match=message):
        forecast(partial(Gate, read), alone, batch, ranks=2, steps=1)


OF_CONSTANTS: dict[str, Callable[[Gate], object]] = {
    "a tensor that is no buffer": lambda model: model.table.tolist() == [0, 1, 2],
    "the shape of a parameter": lambda model: torch.full_like(model.gate, 3.0).item() == 3.0,
    "a mask": lambda model: torch.ones(64, 64).tril().sum() == 65 * 32,
    "angles": lambda model: torch.arange(5000.0).outer(torch.ones(32)).cos()[0, 0] == 1.0,
    "rows": lambda model: len((torch.arange(5000) % 2).nonzero()) == 2500,
    "repeated": lambda model: (
        len(torch.repeat_interleave(model.table, torch.tensor([0, 2000, 1]))) == 2001
    ),
}


@pytest.mark.parametrize("read", OF_CONSTANTS.values(), ids=OF_CONSTANTS)
def test_a_program_that_reads_what_it_computed_of_constants_is_forecast(
    read: Callable[[Gate], object],
) -> None:
    seen: list[bool] = []
    model = partial(Gate, lambda model: seen.append(bool(read(model))))
    assert forecast(model, alone, batch, ranks=2).fits
    assert seen == [True, True]


def offloaded(model: nn.Module) -> None:
    fully_shard(model, policy={Block}, offload_policy=CPUOffloadPolicy())


def to_experts(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch)
    return loss + all_to_all_single(torch.zeros(4096), None, None, dist.group.WORLD).sum()


def next_stage(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch)
    dist.send(loss, 1)
    return loss


def test_a_message_to_another_rank_is_reported() -> None:
    found = forecast(Decoder, ANNOTATE["sharded"][0], batch, ranks=2, loss=next_stage)
    sent = [each for each in found.collectives if each.kind == "send"]
    assert sent == [Collective("send", "(root)", "", 2, 1, 4)]


def test_offload_policies_and_experts_are_refused_by_name() -> None:
    with pytest.raises(ForecastError, match=r"unit '\(root\)' has an offload_policy"):
        forecast(Decoder, offloaded, batch, ranks=2)
    assert forecast(Decoder, offloaded, batch, ranks=2, device="cpu").fits  # it has no effect
    with pytest.raises(ForecastError, match=r"calls 'all_to_all_single' of a process group in for"):
        forecast(Decoder, ANNOTATE["sharded"][0], batch, ranks=2, loss=to_experts)


@pytest.mark.parametrize("verb", [fully_shard, replicate])
def test_steps_of_whole_matrices_are_refused_by_name_and_a_forecast_follows(verb: Any) -> None:
    def muon(parameters: Any) -> torch.optim.Optimizer:
        return step_on_matrices(torch.optim.Muon([p for p in parameters if p.ndim == 2]))

    with pytest.raises(ForecastError, match=r"calls step_on_matrices for Muon.*Leave"):
        forecast(Decoder, verb, batch, ranks=2, optimizer=muon)
    assert forecast(Decoder, verb, batch, ranks=2, optimizer=torch.optim.SGD).fits


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"ranks": 0}, ValueError, "ranks must be a whole number of at least 1, got 0"),
        ({"ranks": 4, "mesh": {"a": 3}}, ValueError, r"mesh={'a': 3} has 3 ranks, not ranks=4"),
        ({"ranks": 4, "device": "h1000"}, ValueError, "no device 'h1000' is known, only a100"),
        ({"ranks": 4, "mesh": 2}, ValueError, "mesh must be names of dimensions with their"),
        ({"ranks": "4"}, ValueError, "ranks must be a whole number"),
        (
            {"ranks": 4, "device": torch.device("cpu")},
            ValueError,
            "device must be a string or a Device",
        ),
        (
            {"ranks": 4, "optimizer": torch.optim.SGD([nn.Parameter(torch.zeros(1))])},
            ValueError,
            r"optimizer must be what makes an optimizer of parameters .* got a SGD",
        ),
        ({"ranks": 4, "make_model": nn.Linear(1, 1)}, ValueError, "must be .* lambda: Model"),
        (
            {"ranks": 4, "make_model": list},
            ValueError,
            "what makes the model returned no module: list",
        ),
        ({"ranks": 4, "make_batch": torch.zeros(1)}, ValueError, "make_batch must be a function"),
        ({"ranks": 4, "annotate": "shard"}, ValueError, "annotate must be a function"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    given = {"make_model": Decoder, "annotate": ANNOTATE["sharded"][0], "make_batch": batch}
    with pytest.raises(error, match=message) as caught:
        forecast(**{**given, **options})
    assert len(str(caught.value)) < 300
    assert not dist.is_initialized()


def test_arguments_of_searches_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="compare: plans must name at least one plan"):
        compare(Decoder, {}, batch, ranks=2)
    memory: Any = "80GB"
    with pytest.raises(ValueError, match=r"memory must be a number of bytes.* got the str '80GB'"):
        compare(Decoder, {"a": replicate}, batch, ranks=2, memory=memory)
    with pytest.raises(ValueError, match=r"memory must be a number of bytes.* got the str '80GB'"):
        suggest(Decoder, batch, ranks=2, memory=memory)
    with pytest.raises(ValueError, match=r"block=.*Conv2d.* is no class of modules of the model"):
        suggest(Decoder, batch, ranks=2, block=nn.Conv2d)


@pytest.mark.parametrize(
    ("annotate", "message"),
    [
        (lambda model: torchs_fully_shard(model.head) and None, "module 'head' was annotated by"),
        (DistributedDataParallel, "calls torch's DistributedDataParallel"),
        (FullyShardedDataParallel, "calls torch's FullyShardedDataParallel"),
    ],
)
def test_torchs_own_verbs_are_refused_by_name(annotate: Any, message: str) -> None:
    with pytest.raises(ForecastError, match=message):
        forecast(Decoder, annotate, batch, ranks=2)
    assert not dist.is_initialized()


def test_dimensions_by_roles_are_forecast_as_a_hybrid_mesh() -> None:
    def by_names(model: nn.Module, mesh: DeviceMesh) -> None:
        fully_shard(model, mesh=mesh, policy={Block})

    def by_roles(model: nn.Module, mesh: DeviceMesh) -> None:
        dims = DataParallelMeshDims(shard="shard", replicate="replicate")
        fully_shard(model, mesh=mesh, policy={Block}, dp_mesh_dims=dims)

    options: dict[str, Any] = {"ranks": 8, "mesh": {"replicate": 2, "shard": 4}}
    one, other = (forecast(Decoder, each, batch, **options) for each in (by_names, by_roles))
    assert one.to_dict() == other.to_dict()


def test_what_is_replaced_in_torch_is_there_again_and_no_other_module_is_changed() -> None:
    def replaced() -> list[Any]:
        foreach = torch_optimizer._get_foreach_kernels_supported_devices
        classes = DistributedDataParallel, FullyShardedDataParallel
        constructors = [each.__init__ for each in classes]
        return [*constructors, foreach, sys.excepthook, vars(torch.UntypedStorage).get("resize_")]

    before = replaced()
    assert forecast(Decoder, ANNOTATE["sharded"][0], batch, ranks=2).fits
    with pytest.raises(ForecastError):
        forecast(Decoder, DistributedDataParallel, batch, ranks=2)
    assert replaced() == before
    for path in Path(devices.__file__).parent.glob("*.py"):
        names = {
            getattr(node, "id", getattr(node, "attr", getattr(node, "module", "")))
            for node in ast.walk(ast.parse(path.read_text()))
        }
        assert not names & {"mock", "unittest", "patch", "setattr"}, path


def test_the_face_of_fsdp2_is_forecast() -> None:
    def by_the_face(model: nn.Module) -> None:
        for block in model.get_submodule("layers"):  # type: ignore[attr-defined]
            fsdp2.fully_shard(block)
        fsdp2.fully_shard(model)

    found = forecast(Decoder, by_the_face, batch, ranks=2)
    # two gathers and a reduction of each of three blocks, one gather and a reduction of the root
    assert found.messages == 3 * 3 + 2
    assert sum(found.at_rest.values()) == sum(
        forecast_for("sharded", 2, device="h100").at_rest.values()
    )


class Experts(nn.Module):
    """As transformers computes them: side by side."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 64, 128, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.arange(256, 1025, 256, dtype=torch.int32)
        return torch._grouped_mm(x.to(self.weight.dtype), self.weight, offs=ends).relu()


def test_experts_side_by_side_are_forecast_in_any_dtype() -> None:
    half, single = (
        forecast(partial(Experts, dtype), fully_shard, lambda: torch.zeros(1024, 64), ranks=2)
        for dtype in (torch.bfloat16, torch.float32)
    )
    rests = "parameters, buffers"
    assert single.at_rest[rests] == pytest.approx(2 * half.at_rest[rests], rel=0.01)
    products = {span.end - span.start for span in single.streams if span.what == "_grouped_mm"}
    plain = forecast(
        lambda: nn.Linear(64, 128, bias=False), fully_shard, lambda: torch.zeros(1024, 64), ranks=2
    )
    assert max(products) >= max(s.end - s.start for s in plain.streams if s.what == "mm")


def test_tensors_larger_than_the_memory_of_this_computer_are_forecast() -> None:
    found = forecast(
        lambda: nn.Linear(8, 1 << 20, bias=False),
        fully_shard,
        lambda: torch.zeros(1 << 20, 8),
        ranks=2,
    )
    assert found.peak > 1 << 42
    assert not found.fits


def test_progress_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["composable.extras.forecast.forecast"], "PACE", 0.0)
    said: list[str] = []
    forecast_for("sharded", 2, progress=said.append)
    assert said[0].startswith("step 1 of 2, forward")
    assert "step 2 of 2, backward of unit 'layers.0'" in said
    assert said[-1] == "step 2 of 2, optimizer"


def test_a_process_with_a_group_is_asked_to_use_another_one(pool: Pool) -> None:
    pool.run(1, refused_with_a_group)


def refused_with_a_group() -> None:
    with pytest.raises(ForecastError, match="this process has a process group already"):
        forecast_for("sharded", 2)
