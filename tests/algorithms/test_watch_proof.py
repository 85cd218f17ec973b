"""`watch` accuses nobody without proof, and is not late."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import LBFGS, SGD, Optimizer

from composable import (
    MixedPrecisionPolicy,
    fully_shard,
    keep_unsharded,
    local_steps,
    replicate,
    watch,
)
from composable.errors import NonFiniteError, RanksDisagreeError
from composable.torch_private import local_tensor
from tests.helpers.world import current_device, spmd

WIDTH: Final = 6


def _mlp() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
    return nn.Sequential(*layers).to(current_device())


def _batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step * 10 + dist.get_rank())
    return torch.randn(4, WIDTH, generator=generator).to(current_device())


def _step(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    model(_batch(step)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _are_finite(model: nn.Module) -> bool:
    return all(bool(local_tensor(each).isfinite().all()) for each in model.parameters())


# --- messages are identified by what sends them --------------------------------------------------


class _Spoiling(nn.Linear):
    """Its weight's gradient is a NaN on rank 1."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if dist.get_rank() == 0 else _Spoiled.apply(self.weight)
        return nn.functional.linear(x, weight, self.bias)


class _Spoiled(torch.autograd.Function):
    """The same value, whose gradient is NaN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * torch.nan


class _Norms(nn.Module):
    """Two layers with a norm, which is in a group of its own where others are in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.norm = nn.Linear(WIDTH, WIDTH, bias=False), nn.LayerNorm(WIDTH)
        self.spoils = ""

    def forward(self, x: Tensor) -> Tensor:
        weight, scale = (
            _Spoiled.apply(each) if name == self.spoils else each  # type: ignore[no-untyped-call]
            for name, each in (("proj.weight", self.proj.weight), ("norm.weight", self.norm.weight))
        )
        normed = nn.functional.layer_norm(x.float(), (WIDTH,), scale, self.norm.bias)
        return x + nn.functional.linear(normed.to(weight.dtype), weight).to(x.dtype)


def _sharded(model: nn.Module, **options: Any) -> None:
    fully_shard(model, policy={_Norms}, **options)


