"""`clip_grad_norm_` does to any mix of parameters, on any number of ranks, what torch's does to the
plain model.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from composable import clip_grad_norm_, fully_shard, replicate
from composable.comm.backends import comms_wrapped_by
from composable.comm.base import Comm
from composable.comm.launch import Launch
from tests.helpers.communicators import Around
from tests.helpers.refusals import refusal
from tests.helpers.world import Pool, current_device, need_devices, spmd
from tests.optim.copies import local

ORDERS: Final = (1, 2.0, 3, math.inf)
Annotate = Callable[["Net"], object]


class Net(nn.Module):
    """Sizes that no number of ranks divides, shards that are empty, a scalar, a frozen weight and
    one that nobody uses.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 7)) for _ in range(3)
        )
        self.layers[1][0].weight.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(1))
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Linear(7, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.scale * layer(x)
        return x * self.temperature


def _shard(model: Net) -> None:
    fully_shard(model, policy={nn.Sequential})


def _replicate(model: Net) -> None:
    replicate(model)


def _replicate_in_shards(model: Net) -> None:
    replicate(model.layers[0])
    replicate(model.layers[2][2])
    fully_shard(model, policy={nn.Sequential})


def _shards_in_replica(model: Net) -> None:
    fully_shard(model.layers[1])
    fully_shard(model.layers[2])
    replicate(model)


def _ignore(model: Net) -> None:
    fully_shard(
        model, policy={nn.Sequential}, ignored_params=[model.layers[0][0].weight, model.temperature]
    )


SCHEMES: Final[dict[str, Annotate]] = {
    "fully_shard": _shard,
    "replicate": _replicate,
    "replicate inside fully_shard": _replicate_in_shards,
    "fully_shard inside replicate": _shards_in_replica,
    "ignored parameters": _ignore,
}


def _net(dtype: torch.dtype = torch.float32, *, mixed: bool = True) -> Net:
    """The same weights at each call; `mixed`: one layer is in double precision."""
    torch.manual_seed(3)
    net = Net().to(current_device(), dtype)
    if not mixed:
        return net
    net.layers[2][0].to(torch.float64)
    net.layers[2][0].register_forward_pre_hook(lambda _, args: (args[0].double(),))
    net.layers[2][0].register_forward_hook(lambda _, __, output: output.to(dtype))
    return net


def _backward(model: nn.Module, step: int = 0) -> None:
    """The same batch on all ranks, so that every rank's gradient is the mean, whoever averages it
    or does not.
    """
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(6, 7, generator=generator).to(current_device(), model.scale.dtype)  # type: ignore[arg-type]
    model(x).square().mean().backward()


def _whole(tensor: Tensor | None) -> Tensor | None:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _assert_same_gradients(model: nn.Module, plain: nn.Module, **tolerance: float) -> None:
    for (name, ours), (_, theirs) in zip(
        model.named_parameters(), plain.named_parameters(), strict=True
    ):
        assert (ours.grad is None) == (theirs.grad is None), name
        if theirs.grad is not None:
            torch.testing.assert_close(
                _whole(ours.grad), theirs.grad, msg=lambda m, name=name: f"{name}: {m}", **tolerance
            )


def _as_torch_does(scheme: str, form: str) -> list[list[float]]:
    plain, norms = _net(), []
    model = copy.deepcopy(plain)
    SCHEMES[scheme](model)
    for order in ORDERS:
        for limit in (0.3, 1e6):
            for each in (model, plain):
                each.zero_grad()
                _backward(each)
            given: Any = (
                model
                if form == "module"
                else list(model.parameters())
                if form == "list"
                else model.parameters()
            )
            norm = clip_grad_norm_(given, limit, order)
            expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), limit, order)
            assert type(norm) is Tensor
            assert norm.shape == ()
            assert norm.dtype == expected.dtype
            torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
            assert 0.3 < norm < 1e6, "one limit clips, the other does not"
            _assert_same_gradients(model, plain, rtol=1e-5, atol=1e-7)
            norms.append(norm.item())
    return norms


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_norm_and_gradients_are_those_of_the_plain_model(
    pool: Pool, scheme: str, ranks: int, device: str
) -> None:
    need_devices(device, ranks)
    form = ("module", "list", "iterator")[ranks % 3]
    norms = pool.run(ranks, _as_torch_does, scheme, form, device=device)
    assert all(other == norms[0] for other in norms), "the same bits on all ranks"


