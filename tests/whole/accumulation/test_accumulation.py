"""Backwards under `no_sync` add up gradients on each rank; what is averaged in the end is what a
plain model has.

The generated programs open scopes of both levels around single forwards and backwards, between
which ranks leave out layers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from composable import (
    MixedPrecisionPolicy,
    fully_shard,
    no_sync,
    reduce_gradients,
    registry,
    remove,
    replicate,
)
from tests.helpers.battery import Case
from tests.helpers.battery.case import mean_square, rows
from tests.helpers.compare import (
    assert_mean_gradients,
    assert_same_gradients,
    full_gradients,
)
from tests.helpers.schemes import SCHEMES
from tests.helpers.world import current_device, spmd


class Layer(nn.Module):
    """Leaves out its second half, and with it parameters, where `short` says so."""

    short = False

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.scale = (
            nn.Linear(6, 7),
            nn.Linear(7, 6),
            nn.Parameter(torch.tensor(0.7)),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        return x.tanh() if self.short else x + self.down(self.up(x).tanh())


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.layers = nn.ModuleList([Layer() for _ in range(3)])
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)  # type: ignore[no-any-return]


CASE: Final = Case("layers", Layers, rows(4, 6), mean_square, (Layer,))


def replicated_inside_sharded(model: Layers, case: Case) -> None:
    replicate(model.layers[1])
    replicate(model.last)
    fully_shard(model, policy=set(case.units))


def hybrid(model: nn.Module, case: Case) -> None:
    shape = (2, dist.get_world_size() // 2)
    mesh = init_device_mesh(current_device().type, shape, mesh_dim_names=("replicate", "shard"))
    fully_shard(model, policy=set(case.units), mesh=mesh)


def several_roots(model: Layers, case: Case) -> None:
    fully_shard(model.layers[0])
    fully_shard(model.layers[1])
    replicate(model.layers[2])
    replicate(model.first)
    replicate(model.last)


by_policy: Final = SCHEMES["fully_shard by policy"].annotate
replicated: Final = SCHEMES["replicate in small buckets"].annotate
_SCHEMES: Final[dict[str, Callable[..., None]]] = {
    "by_policy": by_policy,
    "keeping": SCHEMES["fully_shard without resharding"].annotate,
    "replicated": replicated,
    "replicated_inside_sharded": replicated_inside_sharded,
    "sharded_inside_replicated": SCHEMES["fully_shard inside replicate"].annotate,
    "several_roots": several_roots,
    "checkpointed": SCHEMES["checkpoint, then fully_shard"].annotate,
    "hybrid": hybrid,
}


_LEVEL: Final = ["all"]  # of the scopes of all programs


def held(
    model: nn.Module, *, enabled: bool = True, level: str | None = None
) -> AbstractContextManager[None]:
    """`no_sync`, if anything is annotated."""
    return (
        no_sync(model, enabled=enabled, level=level or _LEVEL[0])
        if _annotated(model)
        else nullcontext()
    )


def _annotated(model: nn.Module) -> bool:
    return any(registry(module) for module in model.modules())


def _end(model: nn.Module) -> None:
    if _annotated(model):
        reduce_gradients(model)


def _step(model: nn.Module, x: Tensor) -> None:
    model(x).square().mean().backward()


def _shorten(model: Layers, *, short: bool, ranks: int = 1) -> None:
    """From here on the first `ranks` leave parameters of one layer out, and all ranks those of
    another.
    """
    model.layers[0].short = short
    model.layers[1].short = short and dist.get_rank() < ranks


def scopes_in_each_other(model: nn.Module, x: Tensor) -> None:
    with held(model):
        with held(model):
            _step(model, x)
        with held(model, enabled=False):
            _step(model, 2 * x)
        _step(model, 3 * x)
    _step(model, 4 * x)


def an_explicit_end(model: nn.Module, x: Tensor) -> None:
    _end(model)
    with held(model):
        _step(model, x)
        _step(model, 2 * x)
        _end(model)
        _step(model, 3 * x)
    _end(model)
    _end(model)


def clearing_in_between(model: nn.Module, x: Tensor) -> None:
    with held(model):
        _step(model, x)
        model.zero_grad()
        _step(model, 2 * x)
        model.zero_grad(set_to_none=False)
        _step(model, 3 * x)
    _step(model, 4 * x)


def scaling_in_between(model: nn.Module, x: Tensor) -> None:
    _step(model, x)
    with held(model):
        _step(model, 2 * x)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)
    _step(model, 3 * x)


def unused_at_last(model: Layers, x: Tensor) -> None:
    with held(model):
        _step(model, x)
    _shorten(model, short=True)
    _step(model, 2 * x)
    _shorten(model, short=False)


def unused_at_first(model: Layers, x: Tensor) -> None:
    _shorten(model, short=True)
    with held(model):
        _step(model, x)
    _shorten(model, short=False)
    _step(model, 2 * x)


def unused_after_it_was_reduced(model: Layers, x: Tensor) -> None:
    for level in ("all", "replicate"):
        _step(model, x)
        # in a whole replica, where there are some
        _shorten(model, short=True, ranks=dist.get_world_size() // 2)
        with held(model, level=level):
            _step(model, 2 * x)
        _end(model)
        _shorten(model, short=False)


def frozen_in_between(model: Layers, x: Tensor) -> None:
    frozen = [model.first.weight, *model.layers[2].parameters()]
    with held(model):
        _step(model, x)
    for parameter in frozen:
        parameter.requires_grad_(False)
    with held(model):
        _step(model, 2 * x)
    _step(model, 3 * x)
    for parameter in frozen:
        parameter.requires_grad_(True)
    with held(model):
        _step(model, 4 * x)
    _step(model, 5 * x)


def a_part_alone(model: Layers, x: Tensor) -> None:
    with held(model.layers[1]):
        _step(model, x)
    with held(model):
        with held(model.layers[1], enabled=False):
            _step(model, 2 * x)
        _step(model, 3 * x)
    _end(model)


def moved_in_between(model: Layers, x: Tensor) -> None:
    """On all ranks, and on one alone, while parameters of one layer wait on some ranks only."""
    for everywhere in (True, False):
        _shorten(model, short=True)
        for step in range(4):
            with held(model, enabled=step != 1):
                _step(model, (step + 1) * x)
            if everywhere or dist.get_rank() == 0:
                model._apply(torch.clone)  # as `model.to(...)` does
        _end(model)
        _shorten(model, short=False)


PROGRAMS: Final[dict[str, Callable[..., object]]] = {
    program.__name__: program
    for program in (
        scopes_in_each_other, an_explicit_end, clearing_in_between, scaling_in_between,
        unused_at_last, unused_at_first, unused_after_it_was_reduced, frozen_in_between,
        a_part_alone, moved_in_between,
    )
}  # fmt: skip


_CASES: Final = [
    *(
        (4 if scheme in ("by_policy", "hybrid", "replicated") else 2, "all", scheme)
        for scheme in _SCHEMES
    ),
    (4, "replicate", "hybrid"),
    (2, "replicate", "hybrid"),  # one shard per replica
    (2, "replicate", "replicated_inside_sharded"),
]


@pytest.mark.parametrize(("ranks", "level", "scheme"), _CASES)
@spmd()
def test_accumulated_gradients_are_those_of_the_plain_model(scheme: str, level: str) -> None:
    _LEVEL[0] = level
    for name, program in PROGRAMS.items():
        try:
            assert_same_gradients(CASE, _SCHEMES[scheme], program)
        except BaseException as error:
            error.add_note(f"in {name}")
            raise


_PLACEMENTS: Final = {
    "by_policy": {"all": "P, P", "replicate": "S, S", "none": "S, S"},
    "replicated_inside_sharded": {"all": "P, P", "replicate": "S, P", "none": "S, R"},
    "hybrid": {"all": "PP, PP", "replicate": "PS, PS", "none": "RS, RS"},
}


@pytest.mark.parametrize("scheme", _PLACEMENTS)
@spmd(ranks=4)
def test_what_is_held_can_be_seen(scheme: str) -> None:
    """How gradients are distributed after a backward of each kind; their value is the mean over all
    ranks each time.
    """
    device = current_device()
    model, plain = CASE.model(0, 0, device), CASE.model(0, 0, device)
    _SCHEMES[scheme](model, CASE)
    (x,) = CASE.inputs(0, 0, dist.get_rank(), device)
    short = {Partial("avg"): "P", Shard(0): "S", Replicate(): "R"}
    for level, expected in _PLACEMENTS[scheme].items():
        with no_sync(model, enabled=level != "none", level="all" if level == "none" else level):
            _step(model, x)
        _step(plain, x)
        gradients = (model.first.weight.grad, model.last.weight.grad)
        assert (
            ", ".join(
                "".join(short[each] for each in gradient.placements) for gradient in gradients
            )
            == expected
        )
        assert_mean_gradients(plain, model)


@spmd(ranks=1)
def test_one_rank_accumulates_like_several() -> None:
    for annotate in (by_policy, replicated):
        model = CASE.model(0, 0, current_device())
        annotate(model, CASE)
        with no_sync(model):
            _step(model, *CASE.inputs(0, 0, 0, current_device()))
        reduce_gradients(model)
        torch.optim.SGD(model.parameters(), lr=0.1).step()


@spmd(ranks=2)
def test_what_waits_is_reduced_by_the_model_that_a_unit_comes_into_or_leaves() -> None:
    """`replicate` alone reduces by arrival, next to shards in backward's order."""
    torch.manual_seed(0)
    data = torch.randn(2, 2, 3, 4, device=current_device())  # by micro-batch and rank
    mine = data[:, dist.get_rank()]
    for leaves in (False, True):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(current_device())
        plain, whole = copy.deepcopy(model), model
        replicate(model[1])
        if leaves:
            fully_shard(model)
        with no_sync(model[1]):
            model[1](mine[0]).square().mean().backward()
        if leaves:
            remove(model, "fully_shard")
            whole = model[1]
        else:
            fully_shard(model)
        whole(mine[1]).square().mean().backward()
        for rank in range(2):
            plain[1](data[0, rank]).square().mean().backward()
            (plain[1] if leaves else plain)(data[1, rank]).square().mean().backward()
        expected, found = plain[1].weight.grad, model[1].weight.grad
        assert expected is not None
        assert found is not None
        found = found.full_tensor() if isinstance(found, DTensor) else found
        torch.testing.assert_close(found, expected / 2)


