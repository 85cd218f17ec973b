"""The simulated accelerator is what it says: asynchronous, ordered by streams and events alone, and
it tells what is not.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable.torch_private import launchers
from tests.accelerator import sim, watch
from tests.helpers.world import Pool, RanksFailed, current_device

MS = 1000  # microseconds


def _found(program: Callable[[torch.device, torch.Stream], None]) -> list[str]:
    """What is found in `program`, which gets the device and another stream than the current one."""
    sim.native.set_places(False)
    try:
        device = current_device()
        side = torch.Stream(device)
        sim.native.name_stream(side.stream_id, "the side stream")
        program(device, side)
        return watch.take_findings()
    finally:
        sim.native.set_places(True)


# --- streams, events and memory -----------------------------------------------------------------


def _reads_too_early() -> tuple[list[float], list[str]]:
    seen: list[float] = []

    def program(device: torch.device, side: torch.Stream) -> None:
        x = torch.zeros(2, device=device)
        torch.accelerator.synchronize()
        sim.native.sleep(100 * MS)
        x.add_(1)
        with side:
            y = x.clone()
        seen.extend(y.tolist())

    return seen, _found(program)


def test_a_read_that_waits_for_nothing_reads_what_was_before_and_both_launches_are_named(
    pool: Pool,
) -> None:
    ((seen, found),) = pool.run(1, _reads_too_early, device="sim")
    assert seen == [0.0, 0.0]
    assert (
        found[0]
        == "write by [add] on the default stream of sim:0 is not ordered before read by [copy_] on"
        " the side stream"
    )


def _waits() -> list[str]:
    def program(device: torch.device, side: torch.Stream) -> None:
        x = torch.zeros(2, device=device)
        sim.native.sleep(20 * MS)
        x.add_(1)
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            y = x * 2
            event = side.record_event()
        torch.accelerator.current_stream().wait_event(event)
        assert (y + x).tolist() == [3.0, 3.0]
        # or it would get its memory back too early
        side.wait_stream(torch.accelerator.current_stream())
        del y

    return _found(program)


def test_events_order_streams(pool: Pool) -> None:
    assert pool.run(1, _waits, device="sim") == [[]]


def _frees(recorded: bool) -> list[str]:
    def program(device: torch.device, side: torch.Stream) -> None:
        x = torch.ones(2, device=device)
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            sim.native.sleep(20 * MS)
            y = x * 2
        if recorded:
            x.record_stream(side)
        del x
        side.synchronize()
        assert (y.tolist() == [2.0, 2.0]) is recorded

    return _found(program)


def test_memory_that_is_freed_while_another_stream_reads_it_is_found(pool: Pool) -> None:
    ((*found, poison),) = pool.run(1, _frees, False, device="sim")
    assert found == [
        "read by [mul] on the side stream is not ordered before write by [free] on the default"
        " stream of sim:0"
    ]
    assert (
        poison
        == "poison reached the host by [copy to host] on the default stream of sim:0; last written"
        " by [mul] on the side stream"
    )


def test_a_stream_that_is_recorded_keeps_memory(pool: Pool) -> None:
    assert pool.run(1, _frees, True, device="sim") == [[]]


def _reads_unwritten_memory() -> None:
    torch.empty(2, device=current_device()).tolist()


def test_a_task_fails_that_let_poison_reach_the_host(pool: Pool) -> None:
    with pytest.raises(RanksFailed) as caught:
        pool.run(1, _reads_unwritten_memory, device="sim")
    text = str(caught.value)
    assert (
        "Unordered: 1 findings of the simulated accelerator:\npoison reached the host by [copy to"
        " host at " in text
    )
    assert "last written by [allocation at " in text
    assert "test_device.py" in text


def _makes_the_host_wait() -> list[str]:
    device = current_device()
    x = torch.ones(2, device=device)

    def program() -> None:
        x.sum().item()
        x.cpu()
        torch.ones(2).to(device)
        torch.ones(2).to(device, non_blocking=True)
        x.nonzero()
        torch.accelerator.synchronize()

    return [each.split(" at ")[0] for each in watch.host_waits_of(program)]


def test_what_makes_the_host_wait_is_counted(pool: Pool) -> None:
    (waits,) = pool.run(1, _makes_the_host_wait, device="sim")
    assert waits[:3] == ["item", "copy to host", "copy to device"]
    assert waits[3] == "operator aten::nonzero"
    assert waits[-1] == "device.synchronize"


# --- operators ----------------------------------------------------------------------------------

_MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolution": (lambda: nn.Conv2d(3, 4, 3, padding=1), (2, 3, 6, 6)),
    "transposed convolution": (lambda: nn.ConvTranspose2d(3, 4, 3), (2, 3, 6, 6)),
    "batch statistics": (lambda: nn.BatchNorm2d(3), (2, 3, 6, 6)),
    "attention": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0),
        (2, 5, 8),
    ),
    "embedding": (lambda: nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4)), (2, 4)),
}


def _results(module: nn.Module, x: Tensor) -> list[Tensor]:
    y = module(x)
    y.square().sum().backward()
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    return [each.detach().cpu() for each in (y, *gradients)]


def _computes() -> None:
    for make, shape in _MODULES.values():
        module, x = make().double(), torch.randn(shape, dtype=torch.float64)
        expected = _results(module, x)
        module.zero_grad()
        torch.testing.assert_close(
            _results(module.to(current_device()), x.to(current_device())), expected
        )


def test_operators_compute_what_they_do_on_a_host(pool: Pool) -> None:
    pool.run(1, _computes, device="sim")


def _normalises(parameters: torch.dtype) -> None:
    """Devices keep statistics in float32, whatever the layer computes in; the host's kernels want
    them as they left them.
    """
    makes: list[Callable[[], nn.Module]] = [
        lambda: nn.BatchNorm1d(4),
        lambda: nn.BatchNorm1d(4, affine=False),
        lambda: nn.BatchNorm1d(4, track_running_stats=False),
        lambda: nn.BatchNorm1d(4, affine=False, track_running_stats=False),
        lambda: nn.BatchNorm1d(4).eval(),
        lambda: nn.LayerNorm(4),
        lambda: nn.LayerNorm(4, bias=False),
        lambda: nn.LayerNorm(4, elementwise_affine=False),
        lambda: nn.GroupNorm(2, 4),
        lambda: nn.GroupNorm(2, 4, affine=False),
    ]
    for number, make in enumerate(makes):
        results = []
        for device in (torch.device("cpu"), current_device()):
            torch.manual_seed(number)
            x = torch.randn(6, 4, device="cpu").bfloat16().to(device).requires_grad_()
            module = make().to(device, parameters)
            results.append(
                [*_results(module, x), *(b.cpu() for b in module.buffers()), x.grad.cpu()]
            )  # type: ignore[union-attr]
        assert all(map(torch.equal, *results)), make()


@pytest.mark.parametrize("parameters", [torch.bfloat16, torch.float32])
def test_norms_of_bfloat16_compute_what_they_do_on_a_host(
    pool: Pool, parameters: torch.dtype
) -> None:
    pool.run(1, _normalises, parameters, device="sim")


def _look_alike(device: torch.device) -> list[Tensor]:
    """What comes out where arguments differ in one thing."""
    x = torch.arange(4.0, device=device).view(2, 2)
    whole, square, out = torch.arange(1, 3, device=device), x.clone(), torch.empty(0, device=device)
    made = [
        x.sum(0),
        x.sum(1),
        x.sum(0, keepdim=True),
        x + x,
        x.t() + x.t(),
        x.double() + x.double(),
        x + square,
    ]
    made += [torch.cat([x, x]), torch.cat([x, x[0:1]]), whole * 2, whole * 2.5]
    made += [whole * torch.tensor(2), whole * torch.tensor(2.5)]
    made += [
        x[0] + torch.tensor(2.0, dtype=torch.float64),
        x[0] + torch.ones(2, dtype=torch.float64, device=device),
    ]
    torch.set_default_dtype(torch.float64)
    made.append(whole / whole)
    torch.set_default_dtype(torch.float32)
    made.append(whole / whole)
    for _ in range(2):  # which has its size the second time
        made.append(torch.add(x, x, out=out).clone())
    return made


def _tells_them_apart() -> None:
    expected = _look_alike(torch.device("cpu"))
    for _ in range(2):  # what the first time found out is remembered
        for found, wanted in zip(_look_alike(current_device()), expected, strict=True):
            assert found.stride() == wanted.stride()
            torch.testing.assert_close(found.cpu(), wanted, rtol=0, atol=0)


def test_what_is_remembered_of_operators_is_distinguished_by_all_that_matters(pool: Pool) -> None:
    pool.run(1, _tells_them_apart, device="sim")


# --- collectives --------------------------------------------------------------------------------


def _adds() -> tuple[list[float], list[float]]:
    """The first term is so large that bfloat16 loses each of the others that is added to it, but
    not their sum.
    """
    term = (256.0, 1.0, 1.0)[dist.get_rank()]
    x = torch.full((3,), term, dtype=torch.bfloat16, device=current_device())
    row = torch.empty(1, dtype=torch.bfloat16, device=current_device())
    group = dist.group.WORLD
    assert group is not None
    launcher = launchers(group, asynchronous=False)["reduce_scatter"]
    getattr(group, launcher.single)(row, x, launcher.options)
    dist.all_reduce(x)
    return row.tolist(), x.tolist()


def test_terms_are_added_in_the_order_of_ranks_and_rounded_after_each(pool: Pool) -> None:
    assert pool.run(3, _adds, device="sim") == [([256.0], [256.0] * 3)] * 3


def _reduces(waits: bool) -> list[str]:
    def program(device: torch.device, side: torch.Stream) -> None:
        x = torch.ones(2, device=device)
        work = dist.all_reduce(x, async_op=True)
        if waits:
            work.wait()
        x.mul_(2)
        work.wait()

    return _found(program)


def test_who_waits_for_a_collective_is_ordered_and_who_does_not_is_found(pool: Pool) -> None:
    assert pool.run(2, _reduces, True, device="sim") == [[], []]
    for found in pool.run(2, _reduces, False, device="sim"):
        assert found
        first = r"write by \[all_reduce of group (\d)\] on the stream of group \1"
        assert re.match(
            first + r" is not ordered before read by \[mul\] on the default stream of sim:",
            found[0],
        ), found