@spmd(ranks=[2, 3])
@pytest.mark.parametrize(
    "scheme", ["fully_shard", "replicate inside fully_shard", "fully_shard inside replicate"]
)
def test_torchs_own_clipping_works_where_all_parameters_share_a_mesh(scheme: str) -> None:
    model, other, plain = (_net(mixed=False) for _ in range(3))
    for each in (model, other):
        SCHEMES[scheme](each)
    # torch refuses the largest element of a DTensor whose local shard is empty
    for order in ORDERS[:-1]:
        for each in (model, other, plain):
            each.zero_grad()
            _backward(each)
        norm = clip_grad_norm_(model, 0.3, order)
        expected = torch.nn.utils.clip_grad_norm_(other.parameters(), 0.3, order)
        assert isinstance(expected, DTensor)
        torch.testing.assert_close(norm, expected.full_tensor())
        torch.testing.assert_close(
            norm, torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.3, order)
        )
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            if two.grad is not None:
                torch.testing.assert_close(one.grad.to_local(), two.grad.to_local())  # type: ignore[union-attr]


@spmd(ranks=4)
def test_dtensors_over_several_dimensions_of_a_mesh() -> None:
    device = current_device()
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("a", "b"))
    distributions = [
        (Shard(0), Shard(1)),
        (Replicate(), Shard(0)),
        (Shard(1), Replicate()),
        (Replicate(), Replicate()),
    ]
    torch.manual_seed(0)
    values = [torch.randn(5, 3, device=device) for _ in range(len(distributions) + 1)]
    for order in ORDERS:
        plain = [nn.Parameter(torch.zeros_like(value)) for value in values]
        ours = [
            nn.Parameter(distribute_tensor(torch.zeros(5, 3, device=device), mesh, distributed))
            for distributed in distributions
        ]
        ours.append(nn.Parameter(torch.zeros(5, 3, device=device)))
        for parameter, mine, value in zip(plain, ours, values, strict=True):
            parameter.grad = value.clone()
            is_distributed = isinstance(mine, DTensor)
            mine.grad = (
                distribute_tensor(value.clone(), mesh, mine.placements)
                if is_distributed
                else value.clone()
            )
        norm = clip_grad_norm_(ours, 0.5, order)
        torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(plain, 0.5, order))
        for parameter, mine in zip(plain, ours, strict=True):
            torch.testing.assert_close(_whole(mine.grad), parameter.grad)


class _Counting(Around):
    """Notes how many numbers a rank sends in each collective."""

    def __init__(self, inner: Comm, sent: list[int]) -> None:
        super().__init__(inner)
        self._sent = sent

    def all_gather(self, pairs: Sequence[tuple[Tensor, Tensor]], launch: Launch) -> Any:
        self._sent.append(sum(shard.numel() for _, shard in pairs))
        return super().all_gather(pairs, launch)

    def all_reduce(self, tensors: Sequence[Tensor], launch: Launch, scale: float = 1.0) -> Any:
        self._sent.append(sum(tensor.numel() for tensor in tensors))
        return super().all_reduce(tensors, launch, scale)


@spmd(ranks=2)
def test_one_collective_whatever_gradients_a_rank_has() -> None:
    def numbers(annotate: Annotate, order: float = 2.0, *, gradients: str = "all") -> list[int]:
        model = _net()
        annotate(model)
        if gradients != "none":
            _backward(model)
        if gradients == "on rank 0" and dist.get_rank():
            model.zero_grad()
        sent: list[int] = []
        with comms_wrapped_by(lambda comm: _Counting(comm, sent)):  # type: ignore[arg-type, return-value]
            clip_grad_norm_(model, 0.3, order)
        assert all(
            (p.grad is None) or bool(local(p.grad).isfinite().all()) for p in model.parameters()
        )
        return sent

    for gradients in ("all", "none", "on rank 0"):
        assert numbers(_shard, gradients=gradients) == [1]
        assert numbers(_replicate_in_shards, gradients=gradients) == [1]
        assert numbers(_replicate, gradients=gradients) == []
    assert numbers(_shard, math.inf) == [1]
    empty = _net()
    _shard(empty)
    assert clip_grad_norm_(empty, 1.0).item() == 0


