"""What goes on inside of a `join` scope besides training steps, and what is refused there."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from composable import (
    EMA,
    apply_optimizer_in_backward,
    fully_shard,
    join,
    joinable,
    no_sync,
    reduce_gradients,
    replicate,
)
from composable.comm.ledger import ledger_of
from composable.errors import CommunicationError
from composable.seams import open_scope
from composable.torch_private import locals_of
from tests.helpers.compare import full
from tests.helpers.refusals import refusal
from tests.helpers.world import Pool, current_device, spmd

with warnings.catch_warnings():  # of torch, about its own decorators
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import ZeroRedundancyOptimizer

Annotate = Callable[[nn.Module], Any]


def _shard(model: nn.Module) -> None:
    fully_shard(model, policy={nn.Linear})


def _plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double().to(current_device())


def _normed() -> nn.Sequential:
    torch.manual_seed(0)
    return (
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        .double()
        .to(current_device())
    )


def _batch(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(4, 3, generator=generator, dtype=torch.float64).to(current_device())


def _batches() -> int:
    """Rank 0 has the fewest, so that nothing that follows rank 0 outside of a scope is right in
    it.
    """
    return 2 * dist.get_rank() + 1


def _sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: int, *, to_none: bool = True
) -> None:
    optimizer.zero_grad(set_to_none=to_none)
    model(_batch(dist.get_rank(), step)).square().mean().backward()
    optimizer.step()


def _alone(make: Callable[[], nn.Module] = _plain, **options: Any) -> nn.Module:
    """What one process trains with the batches of all ranks."""
    model = make()
    optimizer = _sgd(model, **options)
    ranks = dist.get_world_size()
    for step in range(2 * ranks - 1):
        optimizer.zero_grad()
        for rank in range(ranks):
            if step < 2 * rank + 1:
                (model(_batch(rank, step)).square().mean() / ranks).backward()
        optimizer.step()
    return model


def _assert_same(model: nn.Module, expected: nn.Module) -> None:
    for (name, parameter), other in zip(
        model.named_parameters(), expected.parameters(), strict=True
    ):
        torch.testing.assert_close(
            full(parameter.detach()), other.detach(), rtol=1e-9, atol=1e-11, msg=name
        )


def _on_all_ranks(tensor: Tensor) -> list[Tensor]:
    every = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(every, tensor.contiguous())
    return every


def _shards_of(model: nn.Module) -> list[Tensor]:
    return [local.detach().clone() for local in locals_of(list(model.parameters()))]


# --- torch's Join -------------------------------------------------------------------------------


@spmd(ranks=[2, 3])
@pytest.mark.parametrize("stands", ["in the list", "first in the list", "in joinable"])
def test_33_zero_redundancy_optimizer_over_a_replicated_model(stands: str) -> None:
    model = _plain()
    replicate(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    joinables = (
        [joinable(model, optimizer)] if stands == "in joinable" else [joinable(model), optimizer]
    )
    with Join(joinables[::-1] if stands == "first in the list" else joinables):
        for step in range(_batches()):
            _step(model, optimizer, step)
    _assert_same(model, _alone())


class _Counter(Joinable):
    """The example of torch's tutorial: a collective of its own, and one at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.count = torch.zeros(1, device=current_device())
        self.most = 0.0

    def __call__(self) -> None:
        Join.notify_join_context(self)
        ones = torch.ones(1, device=current_device())
        dist.all_reduce(ones)
        self.count += ones

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return _CounterHook(self)

    @property
    def join_device(self) -> torch.device:
        return current_device()

    @property
    def join_process_group(self) -> Any:
        return dist.group.WORLD


class _CounterHook(JoinHook):
    def __init__(self, counter: _Counter) -> None:
        self._counter = counter

    def main_hook(self) -> None:
        dist.all_reduce(torch.zeros(1, device=current_device()))

    def post_hook(self, is_last_joiner: bool) -> None:
        most = self._counter.count.clone()
        dist.all_reduce(most, dist.ReduceOp.MAX)
        self._counter.most = most.item()


