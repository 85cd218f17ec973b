"""Row 34 of the behaviours: ranks that skip a unit are refused by name, and work by choice."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from composable import checkpoint, fully_shard, join, no_sync, replicate, skipped
from composable.errors import RanksDisagreeError
from tests.helpers.compare import full
from tests.helpers.world import current_device, spmd


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.outer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.outer(self.inner(x).tanh())
        return y


class Model(nn.Module):
    """Layers that each rank may skip; `first` of them without anything that is trained before."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Identity() if first else nn.Linear(4, 4)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor, keeps: list[bool]) -> Tensor:
        x = self.embedding(x)
        for layer, keep in zip(self.layers, keeps, strict=True):
            x = layer(x) if keep else skipped(layer, x)
        y: Tensor = self.head(x)
        return y


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, keeps: list[bool]) -> Tensor:
        for layer, keep in zip(self.layers, keeps, strict=True):
            x = layer(x).tanh() if keep else skipped(layer, x)
        return x


class Parts(Model):
    """Parts to checkpoint, in which each rank may skip layers."""

    def __init__(self, calls_torch: bool = False) -> None:
        super().__init__(first=False)
        self.layers = nn.ModuleList(Part() for _ in range(3))
        self._calls_torch = calls_torch

    def forward(self, x: Tensor, keeps: list[bool]) -> Tensor:
        x = self.embedding(x)
        for number, part in enumerate(self.layers):
            rotated = keeps[number:] + keeps[:number]
            x = (
                torch_checkpoint(part, x, rotated, use_reentrant=False)
                if self._calls_torch
                else part(x, rotated)
            )
        y: Tensor = self.head(x)
        return y


def _make(first: bool) -> Model:
    return Model(first).double().to(current_device())


