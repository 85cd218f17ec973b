"""Plain parameters that are one rank's part of a whole, as in Megatron-like models."""

from __future__ import annotations

from contextlib import nullcontext as _nothing
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from composable import (
    clip_grad_norm_,
    declare_part,
    full_state_dict,
    fully_shard,
    materialize,
    no_sync,
    rebind_optimizer,
    remove,
    summon_full_params,
)
from tests.helpers.world import spmd
from tests.tensor_parallel.models import assert_same_parameters, batches, full, mesh_of
from tests.tensor_parallel.test_state import _folder

WIDTH = 6


class _ToParts(torch.autograd.Function):
    """The same input for all parts: its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Sum(torch.autograd.Function):
    """The sum of the parts' outputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient, None


class PartMLP(nn.Module):
    """With `tp`, each rank has some rows of `up` and the same columns of `down`."""

    def __init__(self, tp: DeviceMesh | None = None, hidden: int = 7) -> None:
        super().__init__()
        self.group = None if tp is None else tp.get_group()
        parts, rank = (1, 0) if tp is None else (tp.size(), tp.get_local_rank())
        generator = torch.Generator().manual_seed(0)

        def drawn(*shape: int, dim: int | None = None) -> nn.Parameter:
            whole = torch.randn(*shape, generator=generator, dtype=torch.float64)
            if tp is None:
                return nn.Parameter(whole)
            part = whole if dim is None else whole.chunk(parts, dim)[rank].clone()
            placement = Replicate() if dim is None else Shard(dim)
            return declare_part(nn.Parameter(part), tp, [placement])

        self.norm = nn.LayerNorm(WIDTH, dtype=torch.float64)
        self.up, self.bias = drawn(hidden, WIDTH, dim=0), drawn(hidden, dim=-1)
        self.down, self.after = drawn(WIDTH, hidden, dim=1), drawn(WIDTH)

    def reset_parameters(self) -> None:
        for parameter in self.parameters(recurse=False):
            nn.init.normal_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y = y if self.group is None else _ToParts.apply(y, self.group)
        y = nn.functional.linear(nn.functional.linear(y, self.up, self.bias).relu(), self.down)
        y = y if self.group is None else _Sum.apply(y, self.group)
        return x + y + self.after


def _model(tp: DeviceMesh | None = None) -> nn.Sequential:
    return nn.Sequential(PartMLP(tp), PartMLP(tp))


def _train(model: nn.Module, inputs: list[Tensor]) -> list[Tensor]:
    optimizer, norms = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for index, batch in enumerate(inputs):
        if index % 2 == 0:
            with no_sync(model) if isinstance(model[0].up, DTensor) else _nothing():  # type: ignore[index]
                model(batch).square().mean().backward()
            continue
        model(batch).square().mean().backward()
        clip = clip_grad_norm_ if isinstance(model[0].up, DTensor) else nn.utils.clip_grad_norm_  # type: ignore[index]
        norms.append(clip(model.parameters(), 0.1))
        optimizer.step()
        optimizer.zero_grad()
    return norms


@spmd(ranks=4)
def test_parts_train_as_the_whole_does_and_are_saved_as_the_whole() -> None:
    mesh, folder = mesh_of(2, 2), _folder()
    tp, rank = mesh["tp"], mesh["dp"].get_local_rank()
    model, alone = _model(tp), _model()
    before = dict(model.named_parameters())
    fully_shard(model, mesh=mesh["dp"], policy={PartMLP})
    weight = model[0].down
    assert isinstance(weight, DTensor)
    assert (weight.shape, weight.placements) == ((6, 7), (Shard(1), Shard(0)))
    assert weight.device_mesh.mesh_dim_names == ("tp", "dp")
    norms = _train(model, batches(model, rank, 2, 4))
    torch.testing.assert_close(norms, _train(alone, batches(alone, -1, 2, 4)))
    # plain parameters are the same on all tensor-parallel ranks
    assert_same_parameters(model, alone)
    found = full_state_dict(model, rank0_only=False)
    torch.testing.assert_close(found, dict(alone.state_dict()))
    dcp.save(model.state_dict(), checkpoint_id=folder)
    over_dp = _model()
    fully_shard(over_dp, mesh=mesh_of(4, 1)["dp"])
    other = _model(tp)
    fully_shard(other, mesh=mesh["dp"])
    for target in (over_dp, other):
        with torch.no_grad():
            for parameter in target.parameters():
                parameter.zero_()
        state = target.state_dict()
        dcp.load(state, checkpoint_id=folder)
        target.load_state_dict(state)
        assert_same_parameters(target, alone)
    with summon_full_params(model), torch.no_grad():
        assert model[0].up.shape == before["0.up"].shape
        model[0].up.mul_(2.0)
        alone[0].up.mul_(2.0)
    assert_same_parameters(model, alone)
    remove(model[0], fully_shard)
    remove(model[1], fully_shard)
    remove(model, fully_shard)
    assert all(before[name] is parameter for name, parameter in model.named_parameters())
    fully_shard(model, mesh=mesh["dp"])  # parts know that they are parts
    assert_same_parameters(model, alone)


