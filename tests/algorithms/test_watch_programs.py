"""`watch` in programs that it must leave alone: no false alarm, no hang, and the same bits."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.optim import SGD

from composable import (
    MixedPrecisionPolicy,
    fully_shard,
    keep_unsharded,
    no_sync,
    register_forward_method,
    replicate,
    together,
    watch,
)
from composable.comm import base
from composable.engine.step.observer import OBSERVERS, Observer
from composable.torch_private import local_tensor
from tests.helpers.world import Pool, current_device, spmd

WIDTH: Final = 4


def layers(number: int = 3, kind: Callable[..., nn.Module] = nn.Linear) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(kind(WIDTH, WIDTH) for _ in range(number))).to(current_device())


def batch() -> Tensor:
    return torch.randn(2, WIDTH, device=current_device())


def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model(batch()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


class Spoiled(torch.autograd.Function):
    """The same value, whose gradient has a NaN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient.view(-1)[0] = torch.nan
        return gradient


class Layer(nn.Linear):
    """A layer that raises once, or whose weight gets a NaN."""

    raises = spoils = False

    def forward(self, x: Tensor) -> Tensor:
        if self.raises:
            self.raises = False
            raise ValueError("a bad batch")
        weight = Spoiled.apply(self.weight) if self.spoils else self.weight  # type: ignore[no-untyped-call]
        return nn.functional.linear(x, weight, self.bias)


# --- with `together` -----------------------------------------------------------------------------


