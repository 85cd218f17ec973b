"""Hooks that users register on sharded parameters: called once per backward, with what all ranks
make of the gradient.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from composable import (
    apply_optimizer_in_backward,
    checkpoint,
    contract,
    fully_shard,
    no_sync,
    reduce_gradients,
    remove,
    replicate,
)
from composable.errors import DifferentiationError
from tests.helpers.compare import full
from tests.helpers.world import current_device, spmd

NAMES: Final = ["0.weight", "0.bias", "2.weight", "2.bias"]


@spmd(ranks=2)
def test_hooks_are_called_unit_by_unit_as_gradients_land_and_can_be_removed() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).to(current_device())
    fully_shard(model, policy={nn.Linear}, sync_module_states="broadcast")
    x = torch.ones(2, 3, device=current_device())
    calls: list[str] = []
    handles = []
    for name, parameter in model.named_parameters():
        assert parameter.grad is None
        hook = lambda p, name=name: calls.append(name if p.grad is not None else "no gradient")  # noqa: E731
        handles.append(parameter.register_post_accumulate_grad_hook(hook))
    for called, expected in (
        (model, NAMES[2:] + NAMES[:2]),
        (model, NAMES[2:] + NAMES[:2]),
        (model[0], NAMES[:2]),
    ):
        calls.clear()
        called(x).sum().backward()
        assert calls == expected
    for handle in handles[1:]:
        handle.remove()
    calls.clear()
    model(x).sum().backward()
    assert calls == NAMES[:1]


def _sum_of_squares(parameter: Tensor) -> Tensor:
    found = parameter.square().sum()
    return found.full_tensor() if isinstance(found, DTensor) else found


@spmd(ranks=[1, 2])
def test_an_optimizer_in_backward_refuses_to_step_twice_for_a_penalty_beside_the_loss() -> None:
    torch.manual_seed(0)
    original = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).to(current_device())
    x = torch.ones(2, 3, device=current_device())
    for annotate in (replicate, fully_shard):
        plain, model = copy.deepcopy(original), copy.deepcopy(original)
        annotate(model)
        apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        model(x)  # dropped
        # a penalty alone steps once, and so does the sum where autograd adds it to the same tensor
        for reads in ((False, True), (True, False), (False, True), (True, True)):
            for each in (plain, model):
                terms = [0.1 * _sum_of_squares(p) for p in each.parameters() if reads[1]]
                terms += [each(x).square().mean()] if reads[0] else []
                loss = torch.stack(terms).sum()
                if each is model and all(reads) and annotate is fully_shard:
                    with pytest.raises(DifferentiationError, match="outside of its module"):
                        loss.backward()
                    return
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(full(mine), theirs)


class _Twice(nn.Module):
    """Calls its first layer twice, with another one in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.between, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(self.between(self.first(x)).tanh()))  # type: ignore[no-any-return]