def _not_finite(order: float, bad: float, where: str) -> list[str]:
    """One rank's gradient becomes `bad`."""
    model = _net()
    _ignore(model)
    _backward(model)
    parameter = model.layers[1][2].weight if where == "shard" else model.temperature
    if dist.get_rank() == dist.get_world_size() - 1:
        local(parameter.grad).fill_(bad)  # type: ignore[arg-type]
    before = [None if p.grad is None else local(p.grad).clone() for p in model.parameters()]
    text = refusal(lambda: clip_grad_norm_(model, 1.0, order, error_if_nonfinite=True))
    for p, kept in zip(model.parameters(), before, strict=True):
        if kept is not None:
            torch.testing.assert_close(local(p.grad), kept, rtol=0, atol=0, equal_nan=True)  # type: ignore[arg-type]
    return [text, str(clip_grad_norm_(model, 1.0, order).item())]


@pytest.mark.parametrize("where", ["shard", "plain"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("order", [2.0, math.inf])
def test_all_ranks_raise_if_one_is_not_finite(
    pool: Pool, order: float, bad: float, where: str, device: str
) -> None:
    need_devices(device, 3)
    found = pool.run(3, _not_finite, order, bad, where, device=device)
    assert all(other == found[0] for other in found)
    assert found[0][0].startswith(
        f"NonFiniteError: clip_grad_norm_: the norm of order {order:g} over all gradients is {bad}"
    )
    assert found[0][1] == str(bad)


def _unequal_copies() -> float:
    """A gradient that nobody averaged, different on each rank."""
    model = _net()
    _ignore(model)
    _backward(model)
    model.temperature.grad.fill_(1.0 + dist.get_rank())  # type: ignore[union-attr]
    return clip_grad_norm_(model, 0.1).item()


def test_ranks_agree_even_if_copies_do_not(pool: Pool, device: str) -> None:
    """Otherwise each would scale its shards of one gradient by a number of its own."""
    need_devices(device, 2)
    norms = pool.run(2, _unequal_copies, device=device)
    assert norms[0] == norms[1] > 1.0


@spmd(ranks=2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    model = _net(dtype)
    plain = copy.deepcopy(model)
    _shard(model)
    for each in (model, plain):
        _backward(each)
    norm = clip_grad_norm_(model, 0.3)
    expected = torch.nn.utils.get_total_norm(
        [p.grad.double() for p in plain.parameters() if p.grad is not None]
    )
    torch.testing.assert_close(norm, expected, rtol=1e-2, atol=0, check_dtype=False)
    assert norm.dtype == torch.float64, "one layer is"
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
    assert [p.grad.dtype for p in model.parameters() if p.grad is not None].count(dtype) > 4
    _assert_same_gradients(model, plain, rtol=3e-2, atol=1e-2)


def test_the_norm_of_many_halves_does_not_overflow() -> None:
    parameter = nn.Parameter(torch.zeros(1 << 12, dtype=torch.float16))
    parameter.grad = torch.full_like(parameter, 2000.0)
    norm = clip_grad_norm_(parameter, 64.0)
    assert norm.dtype == torch.float32
    assert norm == 128000
    assert parameter.grad.unique().tolist() == [1.0]


def test_without_a_process_group_it_is_torchs_to_the_bit() -> None:
    assert not dist.is_initialized()
    for scheme, annotate in SCHEMES.items():
        for order in ORDERS:
            model, plain = _net(mixed=False), _net(mixed=False)
            annotate(model)
            for each in (model, plain):
                _backward(each)
            norm = clip_grad_norm_(model.parameters(), 0.2, order)
            assert torch.equal(
                norm, torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.2, order)
            ), scheme
            _assert_same_gradients(model, plain, rtol=1e-6, atol=0)