def _trained(afterwards: str, *, loses: bool, watches: str, repeat: bool) -> list[Tensor]:
    """The parameters after six steps, of which the fourth is lost, or left out."""
    model = fully_shard(layers(kind=Layer), policy={Layer})
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    watched: Any = None
    for number in range(6):
        torch.manual_seed(number * 10 + dist.get_rank())
        if number == 3 and not loses:
            continue
        if number == {"first": 0, "later": 2}[watches]:
            watched = watch(model, action="raise", agree=1, repeat=repeat)
        model[1].raises = number == 3 and dist.get_rank() == 1
        with together(model) as scope:
            x = batch()
            if number == 3 and dist.get_rank() == 0:
                x[0] = torch.nan  # a rank that did not raise has seen something
            model(x).square().mean().backward()
        assert scope.lost == (number == 3)
        if not scope.lost or afterwards == "optimizer":
            optimizer.zero_grad() if scope.lost else None
            optimizer.step()
        elif afterwards == "end_step":
            watched.end_step()
        optimizer.zero_grad()
    assert watched.findings == []
    watched.remove()
    return [local_tensor(parameter).detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("repeat", [False, True])
@pytest.mark.parametrize("watches", ["first", "later"])
@pytest.mark.parametrize("afterwards", ["nothing", "end_step", "optimizer"])
@spmd(ranks=[2, 4])
def test_a_step_that_one_rank_loses_is_forgotten_on_all(
    afterwards: str, watches: str, repeat: bool
) -> None:
    lost = _trained(afterwards, loses=True, watches=watches, repeat=repeat)
    never = _trained("nothing", loses=False, watches=watches, repeat=repeat)
    assert all(map(torch.equal, lost, never))


@spmd(ranks=2)
def test_scopes_of_steps_inside_of_a_watch_and_around_it() -> None:
    model = fully_shard(layers(kind=Layer), policy={Layer})
    optimizer = SGD(model.parameters(), lr=0.1)
    for number in range(5):
        model[2].raises = number in (2, 4) and dist.get_rank() == 1
        with suppress(ZeroDivisionError), watch(model, action="raise", agree=1) as watched:
            with together(model) as scope:
                model(batch()).sum().backward()
            if not scope.lost:
                optimizer.step()
            optimizer.zero_grad()
        assert (scope.lost, watched.findings) == (number in (2, 4), [])


# --- which model, rank and parameter -------------------------------------------------------------


@spmd(ranks=2)
def test_of_two_equal_models_the_other_one_is_not_named() -> None:
    models = [layers(kind=Layer), layers(kind=Layer)]
    for model in models:
        replicate(model)
    watches = [watch(model) for model in models]
    models[0][0].spoils = dist.get_rank() == 1
    sum((model(batch()).sum() for model in models), torch.zeros(())).backward()
    for model in models:
        SGD(model.parameters()).step()
    assert [len(watched.findings) for watched in watches] == [1, 0]
    assert watches[0].findings[0].ranks == (1,)


def _logged_by_a_model_of_one_rank() -> list[str]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("composable")
    logger.addHandler(handler)
    mesh = init_device_mesh(current_device().type, (2, 1), mesh_dim_names=("stage", "data"))
    model = fully_shard(layers(), mesh=mesh["data"])
    with watch(model):
        model(batch() * (torch.nan if dist.get_rank() == 1 else 1.0)).sum().backward()
        SGD(model.parameters()).step()
    logger.removeHandler(handler)
    return [record for record in records if record.startswith("watch")]


def test_the_first_rank_that_has_the_model_logs_a_finding(pool: Pool) -> None:
    nothing, said = pool.run(2, _logged_by_a_model_of_one_rank)
    assert nothing == []
    assert len(said) == 1
    assert "rank 1: a NaN in the inputs" in said[0]


# --- ranks that differ where they may ------------------------------------------------------------


class Statistics(nn.Module):
    """Keeps statistics in a buffer, which it registers anew in each forward, and makes another."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.keeps = False

    def forward(self, x: Tensor) -> Tensor:
        if self.keeps:
            self.mean = 0.9 * self.mean + x.detach().mean(0)
            if not hasattr(self, "table"):
                self.register_buffer("table", torch.ones(3) * (1 + dist.get_rank()))
        y: Tensor = self.inner(x)
        return y


@spmd(ranks=2)
def test_buffers_that_forwards_replace_are_not_compared() -> None:
    model = fully_shard(Statistics().to(current_device()))
    optimizer = SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    with watch(model, action="raise", agree=1):
        for model.keeps in (False, True, True, True):
            step(model, optimizer)


@spmd(ranks=2)
def test_batch_norms_that_train_later_are_not_compared() -> None:
    model = fully_shard(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)))
    optimizer = SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    with watch(model, action="raise", agree=1):
        for trains in (False, True, True):
            model[1].train(trains)
            step(model, optimizer)


@spmd(ranks=2)
def test_what_one_rank_evaluates_before_a_write_is_not_compared() -> None:
    model = fully_shard(layers(), policy={nn.Linear})
    optimizer = SGD(model.parameters(), lr=0.1)
    with watch(model, action="raise", agree=1):
        for _ in range(3):
            with keep_unsharded(model), torch.no_grad():
                if dist.get_rank() == 0:
                    model(batch())
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.clamp_(-0.1, 0.1)
            step(model, optimizer)


@pytest.mark.parametrize("verb", ["replicate", "hybrid"])
@spmd(ranks=2)
def test_gradients_that_wait_to_be_reduced_are_not_compared(verb: str) -> None:
    both = nn.ModuleDict({"slow": layers(), "fast": layers()})
    for each in both.values():
        if verb == "replicate":
            replicate(each)
        else:
            fully_shard(each, mesh=init_device_mesh(current_device().type, (2, 1)))
    slow, fast = (SGD(each.parameters(), lr=0.1) for each in both.values())
    torch.manual_seed(dist.get_rank())
    with watch(both, action="raise", agree=1):
        for number in range(4):
            with no_sync(both["slow"], enabled=number % 2 == 0):
                both["slow"](batch()).sum().backward()
            step(both["fast"], fast)
            if number % 2:
                slow.step()
                slow.zero_grad()


@spmd(ranks=2)
def test_an_optimizer_that_one_rank_keeps_and_does_not_step_is_not_compared() -> None:
    model = fully_shard(layers())
    kept = []
    with watch(model, action="raise", agree=1):
        for lr in (0.1, 0.1, 0.2, 0.2):
            optimizer = SGD(model.parameters(), lr=lr)
            if dist.get_rank() == 0:
                kept.append(optimizer)
            step(model, optimizer)


class Guided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            guide = self.teacher(x)
        y: Tensor = self.student(x) + guide
        return y


@spmd(ranks=2)
def test_a_unit_in_inference_mode_inside_of_a_training_forward() -> None:
    model = fully_shard(Guided().to(current_device()), policy={nn.Linear})
    model.teacher.requires_grad_(False)
    optimizer = SGD(model.student.parameters(), lr=0.1)
    with watch(model, action="raise", agree=1, repeat=True):
        for _ in range(3):
            step(model, optimizer)


# --- its life ------------------------------------------------------------------------------------


class _Collects(Observer):
    def pre_forward(self, root: Any, call: Any) -> None:
        gc.collect()


class _Counts(Observer):
    noted = 0

    def pre_forward(self, root: Any, call: Any) -> None:
        self.noted += 1


@spmd(ranks=1)
def test_others_are_notified_of_everything_while_a_watched_model_is_collected() -> None:
    dropped = fully_shard(layers())
    watch(dropped)
    last = _Counts()
    undo = [OBSERVERS.add(_Collects()), OBSERVERS.add(last)]
    del dropped
    fully_shard(layers(1))(batch())
    for each in undo:
        each()
    assert last.noted == 1


def _tensors_that_are_alive(number: int, **options: Any) -> list[int]:
    """After each of some steps; the user keeps the losses."""
    model = fully_shard(layers(), policy={nn.Linear})
    optimizer, losses, counts = SGD(model.parameters(), lr=1e-3), [], []
    with watch(model, agree=0, **options):
        for _ in range(number):
            losses.append(model(batch()).tanh().square().sum())
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
            gc.collect()
            alive = sum(isinstance(each, Tensor) for each in gc.get_objects())
            counts.append(alive - len(losses))
    return counts


@spmd(ranks=1)
def test_who_keeps_losses_does_not_keep_gradients(tmp_path: Path) -> None:
    for options in ({}, {"folder": tmp_path}, {"repeat": True}):
        counts = _tensors_that_are_alive(5, **options)
        assert counts[-1] == counts[-2], f"{options}: {counts}"


def _reported() -> list[int]:
    return [len(base._LAUNCHING), *map(len, OBSERVERS.values())]


@spmd(ranks=1)
def test_steps_are_observed_until_the_last_watch_is_closed() -> None:
    gc.collect()
    watch(fully_shard(layers())).remove()  # and those that nobody has closed are gone
    before = _reported()
    first, second = watch(fully_shard(layers())), watch(fully_shard(layers()))
    during = _reported()
    assert during > before
    first.remove()
    assert _reported() == during
    second.remove()
    assert _reported() == before
    second.remove()


# --- units that run again ------------------------------------------------------------------------


class Several(nn.Module):
    """Outputs of which one may be computed from another, and a method other than forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.chains = False

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.inner(x)
        return y, y.tanh() if self.chains else self.inner(x).tanh()

    def encode(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = self.inner(x + y).sin()
        return z, z + 1


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.several = nn.Linear(WIDTH, WIDTH), Several()
        self.encodes = False

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x)
        found: tuple[Tensor, Tensor] = (
            self.several.encode(x, x) if self.encodes else self.several(x)
        )
        return found


@pytest.mark.parametrize("how", ["backwards", "no_sync", "chained", "method"])
@spmd(ranks=2)
def test_calls_that_cannot_be_repeated_raise_no_alarm(how: str) -> None:
    torch.manual_seed(0)
    model = fully_shard(Around().to(current_device()), policy={Several})
    register_forward_method(model.several, "encode")
    model.encodes, model.several.chains = how == "method", how == "chained"
    optimizer = SGD(model.parameters(), lr=0.1)
    with watch(model, action="raise", agree=0, repeat=True) as watched:
        one, other = model(batch())
        if how in ("backwards", "no_sync"):
            with no_sync(model, enabled=how == "no_sync"):
                one.square().sum().backward(retain_graph=True)
            other.square().sum().backward()
        else:
            (one.square().sum() + other.square().sum()).backward()
        optimizer.step()
    assert watched.findings == []


@spmd(ranks=2)
def test_one_unit_with_a_loss_and_what_it_is_made_from_reproduces() -> None:
    model = layers(1)
    model.forward = lambda x: (y := model[0](x), y.square().sum())  # type: ignore[assignment]
    fully_shard(model)
    optimizer = SGD(model.parameters(), lr=0.1)
    with watch(model, action="raise", agree=0, repeat=True):
        for _ in range(2):
            model(batch())[1].backward()
            optimizer.step()


@pytest.mark.parametrize("buffers", ["own", "cast"])
@spmd(ranks=2)
def test_statistics_are_not_counted_twice(buffers: str) -> None:
    counted = []
    for repeat in (False, True):
        torch.manual_seed(0)
        norm = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), Statistics())
        model = nn.Sequential(norm, nn.Linear(WIDTH, WIDTH)).to(current_device())
        model[0][2].keeps = True
        low = torch.bfloat16 if buffers == "cast" else None
        policy = MixedPrecisionPolicy(param_dtype=low, buffer_dtype=low)
        fully_shard(model, policy={nn.Sequential}, mp_policy=policy)
        optimizer = SGD(model.parameters(), lr=0.1)
        with watch(model, agree=0, repeat=repeat, action="raise"):
            for _ in range(3):
                step(model, optimizer)
        counted.append([each.clone() for each in model.buffers()])
    assert all(map(torch.equal, *counted))


