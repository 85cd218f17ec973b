"""`replicate`: gradients are means however they come about, and kept gradients stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from composable import no_sync, register_comm_hook, remove, replicate
from tests.helpers.compare import assert_mean_gradients, averaged_gradients
from tests.helpers.means import WIDTH, Parts, batch_of, copies
from tests.helpers.world import current_device, spmd

# --- several backwards, and what they leave ------------------------------------------------------


@pytest.mark.parametrize("views", [True, False])
@pytest.mark.parametrize("cap", [25.0, 0.0001])
@pytest.mark.parametrize("set_to_none", [True, False, None])
@spmd(ranks=[2, 4])
def test_gradients_of_several_backwards_add_up_to_the_mean(
    set_to_none: bool | None, cap: float, views: bool
) -> None:
    plain, ours = copies(Parts, bucket_cap_mb=cap, gradient_as_bucket_view=views)
    for step in range(5):
        for model in (plain, ours):
            model(batch_of(step), [0, 1, 2]).sum().backward()
        assert_mean_gradients(plain, ours)
        if set_to_none is not None and step % 2:
            plain.zero_grad(set_to_none)
            ours.zero_grad(set_to_none)


@pytest.mark.parametrize("views", [True, False])
@spmd(ranks=[2, 4])
def test_a_gradient_stays_to_the_bit_while_no_rank_uses_its_parameter(views: bool) -> None:
    _, ours = copies(Parts, gradient_as_bucket_view=views)
    ours(batch_of(0), [0, 1, 2]).sum().backward()
    last = ours.layers[2].weight  # type: ignore[union-attr,index]
    assert isinstance(last.grad, Tensor)
    with torch.no_grad():
        # what differs from rank to rank must not be averaged
        last.grad.mul_(1.0 + dist.get_rank() / 3)
    gradient, before = last.grad, last.grad.clone()
    for step in (1, 2):
        ours(batch_of(step), [0, 1]).sum().backward()
    assert last.grad is gradient
    assert torch.equal(gradient, before)


@spmd(ranks=3)  # a third of the sum of three equal numbers may be another one
def test_large_gradients_too_stay_to_the_bit_while_no_rank_uses_their_parameter() -> None:
    torch.manual_seed(0)
    model = nn.Linear(600, 600, device=current_device())
    replicate(model)
    x = torch.randn(2, 600).to(current_device())
    model(x).sum().backward()
    assert model.weight.grad is not None
    before = model.weight.grad.clone()
    model.bias.square().sum().backward()
    assert torch.equal(model.weight.grad, before)


@pytest.mark.parametrize("set_to_none", [True, False])
@spmd(ranks=2)
def test_gradients_that_are_views_of_buckets_have_the_same_memory_in_every_step(
    set_to_none: bool,
) -> None:
    plain, ours = copies(Parts, gradient_as_bucket_view=True)
    optimizers = [
        torch.optim.SGD(model.parameters(), lr=0.1, foreach=False) for model in (plain, ours)
    ]
    found = []
    for step in range(5):
        for model in (plain, ours):
            if step == 3:  # accumulated first
                with no_sync(ours, enabled=model is ours):
                    model(batch_of(7), [0, 1, 2]).sum().backward()
            model(batch_of(step), [0, 1, 2]).sum().backward()
        assert_mean_gradients(plain, ours)
        found.append([p.grad.data_ptr() for p in ours.parameters() if p.grad is not None])
        for reference, parameter in zip(plain.parameters(), ours.parameters(), strict=True):
            reference.grad = parameter.grad.clone()  # type: ignore[union-attr]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none)
    assert found[2:] == [found[2]] * 3, "the order of buckets is agreed in the first step"
    remove(ours, replicate)


_ALIASES: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "detach": lambda gradient: gradient.detach(),
    "data": lambda gradient: gradient.data,
    "view": lambda gradient: gradient.view_as(gradient),
}


def _exchange(first: nn.Module, other: nn.Module) -> None:
    first.weight.grad, other.weight.grad = other.weight.grad, first.weight.grad


@pytest.mark.parametrize("alias", _ALIASES)
@spmd(ranks=2)
def test_gradients_may_be_other_tensors_over_the_memory_of_the_bucket(alias: str) -> None:
    for whose in ("all", "one", "those of one rank"):
        plain, ours = copies(Parts, gradient_as_bucket_view=True)
        for step in range(4):
            for model in (plain, ours):
                model(batch_of(step), [0, 1, 2]).sum().backward()
            assert_mean_gradients(plain, ours, f"step {step}")
            parameters = list(ours.parameters())[: 1 if whose == "one" else None]
            for parameter in parameters if whose[0] != "t" or dist.get_rank() else ():
                assert parameter.grad is not None
                parameter.grad = _ALIASES[alias](parameter.grad)
            for model in (plain, ours) if step == 2 else ():
                _exchange(model.layers[0], model.layers[1])


@spmd(ranks=2)
def test_a_hook_gets_gradients_that_live_in_the_bucket_and_another_set_of_parameters_gets_another_bucket() -> None:  # fmt: skip  # noqa: E501
    plain, ours = copies(Parts, gradient_as_bucket_view=True)
    register_comm_hook(ours, None, default_hooks.allreduce_hook)
    for step in range(5):
        for model in (plain, ours):
            model.layers[1].requires_grad_(step != 3)
            model(batch_of(step), [0, 1, 2]).sum().backward()
        assert_mean_gradients(plain, ours)
        if step == 2:  # others are added to
            plain.zero_grad()
            ours.zero_grad()


@spmd(ranks=2)
def test_removal_leaves_no_hook_on_what_modules_computed_with() -> None:
    """With a cast, these are other parameters than the user's."""
    _, ours = copies(Parts, mp_policy="bf16")
    weights: list[Tensor] = []
    layer = ours.layers[0]
    layer.register_forward_hook(lambda module, *_: weights.append(module.weight))
    ours(batch_of(0), [0, 1, 2])
    assert weights[0] is not layer.weight
    assert weights[0]._post_accumulate_grad_hooks
    remove(ours, replicate)
    assert not weights[0]._post_accumulate_grad_hooks


