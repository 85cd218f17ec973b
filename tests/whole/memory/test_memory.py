"""Training leaves nothing behind, neither while it goes on nor when the model is dropped: no
tensors, objects, hooks, pages.
"""

from __future__ import annotations

import copy
import gc
import inspect
import os
import weakref
from typing import Final

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable import (
    EMA,
    clip_grad_norm_,
    full_state_dict,
    fully_shard,
    keep_unsharded,
    no_sync,
    reduce_gradients,
    replicate,
    reset,
    reshard,
    stream_full,
    summon_full_params,
    unshard,
)
from composable.engine.step.unit import units_below
from composable.memory.elastic import idle_bytes
from tests.helpers.battery import BATTERY
from tests.helpers.compare import sgd
from tests.helpers.schemes import SCHEMES
from tests.helpers.world import current_device, spmd

STEPS: Final = 200
WARM_UP: Final = 100
# Allocators keep pages; one object of 64 bytes leaked per module and step would be more than this.
SLACK_BYTES: Final = 4 << 20


def _live() -> tuple[int, int]:
    """How many tensors, and how many objects that could hold some, are alive.

    The least of some counts: a thread of the backend lets go of the last message a moment after
    its result was seen, and what leaks is in every count.
    """
    counts = []
    for _ in range(8):
        dist.barrier()  # those threads get a turn
        gc.collect()
        objects = gc.get_objects()
        counts.append((sum(issubclass(type(item), torch.Tensor) for item in objects), len(objects)))
        del objects
    return min(counts)


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _hooks(model: nn.Module) -> int:
    return sum(
        len(registered)
        for module in model.modules()
        for registered in (
            module._forward_pre_hooks,
            module._forward_hooks,
            module._backward_hooks,
            module._backward_pre_hooks,
        )
    )


