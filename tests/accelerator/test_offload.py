"""Offloaded activations on streams of their own: every wait is needed, the host waits for none, and
memory is given back.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final
from unittest import mock

import pytest
import torch
from torch import nn

from composable import offload_activations
from composable.features import activations
from composable.features.activations import TO_DEVICE_STREAM, TO_HOST_STREAM
from tests.accelerator import sim, watch
from tests.accelerator.faults import COMPUTE, _launch, assert_found, fork_without_waiting
from tests.helpers.offloading import Line
from tests.helpers.world import Pool, current_device

_LEAVES, _RETURNS = f"stream '{TO_HOST_STREAM}'", f"stream '{TO_DEVICE_STREAM}'"
_COPY_OUT, _COPY_BACK = "copy to host", "copy to device"


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Line(64) for _ in range(12)]).to(current_device())


def _x() -> torch.Tensor:
    return torch.randn(32, 64, device=current_device())


def _do_nothing(_: object) -> None:
    return None


def _free_without_waiting() -> AbstractContextManager[Any]:
    return mock.patch.object(activations._OnDevice, "__del__", _do_nothing)


def _use_without_waiting() -> AbstractContextManager[Any]:
    return mock.patch.object(activations._OnDevice, "wait", return_value=None)


def _return_before_it_has_left() -> AbstractContextManager[Any]:
    make = activations._OnDevice.__init__

    def hasty(self: Any, *args: Any, after: Any = None) -> None:
        make(self, *args)

    return mock.patch.object(activations._OnDevice, "__init__", hasty)


# What is left out, and what the finding says of the earlier launch and of the later one.
_FAULTS: Final[dict[str, tuple[Callable[[], AbstractContextManager[Any]], str, str]]] = {
    "what leaves does not wait for what computes": (
        fork_without_waiting(TO_HOST_STREAM),
        _launch("write", "", COMPUTE),
        _launch("read", _COPY_OUT, _LEAVES),
    ),
    "what returns does not wait for what computes": (
        fork_without_waiting(TO_DEVICE_STREAM),
        _launch("write", "", COMPUTE),
        _launch("write", _COPY_BACK, _RETURNS),
    ),
    "memory is given back while it is copied": (
        _free_without_waiting,
        _launch("read", _COPY_OUT, _LEAVES),
        _launch("write", "free", COMPUTE),
    ),
    "backward does not wait for what returns": (
        _use_without_waiting,
        _launch("write", _COPY_BACK, _RETURNS),
        _launch("read", "", COMPUTE),
    ),
    "what returns to another stream does not wait until it has left": (
        _return_before_it_has_left,
        _launch("write", _COPY_OUT, _LEAVES),
        _launch("read", _COPY_BACK, _RETURNS),
    ),
}


def _train_with(fault: str) -> list[str]:
    model, x = _model(), _x()
    offload_activations(model, policy={Line}, min_bytes=0)
    with _FAULTS[fault][0]():
        _run(model, x, aside="another stream" in fault)
    return watch.take_findings()


def _run(model: nn.Module, x: torch.Tensor, *, aside: bool) -> None:
    loss = model(x).square().sum()
    if aside:
        # sum, square, add, addmm
        last = loss.grad_fn.next_functions[0][0].next_functions[0][0].next_functions[1][0]
        with torch.Stream(current_device()) as stream:
            stream.wait_stream(torch.accelerator.current_stream())
            assert last._saved_mat1.shape == (32, 192)
            torch.accelerator.current_stream().synchronize()
    loss.backward()


@pytest.mark.parametrize("aside", [False, True])
def test_without_a_fault_nothing_is_found(pool: Pool, aside: bool) -> None:
    pool.run(1, _train_unspoilt, aside, device="sim")


def _train_unspoilt(aside: bool) -> None:
    model, x = _model(), _x()
    offload_activations(model, policy={Line}, min_bytes=0)
    _run(model, x, aside=aside)


@pytest.mark.parametrize("fault", _FAULTS)
def test_a_fault_is_found_and_both_launches_are_named(pool: Pool, fault: str) -> None:
    _, first, second = _FAULTS[fault]
    assert_found(pool.run(1, _train_with, fault, device="sim"), first, second)


def _peak_and_waits(how: str) -> tuple[int, list[str]]:
    model, x = _model(), _x()
    if how != "plain":
        offload_activations(model, policy={Line}, min_bytes=0)

    for parameter in model.parameters():  # gradients are not what is measured
        parameter.register_post_accumulate_grad_hook(
            lambda parameter: setattr(parameter, "grad", None)
        )

    def step() -> None:
        model(x).square().sum().backward()

    step()
    sim.synchronize()
    index = current_device().index
    sim.native.reset_peak(index)
    before = sim.native.memory(index)[0]
    waits = watch.host_waits_of(step)
    return sim.native.memory(index)[1] - before, waits


def test_the_host_waits_for_nothing_and_the_peak_does_not_grow_with_depth(pool: Pool) -> None:
    ((plain, _),) = pool.run(1, _peak_and_waits, "plain", device="sim")
    ((peak, waits),) = pool.run(1, _peak_and_waits, "offloaded", device="sim")
    assert waits == []
    largest = 32 * 192 * 4
    assert plain >= 12 * (largest + 32 * 64 * 4)
    assert peak <= plain - 6 * largest
