"""Parameters of other kinds: of integers, with attributes of their own, of classes of their own, on devices they leave."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline as assert_text
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composable import fully_shard, remove, replicate
from tests.helpers.refusals import refused, same_on_all
from tests.helpers.world import Pool, current_device, need_devices, spmd


class Quantised(nn.Module):
    """A weight of small integers and its scale, a table of indices, a mask, and a layer that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(-15, 15, dtype=torch.int8).view(5, 6), requires_grad=False)
        self.zeros = nn.Parameter(torch.full((5,), 3, dtype=torch.uint8), requires_grad=False)
        self.order = nn.Parameter(torch.tensor([4, 2, 0, 1, 3]), requires_grad=False)
        self.mask = nn.Parameter(torch.tensor([True, False, True]), requires_grad=False)
        self.scale = nn.Parameter(torch.rand(5))
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        weight = (self.weight.float() - self.zeros.float().unsqueeze(1)) * self.scale.unsqueeze(1)
        result: Tensor = self.last((x @ weight.t())[:, self.order]) * self.mask
        return result


def _integers() -> None:
    torch.manual_seed(0)
    plain = Quantised().to(current_device())
    model = fully_shard(copy.deepcopy(plain), policy={nn.Linear})
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.001) for m in (plain, model)]
    x = torch.randn(4, 6, device=current_device())
    for _ in range(3):
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.zero_grad()
            each(x).square().mean().backward()
            optimizer.step()
    for (name, one), other in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert isinstance(other, DTensor)
        assert (one.dtype, one.requires_grad) == (other.dtype, other.requires_grad)
        torch.testing.assert_close(other.full_tensor(), one.detach(), msg=name)
    model.load_state_dict(plain.state_dict(), assign=True)
    torch.testing.assert_close(model(x), plain(x))
    remove(model, fully_shard)
    torch.testing.assert_close(model(x), plain(x))


class Waves(nn.Module):
    """Complex parameters, the second of which only some ranks use, and a third one nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Parameter(torch.randn(5, 3, dtype=torch.complex64)) for _ in range(3))

    def forward(self, x: Tensor, *, both: bool) -> Tensor:
        out = torch.view_as_real(x.to(torch.complex64) @ self.first).square().sum()
        return out + torch.view_as_real(x.to(torch.complex64) @ self.second).square().sum() if both else out


def _complex(verb: Callable[..., nn.Module]) -> None:
    torch.manual_seed(0)
    plain = Waves().to(current_device())
    model = verb(copy.deepcopy(plain))
    x = torch.randn(4, 5, device=current_device())
    for _ in range(2):
        plain.zero_grad()
        model.zero_grad()
        for rank in range(dist.get_world_size()):
            (plain(x, both=rank == 0) / dist.get_world_size()).backward()
        model(x, both=dist.get_rank() == 0).backward()
        for (name, one), other in zip(plain.named_parameters(), model.parameters(), strict=True):
            if one.grad is None:
                assert other.grad is None, name
                continue
            assert other.grad is not None, name
            ours = other.grad.full_tensor() if isinstance(other.grad, DTensor) else other.grad
            torch.testing.assert_close(ours, one.grad, msg=name)


@pytest.mark.parametrize("verb", [fully_shard, replicate])
@pytest.mark.parametrize("ranks", [2, 4])
def test_complex_parameters_train_and_may_be_left_out(
    pool: Pool, ranks: int, verb: Callable[..., nn.Module], device: str
) -> None:
    need_devices(device, ranks)
    pool.run(ranks, _complex, verb, device=device)


class Mixture(nn.Module):
    """A complex parameter beside a convolution in another order of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.turn = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).mean((2, 3)).to(torch.complex64) @ self.turn
        return torch.view_as_real(y).square().mean()


def _mixture(verb: Callable[..., nn.Module]) -> None:
    torch.manual_seed(0)
    plain = Mixture().to(current_device()).to(memory_format=torch.channels_last)
    model = verb(copy.deepcopy(plain))
    rows = torch.randn(dist.get_world_size(), 2, 3, 8, 8).to(current_device())
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (plain, model)]
    for _ in range(3):
        plain(rows.flatten(0, 1).contiguous(memory_format=torch.channels_last)).backward()
        model(rows[dist.get_rank()].contiguous(memory_format=torch.channels_last)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, one), other in zip(plain.named_parameters(), model.parameters(), strict=True):
        ours = other.full_tensor() if isinstance(other, DTensor) else other
        torch.testing.assert_close(ours, one, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("verb", [fully_shard, replicate])
def test_complex_parameters_train_beside_a_convolution_in_channels_last(
    pool: Pool, verb: Callable[..., nn.Module], device: str
) -> None:
    need_devices(device, 2)
    pool.run(2, _mixture, verb, device=device)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_parameters_of_integers_are_sharded(pool: Pool, ranks: int, device: str) -> None:
    need_devices(device, ranks)
    pool.run(ranks, _integers, device=device)


@spmd(ranks=2)
def test_a_unit_of_one_large_parameter_trains() -> None:
    """Its gradient travels in a message of its own, next to one that has nothing but flags."""
    torch.manual_seed(0)
    plain = nn.Linear(1024, 1024, bias=False).to(current_device())
    model = fully_shard(copy.deepcopy(plain))
    x = torch.randn(2, 4, 1024).to(current_device())
    plain(x).square().mean().backward()
    model(x[dist.get_rank()]).square().mean().backward()
    torch.testing.assert_close(model.weight.grad.full_tensor(), plain.weight.grad)


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.weight.role = "expert"  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight.role == "expert"  # type: ignore[attr-defined]
        return x @ self.weight


def _attributes() -> None:
    with current_device():
        model = Reader()
    original = model.weight
    fully_shard(model)
    x = torch.ones(2, 4, device=current_device())
    assert model.weight.role == "expert"  # type: ignore[attr-defined]
    model(x).sum().backward()
    assert copy.deepcopy(model.weight).role == "expert"  # type: ignore[attr-defined]
    model.weight.rate = 0.1  # type: ignore[attr-defined]
    remove(model, fully_shard)
    assert model.weight is original
    assert vars(model.weight) == {"role": "expert", "rate": 0.1}


def test_attributes_of_parameters_are_kept(pool: Pool, device: str) -> None:
    need_devices(device, 2)
    pool.run(2, _attributes, device=device)


class Own(nn.Parameter):
    pass


def _subclass() -> str:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = Own(torch.ones(4, 4))
    return refused(model, lambda: fully_shard(model, policy={nn.Linear}, sync_module_states="off"))


def test_a_parameter_of_a_class_of_its_own_is_refused_by_name(pool: Pool) -> None:
    assert_text(
        same_on_all(pool.run(2, _subclass)),
        """AnnotationError: parameter '1.weight' is of class Own; only a plain nn.Parameter can be cut, and what its class adds would be lost. Leave it out with ignored_params""",  # noqa: E501
    )