def _hybrid(model: nn.Module, **options: Any) -> None:
    mesh = init_device_mesh(current_device().type, (2, dist.get_world_size() // 2))
    fully_shard(model, policy={_Norms}, mesh=mesh, **options)


@pytest.mark.parametrize("annotate", [_sharded, _hybrid, replicate])
@pytest.mark.parametrize("name", ["proj.weight", "norm.weight"])
@spmd(ranks=[2, 4])
def test_a_nan_in_each_group_of_a_unit_is_named_before_the_step(
    name: str, annotate: Callable[..., Any]
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(_Norms(), _Norms()).to(current_device())
    precision = MixedPrecisionPolicy(
        param_dtype="bf16", reduce_dtype="fp32", full_precision_classes=(nn.LayerNorm,)
    )
    annotate(model, mp_policy=precision)
    rank = dist.get_world_size() - 1
    optimizer = SGD(model.parameters(), lr=0.1)
    with watch(model, action="raise") as watched:
        _step(model, optimizer, 0)
        model[0].spoils = name if dist.get_rank() == rank else ""
        with pytest.raises(NonFiniteError):
            _step(model, optimizer, 1)
    (found,) = watched.findings
    below = f"0.{name}" if annotate is replicate else name
    assert (found.ranks, found.step, found.phase, found.tensor) == ((rank,), 1, "gradient", below)
    assert found.unit == ("(root)" if annotate is replicate else "0")
    assert _are_finite(model)


class _Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.dense = nn.Embedding(5, WIDTH, sparse=True), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.rows(x)
        y = _Spoiled.apply(y) if dist.get_rank() == 1 else y  # type: ignore[no-untyped-call]
        out: Tensor = self.dense(y)
        return out


@spmd(ranks=2)
def test_a_nan_in_a_sparse_gradient_beside_dense_ones_is_named_before_the_step() -> None:
    torch.manual_seed(0)
    model = replicate(_Rows().to(current_device()))
    with watch(model, action="raise") as watched:
        model(torch.tensor([dist.get_rank()], device=current_device())).sum().backward()
        with pytest.raises(NonFiniteError):
            SGD(model.parameters(), lr=0.1).step()
    (found,) = watched.findings
    assert (found.ranks, found.tensor) == ((1,), "rows.weight")
    assert _are_finite(model)


# --- closures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("kind", [SGD, LBFGS])
@spmd(ranks=2)
def test_a_nan_that_a_closure_brings_is_raised_before_the_step(kind: Any, by_name: bool) -> None:
    model = replicate(_mlp()) if kind is LBFGS else fully_shard(_mlp(), policy={nn.Linear})
    optimizer = kind(model.parameters(), lr=0.1)
    with watch(model, action="raise", agree=1) as watched:
        for step in range(4):

            def closure(step: int = step) -> Tensor:
                optimizer.zero_grad()
                x = _batch(step)
                if (step, dist.get_rank()) == (2, 1):
                    x[0, 0] = torch.nan
                loss = model(x).square().mean()
                loss.backward()
                return loss.detach()

            call = {"closure": closure} if by_name else closure
            if step < 2:
                optimizer.step(**call) if by_name else optimizer.step(call)
                assert watched.step == step + 1
                continue
            with pytest.raises(NonFiniteError):
                optimizer.step(**call) if by_name else optimizer.step(call)
            break
    (found,) = watched.findings
    assert (found.rank, found.step, found.unit, found.phase) == (1, 2, "(root)", "input")
    assert _are_finite(model)


@spmd(ranks=2)
def test_a_closure_that_does_not_run_the_model_ends_one_step() -> None:
    model = fully_shard(_mlp(), policy={nn.Linear})
    optimizer = SGD(model.parameters(), lr=0.1)
    with watch(model, action="raise", agree=1) as watched:
        for step in range(3):
            loss = model(_batch(step)).square().mean()
            loss.backward()
            assert optimizer.step(lambda loss=loss: 7.0) == 7.0  # type: ignore[misc]
            optimizer.zero_grad()
    assert (watched.step, watched.findings) == (3, [])


# --- what is to differ ---------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["watch", "local_steps"])
@pytest.mark.parametrize("kind", ["replicate", "hybrid"])
@spmd(ranks=4)
def test_replicas_that_train_apart_are_not_compared_until_they_are_averaged(
    kind: str, first: str
) -> None:
    if kind == "hybrid":
        mesh = init_device_mesh(
            current_device().type, (2, 2), mesh_dim_names=("replicate", "shard")
        )
        model: Any = fully_shard(_mlp(), mesh=mesh)
    else:
        model = replicate(_mlp())
    optimizer = SGD(model.parameters(), lr=0.1)
    opened = watch(model, action="raise", agree=1) if first == "watch" else None
    with local_steps(model, optimizer, every=2):
        with opened or watch(model, action="raise", agree=1) as watched:
            for step in range(5):
                _step(model, optimizer, step)
            # ranks learn of each other nevertheless
            if dist.get_rank() == 3:
                optimizer.param_groups[0]["lr"] = 0.2
            with pytest.raises(RanksDisagreeError, match="rank 3"):
                _step(model, optimizer, 5)
            optimizer.param_groups[0]["lr"] = 0.1
            model(_batch(6) * (torch.nan if dist.get_rank() == 3 else 1)).sum().backward()
            with pytest.raises(NonFiniteError, match="rank 3"):
                optimizer.step()
        optimizer.zero_grad()
        assert [each.kind for each in watched.findings] == ["ranks differ", "not finite"]
    with watch(model, agree=1) as watched:  # replicas are equal again, and a difference is one
        _step(model, optimizer, 7)
        assert watched.findings == []
        with torch.no_grad():
            local_tensor(next(model.parameters())).view(-1)[0] += dist.get_rank()
        _step(model, optimizer, 8)
    assert [each.phase for each in watched.findings] == ["parameter"]


class _Scheduled(SGD):
    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        group = self.param_groups[0]
        group["schedule"] = lambda step: 1.0
        group["bound"] = self.zero_grad
        group["itself"] = [self, {"of": group}]
        group["betas"] = (0.9, 0.95 if dist.get_rank() == 0 else 0.99)


@spmd(ranks=2)
def test_hyper_parameters_are_compared_where_they_are_plain_values() -> None:
    model = fully_shard(_mlp())
    optimizer = _Scheduled(model.parameters())
    with watch(model) as watched:
        _step(model, optimizer, 0)
    (found,) = watched.findings
    assert found.tensor == "betas of group 0"
    assert ("values", "rank 0: (0.9, 0.95), rank 1: (0.9, 0.99)") in found.lines


# --- buffers -------------------------------------------------------------------------------------


class _Cosines(nn.Linear):
    """A cache of cosines that grows with the longest input, and one that forwards without gradients
    write to.
    """

    cos: Tensor
    last: Tensor

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("cos", torch.ones(4, 1), persistent=False)
        self.register_buffer("last", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > len(self.cos):
            self.cos = torch.arange(len(x), device=x.device)[:, None].cos()
        if not torch.is_grad_enabled():
            self.last.copy_(x[0])
        return super().forward(x * self.cos[: len(x)])


@pytest.mark.parametrize("alone", [False, True])
@spmd(ranks=2)
def test_buffers_that_evaluation_writes_are_not_compared(alone: bool) -> None:
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(_Cosines(), _Cosines()).to(current_device()))
    optimizer, rank = SGD(model.parameters(), lr=0.1), dist.get_rank()
    with watch(model, action="raise", agree=1):
        for step in range(5):
            _step(model, optimizer, step)
            with keep_unsharded(model), torch.no_grad():
                if step != 2 and (rank == 0 or not alone):
                    model(torch.randn(4 + step + rank, WIDTH, device=current_device()))


@spmd(ranks=2)
def test_a_buffer_that_no_program_has_written_to_is_compared() -> None:
    model = fully_shard(nn.Sequential(_Cosines(), _Cosines()).to(current_device()))
    optimizer = SGD(model.parameters(), lr=0.1)
    with watch(model, agree=1) as watched:
        _step(model, optimizer, 0)
        if dist.get_rank() == 1:
            model[1].last.data[0] = 3.0  # as memory that fails: its version stays as it was
        _step(model, optimizer, 1)
    assert [(each.phase, each.tensor) for each in watched.findings] == [("buffer", "1.last")]


# --- a parameter ---------------------------------------------------------------------------------


@pytest.mark.parametrize("units", [False, True])
@pytest.mark.parametrize("name", ["0.weight", "3.weight"])
@spmd(ranks=2)
def test_a_nan_in_a_shard_is_named_by_the_rank_that_has_it(name: str, units: bool) -> None:
    model = fully_shard(_mlp(), **({"policy": {nn.Linear}} if units else {}))
    optimizer = SGD(model.parameters(), lr=0.1)
    with watch(model, action="raise") as watched, torch.no_grad():
        if dist.get_rank() == 1:
            local_tensor(model.get_parameter(name)).view(-1)[0] = torch.nan
        with torch.enable_grad(), pytest.raises(NonFiniteError):
            _step(model, optimizer, 0)
    (found,) = watched.findings
    assert (found.ranks, found.phase) == ((1,), "parameter")
    assert (found.unit, found.tensor) == (tuple(name.split(".")) if units else ("(root)", name))


# --- hints ---------------------------------------------------------------------------------------


class _Unused(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.5)


@spmd(ranks=2)
def test_dropout_that_no_forward_calls_is_no_hint() -> None:
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(_Unused(), _Unused()).to(current_device()))
    optimizer = SGD(model.parameters(), lr=0.1)
    with watch(model, agree=1) as watched:
        _step(model, optimizer, 0)
    assert (watched.findings, watched.hints) == ([], [])


@spmd(ranks=2)
def test_a_hint_is_logged_and_is_no_finding() -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("composable").addHandler(handler)
    try:
        torch.manual_seed(0)
        model = fully_shard(
            nn.Sequential(nn.Linear(WIDTH, 2), nn.Dropout(0.5)).to(current_device())
        )
        with watch(model, action="raise") as watched:
            _step(model, SGD(model.parameters(), lr=0.1), 0)
    finally:
        logging.getLogger("composable").removeHandler(handler)
    assert (len(watched.findings), len(watched.hints)) == (0, 1)
    assert len(said) == (dist.get_rank() == 0)


@spmd(ranks=2)
def test_a_rank_that_a_reduction_has_sent_a_nan_to_is_not_named() -> None:
    """In the second backward of an accumulation both ranks have the first one's mean."""
    model = _Spoiling().to(current_device())
    replicate(model, gradient_as_bucket_view=True)
    x = torch.ones(2, 4, device=current_device())
    with watch(model) as watched:
        for _ in range(2):
            model(x).sum().backward()
        watched.end_step()
    assert watched.findings[0].ranks == (1,)
    assert watched.findings[0].tensor == "weight"