@spmd(ranks=2)
def test_gradients_that_a_user_keeps_stay_and_others_are_freed() -> None:
    _, ours = copies(Parts)
    kept, watched = [], []
    for step in range(8):
        ours(batch_of(step), [0, 1, 2]).sum().backward()
        gradients = [p.grad for p in ours.parameters() if p.grad is not None]
        assert len(gradients) == 6
        watched += list(map(ref, gradients))
        if step == 4:
            kept = [(gradient.detach(), gradient.clone()) for gradient in gradients]
        del gradients
        ours.zero_grad()
        assert all(each() is None for each in watched)
    assert all(torch.equal(gradient, before) for gradient, before in kept)


@spmd(ranks=2)
def test_gradients_stay_on_the_parameters_when_the_annotation_is_removed() -> None:
    plain, ours = copies(Parts)
    for model in (plain, ours):
        model(batch_of(0), [0, 1, 2]).sum().backward()
    assert_mean_gradients(plain, ours)
    remove(ours, replicate)
    before = [p.grad.clone() for p in ours.parameters() if p.grad is not None]
    ours(batch_of(1), [0, 1, 2]).sum().backward()
    plain.zero_grad()
    plain(batch_of(1), [0, 1, 2]).sum().backward()
    for old, one, other in zip(before, plain.parameters(), ours.parameters(), strict=True):
        assert one.grad is not None
        torch.testing.assert_close(other.grad, old + one.grad)


# --- how gradients come about -------------------------------------------------------------------


@spmd(ranks=2)
def test_parameters_that_backward_reaches_by_no_output() -> None:
    plain, ours = copies(Parts)
    for step in range(3):
        for model in (plain, ours):
            model(batch_of(step), [0, 1])
            penalty = model.layers[0].weight.pow(2).sum() + model.layers[2].bias.exp().sum()  # type: ignore[index,union-attr]
            (penalty * (1 + dist.get_rank())).backward()
        assert_mean_gradients(plain, ours)


@spmd(ranks=2)
def test_gradients_go_where_the_user_has_put_them() -> None:
    plain, ours = copies(Parts)
    flat = torch.zeros(
        sum(p.numel() for p in ours.parameters()), dtype=torch.float64, device=current_device()
    )
    pieces = flat.split([p.numel() for p in ours.parameters()])
    for parameter, piece in zip(ours.parameters(), pieces, strict=True):
        parameter.grad = piece.view(parameter.shape)
    for step in range(3):
        for model in (plain, ours):
            model(batch_of(step), [0, 1, 2]).sum().backward()
    assert_mean_gradients(plain, ours)
    means = averaged_gradients(plain).values()
    torch.testing.assert_close(
        flat, torch.cat([mean.view(-1) for mean in means if mean is not None])
    )


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(7, WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(nn.functional.embedding(x, self.table, sparse=True))  # type: ignore[no-any-return]


@pytest.mark.sparse
@spmd(ranks=2)
def test_sparse_gradients_of_modules_that_do_not_tell_become_dense_means() -> None:
    plain, ours = copies(Lookup)
    for step in range(3):
        rows = torch.tensor([0, 2 + dist.get_rank()], device=current_device())
        for model in (plain, ours):
            model(rows).pow(2).sum().backward()
        for parameter in plain.parameters():
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
        assert_mean_gradients(plain, ours)
        if step:
            plain.zero_grad()
            ours.zero_grad()


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
    batch = batch_of(0).float()
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
    for one, other in zip(averaged_gradients(plain).values(), model.parameters(), strict=True):
        assert one is not None
        assert other.grad is not None
        assert other.grad.dtype == one.dtype
        assert torch.equal(other.grad, one)


@spmd(ranks=2)
def test_gradients_are_laid_out_like_their_parameters() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3)).to(
            memory_format=torch.channels_last
        )  # type: ignore[call-overload,no-any-return]

    plain, ours = copies(make)
    images = torch.randn(
        2, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(dist.get_rank())
    )
    for _ in range(2):
        for model in (plain, ours):
            model.zero_grad()
            model(images.to(current_device())).pow(2).sum().backward()
        assert_mean_gradients(plain, ours)
        weight = ours[0].weight  # type: ignore[index]
        assert isinstance(weight, nn.Parameter)
        assert weight.grad is not None
        assert weight.grad.stride() == weight.stride() != torch.empty(weight.shape).stride()
