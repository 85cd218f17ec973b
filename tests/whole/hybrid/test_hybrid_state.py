"""What users do with the parameters and gradients of hybrid models beside training them: load,
clip, undo.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from composable import clip_grad_norm_, describe, fully_shard, remove
from composable.errors import RanksDisagreeError
from tests.helpers.compare import full_parameters
from tests.helpers.refusals import refusal
from tests.helpers.world import current_device, spmd

NAMES = ("dp_shard", "dp_replicate")  # not in the order that a mesh without names has


def _mesh(*shape: int, names: tuple[str, ...] | None = NAMES) -> DeviceMesh:
    return init_device_mesh(current_device().type, shape, mesh_dim_names=names)


class Small(nn.Module):
    """Parameters of several sizes, one of them without dimensions, in an odd number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.last = nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.first(x).tanh()) * self.scale
        return result


def _plain() -> Small:
    torch.manual_seed(0)
    return Small().to(current_device())


def _hybrid(**kwargs: Any) -> Small:
    model = _plain()
    fully_shard(model, policy={nn.Linear}, **{"mesh": _mesh(2, 2), **kwargs})
    return model


def _batches(step: int) -> list[Tensor]:
    """Each rank's."""
    rows = torch.randn(dist.get_world_size(), 4, 6, generator=torch.Generator().manual_seed(step))
    return list(rows.to(current_device()))


def _train(
    plain: nn.Module, model: nn.Module, *optimizers: torch.optim.Optimizer, steps: int = 2
) -> None:
    """The plain model on everybody's batches, the other one on this rank's."""
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        batches = _batches(step)
        plain(torch.cat(batches)).square().mean().backward()
        model(batches[dist.get_rank()]).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


def _assert_same(model: nn.Module, plain: nn.Module) -> None:
    for name, value in full_parameters(model).items():
        torch.testing.assert_close(
            value, plain.get_parameter(name), msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("assign", [False, True])
@spmd(ranks=4)
def test_whole_state_dicts_and_shards_are_loaded(assign: bool) -> None:
    """Checkpoints of hybrid models, and what their optimizers keep, are in tests/state."""
    plain, source = _plain(), _hybrid()
    _train(plain, source, *[torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, source)])
    for state in (plain.state_dict(), source.state_dict()):
        model = _hybrid()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3)
        model.load_state_dict(state, assign=assign)
        assert model.first.weight.placements == (Shard(0), Replicate())  # type: ignore[union-attr]
        _assert_same(model, plain)


@spmd(ranks=4)
def test_a_norm_counts_every_gradient_once() -> None:
    """Also next to plain units and to plain parameters, with our function; with torch's where all
    are on one mesh.
    """
    mixed = _plain()
    fully_shard(mixed.first, mesh=_mesh(2, 2))
    fully_shard(mixed, policy={nn.Linear}, ignored_params=["scale"])
    for model in (_hybrid(), _hybrid(mesh=_mesh(1, 4)), _hybrid(mesh=_mesh(4, 1)), mixed):
        plain = _plain()
        _train(plain, model, steps=1)
        if model is mixed:
            assert mixed.scale.grad is not None
            dist.all_reduce(mixed.scale.grad)
            mixed.scale.grad /= dist.get_world_size()
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        clone = copy.deepcopy([parameter.grad for parameter in model.parameters()])
        torch.testing.assert_close(clip_grad_norm_(model, 0.1), expected)
        if model is not mixed:
            for parameter, gradient in zip(model.parameters(), clone, strict=True):
                parameter.grad = gradient
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            torch.testing.assert_close(norm.full_tensor(), expected)  # type: ignore[attr-defined]
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            whole = one.grad.full_tensor() if isinstance(one.grad, DTensor) else one.grad
            torch.testing.assert_close(whole, other.grad)


@spmd(ranks=4)
def test_removing_gives_whole_parameters_and_gradients_back() -> None:
    for mesh in (_mesh(2, 2), _mesh(1, 4), _mesh(4, 1)):
        plain, model = _plain(), _hybrid(mesh=mesh)
        _train(plain, model, steps=1)
        remove(model, fully_shard)
        for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert type(one) is nn.Parameter
            torch.testing.assert_close(one, other, msg=name)
            torch.testing.assert_close(one.grad, other.grad, msg=name)


@spmd(ranks=4)
def test_it_is_described_with_all_ranks_and_both_placements() -> None:
    model = _hybrid()
    root, *units = describe(model).to_dict()["units"]
    assert [unit["ranks"] for unit in (root, *units)] == [4, 4, 4]
    assert root["placements"] == ("R, R",)
    assert units[0]["placements"] == ("S(0), R",)
    assert units[0]["bytes_per_rank"] == (4 if dist.get_rank() < 2 else 3) * 7 * 4


# --- agreement of all ranks ---------------------------------------------------------------------


@spmd(ranks=4)
def test_parameters_are_compared_and_copied_over_all_ranks_and_not_within_a_replica() -> None:
    model = _plain()
    if dist.get_rank() == 3:
        with torch.no_grad():
            model.last.bias.add_(1)
    with pytest.raises(
        RanksDisagreeError,
        match=r"^fully_shard: the ranks differ in values: rank 0 has parameter 'last\.bias'",
    ):
        fully_shard(model, mesh=_mesh(2, 2))
    fully_shard(model, mesh=_mesh(2, 2), sync_module_states="broadcast")
    _assert_same(model, _plain())


@spmd(ranks=4)
def test_a_rank_that_arranges_the_mesh_otherwise_is_named() -> None:
    meshes = [_mesh(2, 2), _mesh(2, 2, names=None)]
    assert (
        refusal(lambda: fully_shard(_plain(), mesh=meshes[dist.get_rank() == 3]))
        == "RanksDisagreeError: fully_shard: the ranks differ in arguments: rank 0 has for 'scale'"
        " unit '(root)', reshard_after_forward=None, over ranks [[0, 2], [1, 3]], dimension"
        " None, rank 3 has for 'scale' unit '(root)', reshard_after_forward=None, over ranks"
        " [[0, 1], [2, 3]], dimension None. Pass the same arguments on every rank."
    )
