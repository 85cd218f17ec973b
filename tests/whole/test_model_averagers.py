"""torch's model averagers: they average what is replicated, with gradients or without, and are refused what is sharded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from textwrap import fill
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline as assert_text
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import ModelAverager, PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.distributed.device_mesh import init_device_mesh

from composable import fully_shard, replicate
from tests.helpers.compare import full_parameters
from tests.helpers.refusals import refusal
from tests.helpers.world import Pool, current_device, need_devices


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)).to(current_device())


def _hybrid(model: nn.Module) -> None:
    fully_shard(model, mesh=init_device_mesh(current_device().type, (2, 2), mesh_dim_names=("replicate", "shard")))


def _next_to_shards(model: nn.Module) -> None:
    replicate(model.get_submodule("0"))
    fully_shard(model)


_SCHEMES: Final[dict[str, Callable[[nn.Module], Any]]] = {
    "sharded": lambda model: fully_shard(model, policy={nn.Linear}),
    "hybrid": _hybrid,
    "next to shards": _next_to_shards,
}


def _refused(scheme: str) -> str:
    model = _model()
    _SCHEMES[scheme](model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = refusal(
        lambda: PeriodicModelAverager(period=2).average_parameters(model.parameters())
    )  # before a gradient is there
    model(torch.ones(2, 4, device=current_device())).sum().backward()
    before = {name: value.clone() for name, value in full_parameters(model).items()}
    for given in (model.parameters(), optimizer.param_groups):
        assert refusal(lambda given=given: PeriodicModelAverager(period=2).average_parameters(given)) == first
    for name, value in full_parameters(model).items():
        assert torch.equal(value, before[name]), name
    optimizer.step()
    return first


def test_sharded_parameters_are_refused_by_name_before_anything_happens(pool: Pool) -> None:
    found = {scheme: pool.run(4, _refused, scheme) for scheme in _SCHEMES}
    for by_rank in found.values():
        assert [text.replace(f"on rank {rank} ", "on rank 0 ") for rank, text in enumerate(by_rank)] == [by_rank[0]] * 4
    assert_text(
        "\n".join(fill(f"{scheme}: {by_rank[0]}", 110) for scheme, by_rank in found.items()),
        """\
sharded: ShardedParameterError: a model averager on rank 0 was given parameter 'weight' of unit '0', which is
sharded: there is one copy of it, and nothing to average. Pass those that are plain tensors: [p for p in
model.parameters() if not isinstance(p, DTensor)]. No parameter was changed
hybrid: ShardedParameterError: a model averager on rank 0 was given parameter '0.weight' of unit '(root)',
which is sharded: there is one copy of it, and nothing to average. Pass those that are plain tensors: [p for p
in model.parameters() if not isinstance(p, DTensor)]. No parameter was changed
next to shards: ShardedParameterError: a model averager on rank 0 was given parameter 'weight' of unit '0',
which is replicated, and rests as a DTensor because others are sharded, which averagers cannot take. Pass
those that are plain tensors: [p for p in model.parameters() if not isinstance(p, DTensor)]; average
p.to_local() of the others yourself, under torch.no_grad() and on all ranks. No parameter was changed""",
    )


class _Uses(nn.Module):
    """Ranks use different layers, one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.layers[3].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[dist.get_rank() % 2](x)  # type: ignore[no-any-return]


def _averages(make: str) -> None:
    """Parameters are apart by hand, gradients are nowhere, or on some ranks only."""
    torch.manual_seed(0)
    model = replicate(_Uses().to(current_device()))
    start = [parameter.detach().clone() for parameter in model.parameters()]
    ranks, rank = dist.get_world_size(), dist.get_rank()
    foreign = nn.Linear(2, 2).to(current_device())  # nobody's: as torch does
    kept = foreign.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for given in (lambda: [*model.parameters(), *foreign.parameters()], lambda: optimizer.param_groups):
        for forward in (False, True):
            with torch.no_grad():
                for parameter, value in zip(model.parameters(), start, strict=True):
                    parameter.copy_(value + (rank if parameter.requires_grad else 0))
            model.zero_grad()
            if forward:  # a gradient for one layer on each rank, of which the others are told
                model(torch.ones(1, 4, device=current_device())).sum().backward()
                (model.layers[2].weight.grad, model.layers[0].weight.grad) = (
                    None,
                    None if rank else model.layers[0].weight.grad,
                )
            averager: ModelAverager  # its first call averages
            averager = PeriodicModelAverager(2) if make == "periodic" else HierarchicalModelAverager(OrderedDict([(2, ranks)]))
            averager.average_parameters(given())
            for parameter, value in zip(model.parameters(), start, strict=True):
                expected = value + ((ranks - 1) / 2 if parameter.requires_grad else 0)
                torch.testing.assert_close(parameter.detach(), expected)
            assert torch.equal(foreign.weight, kept)
    optimizer.zero_grad()
    model(torch.ones(1, 4, device=current_device())).sum().backward()  # and gradients are means, as before
    gradient = model.layers[0].weight.grad
    assert gradient is not None
    torch.testing.assert_close(gradient, torch.full_like(gradient, 0.5))


@pytest.mark.parametrize("make", ["periodic", "hierarchical"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_replicated_parameters_are_averaged_whoever_has_a_gradient(pool: Pool, ranks: int, make: str, device: str) -> None:
    need_devices(device, ranks)
    pool.run(ranks, _averages, make, device=device)