def _loss(model: Model, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    x = torch.randn(2, 4, generator=generator, dtype=torch.float64).to(current_device())
    keeps = [bool(torch.rand((), generator=generator) < 0.5) for _ in model.layers]
    loss: Tensor = model(x, keeps).square().mean()
    return loss


def _assert_trains_as_one_process(
    annotate: Callable[[Model], None],
    *,
    first: bool = False,
    accumulates: bool = False,
    make: Callable[[], Model] | None = None,
) -> None:
    alone, model = (
        make().double().to(current_device()) if make else _make(first) for _ in range(2)
    )
    annotate(model)
    optimizers = [
        torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (alone, model)
    ]
    ranks = dist.get_world_size()
    for step in range(6):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for micro_batch in range(1 + accumulates):
            for rank in range(ranks):
                (_loss(alone, rank, 10 * step + micro_batch) / ranks).backward()
            with no_sync(model, enabled=micro_batch < accumulates):
                _loss(model, dist.get_rank(), 10 * step + micro_batch).backward()
        for optimizer in optimizers:
            optimizer.step()
    for (name, parameter), expected in zip(
        model.named_parameters(), alone.parameters(), strict=True
    ):
        torch.testing.assert_close(
            full(parameter.detach()), expected.detach(), rtol=1e-9, atol=1e-11, msg=name
        )


def _shard(model: Model) -> None:
    fully_shard(model, policy={Block})


def _shard_inside(model: Model) -> None:
    fully_shard(model, policy={Block, nn.Linear})


def _shard_and_keep(model: Model) -> None:
    fully_shard(model, policy={Block}, reshard_after_forward=False)


def _hybrid(model: Model) -> None:
    fully_shard(
        model,
        policy={Block},
        mesh=init_device_mesh(current_device().type, (2, dist.get_world_size() // 2)),
    )


def _replicate_layers(model: Model) -> None:
    for layer in model.layers:
        replicate(layer)
    fully_shard(model)


def _replicate(model: Model) -> None:
    replicate(model, policy={Block})


def _checkpoint_inside(model: Model) -> None:
    for layer in model.layers:
        checkpoint(layer)
    fully_shard(model, policy={Block})


def _checkpoint_around(model: Model) -> None:
    fully_shard(model, policy={Block})
    checkpoint(model)


_PLANS = [
    _shard,
    _shard_inside,
    _shard_and_keep,
    _replicate_layers,
    _replicate,
    _checkpoint_inside,
    _checkpoint_around,
]


@spmd(ranks=[1, 2, 3])
@pytest.mark.parametrize("annotate", _PLANS)
def test_34_layers_that_some_ranks_skip_train_as_in_one_process(
    annotate: Callable[[Model], None],
) -> None:
    _assert_trains_as_one_process(annotate)


@spmd(ranks=4)
def test_34_skipped_on_a_hybrid_mesh() -> None:
    _assert_trains_as_one_process(_hybrid)


@spmd(ranks=2)
@pytest.mark.parametrize("annotate", [_shard, _shard_inside, _replicate_layers])
def test_34_backward_comes_to_a_skipped_layer_whose_input_needs_no_gradient(
    annotate: Callable[[Model], None],
) -> None:
    _assert_trains_as_one_process(annotate, first=True)


@spmd(ranks=2)
@pytest.mark.parametrize("annotate", [_shard, _replicate])
def test_34_skipped_layers_accumulate_nothing_under_no_sync(
    annotate: Callable[[Model], None],
) -> None:
    _assert_trains_as_one_process(annotate, accumulates=True)


def _shard_layers(model: Model) -> None:
    fully_shard(model, policy={nn.Linear})


def _shard_parts_and_layers(model: Model) -> None:
    fully_shard(model, policy={nn.Linear, Part})


def _hybrid_layers(model: Model) -> None:
    mesh = init_device_mesh(current_device().type, (dist.get_world_size(), 1))
    fully_shard(model, policy={nn.Linear}, mesh=mesh, reshard_after_forward=False)


def _replicate_all_layers(model: Model) -> None:
    for module in model.modules():
        if isinstance(module, Part):
            replicate(list(module.layers)[-1])
    fully_shard(model, policy={nn.Linear})


def _recompute(model: Model) -> None:
    checkpoint(model, policy={Part}, early_stop=dist.get_world_size() == 2)


@spmd(ranks=[2, 3])
@pytest.mark.parametrize(
    "annotate", [_shard_layers, _shard_parts_and_layers, _hybrid_layers, _replicate_all_layers]
)
def test_34_layers_skipped_inside_of_checkpointed_parts(annotate: Callable[[Model], None]) -> None:
    def both(model: Model) -> None:
        _recompute(model)
        annotate(model)

    _assert_trains_as_one_process(both, make=Parts, accumulates=annotate is _shard_layers)


@spmd(ranks=2)
def test_34_layers_skipped_inside_of_parts_that_torch_checkpoints() -> None:
    _assert_trains_as_one_process(_shard_layers, make=partial(Parts, calls_torch=True))


@spmd(ranks=2)
def test_34_checkpointed_parts_with_skipped_layers_inside_of_join() -> None:
    model = Parts().double().to(current_device())
    _recompute(model)
    _shard_layers(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    alone = Parts().double().to(current_device())
    expected = torch.optim.SGD(alone.parameters(), lr=0.1)
    with join(model, optimizer):
        for step in range(2 if dist.get_rank() else 4):
            optimizer.zero_grad()
            _loss(model, dist.get_rank(), step).backward()
            optimizer.step()
    for step in range(4):
        expected.zero_grad()
        for rank in range(2):
            if step < (2 if rank else 4):
                (_loss(alone, rank, step) / 2).backward()
        expected.step()
    for parameter, value in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(full(parameter.detach()), value.detach(), rtol=1e-9, atol=1e-11)


class Tower(Model):
    """A frozen tower, whose inputs require no gradients; ranks without an image pass through what
    does.
    """

    def __init__(self, without_graph: bool, all_have_the_first: bool) -> None:
        super().__init__(first=False)
        self.tower = nn.Sequential(nn.Linear(4, 4), Block()).requires_grad_(False)
        self._without_graph = without_graph
        self._all_have_the_first = all_have_the_first

    def forward(self, x: Tensor, keeps: list[bool]) -> Tensor:
        hidden = self.embedding(x)
        if keeps[0] or self._all_have_the_first:
            with torch.set_grad_enabled(not self._without_graph and torch.is_grad_enabled()):
                seen = self.tower(x)
            hidden = hidden + seen
        else:
            hidden = skipped(self.tower, hidden)
        self._all_have_the_first = False
        for layer in self.layers:
            hidden = layer(hidden)
        y: Tensor = self.head(hidden)
        return y


@spmd(ranks=2)
@pytest.mark.parametrize("all_have_the_first", [True, False])
@pytest.mark.parametrize("without_graph", [True, False])
def test_34_backward_does_not_come_to_a_frozen_tower_of_images(
    without_graph: bool, all_have_the_first: bool
) -> None:
    torch.manual_seed(0)
    alone, model = (Tower(without_graph, False).double().to(current_device()) for _ in range(2))
    model._all_have_the_first = all_have_the_first
    fully_shard(model, policy={nn.Linear, Block})
    if all_have_the_first:
        _loss(model, dist.get_rank(), 0).backward()
        model.zero_grad()
    optimizers = [
        torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.1)
        for each in (alone, model)
    ]
    for step in range(6):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for rank in range(2):
            (_loss(alone, rank, step) / 2).backward()
        _loss(model, dist.get_rank(), step).backward()
        for optimizer in optimizers:
            optimizer.step()
    for parameter, value in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(full(parameter.detach()), value.detach(), rtol=1e-9, atol=1e-11)


@spmd(ranks=2)
def test_34_frozen_layers_are_skipped_while_more_and_more_is_trained() -> None:
    alone, model = _make(first=False), _make(first=False)
    _shard_inside(model)
    for step in range(9):
        for each in (alone, model):
            each.zero_grad()
            if step % 3 == 0:
                each.layers.requires_grad_(False)
                each.embedding.requires_grad_(step > 0)
        if step == 6:
            with torch.no_grad():
                model(torch.ones(2, 4, dtype=torch.float64, device=current_device()), [True] * 3)
        for rank in range(2):
            (_loss(alone, rank, step) / 2).backward()
        _loss(model, dist.get_rank(), step).backward()
        for parameter, value in zip(model.parameters(), alone.parameters(), strict=True):
            assert (parameter.grad is None) == (value.grad is None)
            if value.grad is not None:
                torch.testing.assert_close(full(parameter.grad), value.grad, rtol=1e-9, atol=1e-11)


@spmd(ranks=2)
def test_34_skipped_without_gradients() -> None:
    model = _make(first=False)
    _shard(model)
    x = torch.ones(2, 4, dtype=torch.float64, device=current_device())
    with torch.no_grad():
        for step in range(3):
            y = model(x, [dist.get_rank() == 0, step == 0, dist.get_rank() == 1])
    assert not y.requires_grad
    assert len(list(model.layers[0].parameters())) == 4


@pytest.mark.launches_not_compared("the ranks skip different layers")
@spmd(ranks=2)
def test_34_a_layer_skipped_without_being_asked_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)).to(current_device())
    fully_shard(model, policy={nn.Linear})
    x = torch.ones(2, 4, device=current_device())

    def forward(x: Tensor) -> Tensor:
        y: Tensor = model[2](x if dist.get_rank() else model[1](x))
        return y

    model.forward = forward  # type: ignore[method-assign]
    with pytest.raises(RanksDisagreeError, match="rank 0 runs '1', rank 1 runs '2'"):
        model(x)


def test_34_modules_without_annotations_need_nothing() -> None:
    x = torch.ones(2, 4)
    assert skipped(nn.Linear(4, 4), x) is x


@spmd(ranks=2)
def test_34_skipped_layers_inside_of_join() -> None:
    alone, model = _make(first=False), _make(first=False)
    _shard(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (alone, model)]
    with join(model, optimizers[1]):
        for step in range(4 - 2 * dist.get_rank()):
            optimizers[1].zero_grad()
            _loss(model, dist.get_rank(), step).backward()
            optimizers[1].step()
    for step in range(4):
        optimizers[0].zero_grad()
        for rank in range(2 if step < 2 else 1):
            (_loss(alone, rank, step) / 2).backward()
        optimizers[0].step()
    for parameter, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(
            full(parameter.detach()), expected.detach(), rtol=1e-9, atol=1e-11
        )