@spmd(ranks=[2, 3])
@pytest.mark.parametrize("annotate", [_shard, replicate])
def test_33_other_joinables_stand_and_are_called_in_any_order(annotate: Annotate) -> None:
    for ours_first, ours_is_called_first in (
        (True, True),
        (True, False),
        (False, True),
        (False, False),
    ):
        model, other = _plain(), _plain()
        annotate(model)
        ddp, counter = DistributedDataParallel(other), _Counter()
        optimizers = [_sgd(model), _sgd(other)]
        others: list[Joinable] = [counter, ddp]
        ours = joinable(model, optimizers[0])
        with Join([ours, *others] if ours_first else [*others, ours]):
            for step in range(_batches()):
                if ours_is_called_first:
                    _step(model, optimizers[0], step)
                counter()
                _step(ddp, optimizers[1], step)
                counter()
                if not ours_is_called_first:
                    _step(model, optimizers[0], step)
        alone = _alone()
        _assert_same(model, alone)
        _assert_same(other, alone)
        assert counter.most == 2 * sum(2 * rank + 1 for rank in range(dist.get_world_size()))


@spmd(ranks=2)
def test_33_another_joinable_is_called_between_forward_and_step() -> None:
    model, counter = _plain(), _Counter()
    _shard(model)
    optimizer = _sgd(model)
    with Join([counter, joinable(model, optimizer)]):
        for step in range(_batches()):
            optimizer.zero_grad()
            loss = model(_batch(dist.get_rank(), step)).square().mean()
            counter()
            loss.backward()
            counter()
            optimizer.step()
    _assert_same(model, _alone())
    assert counter.most == 8


@spmd(ranks=[2, 3])
@pytest.mark.parametrize("annotate", [_shard, replicate])
def test_33_ranks_without_data_follow_freezing(annotate: Annotate) -> None:
    """As in adversarial training: a step of the model, then gradients through the frozen model,
    then a part of it is frozen.
    """

    def passes(model: nn.Module, step: int) -> list[Callable[[int], Tensor]]:
        def through(rank: int) -> Tensor:
            return model(_batch(rank, step + 50).requires_grad_()).square().mean()

        return [lambda rank: model(_batch(rank, step)).square().mean(), through, through]

    def freeze(model: nn.Module, number: int) -> None:
        model.requires_grad_(number != 1)
        if number == 2:
            model.get_submodule("0").requires_grad_(False)

    model, alone = _plain(), _plain()
    annotate(model)
    optimizer, expected = _sgd(model), _sgd(alone)
    ranks = dist.get_world_size()
    with join(model, optimizer):
        for step in range(_batches()):
            for number, loss in enumerate(passes(model, step)):
                freeze(model, number)
                optimizer.zero_grad()
                loss(dist.get_rank()).backward()
                optimizer.step()
    for step in range(2 * ranks - 1):
        for number, loss in enumerate(passes(alone, step)):
            freeze(alone, number)
            expected.zero_grad()
            for rank in range(ranks):
                if step < 2 * rank + 1:
                    (loss(rank) / ranks).backward()
            expected.step()
    _assert_same(model, alone)
    assert [p.requires_grad for p in model.parameters()] == [
        p.requires_grad for p in alone.parameters()
    ]


@spmd(ranks=2)
def test_33_several_joinables_of_one_join() -> None:
    models, alone = [_plain(), _plain()], _plain()
    _shard(models[0])
    replicate(models[1])
    optimizers = [_sgd(model) for model in models]
    with Join([joinable(*each) for each in zip(models, optimizers, strict=True)]):
        for step in range(_batches()):
            # the first joinable notifies, whichever model comes first
            _step(models[1], optimizers[1], step)
            _step(models[0], optimizers[0], step)
    alone = _alone()
    for model in models:
        _assert_same(model, alone)


@spmd(ranks=2)
def test_33_two_models_in_one_backward() -> None:
    models, alone = [_plain(), nn.Linear(3, 3).double().to(current_device())], _alone
    both = nn.Sequential(models[1], models[0])
    with torch.no_grad():
        for parameter in models[1].parameters():
            dist.broadcast(parameter, 0)
    expected = _copy(both)
    for model in models:
        _shard(model)
    optimizer = _sgd(both)
    with join(*models, optimizer):
        for step in range(_batches()):
            _step(both, optimizer, step)
    _assert_same(both, alone(lambda: expected))


