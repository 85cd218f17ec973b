"""`replicate`: gradients are means however they come about, buckets follow readiness, and kept gradients stay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from composable import remove, replicate
from composable.device.collectives import Channel, Wire, wires_wrapped_by
from composable.runtime.reducer import HOST_IN_FLIGHT
from tests.helpers.compare import averaged_gradients
from tests.helpers.wires import Log, Recording
from tests.helpers.world import Pool, current_device, need_devices, spmd

WIDTH: Final = 4


class Parts(nn.Module):
    """Linear layers that run in the order in which they are asked for."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def forward(self, x: Tensor, order: Sequence[int]) -> Tensor:
        for index in order:
            x = self.layers[index](x).tanh()
        return x


def _twins(make: Callable[[], nn.Module], **options: Any) -> tuple[nn.Module, nn.Module]:
    """A plain model and the same one replicated."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(make().to(current_device(), torch.float64))
    plain, ours = models
    replicate(ours, **options)
    return plain, ours


def _batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(3, WIDTH, generator=generator, dtype=torch.float64).to(current_device())


def _assert_means(expected: dict[str, Tensor | None], model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        mean = expected[name]
        if mean is None:
            assert parameter.grad is None, name
        else:
            torch.testing.assert_close(
                parameter.grad, mean, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}"
            )


# --- several backwards, and what they leave ---------------------------------------------------------------------------


@pytest.mark.parametrize("cap", [25.0, 0.0001])
@pytest.mark.parametrize("set_to_none", [True, False, None])
@spmd(ranks=[2, 4])
def test_gradients_of_several_backwards_add_up_to_the_mean(set_to_none: bool | None, cap: float) -> None:
    plain, ours = _twins(Parts, bucket_cap_mb=cap)
    for step in range(5):
        for model in (plain, ours):
            model(_batch(step), [0, 1, 2]).sum().backward()
        _assert_means(averaged_gradients(plain), ours)
        if set_to_none is not None and step % 2:
            plain.zero_grad(set_to_none)
            ours.zero_grad(set_to_none)


@pytest.mark.parametrize("cap", [25.0, 0.0001])
@spmd(ranks=[2, 4])
def test_parameters_that_some_ranks_or_all_leave_out(cap: float) -> None:
    plain, ours = _twins(Parts, bucket_cap_mb=cap)
    mine = [[0, 1], [1], [1, 2], [0]]  # by step; other ranks differ
    theirs = [[0], [1, 2], [1], [0]]
    for step, order in enumerate(mine if dist.get_rank() == 0 else theirs):
        for model in (plain, ours):
            model(_batch(step), order).sum().backward()
        _assert_means(averaged_gradients(plain), ours)


@spmd(ranks=[2, 4])
def test_a_gradient_stays_to_the_bit_while_no_rank_uses_its_parameter() -> None:
    _, ours = _twins(Parts)
    ours(_batch(0), [0, 1, 2]).sum().backward()
    last = ours.layers[2].weight  # type: ignore[union-attr,index]
    assert isinstance(last.grad, Tensor)
    with torch.no_grad():
        last.grad.mul_(1.0 + dist.get_rank() / 3)  # what differs from rank to rank must not be averaged
    gradient, before = last.grad, last.grad.clone()
    for step in (1, 2):
        ours(_batch(step), [0, 1]).sum().backward()
    assert last.grad is gradient
    assert torch.equal(gradient, before)


@spmd(ranks=2)
def test_kept_gradients_stay_and_memory_is_used_again() -> None:
    _, ours = _twins(Parts)
    addresses, kept = [], []
    for step in range(8):
        ours(_batch(step), [0, 1, 2]).sum().backward()
        gradients = [p.grad for p in ours.parameters() if p.grad is not None]
        assert len(gradients) == 6
        addresses.append([gradient.data_ptr() for gradient in gradients])
        if step == 4:
            kept = [(gradient.detach(), gradient.clone()) for gradient in gradients]
        del gradients
        ours.zero_grad()
    assert addresses[0] == addresses[4]
    assert addresses[4] != addresses[5] == addresses[7]
    assert all(torch.equal(gradient, before) for gradient, before in kept)


@spmd(ranks=2)
def test_gradients_stay_on_the_parameters_when_the_annotation_is_removed() -> None:
    plain, ours = _twins(Parts)
    for model in (plain, ours):
        model(_batch(0), [0, 1, 2]).sum().backward()
    _assert_means(averaged_gradients(plain), ours)
    remove(ours, replicate)
    before = [p.grad.clone() for p in ours.parameters() if p.grad is not None]
    ours(_batch(1), [0, 1, 2]).sum().backward()
    plain.zero_grad()
    plain(_batch(1), [0, 1, 2]).sum().backward()
    for old, one, other in zip(before, plain.parameters(), ours.parameters(), strict=True):
        assert one.grad is not None
        torch.testing.assert_close(other.grad, old + one.grad)


@spmd(ranks=2)
def test_a_rank_that_hands_its_input_on_takes_part_in_every_backward_through_one_forward() -> None:
    plain, ours = _twins(Parts)
    for model in (plain, ours):
        loss = model(_batch(0).requires_grad_(), [0, 1, 2] if dist.get_rank() == 0 else []).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    _assert_means(averaged_gradients(plain), ours)


# --- how gradients come about -----------------------------------------------------------------------------------------


@spmd(ranks=2)
def test_parameters_that_backward_reaches_by_no_output() -> None:
    plain, ours = _twins(Parts)
    for step in range(3):
        for model in (plain, ours):
            model(_batch(step), [0, 1])
            penalty = model.layers[0].weight.pow(2).sum() + model.layers[2].bias.exp().sum()  # type: ignore[index,union-attr]
            (penalty * (1 + dist.get_rank())).backward()
        _assert_means(averaged_gradients(plain), ours)


@spmd(ranks=2)
def test_gradients_go_where_the_user_has_put_them() -> None:
    plain, ours = _twins(Parts)
    flat = torch.zeros(sum(p.numel() for p in ours.parameters()), dtype=torch.float64, device=current_device())
    pieces = flat.split([p.numel() for p in ours.parameters()])
    for parameter, piece in zip(ours.parameters(), pieces, strict=True):
        parameter.grad = piece.view(parameter.shape)
    for step in range(3):
        for model in (plain, ours):
            model(_batch(step), [0, 1, 2]).sum().backward()
    means = averaged_gradients(plain)
    _assert_means(means, ours)
    torch.testing.assert_close(flat, torch.cat([mean.view(-1) for mean in means.values() if mean is not None]))


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(7, WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(nn.functional.embedding(x, self.table, sparse=True))  # type: ignore[no-any-return]


@spmd(ranks=2)
def test_sparse_gradients_of_modules_that_do_not_tell_become_dense_means() -> None:
    plain, ours = _twins(Lookup)
    for step in range(3):
        rows = torch.tensor([0, 2 + dist.get_rank()], device=current_device())
        for model in (plain, ours):
            model(rows).pow(2).sum().backward()
        means = {
            name: _mean(p.grad.to_dense() if p.grad is not None and p.grad.is_sparse else p.grad)
            for name, p in plain.named_parameters()
        }
        _assert_means(means, ours)
        if step:
            plain.zero_grad()
            ours.zero_grad()


def _mean(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    total = gradient.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(WIDTH, WIDTH)
        self.high = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.high(self.low(x.to(self.low.weight.dtype)).tanh().to(self.high.weight.dtype))  # type: ignore[no-any-return]


@pytest.mark.parametrize("when", ["before", "after"])
@spmd(ranks=2)
def test_dtypes_are_kept_apart_also_when_they_change_after_annotation(when: str) -> None:
    torch.manual_seed(0)
    model = Mixed().to(current_device())
    if when == "before":
        model.low.half()
    replicate(model)
    batch = _batch(0).float()
    for _ in range(2):
        model(batch).sum().backward()
        model.zero_grad()
    if when == "after":
        model.low.half()
    for _ in range(2):
        model.zero_grad()
        model(batch).sum().backward()
    plain = Mixed().to(current_device())
    plain.low.half()
    plain.load_state_dict(model.state_dict())
    plain(batch).sum().backward()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert other.grad.dtype == one.dtype
        assert torch.equal(other.grad, _mean(one.grad))


@spmd(ranks=2)
def test_gradients_are_laid_out_like_their_parameters() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3)).to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]

    plain, ours = _twins(make)
    images = torch.randn(2, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(dist.get_rank()))
    addresses = []
    for _ in range(4):
        for model in (plain, ours):
            model.zero_grad()
            model(images.to(current_device())).pow(2).sum().backward()
        _assert_means(averaged_gradients(plain), ours)
        weight = ours[0].weight  # type: ignore[index]
        assert isinstance(weight, nn.Parameter)
        assert weight.grad is not None
        assert weight.grad.stride() == weight.stride() != torch.empty(weight.shape).stride()
        addresses.append(weight.grad.data_ptr())
    assert addresses[2] == addresses[3]


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 700)
        self.large = nn.Linear(700, 700)
        self.down = nn.Linear(700, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.large(self.up(x)).tanh())  # type: ignore[no-any-return]


def _large_gradients() -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Wide().to(current_device()))
    theirs, ours = models
    assert ours.large.weight.numel() * 4 > 1 << 20, "it is a bucket alone"
    device = current_device()
    rival = DistributedDataParallel(theirs, device_ids=[device] if device.type == "cuda" else None)
    replicate(ours)
    for step in range(4):
        for model in (rival, ours):
            model(_batch(step).float()).pow(2).sum().backward()
        for one, other in zip(theirs.parameters(), ours.parameters(), strict=True):
            assert one.grad is not None
            assert other.grad is not None
            assert torch.equal(one.grad, other.grad)
        if step % 2:
            theirs.zero_grad()
            ours.zero_grad()


def test_large_gradients_equal_ddps_bit_for_bit(pool: Pool, device: str) -> None:
    need_devices(device, 2)
    pool.run(2, _large_gradients, device=device)


# --- order ------------------------------------------------------------------------------------------------------------


class _Counting(Recording):
    """Also notes when ranks tell each other an order."""

    def extremes(self, values: Sequence[int], *, label: str, channel: Channel | None = None) -> tuple[list[int], list[int]]:
        if label.startswith("exchange of the order"):
            self._log.add("exchange", label)
        return self._inner.extremes(values, label=label, channel=channel)


def _observed(log: Log) -> Callable[[Wire], Wire]:
    return lambda wire: _Counting(wire, log)


_CAP: Final = 160 / (1 << 20)  # bytes: one layer of the model in a bucket


def _launches(orders: Sequence[Sequence[int]]) -> tuple[list[list[str]], int]:
    """For each step the labels of its launches, and how often the ranks agreed on an order."""
    log, steps = Log(), []
    with wires_wrapped_by(_observed(log)):
        plain, ours = _twins(Parts, bucket_cap_mb=_CAP)
    log.events.clear()
    for step, order in enumerate(orders):
        for model in (plain, ours):
            model.zero_grad()
            model(_batch(step), order).sum().backward()
        _assert_means(averaged_gradients(plain), ours)
        steps.append(log.labels())
        exchanges = log.labels("exchange")
        log.events[:] = [event for event in log.events if event[0] == "exchange"]
    return steps, len(exchanges)


def _layers(labels: Sequence[str]) -> str:
    return "".join(label.partition("layers.")[2][0] for label in labels)


def _in_orders(by_rank: Sequence[Sequence[Sequence[int]]]) -> tuple[list[str], int]:
    steps, exchanges = _launches(by_rank[dist.get_rank()])
    return [_layers(labels) for labels in steps], exchanges


def test_buckets_follow_the_order_in_which_gradients_become_ready(pool: Pool, device: str) -> None:
    need_devices(device, 2)
    orders = [[2, 0, 1]] * 3
    for launched, exchanges in pool.run(2, _in_orders, [orders, orders], device=device):
        assert launched == ["210", "102", "102"]
        assert exchanges == 1


def test_buckets_are_filled_anew_once_and_not_when_the_graph_changes(pool: Pool, device: str) -> None:
    need_devices(device, 2)
    orders = [[2, 0, 1], [0, 1, 2], [1, 2, 0], [1, 2, 0]]
    for launched, exchanges in pool.run(2, _in_orders, [orders, orders], device=device):
        assert launched == ["210", "102", "102", "102"]
        assert exchanges == 1


def test_ranks_with_other_orders_of_readiness_launch_the_same_buckets(pool: Pool, device: str) -> None:
    need_devices(device, 2)
    by_rank = [[[2, 0, 1], [0, 1, 2], [2, 1, 0]], [[1, 2, 0], [2, 0, 1], [0, 1, 2]]]
    ours, theirs = pool.run(2, _in_orders, by_rank, device=device)
    assert ours == theirs == (["210", "102", "102"], 1)


def test_the_order_is_that_of_the_first_backward_that_some_rank_completes(pool: Pool, device: str) -> None:
    need_devices(device, 2)
    by_rank = [[[0, 2], [0, 2], [0, 2]], [[0], [1, 0, 2], [0]]]
    for launched, exchanges in pool.run(2, _in_orders, by_rank, device=device):
        assert launched == ["210", "210", "201"]
        assert exchanges == 1


def _freezing() -> tuple[list[str], int]:
    log, launched = Log(), []
    with wires_wrapped_by(_observed(log)):
        plain, ours = _twins(Parts, bucket_cap_mb=_CAP)
    log.events.clear()
    for step, frozen in enumerate([(), (), (0,), (), (1,), ()]):
        for model in (plain, ours):
            for index, layer in enumerate(model.layers):  # type: ignore[union-attr,arg-type]
                layer.requires_grad_(index not in frozen)
            model.zero_grad()
            model(_batch(step), [2, 0, 1]).sum().backward()
        _assert_means(averaged_gradients(plain), ours)
        launched.append(_layers(log.labels()))
        exchanges = log.labels("exchange")
        log.events[:] = [event for event in log.events if event[0] == "exchange"]
    return launched, len(exchanges)


def test_what_is_agreed_outlives_freezing_and_unfreezing(pool: Pool, device: str) -> None:
    need_devices(device, 2)
    for launched, exchanges in pool.run(2, _freezing, device=device):
        assert launched == ["210", "102", "12", "102", "02", "102"]
        assert exchanges == 1


def _in_flight() -> list[int]:
    log = Log()
    with wires_wrapped_by(_observed(log)):
        _, ours = _twins(lambda: Parts(6), bucket_cap_mb=_CAP)
    counts, flying = [], 0
    log.events.clear()
    for step in range(2):
        # Nobody but the first rank has a gradient for the first bucket: the others launch everything at the end.
        ours(_batch(step), range(6 if dist.get_rank() == 0 else 5)).sum().backward()
    for event, _ in log.events:
        flying += {"launch": 1, "wait": -1}.get(event, 0)
        counts.append(flying)
    return counts


def test_a_host_keeps_few_buckets_in_flight_also_if_others_launch_theirs_at_the_end(pool: Pool) -> None:
    for counts in pool.run(2, _in_flight):
        assert max(counts) <= HOST_IN_FLIGHT < 6
        assert counts[-1] == 0
