"""`watch`: the first difference between ranks is named: rank, unit, and since which step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.optim import SGD

from composable import fully_shard, register_comm_hook, watch
from composable.comm.backends import comms_wrapped_by
from composable.comm.base import Again, Comm, Work
from composable.comm.launch import Launch
from composable.errors import RanksDisagreeError
from composable.torch_private import local_tensor
from tests.algorithms.watched import PROGRAMS, SKIPPING, Model, Program
from tests.helpers.world import Pool, current_device, spmd

STEPS: Final = 3
_GATHERS: Final = ("bit", "row", "stale")


@dataclass
class Planted:
    """A fault, and the step that is under way.

    Attributes:
        kind: "bit" or "row" of a gather, "stale" shard, "sum" of a reduction, "parameter",
            "buffer" or "lr".
        call: which gather of a step.
    """

    kind: str
    rank: int
    step: int
    block: int
    call: int = 0
    now: int = -1
    calls: int = 0

    @property
    def strikes(self) -> bool:
        return (self.rank, self.step) == (dist.get_rank(), self.now)

    @property
    def unit(self) -> str:
        return f"blocks.{self.block}"


@dataclass
class _Then:
    work: Work
    then: Any

    def wait(self) -> None:
        self.work.wait()
        self.then()


def _flip(tensor: Tensor) -> None:
    tensor.view(-1)[:1].view(torch.uint8)[0] ^= 1


class Spoiling:
    """A comm with a fault."""

    def __init__(self, inner: Any, planted: Planted) -> None:
        self._inner, self._planted = inner, planted
        self._old: dict[str, list[Tensor]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def all_gather(self, pairs: Any, launch: Launch) -> Work:
        planted = self._planted
        if launch.text != f"all-gather of unit '{planted.unit}'" or planted.now < 0:
            return self._inner.all_gather(pairs, launch)  # type: ignore[no-any-return]
        planted.calls += 1
        old = self._old.setdefault(launch.text, [shard.clone() for _, shard in pairs])
        if planted.strikes and planted.kind in _GATHERS and planted.calls == planted.call + 1:
            if planted.kind == "stale":
                stale = [(whole, each) for (whole, _), each in zip(pairs, old, strict=True)]
                return self._inner.all_gather(Again(stale), launch)  # type: ignore[no-any-return]
            owner = int(self._inner.rank == 0)  # later ranks may have no row, and send padding
            rows = pairs[0][0].view(self._inner.size, -1)[owner]
            spoil = (lambda: _flip(rows)) if planted.kind == "bit" else rows.zero_
            return _Then(self._inner.all_gather(pairs, launch), spoil)
        return self._inner.all_gather(pairs, launch)  # type: ignore[no-any-return]

    def all_reduce(self, tensors: Sequence[Tensor], launch: Launch, scale: float = 1.0) -> Work:
        work: Work = self._inner.all_reduce(tensors, launch, scale)
        planted, named = self._planted, f"gradient all-reduce of unit '{self._planted.unit}'"
        if planted.kind == "sum" and planted.strikes and launch.text.startswith(named):
            return _Then(work, lambda: _flip(tensors[0]))
        return work


@torch.no_grad()
def _strike(planted: Planted, model: Model, optimizer: SGD) -> None:
    """What happens between two steps."""
    block = model.blocks[planted.block]
    if planted.kind == "parameter":
        _flip(local_tensor(block.get_parameter("norm.weight")))
    elif planted.kind == "buffer":
        _flip(block.get_buffer("table").data)  # what the program writes is its own
    elif planted.kind == "lr":
        optimizer.param_groups[0]["lr"] *= 2


def train(program: Program, planted: Planted | None, **options: Any) -> list[Any]:
    """The findings of a short training."""
    if planted is None:
        model, plant = program.build()
    else:
        with comms_wrapped_by(lambda comm: comm if comm.size == 1 else _spoiling(comm, planted)):
            model, plant = program.build()
    optimizer = SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())  # dropout
    with watch(model, agree=1, **options) as watched:
        for plant.step in range(STEPS):
            if planted is not None:
                planted.now, planted.calls = plant.step, 0
                if planted.strikes:
                    _strike(planted, model, optimizer)
            program.backward(model, plant)
            optimizer.step()
            optimizer.zero_grad()
    return watched.findings


def _spoiling(comm: Comm, planted: Planted) -> Any:
    return Spoiling(comm, planted)


TOPICS: Final = {
    "bit": "gathered parameter",
    "row": "gathered parameter",
    "stale": "gathered parameter",
    "sum": "gradient",
    "parameter": "parameter",
    "buffer": "buffer",
    "lr": "hyper-parameter",
}
# What can go wrong in a program, by its name.
FAULTS: Final = {
    name: (*_GATHERS, "buffer", "lr")
    for name in PROGRAMS
    if name not in ("hybrid", "replicate", "replicate, accumulation", "replicate in shards")
} | {
    "hybrid": ("parameter", "buffer", "lr"),
    "replicate": ("sum", "parameter", "lr"),
    "replicate, accumulation": ("sum", "parameter", "lr"),
    "replicate in shards": ("lr",),
}


def generated(name: str, ranks: int, seed: int) -> list[Planted]:
    draw = random.Random(f"{name} {ranks} {seed}")
    found = []
    kinds = FAULTS[name] + (_GATHERS if name == "hybrid" and ranks == 4 else ())
    for kind in kinds:
        rank, step = draw.randrange(ranks), draw.randrange(STEPS)
        block, call = draw.randrange(3), 0
        if kind == "stale":
            step = max(step, 1)  # in the first one nothing is old
        if kind == "buffer":
            step = max(step, 1)  # and nothing was seen to be equal
        if kind in _GATHERS and name == "shards" and draw.random() < 0.5:
            block, call = 1, 1  # the gather of backward
        found.append(Planted(kind, rank, step, block, call))
    return found


def _every_difference_is_named(name: str, seed: int) -> None:
    for planted in generated(name, dist.get_world_size(), seed):
        findings = train(PROGRAMS[name], planted)
        assert findings, f"{planted} was missed"
        first = findings[0]
        unit = "SGD 0" if planted.kind == "lr" else planted.unit
        named = first.unit, first.phase, first.step
        assert named == (unit, TOPICS[planted.kind], planted.step), f"{planted}: {first}"
        reported = not any(name == "rank" for name, _ in first.lines)
        assert planted.rank in first.ranks, f"{planted}: {first}"
        assert not reported or len(first.ranks) == 1, f"{planted}: {first}"


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", FAULTS)
def test_ranks_that_differ_are_named(pool: Pool, name: str, ranks: int, seed: int) -> None:
    pool.run(ranks, _every_difference_is_named, name, seed)


def _all_agree(name: str) -> None:
    assert train(PROGRAMS.get(name, SKIPPING), None, action="raise") == []


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", [*PROGRAMS, "skipped units"])
def test_sound_ranks_agree(pool: Pool, name: str, ranks: int) -> None:
    pool.run(ranks, _all_agree, name)


# --- hints, and what is no difference ------------------------------------------------------------


@spmd(ranks=2)
def test_dropout_that_is_the_same_on_all_ranks_is_hinted_at() -> None:
    model, plant = PROGRAMS["shards"].build()
    optimizer = SGD(model.parameters(), lr=0.1)
    torch.manual_seed(0)
    with watch(model, action="raise", agree=1) as watched:
        for plant.step in range(2):
            PROGRAMS["shards"].backward(model, plant)
            optimizer.step()
    (found,) = watched.hints
    assert "drop the same places" in str(found)
    assert watched.findings == []


@spmd(ranks=2)
def test_replicas_that_a_hook_keeps_apart_are_not_compared() -> None:
    program = PROGRAMS["replicate"]
    model, plant = program.build()
    register_comm_hook(model, None, noop_hook)
    optimizer = SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    with watch(model, action="raise", agree=1) as watched:
        for plant.step in range(2):
            program.backward(model, plant)
            optimizer.step()
            optimizer.zero_grad()
    assert watched.findings == []


@spmd(ranks=2)
def test_buffers_to_which_forwards_write_are_not_compared() -> None:
    model = fully_shard(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to(current_device()))
    optimizer = SGD(model.parameters(), lr=0.1)
    with watch(model, action="raise", agree=1) as watched:
        for _ in range(3):
            x = torch.randn(4, 3, device=current_device()) + dist.get_rank()
            model(x).sum().backward()
            optimizer.step()
    assert watched.findings == []


@spmd(ranks=2)
def test_it_says_since_when_and_raises_on_all_ranks() -> None:
    model, plant = PROGRAMS["shards"].build()
    optimizer = SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    watch(model, action="raise", agree=2)
    for plant.step in range(3):
        PROGRAMS["shards"].backward(model, plant)
        if plant.step == 1:
            optimizer.param_groups[0]["lr"] = 0.1 + dist.get_rank()
        if plant.step < 2:
            optimizer.step()
            continue
        with pytest.raises(RanksDisagreeError) as raised:
            optimizer.step()
    assert str(raised.value) == (
        "watch: step 2, rank 0, 1: the optimizer has other hyper-parameters than those of the other"
        " ranks\n"
        "  unit      SGD 0\n"
        "  phase     hyper-parameter\n"
        "  tensor    lr of group 0\n"
        "  since     step 2; the ranks agreed in step 0\n"
        "  values    rank 0: 0.1, rank 1: 1.1\n"
        "  rank      one of these; which one is not known"
    )