def _copy(model: nn.Module) -> nn.Module:
    copied = nn.Sequential(nn.Linear(3, 3).double().to(current_device()), _plain())
    copied.load_state_dict(model.state_dict())
    return copied


@spmd(ranks=2)
@pytest.mark.parametrize("annotate", [_shard, replicate])
def test_33_early_termination_throws_on_all_ranks(annotate: Annotate) -> None:
    model = _plain()
    annotate(model)
    optimizer = _sgd(model)

    def train() -> None:
        with join(model, optimizer, throw_on_early_termination=True):
            for step in range(_batches()):
                _step(model, optimizer, step)

    with pytest.raises(RuntimeError, match=r"exhausted all inputs|exhausted inputs"):
        train()
    assert open_scope() is None


@spmd(ranks=2)
@pytest.mark.parametrize("enable", [True, False])
def test_33_nothing_listens_after_a_scope_with_even_inputs(enable: bool) -> None:
    model = _plain()
    _shard(model)
    optimizer = _sgd(model)
    with join(model, optimizer, enabled=enable):
        assert (open_scope() is not None) is enable
        _step(model, optimizer, 0)
    assert open_scope() is None
    _step(model, optimizer, 1)


@spmd(ranks=2)
def test_33_a_joinable_serves_many_scopes() -> None:
    model = _plain()
    _shard(model)
    optimizer = _sgd(model)
    joined, before = joinable(model, optimizer), [*model.state_dict()]
    for _ in range(3):
        with Join([joined]):
            for step in range(_batches()):
                _step(model, optimizer, step)
    assert [*model.state_dict()] == before
    assert (
        len(
            {
                float(each)
                for each in _on_all_ranks(sum(full(p.detach()).sum() for p in model.parameters()))
            }
        )
        == 1
    )


# --- what runs inside ---------------------------------------------------------------------------


@spmd(ranks=[2, 3])
@pytest.mark.parametrize("annotate", [_shard, replicate])
def test_33_evaluation_loops_of_different_lengths(annotate: Annotate) -> None:
    model, alone = _plain(), _plain()
    annotate(model)
    with torch.no_grad(), join(model):
        for step in range(_batches()):
            torch.testing.assert_close(
                model(_batch(dist.get_rank(), step)), alone(_batch(dist.get_rank(), step))
            )


@spmd(ranks=[2, 3])
def test_33_buffers_follow_a_rank_with_data() -> None:
    model, last = _normed(), dist.get_world_size() - 1
    replicate(model)
    optimizer = _sgd(model)
    with join(model, optimizer):
        for step in range(_batches()):
            _step(model, optimizer, step)
    assert int(model[1].num_batches_tracked) == 2 * last + 1
    for buffer in model.buffers():
        first, *others = _on_all_ranks(buffer)
        for other in others:
            assert torch.equal(first, other)


@spmd(ranks=2)
def test_33_a_replicated_model_without_optimizer_takes_the_parameters_of_the_last_rank() -> None:
    model = _plain()
    replicate(model)
    optimizer = _sgd(model)
    with join(model):
        for step in range(_batches()):
            _step(model, optimizer, step)
    _assert_same(model, _alone())


