"""Training leaves nothing behind, neither while it goes on nor when the model is dropped: no
tensors, objects, hooks, pages.
"""

from __future__ import annotations

import gc
import os
import weakref
from typing import Final

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable import describe, fully_shard, no_sync, reduce_gradients, replicate
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


@pytest.mark.parametrize("verb", ["fully_shard", "replicate"])
@spmd(ranks=2, everywhere=True)
def test_a_host_keeps_nothing_unsharded_and_no_idle_memory_between_steps(verb: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    {"fully_shard": fully_shard, "replicate": replicate}[verb](
        model, policy={nn.Linear}, mp_policy="bf16"
    )
    x = torch.ones(2, 64)

    def fail(*_: object) -> None:
        assert verb != "fully_shard" or idle_bytes() > 0, (
            "what is freed within a step serves the next unit"
        )
        raise MemoryError

    def accumulate() -> None:
        with no_sync(model):
            model(x).sum().backward()
        reduce_gradients(model)

    def lose() -> None:
        with model[2].register_forward_hook(fail), pytest.raises(MemoryError):
            model(x)

    def evaluate() -> None:
        with torch.no_grad():
            model(x)

    for step in (lambda: model(x).sum().backward(), evaluate, accumulate, lose):
        step()
        assert idle_bytes() == 0
        assert {row.state for row in describe(model).rows} <= {"SHARDED", "-"}


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
