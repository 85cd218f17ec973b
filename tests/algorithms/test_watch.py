"""`watch`: the first value that is not finite is named: rank, unit, phase, tensor, step."""

from __future__ import annotations

import copy
import gc
import logging
import os
import random
import subprocess
import sys
import weakref
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

from composable import (
    apply_optimizer_in_backward,
    fully_shard,
    join,
    registry,
    remove,
    watch,
)
from composable.contract.hooks import dispatcher_of
from composable.errors import (
    NonFiniteError,
)
from composable.torch_private import local_tensor
from tests.algorithms.watched import PROGRAMS, SKIPPING, Fault, Program, spoil_at_rest
from tests.helpers.world import Pool, current_device, spmd

STEPS: Final = 3
# What each fault is called: the unit, the phase, and how the tensor's name begins.
NAMES: Final[dict[str, tuple[str, str, str]]] = {
    "forward": ("blocks.{block}", "output", "output 0"),
    "backward": ("blocks.{block}", "gradient", "gradient of input 0"),
    "weight": ("blocks.{block}", "gradient", "up.weight"),
    "between forward": ("(root)", "input", "input 0 of unit 'blocks.{next}'"),
    "between backward": ("(root)", "gradient", "gradient of output 0 of unit 'blocks.{block}'"),
    "batch": ("(root)", "input", "input 0"),
    "loss": ("(root)", "gradient", "gradient of output 0"),
    "at rest": ("blocks.{block}", "parameter", "{parameter}"),
}


def train(program: Program, fault: Fault | None, **options: Any) -> tuple[list[Any], str]:
    """The findings of a short training, and the parameter that was written to."""
    model, plant = program.build(fault)
    optimizer, parameter = SGD(model.parameters(), lr=0.1), ""
    with watch(model, **options) as watched:
        for step in range(STEPS):
            plant.step = step
            if fault is not None and (fault.kind, fault.step) == ("at rest", step):
                parameter = spoil_at_rest(model, fault)
            program.backward(model, plant)
            optimizer.step()
            optimizer.zero_grad()
    return watched.findings, parameter


def generated(name: str, ranks: int, seed: int) -> list[Fault]:
    """One fault of each kind, at a place that the seed decides."""
    draw = random.Random(f"{name} {ranks} {seed}")
    found = []
    for kind in NAMES:
        # behind the last block the root goes on, and no unit is entered
        block = draw.randrange(2 if kind == "between forward" else 3)
        where = draw.randrange(ranks), draw.randrange(STEPS)
        value = draw.choice([float("nan"), float("nan"), float("inf")])
        found.append(Fault(kind, *where, 0 if kind in ("batch", "loss") else block, value))
    return found


def _every_fault_is_named(name: str, seed: int) -> None:
    for fault in generated(name, dist.get_world_size(), seed):
        findings, parameter = train(PROGRAMS[name], fault)
        unit, phase, tensor = (
            text.format(block=fault.block, next=fault.block + 1, parameter=parameter)
            for text in NAMES[fault.kind]
        )
        assert findings, f"{fault} was missed"
        first = findings[0]
        named = first.unit, first.phase, first.tensor, first.step
        assert named == (unit, phase, tensor, fault.step), f"{fault}: {first}"
        assert fault.rank == first.rank or fault.kind == "at rest", f"{fault}: {first}"


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_value_that_is_not_finite_is_named(pool: Pool, name: str, ranks: int) -> None:
    pool.run(ranks, _every_fault_is_named, name, 0)


# --- no false alarm ------------------------------------------------------------------------------


def _all_is_well(name: str) -> None:
    program = PROGRAMS.get(name, SKIPPING)
    findings, _ = train(program, None, action="raise")
    assert findings == []


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", [*PROGRAMS, "skipped units"])
def test_a_sound_program_raises_no_alarm(pool: Pool, name: str, ranks: int) -> None:
    pool.run(ranks, _all_is_well, name)


def _values(model: nn.Module) -> list[torch.Tensor]:
    return [local_tensor(parameter).detach().clone() for parameter in model.parameters()]


@spmd(ranks=2)
def test_a_model_that_is_watched_trains_to_the_same_bits() -> None:
    trained = []
    for watches in (False, True):
        model, plant = PROGRAMS["shards"].build()
        optimizer = SGD(model.parameters(), lr=0.1)
        if watches:
            watch(model)
        for plant.step in range(STEPS):
            torch.manual_seed(plant.step)  # of dropout
            PROGRAMS["shards"].backward(model, plant)
            optimizer.step()
            optimizer.zero_grad()
        trained.append(_values(model))
    assert all(map(torch.equal, *trained))