@spmd(ranks=4)
def test_an_optimizer_of_parts_follows_an_annotation_and_its_removal() -> None:
    mesh = mesh_of(2, 2)
    rank = mesh["dp"].get_local_rank()
    model, alone = _model(mesh["tp"]), _model()
    optimizer, reference = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, alone))

    def step(inputs: list[Tensor], whole: list[Tensor]) -> None:
        for each, stepper, batch in (
            (model, optimizer, inputs[0]),
            (alone, reference, whole[0]),
        ):
            each(batch).square().mean().backward()
            stepper.step()
            stepper.zero_grad()

    step(batches(alone, -1, 1), batches(alone, -1, 1))
    fully_shard(model, mesh=mesh["dp"], policy={PartMLP})
    rebind_optimizer(model, optimizer)
    for index in range(2):
        step(batches(model, rank, 2, 2)[index:], batches(alone, -1, 2, 2)[index:])
    assert_same_parameters(model, alone)
    for module in (*model, model):
        remove(module, fully_shard)
    rebind_optimizer(model, optimizer)
    step(batches(alone, -1, 1), batches(alone, -1, 1))
    fully_shard(model, mesh=mesh["dp"], policy={PartMLP})
    assert_same_parameters(model, alone)


@spmd(ranks=4)
def test_one_rank_edits_a_part_and_its_gradient_for_the_ranks_that_share_it() -> None:
    mesh = mesh_of(2, 2)
    model, alone = _model(mesh["tp"]), _model()
    fully_shard(model, mesh=mesh["dp"])
    batch = batches(model, 0, 1)[0]
    for each in (model, alone):
        each(batch).square().mean().backward()
    with summon_full_params(model, rank0_only=True, with_grads=True), torch.no_grad():
        if mesh["dp"].get_local_rank() == 0:
            for parameter in model.parameters():
                parameter.mul_(2.0)
                assert parameter.grad is not None
                parameter.grad.mul_(3.0)
    for parameter, plain in zip(model.parameters(), alone.parameters(), strict=True):
        assert parameter.grad is not None
        assert plain.grad is not None
        torch.testing.assert_close(full(parameter), 2.0 * plain.detach())
        torch.testing.assert_close(full(parameter.grad), 3.0 * plain.grad)


@spmd(ranks=4)
def test_materialize_draws_the_whole() -> None:
    mesh = mesh_of(2, 2)
    with torch.device("meta"):
        whole = PartMLP()
    model = PartMLP(mesh["tp"])
    for name, parameter in list(model.named_parameters(recurse=False)):
        bare = nn.Parameter(torch.empty_like(parameter, device="meta"))
        where = [Replicate() if name == "after" else Shard(int(name == "down"))]
        setattr(model, name, declare_part(bare, mesh["tp"], where))
    model.norm.to_empty(device="meta")
    fully_shard(model, mesh=mesh["dp"])
    torch.manual_seed(3)
    materialize(model)
    whole.to_empty(device="cpu")
    torch.manual_seed(3)
    whole.norm.reset_parameters()
    whole.reset_parameters()
    assert_same_parameters(model, whole)