class Two(nn.Module):
    """The sum of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) + self.other(x)  # type: ignore[no-any-return]


def _one_dimension(model: nn.Module, **options: Any) -> None:
    fully_shard(model, **options)


def _hybrid(model: nn.Module, **options: Any) -> None:
    mesh = init_device_mesh(current_device().type, (dist.get_world_size(), 1))
    fully_shard(model, mesh=mesh, **options)


def _beside_shards(model: nn.Module, **options: Any) -> None:
    replicate(model.get_submodule("one"), **options)
    fully_shard(model, **options)


@pytest.mark.parametrize(
    ("annotate", "level"),
    [(_one_dimension, "all"), (_beside_shards, "all"), (_hybrid, "all"), (_hybrid, "replicate")],
)
@spmd(ranks=2)
def test_what_waits_to_be_reduced_in_float32_is_added_up_in_float32(
    annotate: Callable[..., None], level: str
) -> None:
    """In bfloat16 256 + 1 is 256."""
    model = Two().to(current_device(), torch.bfloat16)
    annotate(model, mp_policy=MixedPrecisionPolicy(reduce_dtype="fp32"))
    for _ in range(2):
        model.zero_grad()
        for step in range(9):
            with no_sync(model, level=level, enabled=step < 8):
                x = torch.full((1, 4), 1.0 if step else 256.0, dtype=torch.bfloat16)
                model(x.to(current_device())).sum().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            assert parameter.grad.dtype == parameter.grad_dtype == torch.bfloat16
        for gradient in full_gradients(model).values():
            assert torch.equal(gradient, torch.full_like(gradient, 264.0))