@spmd(ranks=2)
def test_ranks_without_data_take_part_in_exchanges() -> None:
    model, plant = PROGRAMS["shards"].build()
    optimizer = SGD(model.parameters(), lr=0.1)
    with watch(model, action="raise") as watched, join(model, optimizer):
        for plant.step in range(2 + dist.get_rank()):
            PROGRAMS["shards"].backward(model, plant)
            optimizer.step()
            optimizer.zero_grad()
    assert watched.step == 3


# --- what it does --------------------------------------------------------------------------------


def _one_step(fault: Fault, **options: Any) -> tuple[Any, Any]:
    """A watch, and what the optimizer's step raised."""
    model, plant = PROGRAMS["shards"].build(fault)
    watched, optimizer = watch(model, **options), SGD(model.parameters(), lr=0.1)
    PROGRAMS["shards"].backward(model, plant)
    before = _values(model)
    try:
        optimizer.step()
    except NonFiniteError as error:
        assert all(map(torch.equal, before, _values(model)))
        return watched, str(error)
    return watched, None


@spmd(ranks=2)
def test_on_raise_stops_all_ranks_before_the_optimizer() -> None:
    watched, error = _one_step(Fault("forward", rank=1, block=1), action="raise")
    assert error == (
        "watch: step 0, rank 1: a NaN in the outputs\n"
        "  unit      blocks.1\n"
        "  phase     output\n"
        "  tensor    output 0\n"
        "  is        float32 (3, 5)\n"
        "  made by   the forward of unit 'blocks.1'"
    )
    assert len(watched.findings) == 1


def _a_warning_is_logged() -> list[str]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("composable")
    logger.addHandler(handler)
    try:
        _, error = _one_step(Fault("loss", rank=1))
    finally:
        logger.removeHandler(handler)
    assert error is None
    return [record for record in records if record.startswith("watch")]


def test_on_warn_rank_0_logs_a_finding(pool: Pool) -> None:
    said, nothing = pool.run(2, _a_warning_is_logged)
    assert nothing == []
    assert said == [
        "watch: step 0, rank 1: a NaN in the gradients\n"
        "  unit      (root)\n"
        "  phase     gradient\n"
        "  tensor    gradient of output 0\n"
        "  is        float32 (3, 2)\n"
        "  made by   the loss, or what is between it and the model"
    ]


@spmd(ranks=2)
def test_steps_between_are_not_looked_at() -> None:
    for step, found in ((1, 0), (2, 1)):
        findings, _ = train(PROGRAMS["shards"], Fault("weight", step=step), every=2)
        assert len([each for each in findings if each.phase == "gradient"]) == found


@spmd(ranks=2)
def test_a_finding_is_reported_for_all_micro_batches_of_a_step() -> None:
    program = PROGRAMS["accumulation"]
    findings, _ = train(program, Fault("weight", rank=1, step=2, block=1))
    assert [(each.unit, each.rank, each.step) for each in findings] == [("blocks.1", 1, 2)]


@spmd(ranks=2)
def test_an_infinity_that_a_loss_scaler_made_is_counted() -> None:
    program = PROGRAMS["shards"]
    model, plant = program.build()
    optimizer = SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(current_device().type, init_scale=2.0**127, growth_interval=100)
    with watch(model, action="raise") as watched:
        for plant.step in range(4):
            scale = scaler.get_scale()
            x = torch.ones(3, 5, device=current_device())
            (scaler.scale(model(x).sum()) * (100.0 if plant.step < 2 else 1e-30)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert (scaler.get_scale() < scale) == (plant.step < 2)
    assert ([each.kind for each in watched.hints], watched.findings) == (["hint"], [])
    assert "expected of a loss scaler" in str(watched.hints[0])
    assert (watched.overflows, watched.step) == (2, 4)


@spmd(ranks=2)
def test_a_nan_in_forward_is_named_also_with_a_loss_scaler() -> None:
    program = PROGRAMS["shards"]
    model, _ = program.build(Fault("forward", rank=1, block=2))
    optimizer, scaler = SGD(model.parameters()), torch.amp.GradScaler(current_device().type)
    with watch(model) as watched:
        x = torch.ones(3, 5, device=current_device())
        scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)
    assert [(each.kind, each.unit, each.rank) for each in watched.findings] == [
        ("not finite", "blocks.2", 1)
    ]


@spmd(ranks=2)
def test_an_optimizer_in_backward_is_notified_after_it_has_stepped() -> None:
    model, plant = PROGRAMS["shards"].build(Fault("backward", rank=1, block=1))
    apply_optimizer_in_backward(SGD, model.parameters(), {"lr": 0.1})
    with watch(model) as watched:
        PROGRAMS["shards"].backward(model, plant)
    assert [(each.unit, each.rank) for each in watched.findings] == [("blocks.1", 1)]