@pytest.mark.parametrize(
    "scheme",
    [
        "fully_shard by policy",
        "fully_shard without resharding",
        "replicate",
        "replicate inside fully_shard",
        "checkpoint, then fully_shard",
    ],
)
@spmd(ranks=2)
def test_nothing_grows_over_two_hundred_steps(scheme: str) -> None:
    case = BATTERY["a unit used several times"]
    model = case.model(0, 0, current_device())
    SCHEMES[scheme].annotate(model, case)
    optimizer = sgd(model)
    for group in optimizer.param_groups:
        group["lr"] = 1e-4
        # with DTensors of torch 2.11 every such call leaks: pytorch/pytorch#178276
        group["foreach"] = False
    seen = []
    for step in range(STEPS):
        inputs = case.inputs(0, step, dist.get_rank(), current_device())
        # Evaluation and forwards that nobody uses are where leftovers would gather.
        if step % 4 == 0:
            with torch.no_grad():
                model(*inputs)
        loss = case.loss(model, *inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 in (WARM_UP, STEPS):
            del loss, inputs
            seen.append((*_live(), _resident_bytes(), _hooks(model)))
    (
        (tensors_before, objects_before, resident_before, hooks_before),
        (
            tensors,
            objects,
            resident,
            hooks,
        ),
    ) = seen
    assert tensors <= tensors_before
    assert objects <= objects_before + 50  # caches of the interpreter; a leak would be one per step
    assert resident <= resident_before + SLACK_BYTES
    assert hooks == hooks_before


@spmd(ranks=1)
def test_a_leaked_tensor_per_step_would_be_seen() -> None:
    before, _ = _live()
    kept = [torch.zeros(1) for _ in range(STEPS)]
    assert _live()[0] - before == len(kept) == STEPS


# --- between steps ------------------------------------------------------------------------------


def _held(model: nn.Module) -> int:
    """Bytes of gathered and cast parameters, and of idle blocks."""
    gathers = [group.gather for unit in units_below([model]) for group in unit.groups]
    buffers = [
        buffer
        for each in gathers
        if each
        for buffer in (*each.buffers, *each._stagings, each._sent)
    ]
    return idle_bytes() + sum(buffer.nbytes for buffer in buffers if buffer and buffer.held)


def _model(verb: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    if verb == "both":
        replicate(model[0], mp_policy="bf16")
    annotate = replicate if verb == "replicate" else fully_shard
    return annotate(model, policy={nn.Linear}, mp_policy="bf16")


def _raise(*_: object) -> None:
    raise MemoryError


class Calls:
    """What one does with a model between steps, and steps of several kinds."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.x = torch.ones(2, 64)
        self.optimizer = sgd(model)
        self.ema = EMA(model, decay=0.9)
        self.idle_within = 0  # a forward

    def train(self) -> None:
        self.model(self.x).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def accumulate(self) -> None:
        with no_sync(self.model):
            self.model(self.x).sum().backward()
        reduce_gradients(self.model)

    def clip(self) -> None:
        self.model(self.x).sum().backward()
        clip_grad_norm_(self.model.parameters(), 1.0)

    def evaluate(self) -> None:
        with torch.no_grad():
            self.model(self.x)

    def evaluate_the_average(self) -> None:
        self.ema.update()
        with self.ema.swap():
            self.evaluate()

    def look(self) -> None:
        with summon_full_params(self.model, writeback=False):
            assert self.model[0].weight.shape == (64, 64)

    def edit(self) -> None:
        with summon_full_params(self.model, rank0_only=True), torch.no_grad():
            if dist.get_rank() == 0:
                self.model[0].weight.mul_(2.0)

    def save_whole(self) -> None:
        full_state_dict(self.model, dtype=torch.bfloat16)

    def stream(self) -> None:
        assert len(list(stream_full(self.model))) == 6

    def save_and_load(self) -> None:
        self.model.load_state_dict(self.model.state_dict())

    def copy(self) -> None:
        clone = copy.deepcopy(self.model)
        clone(self.x).sum().backward()

    def lose_a_forward(self) -> None:
        def fail(*_: object) -> None:
            self.idle_within = idle_bytes()
            raise MemoryError

        with self.model[2].register_forward_hook(fail), pytest.raises(MemoryError):
            self.model(self.x)

    def evaluate_after_a_forward_that_nobody_uses(self) -> None:
        self.model(self.x)
        self.evaluate()

    def reset_after_a_forward_that_nobody_uses(self) -> None:
        self.model(self.x)
        reset(self.model)


class CallsOfShards(Calls):
    """The same with those that refuse a model that is replicated alone."""

    def generate(self) -> None:
        with torch.no_grad(), keep_unsharded(self.model):
            self.model(self.x)
            self.model[1](self.x)

    def train_unsharded(self) -> None:
        with keep_unsharded(self.model):
            self.train()

    def gather_by_hand(self) -> None:
        unshard(self.model)
        reshard(self.model)

    def gather_and_train(self) -> None:
        unshard(self.model)
        self.train()

    def generate_after_a_forward_that_nobody_uses(self) -> None:
        self.model(self.x)
        self.generate()


@pytest.mark.parametrize("verb", ["fully_shard", "replicate", "both"])
@spmd(ranks=2, everywhere=True)
def test_after_every_call_nothing_is_unsharded_and_no_memory_of_a_host_idles(verb: str) -> None:
    model = _model(verb)
    calls = (Calls if verb == "replicate" else CallsOfShards)(model)
    names = [
        name for name in dir(calls) if inspect.ismethod(getattr(calls, name)) and name[0] != "_"
    ]
    assert len(names) > 13
    for name in names:
        getattr(calls, name)()
        assert _held(model) == 0, name
        calls.train()
        assert _held(model) == 0
    if verb == "fully_shard" and current_device().type == "cpu":
        assert calls.idle_within > 0, "what is freed within a step serves the next unit"


@pytest.mark.parametrize("verb", ["fully_shard", "replicate", "both"])
@spmd(ranks=2, everywhere=True)
def test_after_a_backward_that_raised_a_host_holds_what_is_in_flight_and_after_a_reset_nothing(
    verb: str,
) -> None:
    model = _model(verb)
    calls = Calls(model)
    calls.train()
    with model[1].register_forward_hook(
        lambda _m, _x, output: output.register_hook(_raise) and None
    ):
        loss = model(calls.x).sum()
    with pytest.raises(MemoryError):
        loss.backward()
    if current_device().type == "cpu":
        whole = 2 * (64 * 64 + 64)  # of one unit, the one that is gathered ahead
        assert _held(model) <= whole + whole // 2, "where it arrives, and the shard that is sent"
    reset(model)
    assert _held(model) == 0
    calls.train()
    assert _held(model) == 0


# --- models that are dropped --------------------------------------------------------------------


def _train_and_drop(scheme: str) -> list[weakref.ref[nn.Module | torch.Tensor]]:
    case = BATTERY["a unit used several times"]
    model = case.model(0, 0, current_device())
    originals = [weakref.ref(parameter) for parameter in model.parameters()]
    SCHEMES[scheme].annotate(model, case)
    optimizer = sgd(model)
    for step in range(3):
        case.loss(model, *case.inputs(0, step, dist.get_rank(), current_device())).backward()
        optimizer.step()
    return [*originals, *map(weakref.ref, model.modules()), *map(weakref.ref, model.parameters())]


@pytest.mark.parametrize("scheme", SCHEMES)
@spmd(ranks=2)
def test_a_model_that_is_dropped_is_gone_with_all_that_it_held(scheme: str) -> None:
    """torch keeps a gradient hook alive with its parameter where the collector does not look."""
    counts = []
    for _ in range(4):
        references = _train_and_drop(scheme)
        gc.collect()
        assert [reference() for reference in references if reference() is not None] == []
        counts.append(_live()[0])
    assert counts[-1] < counts[0] + 3, "one for each model that followed"
