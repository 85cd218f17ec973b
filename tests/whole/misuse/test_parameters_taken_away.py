"""Parameters that users take away from an annotated module: it computes without them, and they do
not come back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable import (
    MixedPrecisionPolicy,
    fully_shard,
    no_sync,
    reduce_gradients,
    registry,
    remove,
    replicate,
)
from tests.helpers.compare import assert_mean_gradients
from tests.helpers.refusals import refusal
from tests.helpers.world import Pool, current_device, spmd


class Model(nn.Module):
    """What is taken away stands before the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.spare = nn.Parameter(torch.ones(3))
        self.norm = nn.LayerNorm(4)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))  # type: ignore[no-any-return]


def _set_to_none(model: Model) -> None:
    model.first.bias = None  # type: ignore[assignment]


def _delete(model: Model) -> None:
    del model.spare


def _do_both(model: Model) -> None:
    _set_to_none(model)
    _delete(model)


_CHANGES: Final[dict[str, Callable[[Model], None]]] = {
    "None": _set_to_none,
    "deleted": _delete,
    "both": _do_both,
}


def _next_to_shards(model: Model) -> None:
    replicate(model.first)
    fully_shard(model)


_SCHEMES: Final[dict[str, Callable[..., Any]]] = {
    "sharded": fully_shard,
    "units": lambda model: fully_shard(model, policy={nn.Linear}),
    "replicated": replicate,
    "next to shards": _next_to_shards,
}


def _model() -> Model:
    torch.manual_seed(0)
    return Model().to(current_device())


def _step(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(dist.get_rank())
    model(torch.randn(3, 4, generator=generator).to(current_device())).square().mean().backward()


def _trains(scheme: str, how: str, steps: int) -> None:
    change = _CHANGES[how]
    plain, model = _model(), _model()
    change(plain)
    _step(plain)
    _SCHEMES[scheme](model)
    for _ in range(steps):
        _step(model)
    model.zero_grad()
    change(model)
    for _ in range(2):
        model.zero_grad()
        _step(model)
        assert_mean_gradients(plain, model, rtol=1.3e-6, atol=1e-5)
    with no_sync(model):
        _step(model)
    other = nn.Linear(4, 2).to(current_device())
    other(torch.ones(1, 4, device=current_device())).sum().backward()
    torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)  # asks for what all units hold
    reduce_gradients(model)
    with model.last.register_forward_hook(lambda *_: 1 / 0), pytest.raises(ZeroDivisionError):
        _step(model)
    _step(model)  # with the gradients from before
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for module in (model, *model.children()):
        for verb in (fully_shard, replicate):
            if verb.__name__ in registry(module):
                remove(module, verb)
    assert [*dict(model.named_parameters())] == [*dict(plain.named_parameters())]
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


@pytest.mark.parametrize("scheme", _SCHEMES)
@pytest.mark.parametrize("how", _CHANGES)
def test_what_is_left_trains_on_and_what_is_gone_stays_away(
    pool: Pool, scheme: str, how: str
) -> None:
    for steps in (0, 1):
        pool.run(2, _trains, scheme, how, steps)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.table = nn.Linear(4, 4), nn.Embedding(6, 4, sparse=True)
        self.norm, self.last = nn.LayerNorm(4), nn.Linear(4, 2)

    def forward(self, index: Tensor) -> Tensor:
        return self.last(self.norm(self.first(self.table(index))))  # type: ignore[no-any-return]


@pytest.mark.sparse
@spmd(ranks=2)
def test_the_other_parameters_of_a_replicated_module_keep_their_names_dtypes_and_sparse_gradients() -> None:  # fmt: skip  # noqa: E501
    torch.manual_seed(0)
    model = Table().to(current_device())
    replicate(model, mp_policy=MixedPrecisionPolicy("bf16", full_precision_classes=nn.LayerNorm))
    model.first.bias = None  # type: ignore[assignment]
    index = torch.tensor([0, 1, 1 + dist.get_rank()], device=current_device())
    model(index).float().square().mean().backward()
    assert model.table.weight.grad is not None
    assert model.table.weight.grad.is_sparse
    gradient, other = model.norm.weight.grad, model.last.weight.grad
    assert gradient is not None
    assert other is not None
    assert not torch.equal(gradient, gradient.bfloat16().float())  # it was summed in its own dtype
    assert torch.equal(other, other.bfloat16().float())
    model.zero_grad()
    with no_sync(model):
        model(index).float().square().mean().backward()
    for parameter in (
        model.first.weight,
        model.table.weight,
        *model.norm.parameters(),
        model.last.bias,
    ):
        parameter.grad = None
    said = refusal(torch.optim.SGD(model.parameters(), lr=0.1).step)
    assert "parameter 'last.weight'" in said, said
