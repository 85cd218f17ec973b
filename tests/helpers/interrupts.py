"""Trains a small model and interrupts a step at a line of the library; knows seeds and schemes, no pool of ranks.

Everything follows from a seed, but how often a rank that waits for another one looks: such lines are not counted.
"""

from __future__ import annotations

import copy
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from linecache import getline
from pathlib import Path
from tempfile import gettempdir
from types import FrameType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import composable
from composable import MixedPrecisionPolicy, checkpoint, describe, fully_shard, replicate
from composable.device.private_groups import timeout_of
from composable.errors import ComposableError
from tests.helpers.compare import full
from tests.helpers.quiet import errors_only

_LIBRARY: Final = str(Path(composable.__file__).parent)
_WAITING: Final = ("pipes.py",)  # how often those lines run is a matter of time
_STEPS: Final = 6
_INTERRUPTED: Final = 2


class Line(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.scale


class Pair(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = Line(width)
        self.second = Line(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(x))


class Model(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.body = nn.ModuleList([Pair(width), Line(width)])
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for each in self.body:
            x = each(x)
        return self.head(x)


def _by_policy(model: Model, group: Any) -> None:
    fully_shard(model, mesh=group, policy={Line})


def _keeping(model: Model, group: Any) -> None:
    fully_shard(model, mesh=group, policy={Line}, reshard_after_forward=False)


def _regrouping(model: Model, group: Any) -> None:
    fully_shard(model, mesh=group, policy={Line}, reshard_after_forward=2)


def _casting(model: Model, group: Any) -> None:
    """Computes in more than it needs, so that numbers are those of the others."""
    model.body[0].register_buffer("table", torch.full((6,), 1 / 3))
    precision = MixedPrecisionPolicy("fp64", buffer_dtype="bf16", output_dtype="fp32")
    fully_shard(model, mesh=group, policy={Line}, mp_policy=precision)


def _with_replicas(model: Model, group: Any) -> None:
    """Four ranks, two of them a replica; groups give up as early as `group` does."""
    rows = [[0, 1], [2, 3]]
    limit = timeout_of(group, torch.device("cpu"))
    shards = [dist.new_group(row, timeout=limit) for row in rows]
    copies = [dist.new_group(list(column), timeout=limit) for column in zip(*rows, strict=True)]
    replica, shard = divmod(dist.get_rank(), 2)
    mesh = DeviceMesh.from_group(
        [copies[shard], shards[replica]], "cpu", mesh=torch.tensor(rows), mesh_dim_names=("replicate", "shard")
    )
    fully_shard(model, mesh=mesh, policy={Line})


def _nested(model: Model, group: Any) -> None:
    fully_shard(model, mesh=group, policy={Line, Pair})


def _replicated(model: Model, group: Any) -> None:
    replicate(model, mesh=group, bucket_cap_mb=0.0002)


def _next_to_shards(model: Model, group: Any) -> None:
    replicate(model.embed, mesh=group)
    replicate(model.body[0].second, mesh=group)
    fully_shard(model, mesh=group, policy={Line})


def _checkpointed(model: Model, group: Any) -> None:
    for each in model.body:
        checkpoint(each)
    fully_shard(model, mesh=group, policy={Pair, Line})


SCHEMES: Final[dict[str, Callable[[Model, Any], None]]] = {
    "by policy": _by_policy,
    "keeping": _keeping,
    "regrouping": _regrouping,
    "casting": _casting,
    "with replicas": _with_replicas,
    "nested": _nested,
    "replicated": _replicated,
    "next to shards": _next_to_shards,
    "checkpointed": _checkpointed,
}


_ON_FOUR: Final = ("regrouping", "with replicas")
ON_TWO: Final = tuple(name for name in SCHEMES if name not in _ON_FOUR)  # schemes that take no more than two ranks


class Interrupter:
    """Counts lines of the library as they run, and interrupts this thread at one of them."""

    def __init__(self, at: int | None = None, flag: Path | None = None) -> None:
        self.seen = 0
        self.where = ""
        self._at = at
        self._flag = flag  # is there once a rank has been interrupted

    @contextmanager
    def at_work(self) -> Iterator[None]:
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(None)

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(_LIBRARY):
            return None
        if name.endswith(_WAITING):
            return self._wait if frame.f_code.co_name == "wait" and self._at is not None else None
        return self._line

    def _wait(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Ctrl-C reaches all ranks: one that waits for another one does not hear of it in any other way."""
        if self._flag is not None and self._flag.exists():
            self._interrupt(frame)
        return self._wait

    def _interrupt(self, frame: FrameType) -> None:
        stack = []
        at: FrameType | None = frame
        while at is not None and len(stack) < 6:
            if at.f_code.co_filename.startswith(_LIBRARY):
                stack.append(f"{Path(at.f_code.co_filename).name}:{at.f_lineno} {at.f_code.co_name}")
            at = at.f_back
        self.where = " < ".join(stack)
        if self._flag is not None:
            self._flag.touch()
        raise KeyboardInterrupt

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        # Python lets nothing in between the end of a `with` block and the context's own end.
        if event == "line" and not getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with "):
            self.seen += 1
            if self._at is not None and self.seen >= self._at and not self.where and not _in_del(frame):
                self._interrupt(frame)
        return self._line


def _in_del(frame: FrameType | None) -> bool:
    """Python drops what is raised there, and stops to trace: no rank would be interrupted."""
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


@dataclass(frozen=True)
class Plan:
    """What a seed stands for."""

    seed: int
    scheme: str
    everybody: bool  # is interrupted, or rank 0 alone
    micro_batches: int
    clears: str  # who clears gradients after the interrupt


def plan_of(seed: int, ranks: int, scheme: str = "") -> Plan:
    chosen = random.Random(seed)
    names = [scheme] if scheme else [name for name in SCHEMES if name in ON_TWO or ranks == 4]
    everybody = chosen.random() < 0.75
    return Plan(
        seed,
        chosen.choice(names),
        everybody,
        # Others would take the next micro-batch of a rank that left one for its partner: nobody can tell.
        micro_batches=chosen.choice((1, 1, 2)) if everybody else 1,
        clears=chosen.choice(("model", "optimizer")),
    )


@dataclass
class Seen:
    """What became of a seed on one rank."""

    seed: int
    where: str = ""
    lines: int = 0
    errors: dict[int, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    slowest: float = 0.0


def _batches(plan: Plan, rank: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1000 * plan.seed + rank)
    return [[torch.randn(3, 6, generator=generator) for _ in range(plan.micro_batches)] for _ in range(_STEPS)]


def _expected(plan: Plan, left_out: Sequence[int], ranks: int) -> dict[str, Tensor]:
    torch.manual_seed(plan.seed)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    everybody = [_batches(plan, rank) for rank in range(ranks)]
    for step in range(_STEPS):
        if step in left_out:
            continue
        optimizer.zero_grad()
        for batches in everybody:
            for x in batches[step]:
                (model(x).square().mean() / ranks).backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _look(model: Model, before: dict[str, Tensor], seen: Seen) -> None:
    """What users do right after an interrupt."""
    said = str(describe(model))
    if (
        "SHARDED" not in said
        and "SHARDED_POST_FORWARD" not in said
        and any(isinstance(value, DTensor) for value in before.values())
    ):
        seen.wrong.append("describe() tells of nothing sharded")
    for name, value in model.state_dict().items():
        local = value.to_local() if isinstance(value, DTensor) else value
        if type(value) is not type(before[name]):
            seen.wrong.append(f"state_dict(): {name} is a {type(value).__name__}")
        elif not torch.equal(local, _local(before[name])):
            seen.wrong.append(f"state_dict(): {name} differs")


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def _train(plan: Plan, at: int | None, group: Any, flag: Path | None = None) -> tuple[Seen, Model]:
    torch.manual_seed(plan.seed)
    model = Model()
    SCHEMES[plan.scheme](model, group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = _batches(plan, dist.get_rank())
    seen = Seen(plan.seed)
    for step in range(_STEPS):
        start = time.monotonic()
        interrupter = Interrupter(at if step == _INTERRUPTED else None, flag)
        before = {name: copy.deepcopy(value) for name, value in model.state_dict().items()}
        try:
            with interrupter.at_work() if step == _INTERRUPTED else nullcontext():
                for x in batches[step]:
                    model(x).square().mean().backward()
        except KeyboardInterrupt:
            seen.errors[step] = "KeyboardInterrupt"
            _look(model, before, seen)
        except ComposableError as error:
            seen.errors[step] = f"{type(error).__name__}: {error}"
        except Exception as error:
            seen.errors[step] = f"OBSCURE {type(error).__name__}: {error}"
        if step == _INTERRUPTED and plan.everybody and at is not None:
            dist.barrier()  # where all ranks have caught the interrupt
        if step == _INTERRUPTED:
            seen.where, seen.lines = interrupter.where, interrupter.seen
        elif step not in seen.errors:
            try:
                optimizer.step()
            except ComposableError as error:
                seen.errors[step] = f"{type(error).__name__}: {error}"
        (model if plan.clears == "model" else optimizer).zero_grad()
        seen.slowest = max(seen.slowest, time.monotonic() - start)
    return seen, model


def lines_of(scheme: str, micro_batches: int = 1) -> int:
    """How many lines of the library run in a step, at least."""
    group = dist.new_group(timeout=timedelta(seconds=60))
    seen, _ = _train(Plan(0, scheme, True, micro_batches, "optimizer"), None, group)
    return seen.lines


_LINES: dict[tuple[str, int, int], int] = {}


@errors_only()
def run_seed(seed: int, seconds: float, scheme: str = "") -> Seen:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    plan = plan_of(seed, ranks, scheme)
    key = plan.scheme, plan.micro_batches, ranks
    if key not in _LINES:
        _LINES[key] = lines_of(plan.scheme, plan.micro_batches)
    at = random.Random(f"{seed} {rank}").randrange(1, _LINES[key]) if plan.everybody or rank == 0 else None
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    flag = Path(gettempdir()) / f"interrupted-{os.getppid()}-{seed}-{seconds}"
    seen, model = _train(plan, at, group, flag if plan.everybody else None)
    left_out = sorted({_INTERRUPTED, *seen.errors})
    expected = _expected(plan, left_out, ranks)
    if any("OBSCURE" in text for text in seen.errors.values()):
        seen.wrong.append("obscure")
    if any("within 0:00" in text for text in seen.errors.values()):
        seen.wrong.append("waited for the timeout")
    found: list[Any] = [None] * ranks
    dist.all_gather_object(found, left_out)
    flag.unlink(missing_ok=True)
    if any(other != found[0] for other in found):
        seen.wrong.append(f"ranks left out {found}")
    elif len(left_out) > 3:
        seen.wrong.append(f"left out {left_out}")
    else:
        try:
            for name, parameter in model.named_parameters():
                got = full(parameter)
                if got.shape != expected[name].shape or not torch.allclose(got, expected[name], rtol=1e-4, atol=1e-6):
                    seen.wrong.append(f"{name} differs by {(got - expected[name]).abs().max().item():.2g}")
        except Exception as error:
            seen.wrong.append(f"{type(error).__name__}: {error}")
    return seen


def run_seeds(seeds: Sequence[int], seconds: float, scheme: str = "") -> list[Seen]:
    found = []
    for seed in seeds:
        found.append(run_seed(seed, seconds, scheme))
        dist.barrier()
    return found