@spmd(ranks=[2, 3])
@pytest.mark.parametrize("annotate", [_shard, replicate])
def test_33_optimizers_and_schedulers_end_alike_on_all_ranks(annotate: Annotate) -> None:
    model = _plain()
    annotate(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    averages = EMA(model, decay=0.5)
    optimizer.register_step_post_hook(lambda *_: averages.update())
    with join(model, optimizer, scheduler):
        for step in range(_batches()):
            _step(model, optimizer, step)
            scheduler.step()
    steps = 2 * dist.get_world_size() - 1
    assert {int(state["step"]) for state in optimizer.state.values()} == {steps}
    assert scheduler.last_epoch == steps
    assert (
        optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0] == 0.1 * 0.5 ** (steps // 2)
    )


@spmd(ranks=[2, 3])
@pytest.mark.parametrize("annotate", [_shard, replicate])
def test_33_a_scaler_skips_steps_on_all_ranks(annotate: Annotate) -> None:
    model = _plain()
    annotate(model)
    optimizer = _sgd(model)
    scaler = torch.amp.GradScaler(current_device().type, init_scale=8.0)
    with join(model, optimizer, scaler):
        for step in range(_batches()):
            before = _shards_of(model)
            optimizer.zero_grad()
            loss = model(_batch(dist.get_rank(), step)).square().mean()
            scaler.scale(loss * (float("inf") if step == 1 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            if step == 1:
                assert all(map(torch.equal, before, _shards_of(model)))
    assert scaler.get_scale() == 4.0
    total = sum(full(parameter.detach()).sum() for parameter in model.parameters())
    assert isinstance(total, Tensor)
    assert torch.isfinite(total)
    assert len({float(each) for each in _on_all_ranks(total)}) == 1


@spmd(ranks=[2, 3])
@pytest.mark.parametrize("annotate", [_shard, replicate])
def test_33_gradients_that_are_set_to_zero(annotate: Annotate) -> None:
    model = _plain()
    annotate(model)
    optimizer = _sgd(model)
    with join(model, optimizer):
        for step in range(_batches()):
            _step(model, optimizer, step, to_none=False)
    _assert_same(model, _alone())


@spmd(ranks=[2, 3])
@pytest.mark.parametrize("annotate", [_shard, replicate])
def test_33_accumulated_gradients_are_reduced_without_a_backward(annotate: Annotate) -> None:
    model = _plain()
    annotate(model)
    optimizer = _sgd(model)
    with join(model, optimizer):
        for step in range(_batches()):
            optimizer.zero_grad()
            with no_sync(model):
                model(_batch(dist.get_rank(), step)).square().mean().backward()
            reduce_gradients(model)
            optimizer.step()
    _assert_same(model, _alone())


@spmd(ranks=2)
@pytest.mark.parametrize("annotate", [_shard, replicate])
def test_33_an_optimizer_in_backward_steps_on_all_ranks(annotate: Annotate) -> None:
    model = _plain()
    annotate(model)
    apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1, "momentum": 0.9})
    with join(model):
        for step in range(_batches()):
            model(_batch(dist.get_rank(), step)).square().mean().backward()
    _assert_same(model, _alone())


class _Recomputed(nn.Module):
    """Its layers, in order; those of groups with a "c" are recomputed together."""

    def __init__(self, groups: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = [(3, 4), (4, 4), (4, 5), (5, 1)]
        self.layers = nn.ModuleList(nn.Linear(*size) for size in sizes)
        self.groups = groups.split()
        self.double().to(current_device())

    def forward(self, x: Tensor) -> Tensor:
        x.requires_grad_(True)
        for group in self.groups:
            part = nn.Sequential(*(self.layers[int(index)] for index in group.strip("c")))
            again = group.startswith("c")
            x = torch_checkpoint(part, x, use_reentrant=True) if again else part(x)
            x = x.tanh()
        return x


@pytest.mark.parametrize("groups", ["0 c1 c2 3", "0 c12 3", "c0 1 c2 c3", "0 c1 c1 c23"])
@pytest.mark.parametrize("verb", [replicate, fully_shard])
@spmd(ranks=2)
def test_33_roots_that_run_again_in_a_backward_inside_of_it(verb: Any, groups: str) -> None:
    model = _Recomputed(groups)
    for layer in model.layers:
        verb(layer)
    optimizer = _sgd(model)
    with join(model.layers, optimizer):
        for step in range(_batches()):
            _step(model, optimizer, step)
    _assert_same(model, _alone(lambda: _Recomputed(groups)))


@spmd(ranks=2)
def test_33_several_forwards_before_one_backward() -> None:
    model, alone = _plain(), _plain()
    _shard(model)
    optimizers = [_sgd(alone), _sgd(model)]
    with join(model, optimizers[1]):
        for step in range(_batches()):
            optimizers[1].zero_grad()
            losses = [
                model(_batch(dist.get_rank(), 10 * step + part)).square().mean()
                for part in range(3)
            ]
            (losses[0] + losses[2]).backward()
            optimizers[1].step()
    for step in range(3):
        optimizers[0].zero_grad()
        for rank in range(int(step > 0), 2):
            for part in (0, 2):
                (alone(_batch(rank, 10 * step + part)).square().mean() / 2).backward()
        optimizers[0].step()
    _assert_same(model, alone)


@spmd(ranks=[2, 3])
def test_33_sparse_gradients_come_from_ranks_with_data() -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return (
            nn.Sequential(nn.Embedding(8, 3, sparse=True), nn.Linear(3, 1))
            .double()
            .to(current_device())
        )

    def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
        loss: Tensor = model(torch.tensor([rank, step, 7], device=current_device())).square().mean()
        return loss

    model, alone = make(), make()
    replicate(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (alone, model)]
    with join(model, optimizers[1]):
        for step in range(_batches()):
            optimizers[1].zero_grad()
            loss_of(model, dist.get_rank(), step).backward()
            optimizers[1].step()
    for step in range(2 * dist.get_world_size() - 1):
        optimizers[0].zero_grad()
        for rank in range(dist.get_world_size()):
            if step < 2 * rank + 1:
                (loss_of(alone, rank, step) / dist.get_world_size()).backward()
        optimizers[0].step()
    _assert_same(model, alone)


@spmd(ranks=2)
@pytest.mark.parametrize("annotate", [_shard, replicate])
def test_33_while_all_ranks_have_data_the_ledger_is_that_without_a_scope(
    annotate: Annotate,
) -> None:
    model = _plain()
    annotate(model)
    optimizer, ledger = _sgd(model), ledger_of(dist.group.WORLD)
    for step in range(2):
        _step(model, optimizer, step)
    counts = []
    for scope in (nullcontext(), join(model, optimizer)):
        with scope:
            before = ledger.count
            _step(model, optimizer, 2)
            counts.append(ledger.count - before)
    assert counts[0] == counts[1] > 0


# --- steps that fail ----------------------------------------------------------------------------


class _Fails(nn.Linear):
    fails = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.fails == "forward":
            raise torch.OutOfMemoryError(self.fails)
        y = super().forward(x)
        if self.fails == "backward":
            y.register_hook(self._raise)
        return y

    def _raise(self, _: Tensor) -> None:
        raise torch.OutOfMemoryError(self.fails)


@spmd(ranks=[2, 3])
@pytest.mark.parametrize("annotate", [_shard, replicate])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_33_a_step_that_fails_on_all_ranks_with_data_is_lost_on_the_others_too(
    annotate: Annotate, where: str
) -> None:
    model, alone = _plain(), _plain()
    torch.manual_seed(0)
    model[2] = _Fails(4, 1).double().to(current_device())
    model[2].load_state_dict(alone[2].state_dict())
    annotate(model)
    optimizer = _sgd(model)
    with join(model, optimizer):
        for step in range(_batches()):
            for attempt in range(2):
                model[2].fails = where if attempt == 0 and step == 1 else ""
                try:
                    _step(model, optimizer, step)
                    break
                except torch.OutOfMemoryError:
                    continue
    _assert_same(model, _alone())


def _one_rank_raises() -> str:
    model = _plain()
    _shard(model)
    optimizer = _sgd(model)
    try:
        with join(model, optimizer):
            for step in range(_batches()):
                if step == 2:
                    raise ValueError("a bad batch")
                _step(model, optimizer, step)
    except (ValueError, CommunicationError) as error:
        assert open_scope() is None
        return str(error)
    return ""


@pytest.mark.launches_not_compared("one rank raises, and launches less")
def test_33_a_rank_that_raises_inside_ends_the_others(pool: Pool, device: str) -> None:
    one, other = pool.run(2, _one_rank_raises, device=device, group_timeout=2.0, spoils=True)
    assert other == "a bad batch"
    assert "rank 0: the exchange of which ranks have data failed" in one


# --- bad input ----------------------------------------------------------------------------------


def _refusal_inside(scope: Any, act: Callable[[], object]) -> str:
    def run() -> None:
        with scope:
            act()

    return refusal(run)


@spmd(ranks=2)
def test_33_scopes_do_not_nest() -> None:
    model = _plain()
    _shard(model)

    def act() -> None:
        model(_batch(0, 0))
        with join(model):
            pass

    assert _refusal_inside(join(model), act).startswith(
        "PhaseError: joinable: a join scope is open already. Scopes do not nest"
    )
    assert open_scope() is None


def test_33_one_process_without_ranks_needs_nothing() -> None:
    model = nn.Linear(3, 1)
    fully_shard(model)
    with join(model):
        model(torch.ones(2, 3)).sum().backward()
    assert model.weight.grad is not None
