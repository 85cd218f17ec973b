"""Parameters of other kinds: of integers, with attributes of their own, of classes of their own, on
devices they leave.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composable import fully_shard, remove, replicate
from tests.helpers.compare import assert_mean_gradients
from tests.helpers.refusals import refused
from tests.helpers.world import current_device, spmd


class Quantised(nn.Module):
    """A weight of small integers and its scale, a table of indices, a mask, and a layer that
    trains.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.arange(-15, 15, dtype=torch.int8).view(5, 6), requires_grad=False
        )
        self.zeros = nn.Parameter(torch.full((5,), 3, dtype=torch.uint8), requires_grad=False)
        self.order = nn.Parameter(torch.tensor([4, 2, 0, 1, 3]), requires_grad=False)
        self.mask = nn.Parameter(torch.tensor([True, False, True]), requires_grad=False)
        self.scale = nn.Parameter(torch.rand(5))
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        weight = (self.weight.float() - self.zeros.float().unsqueeze(1)) * self.scale.unsqueeze(1)
        result: Tensor = self.last((x @ weight.t())[:, self.order]) * self.mask
        return result


class Waves(nn.Module):
    """Complex parameters, the second of which only some ranks use, and a third one nobody; a real
    one in another order of memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (
            nn.Parameter(torch.randn(5, 3, dtype=torch.complex64)) for _ in range(3)
        )
        self.turned = nn.Parameter(torch.randn(5, 3).t())

    def forward(self, x: Tensor, *, both: bool) -> Tensor:
        out = (
            torch.view_as_real(x.to(torch.complex64) @ self.first).square().sum()
            + (x @ self.turned.t()).square().sum()
        )
        return (
            out + torch.view_as_real(x.to(torch.complex64) @ self.second).square().sum()
            if both
            else out
        )


@pytest.mark.parametrize("verb", [fully_shard, replicate])
@spmd(ranks=[2, 4])
def test_complex_parameters_train_and_may_be_left_out(verb: Callable[..., nn.Module]) -> None:
    torch.manual_seed(0)
    plain = Waves().to(current_device())
    model = verb(copy.deepcopy(plain))
    x = torch.randn(4, 5, device=current_device())
    for _ in range(2):
        for each in (plain, model):
            each.zero_grad()
            each(x, both=dist.get_rank() == 0).backward()
        assert_mean_gradients(plain, model, rtol=1.3e-6, atol=1e-5)


@spmd(ranks=[1, 2, 4])
def test_parameters_of_integers_are_sharded() -> None:
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


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.weight.role = "expert"  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight.role == "expert"  # type: ignore[attr-defined]
        return x @ self.weight


@spmd(ranks=2)
def test_attributes_of_parameters_are_kept() -> None:
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


_CONVERSIONS: Final[dict[str, Callable[[nn.Module], object]]] = {
    "to a dtype": lambda model: model.to(torch.float64),
    "twice": lambda model: model.half().float(),
    "to where it is": lambda model: model.to(current_device()),
    "of one child": lambda model: model[0].half().float(),  # type: ignore[operator, index]
    "to memory": lambda model: model.to_empty(device=current_device()),
}


def _annotated(model: nn.Sequential, verb: str) -> None:
    if verb == "both":
        replicate(model[0])
    (replicate if verb == "replicate" else fully_shard)(model)


@pytest.mark.parametrize("verb", ["fully_shard", "replicate", "both"])
@spmd(ranks=2)
def test_conversions_keep_attributes_so_that_groups_made_by_them_are_those_of_before(
    verb: str,
) -> None:
    for by_swapping in (False, True):
        for convert in _CONVERSIONS.values():
            torch.manual_seed(0)
            with current_device():
                model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
            before = [{*vars(module)} for module in model.modules()]
            model[0].weight.no_decay = True  # type: ignore[assignment]
            _annotated(model, verb)
            model[1].bias.no_decay = True  # type: ignore[assignment]
            torch.__future__.set_swap_module_params_on_conversion(by_swapping)
            try:
                convert(model)
            finally:
                torch.__future__.set_swap_module_params_on_conversion(False)
            kept = [name for name, each in model.named_parameters() if hasattr(each, "no_decay")]
            assert kept == ["0.weight", "1.bias"]
            copied = copy.deepcopy(model).half()
            assert next(model.parameters()).dtype != next(copied.parameters()).dtype
            model(torch.ones(2, 4, dtype=model[0].weight.dtype, device=current_device()))  # type: ignore[arg-type]
            if verb == "both":
                remove(model[0], replicate)
            remove(model, replicate if verb == "replicate" else fully_shard)
            assert [{*vars(module)} for module in model.modules()] == before


class Own(nn.Parameter):
    pass


@spmd(ranks=2, everywhere=True)
def test_a_parameter_of_a_class_of_its_own_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = Own(torch.ones(4, 4))
    assert (
        refused(model, lambda: fully_shard(model, policy={nn.Linear}, sync_module_states="off"))
        == "AnnotationError: parameter '1.weight' is of class Own; only a plain nn.Parameter can be"
        " cut, and what its class adds would be lost. Leave it out with ignored_params, or give the"
        " class fsdp_pre_all_gather() and fsdp_post_all_gather()"
    )