@spmd(ranks=2)
def test_hooks_of_users_are_called_once() -> None:
    calls: list[str] = []
    inner = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    inner[0].register_forward_hook(lambda *_: calls.append("forward"))
    model = nn.Sequential(inner, nn.Linear(WIDTH, WIDTH)).to(current_device())
    for each in model:
        replicate(each)
    replicate(model)
    model[1].weight.register_hook(lambda _: calls.append("gradient"))
    optimizer = SGD(model.parameters(), lr=0.1)
    with watch(model, agree=0, repeat=True, action="raise"):
        for _ in range(4):
            step(model, optimizer)
    assert (calls.count("forward"), calls.count("gradient")) == (4, 4)


class Once(nn.Module):
    """Raises when it is called again, on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.runs = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        if self.runs == 2 and dist.get_rank() == 1:
            raise ValueError("twice")
        y: Tensor = self.inner(x)
        return y


@spmd(ranks=2)
def test_the_forward_of_a_unit_runs_once() -> None:
    model = fully_shard(Once().to(current_device()))
    optimizer = SGD(model.parameters(), lr=0.1)
    with watch(model, agree=0, repeat=True, action="raise") as watched:
        step(model, optimizer)
    assert watched.findings == []
    assert model.runs == 1


class WrongOnce(nn.Linear):
    wrong = True

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        wrong, self.wrong = self.wrong, False
        return y * 1.0001 if wrong and dist.get_rank() == 1 else y


@spmd(ranks=2)
def test_a_rank_does_not_run_a_tensor_parallel_unit_alone() -> None:
    device, names = current_device().type, ("data", "tensor")
    mesh = init_device_mesh(device, (1, 2), mesh_dim_names=names)
    model = nn.Sequential(layers(1), layers(2, kind=WrongOnce))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    parallelize_module(model[1], mesh["tensor"], plan)
    fully_shard(model, policy={nn.Sequential}, mesh=mesh["data"])
    optimizer = SGD(model.parameters(), lr=0.1)
    with watch(model, agree=0, repeat=True, action="raise"):
        for number in range(2):
            model[1][1].wrong = number == 1  # whose turn it is
            torch.manual_seed(0)
            step(model, optimizer)


@spmd(ranks=2)
def test_a_unit_runs_again_inside_of_keep_unsharded() -> None:
    model = fully_shard(layers(), policy={nn.Linear})
    optimizer = SGD(model.parameters(), lr=0.1)
    with watch(model, action="raise", agree=1, repeat=True):
        for _ in range(3):
            with keep_unsharded(model):
                step(model, optimizer)


class _TwoGradients(SGD):
    """Sharpness-aware: it moves by a first gradient, and steps by that of the closure there."""

    def step(self, closure: Any = None) -> Any:
        (param,) = self.param_groups[0]["params"]
        with torch.no_grad():
            param.add_(param.grad)
            with torch.enable_grad():
                closure()
            param.sub_(param.grad)
        return super().step()


@spmd(ranks=2)
def test_a_backward_before_the_closure_is_of_the_same_step() -> None:
    model = fully_shard(nn.Linear(WIDTH, 1, bias=False))
    optimizer = _TwoGradients(model.parameters(), lr=0.1)
    numbers = []
    with watch(model, agree=0) as watched:
        for number in range(3):

            def closure(bad: bool = False) -> Tensor:
                optimizer.zero_grad()
                loss: Tensor = model(batch()).square().mean()
                (loss * (float("nan") if bad else 1)).backward()
                return loss

            closure()
            optimizer.step(partial(closure, bad=number == 2 and dist.get_rank() == 1))
            numbers.append(watched.step)
    assert numbers == [1, 2, 3]
    assert [(each.step, each.ranks) for each in watched.findings] == [(2, (1,))]


class _Masked(nn.Module):
    """A frozen parameter with infinities below zero, and a buffer that is normalised by."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        mask = torch.full((WIDTH, WIDTH), -torch.inf).triu(1)
        self.mask = nn.Parameter(mask, requires_grad=False)
        self.spoils = False

    def forward(self, x: Tensor) -> Tensor:
        y = (self.norm(self.inner(x))[:, None] + self.mask).softmax(-1).mean(1)
        return y * (self.mask[0, 1] if self.spoils else 1)


@spmd(ranks=2)
def test_masks_statistics_and_devices_of_ranks_are_no_findings() -> None:
    """The statistics are those of an evaluation of each rank; versions do not tell of them."""
    model = fully_shard(nn.Sequential(_Masked(), _Masked()).to(current_device()), policy={_Masked})
    optimizer = SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    optimizer.param_groups[0]["device"] = torch.device("cuda", dist.get_rank())
    torch.manual_seed(dist.get_rank())
    with watch(model, agree=1) as watched:
        for number in range(4):
            with torch.no_grad():
                model.train(number > 0)(batch())
            model.eval()
            model[1].spoils = number == 3
            step(model, optimizer)
    assert [(each.step, each.unit, each.phase) for each in watched.findings] == [(3, "1", "output")]
