"""Communication hooks that one rank alone removes: all ranks are told where they wait for each other, and nothing is summed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh

from composable import fully_shard, register_comm_hook, replicate
from composable.errors import CommunicationError
from tests.helpers.compare import full_gradients
from tests.helpers.world import Pool


def _hybrid(shards: int) -> Callable[[nn.Module], Any]:
    def annotate(model: nn.Module) -> Any:
        mesh = init_device_mesh("cpu", (dist.get_world_size() // shards, shards), mesh_dim_names=("replicate", "shard"))
        return fully_shard(model, mesh=mesh, policy={nn.Linear})

    return annotate


_SCHEMES: Final[dict[str, Callable[[nn.Module], Any]]] = {
    "sharded": lambda model: fully_shard(model, policy={nn.Linear}),
    "replicated": replicate,
    "2x1": _hybrid(1),
    "2x2": _hybrid(2),
}
_BOTH: Final = ("reduce_scatter", "all_reduce")
_CASES: Final[list[tuple[str, tuple[str | None, ...], str | None]]] = [
    ("sharded", (None,), None),
    ("replicated", (None,), None),
    ("2x1", ("all_reduce",), "all_reduce"),
    ("2x2", ("all_reduce",), "all_reduce"),
    ("2x2", ("reduce_scatter",), "reduce_scatter"),
    ("2x2", _BOTH, "all_reduce"),
    ("2x2", _BOTH, "reduce_scatter"),
]


def _model(annotate: Callable[[nn.Module], Any]) -> nn.Module:
    torch.manual_seed(0)
    return annotate(nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3)))  # type: ignore[no-any-return]


def _loss(model: nn.Module, step: int) -> Tensor:
    torch.manual_seed(10 * step + dist.get_rank())
    return model(torch.randn(5, 6)).square().mean()  # type: ignore[no-any-return]


def _remove_alone(scheme: str, stages: tuple[str | None, ...], removed: str | None) -> list[str]:
    """What two steps end with, after the last rank alone has removed a hook; then all remove theirs, and train on."""
    models = [_model(_SCHEMES[scheme]) for _ in range(2)]
    handles = {stage: register_comm_hook(models[1], allreduce_hook, stage=stage) for stage in stages}
    for model in models:
        _loss(model, 0).backward()
    if dist.get_rank() == dist.get_world_size() - 1:
        handles[removed].remove()
    told = []
    for step in (1, 2):
        models[1].zero_grad()
        with pytest.raises(CommunicationError) as caught:
            _loss(models[1], step).backward()
        told.append(str(caught.value).partition("\n")[0])
    handles[removed].remove()
    for step in range(3, 6):
        for model in models:
            model.zero_grad()
            _loss(model, step).backward()
        expected, actual = (full_gradients(model) for model in models)
        for name, gradient in expected.items():
            assert gradient is not None
            assert torch.equal(gradient, actual[name]), f"step {step}: {name}"  # type: ignore[arg-type]
    return told


_SAYS: Final = re.compile(
    r"rank \d: the (all-gather|gradient reduction|gradient all-reduce) of unit '[a-z0-9.()]+'.* failed: rank \d "
)
_NAMES: Final = re.compile(
    r"(?=.*by allreduce_hook).* waits for the .*, and neither rank comes to what the other waits for: .* one of them has cast "
    r"the model, or has other communication hooks$"
)
_TOLD: Final = re.compile(r".* has left this step: its backward did not finish$")


@pytest.mark.host
@pytest.mark.parametrize(("scheme", "stages", "removed"), _CASES)
def test_where_one_rank_alone_removes_a_hook_all_are_told_and_nothing_is_summed(
    pool: Pool, scheme: str, stages: tuple[str | None, ...], removed: str | None
) -> None:
    for texts in zip(*pool.run(4 if scheme == "2x2" else 2, _remove_alone, scheme, stages, removed, device="cpu"), strict=True):
        assert all(map(_SAYS.match, texts)), texts
        assert any(map(_NAMES.match, texts)), texts
        assert all(_NAMES.match(text) or _TOLD.match(text) for text in texts), texts