def _annotated(how: str) -> nn.Module:
    torch.manual_seed(0)
    model = _Twice().to(current_device())
    if how == "checkpointed":
        for layer in (model.first, model.between):
            checkpoint(layer)
    mesh = None
    if how == "hybrid":
        shape = (2, dist.get_world_size() // 2)
        mesh = init_device_mesh(current_device().type, shape, mesh_dim_names=("replicate", "shard"))
    if how == "mixed":
        replicate(model.between)
    fully_shard(
        model, mesh=mesh, policy={nn.Linear}, reshard_after_forward=False if how == "kept" else None
    )
    return model


@spmd(ranks=[2, 4])
def test_hooks_of_both_kinds_are_called_once_after_the_reduction_in_every_composition() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    batches = [
        torch.randn(2, 4, generator=torch.Generator().manual_seed(r)).to(current_device())
        for r in range(size)
    ]
    for how in ("units", "checkpointed", "hybrid", "kept", "mixed"):
        for micro_batches in (1, 3):
            torch.manual_seed(0)
            plain = _Twice().to(current_device())
            (sum(plain(x).square().mean() for x in batches) / size * micro_batches).backward()  # type: ignore[union-attr]
            model = _annotated(how)
            names = [name for name, _ in plain.named_parameters()]
            hooked, accumulated = ({name: list[Tensor]() for name in names} for _ in range(2))
            for name, parameter in model.named_parameters():
                parameter.register_hook(
                    lambda gradient, seen=hooked[name]: seen.append(gradient.clone())
                )
                parameter.register_post_accumulate_grad_hook(
                    lambda p, seen=accumulated[name]: seen.append(p.grad.clone())
                )
            for number in range(micro_batches):
                with nullcontext() if number == micro_batches - 1 else no_sync(model):
                    model(batches[rank]).square().mean().backward()
            for name, parameter in plain.named_parameters():
                for seen in (hooked[name], accumulated[name]):
                    assert len(seen) == 1, (how, micro_batches, name)
                    torch.testing.assert_close(full(seen[0]), parameter.grad)


@contract()
def _shard_in_vain(module: nn.Module) -> None:
    fully_shard(module)
    raise MemoryError


@spmd(ranks=[2, 4])
def test_hooks_go_with_parameters_that_are_sharded_and_with_those_that_come_back() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    plain, model = nn.Linear(4, 2).to(current_device()), nn.Linear(4, 2).to(current_device())
    batches = [torch.full((1, 4), 1.0 + r, device=current_device()) for r in range(size)]
    seen: list[tuple[str, Tensor]] = []
    halves = model.weight.register_hook(lambda gradient: gradient * 0.5)
    model.weight.register_post_accumulate_grad_hook(
        lambda p: seen.append(("before", p.grad.clone()))
    )
    with pytest.raises(MemoryError):
        _shard_in_vain(model)
    model(batches[rank]).square().sum().backward()
    (_, whole), *_ = seen
    assert model.weight.grad is not None
    assert torch.equal(whole, model.weight.grad)
    seen.clear()
    model.zero_grad()
    fully_shard(model, sync_module_states="broadcast")
    plain.load_state_dict({name: full(value) for name, value in model.state_dict().items()})
    (sum(plain(x).square().sum() for x in batches) / size).backward()  # type: ignore[union-attr]
    after = model.weight.register_post_accumulate_grad_hook(
        lambda p: seen.append(("after", p.grad.clone()))
    )
    model(batches[rank]).square().sum().backward()
    assert [who for who, _ in seen] == ["before", "after"]
    for _, gradient in seen:
        torch.testing.assert_close(full(gradient), plain.weight.grad * 0.5)
    torch.testing.assert_close(full(model.bias.grad), plain.bias.grad)
    halves.remove()
    model.zero_grad()
    seen.clear()
    model(batches[rank]).square().sum().backward()
    torch.testing.assert_close(full(seen[0][1]), plain.weight.grad)

    twice = model.bias.register_hook(lambda gradient: gradient * 2)  # the first one that it has
    remove(model, fully_shard)
    model.zero_grad()
    seen.clear()
    model(batches[rank]).sum().backward()
    assert [who for who, _ in seen] == ["before", "after"]
    assert model.bias.grad is not None
    assert model.bias.grad.tolist() == [2.0, 2.0]
    after.remove()
    twice.remove()
    model.zero_grad()
    seen.clear()
    model(batches[rank]).sum().backward()
    assert [who for who, _ in seen] == ["before"]
    assert model.bias.grad.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("then", ["reduce_gradients", "another backward", "one of another part"])
@spmd(ranks=2)
def test_hooks_that_one_rank_alone_has_change_no_message_under_no_sync(then: str) -> None:
    """Gradients of shards are reduced there: only the hooks wait."""
    torch.manual_seed(0)
    parts = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(current_device())
    plain = copy.deepcopy(parts)
    fully_shard(parts, policy={nn.Linear})
    x, seen = torch.ones(2, 4, device=current_device()), list[Tensor]()
    if dist.get_rank() == 1:
        parts[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    for model in (parts, plain):
        with no_sync(parts, level="replicate"):
            model(x).sum().backward()
    assert not seen
    if then == "reduce_gradients":
        reduce_gradients(parts)
    else:
        for model in (parts, plain):
            (model if then == "another backward" else model[1])(x).sum().backward()
    assert len(seen) == dist.get_rank()
    torch.testing.assert_close(full(parts[0].weight.grad), plain[0].weight.grad)