class Unbounded(nn.Module):
    """Logarithms of zero, which the loss does not use in steps before `spoiled`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.spoiled = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        return torch.cat([y, y[:, :1] * 0 - torch.inf], dim=1)


class Uses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unbounded = Unbounded()
        self.last = nn.Linear(3, 1)
        self.spoiled = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.unbounded(x)
        z: torch.Tensor = self.last(y[:, :3] if not self.spoiled else y[:, 1:] * 0)
        return z


@pytest.mark.parametrize("usual", [True, False])
@spmd(ranks=2)
def test_an_infinity_below_zero_is_named_where_a_nan_follows_and_it_is_not_usual(
    usual: bool,
) -> None:
    model = fully_shard(Uses().to(current_device()), policy={Unbounded, nn.Linear})
    optimizer, x = SGD(model.parameters()), torch.ones(2, 3, device=current_device())
    with watch(model) as watched:
        for model.spoiled in [False] * usual + [True]:
            model(x).sum().backward()
            optimizer.step()
    named = [(each.unit, each.phase, each.step) for each in watched.findings]
    assert named == [("(root)", "input", 1) if usual else ("unbounded", "output", 0)]


def _with_gradients_at_rest() -> None:
    model, plant = PROGRAMS["shards"].build(Fault("weight", block=2))
    optimizer = SGD(model.parameters(), lr=0.1)
    with watch(model) as watched:
        PROGRAMS["shards"].backward(model, plant)
        optimizer.step()
    named = [(each.unit, each.tensor) for each in watched.findings]
    assert named == [("blocks.2", "up.weight")]


def test_one_rank_alone_is_watched_too(pool: Pool) -> None:
    pool.run(1, _with_gradients_at_rest)


# --- its life ------------------------------------------------------------------------------------


@spmd(ranks=2)
def test_close_ends_it_and_another_may_follow() -> None:
    model, plant = PROGRAMS["shards"].build(Fault("forward"))
    optimizer = SGD(model.parameters())
    first = watch(model)
    first.remove()
    first.remove()
    second = watch(model)
    PROGRAMS["shards"].backward(model, plant)
    optimizer.step()
    assert (first.findings, len(second.findings)) == ([], 1)
    second.remove()
    remove(model, "fully_shard")


@spmd(ranks=2)
def test_a_model_whose_annotation_was_removed_is_not_watched() -> None:
    model, _ = PROGRAMS["shards"].build(Fault("forward"))
    watched = watch(model)
    for module in model.modules():
        if registry(module):
            remove(module, "fully_shard")
    model(torch.ones(3, 5, device=current_device())).sum().backward()
    SGD(model.parameters()).step()
    assert watched.findings == []
    assert all(dispatcher_of(module) is None for module in model.modules())


@spmd(ranks=2)
def test_a_forward_without_a_backward_is_not_named() -> None:
    model, plant = PROGRAMS["shards"].build()
    optimizer = SGD(model.parameters())
    with watch(model, action="raise") as watched:
        model(torch.full((3, 5), torch.nan, device=current_device()))
        PROGRAMS["shards"].backward(model, plant)
        optimizer.step()
    assert watched.findings == []


@spmd(ranks=2)
def test_copies_are_not_watched() -> None:
    model, _ = PROGRAMS["shards"].build()
    watched = watch(model)
    clone = copy.deepcopy(model)
    clone.plant.fault = Fault("forward")
    PROGRAMS["shards"].backward(clone, clone.plant)
    SGD(clone.parameters()).step()
    assert (watched.findings, watched.step) == ([], 0)
    watch(clone).remove()


@spmd(ranks=2)
def test_a_model_that_is_dropped_is_freed() -> None:
    model, plant = PROGRAMS["shards"].build()
    watched, optimizer = watch(model), SGD(model.parameters())
    PROGRAMS["shards"].backward(model, plant)
    optimizer.step()
    gone = [weakref.ref(model), weakref.ref(model.blocks[0].up.weight)]
    del model, plant, watched, optimizer
    gc.collect()
    assert [each() for each in gone] == [None, None]


def test_the_environment_watches_every_model(pool: Pool) -> None:
    code = (
        "import torch; from torch import nn; from composable import fully_shard\n"
        "model = fully_shard(nn.Linear(2, 2)); optimizer = torch.optim.SGD(model.parameters())\n"
        "for x in (1.0, float('nan')):\n"
        "    model(torch.full((1, 2), x)).sum().backward(); optimizer.step()\n"
    )
    for value, said in (("1", "a NaN in the inputs"), ("raise", "NonFiniteError"), ("0", "")):
        environment = {**os.environ, "COMPOSABLE_WATCH": value}
        ran = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            capture_output=True, text=True, env=environment, check=False,
        )  # fmt: skip
        assert (said in ran.stderr) if said else not ran.stderr, ran.stderr
        assert ran.returncode == (value == "raise")
