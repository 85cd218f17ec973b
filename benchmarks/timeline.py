"""Claim: on accelerators told what to do in time, no more is exposed than with FSDP2.

What is exposed is communication, in virtual time.

No accelerator and no values: both libraries run as they are, over the clocks of `virtual.py`. What
these say is when things are launched and what waits for what; they know nothing of kernels' true
speed. See the section in README.md.

    python benchmarks/timeline.py
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from harness import ROOT  # noqa: F401 - the checkout of these benchmarks is the one looked at
from options import counts, parse, parser
from publish import emit, table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from virtual import DeviceModule

from composable.comm import base
from composable.comm.backends import AcceleratorComm, comms_wrapped_by
from composable.comm.base import Comm
from composable.extras.forecast.devices import DEVICES
from composable.extras.forecast.machine import BACKEND, COMPUTE, Machine, NoValues, form_group
from composable.memory.elastic import resizing_buffers

CPU = torch.device("cpu")
CONTENDERS = ("un-annotated", "composable", "fsdp2")
PREFETCH = {"composable, prefetch=0": 0, "composable, prefetch=2": 2}  # `composable` has 1
WARM_UP = 2  # steps in which orders are recorded


@dataclass(frozen=True)
class Shape:
    """A model, in bfloat16, and what a rank feeds it in a step."""

    width: int
    heads: int
    groups: int
    hidden: int
    layers: int
    vocabulary: int
    tokens: int
    recompute: bool


SHAPES = {
    "7B": Shape(4096, 32, 32, 11008, 32, 32_000, 4096, recompute=False),
    "70B": Shape(8192, 64, 8, 28672, 80, 128_256, 4096, recompute=True),
    "tiny": Shape(512, 4, 2, 1024, 3, 1000, 256, recompute=True),
}


class Block(nn.Module):
    """A Llama block without rotary embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        linear, width = partial(nn.Linear, bias=False), shape.width
        self.shape = shape
        self.query, self.output = linear(width, width), linear(width, width)
        self.key, self.value = (
            linear(width, width // shape.heads * shape.groups) for _ in range(2)
        )
        self.up, self.gate, self.down = (
            linear(width, shape.hidden),
            linear(width, shape.hidden),
            linear(shape.hidden, width),
        )
        self.before_attention, self.before_feed = nn.RMSNorm(width), nn.RMSNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        if not self.shape.recompute:
            return self.compute(x)
        again: Tensor = checkpoint(self.compute, x, use_reentrant=False, preserve_rng_state=False)
        return again

    def compute(self, x: Tensor) -> Tensor:
        shape, y = self.shape, self.before_attention(x)
        batch, length, width = x.shape
        query, key, value = (
            part(y).view(batch, length, heads, -1).transpose(1, 2)
            for part, heads in (
                (self.query, shape.heads),
                (self.key, shape.groups),
                (self.value, shape.groups),
            )
        )
        if shape.groups < shape.heads:
            wide = (batch, shape.groups, shape.heads // shape.groups, length, -1)
            key, value = (t.unsqueeze(2).expand(wide).reshape(query.shape) for t in (key, value))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(attended.transpose(1, 2).reshape(batch, length, width))
        y = self.before_feed(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList([Block(shape) for _ in range(shape.layers)])
        self.norm, self.head = (
            nn.RMSNorm(shape.width),
            nn.Linear(shape.width, shape.vocabulary, bias=False),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), tokens.view(-1))


# --- contenders ---------------------------------------------------------------------------------


def _composable(
    model: Llama, mesh: DeviceMesh, machine: Machine, prefetch: int = 1
) -> list[AbstractContextManager[Any]]:
    from composable import fully_shard

    def accelerated(comm: Comm) -> Comm:
        return comm if comm.group is None else AcceleratorComm(comm.group, CPU, machine)

    # As on an accelerator with NCCL: the mean is the backend's, and storages are resized.
    averages = mock.patch.object(base, "_AVERAGING", (BACKEND,))
    with comms_wrapped_by(accelerated), averages, resizing_buffers():
        fully_shard(model, policy={Block}, mesh=mesh, prefetch=prefetch, sync_module_states="off")
    return [resizing_buffers()]  # the first forward makes buffers anew


def _fsdp2(model: Llama, mesh: DeviceMesh, machine: Machine) -> list[AbstractContextManager[Any]]:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.fsdp._fully_shard import (
        _fsdp_collectives,
        _fsdp_init,
        _fsdp_param_group,
        _fsdp_state,
    )

    module = DeviceModule(machine)
    modules = (_fsdp_collectives, _fsdp_init, _fsdp_param_group, _fsdp_state)
    patches = [
        mock.patch.object(each, "_get_device_handle", return_value=module) for each in modules
    ]
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return patches  # anew, while it trains


def _alone(model: Llama, mesh: DeviceMesh, machine: Machine) -> list[AbstractContextManager[Any]]:
    return []


ANNOTATE: dict[str, Callable[[Llama, DeviceMesh, Machine], list[AbstractContextManager[Any]]]] = {
    "un-annotated": _alone,
    "composable": _composable,
    "fsdp2": _fsdp2,
} | {name: partial(_composable, prefetch=ahead) for name, ahead in PREFETCH.items()}


# --- a run --------------------------------------------------------------------------------------

Sample = dict[str, Any]


def simulate(contender: str, name: str, ranks: int, bandwidths: list[int]) -> list[Sample]:
    """One step at each bandwidth (GB/s), the same program each time."""
    machine, shape = Machine(DEVICES["h100"]), SHAPES[name]
    form_group(machine, ranks, rank=0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        model = Llama(shape)
    patches = ANNOTATE[contender](model, init_device_mesh("cpu", (ranks,)), machine)
    found = []
    with ExitStack() as stack:
        for each in (*patches, NoValues(machine, model)):
            stack.enter_context(each)
        model.to_empty(device="cpu")
        tokens = torch.zeros(1, shape.tokens, dtype=torch.int64)
        for step, bandwidth in enumerate(bandwidths[:1] * WARM_UP + bandwidths):
            speed = bandwidth * 1e9
            machine.device = replace(machine.device, links=speed, network=speed)
            start = machine.begin_step()
            model(tokens).backward()
            end = machine.end_step()
            if step >= WARM_UP:
                found.append(_sample(machine, start, end))
            model.zero_grad()
    return found


def _sample(machine: Machine, start: float, end: float) -> Sample:
    taken: dict[str, float] = {}
    for span in machine.spans:
        key = COMPUTE if span.stream == COMPUTE else "communication"
        taken[key] = taken.get(key, 0.0) + span.end - span.start
    return {
        "step": end - start,
        "compute": taken[COMPUTE],
        "communication": taken.get("communication", 0.0),
        "waits": machine.exposed,
        "host": machine.host - start,
        "peak": machine.peak.total,
        "memory": _thinned([(moment - start, sum(sizes)) for moment, sizes in machine.samples]),
        "spans": [
            (span.stream, span.start - start, span.end - start, span.what) for span in machine.spans
        ],
    }


def _thinned(points: list[tuple[float, int]], most: int = 400) -> list[tuple[float, int]]:
    """At most so many points: the highest of each stretch."""
    size = -(-len(points) // most)
    return [
        max(points[k : k + size], key=lambda point: point[1]) for k in range(0, len(points), size)
    ]


def _work(connection: Any, *job: Any) -> None:
    connection.send(simulate(*job))


def _in_a_process(*job: Any) -> list[Sample]:
    """Each run has a process of its own: a process group, and patches of torch, are a process's."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, *job))
    process.start()
    theirs.close()
    try:
        found: list[Sample] = ours.recv()
    except EOFError:
        raise RuntimeError(f"{job[0]} did not run, see above") from None
    finally:
        process.join()
    return found


# --- what comes of it ---------------------------------------------------------------------------


def exposed(sample: Sample, alone: Sample) -> float:
    """What a step takes longer than the model's own operations: waits, and copies for the sake of
    messages.
    """
    return float(sample["step"] - alone["step"])


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.set_defaults(fake_world=64)
    options.add_argument("--models", default="7B,70B", help=f"some of {', '.join(SHAPES)}")
    options.add_argument(
        "--bandwidths", type=counts, default="50,150,350", help="of a rank in collectives, GB/s"
    )
    found = parse(options, models="tiny", bandwidths=[50])
    runs: dict[tuple[str, int, str], Sample] = {}
    models = found.models.split(",")
    for model in models:
        for contender in (*CONTENDERS, *PREFETCH):
            samples = _in_a_process(contender, model, found.fake_world, found.bandwidths)
            runs |= {
                (model, bandwidth, contender): s
                for bandwidth, s in zip(found.bandwidths, samples, strict=True)
            }
    rows, claims = [], []
    for model in models:
        for bandwidth in found.bandwidths:
            alone, ours, theirs = (runs[model, bandwidth, contender] for contender in CONTENDERS)
            for contender in (*CONTENDERS[1:], *PREFETCH):
                sample = runs[model, bandwidth, contender]
                times = [
                    sample["step"],
                    exposed(sample, alone),
                    sample["waits"],
                    sample["communication"],
                    sample["host"],
                ]
                rows.append(
                    [
                        f"{model}, {bandwidth} GB/s, {contender}",
                        *map(_ms, times),
                        f"{sample['peak'] / 2**30:.2f}",
                    ]
                )
            ratio = exposed(ours, alone) / exposed(theirs, alone)
            steps = ours["step"] / theirs["step"]
            reached = "yes" if ratio <= 1.0 else "no"
            claims.append(
                [f"{model}, {bandwidth} GB/s", f"{ratio:.3f}", f"{steps:.3f}", "1.00", reached]
            )
    header = [
        "",
        "step, ms",
        "exposed, ms",
        "of it waiting, ms",
        "communication, ms",
        "host, ms",
        "peak, GiB",
    ]
    ratios = ["composable / fsdp2", "exposed", "step", "limit of exposed", "reached"]
    title = f"Virtual time of a step (forward and backward) at {found.fake_world} ranks"
    figures = {
        ", ".join(map(str, key)): {
            k: round(v, 7) for k, v in sample.items() if k not in ("memory", "spans")
        }
        for key, sample in runs.items()
    }
    data = {
        "device": {k: v for k, v in vars(DEVICES["h100"]).items() if k != "flops"},
        "shapes": {name: asdict(SHAPES[name]) for name in models},
        "figures": figures,
    }
    tables = [table(header, rows), table(ratios, claims)]
    emit(
        "timeline",
        found,
        title=title,
        tables=tables,
        data=data,
        draw=partial(_draw, title=title, runs=runs),
    )


def _draw(path: Path, *, title: str, runs: dict[tuple[str, int, str], Sample]) -> None:
    from timeline_picture import draw

    draw(path, title, runs)


if __name__ == "__main__":
    main()
