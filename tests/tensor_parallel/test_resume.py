"""Training goes on from a checkpoint with other numbers of data- and tensor-parallel ranks, and
from or with FSDP2, to the losses of one process that never stopped.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as fsdp2

from composable import fully_shard
from tests.helpers.world import spmd
from tests.tensor_parallel.models import (
    MLP,
    OPTIMIZERS,
    WIDTH,
    assert_same_parameters,
    full,
    made,
    mesh_of,
    parallelize_mlp,
)
from tests.tensor_parallel.test_state import _folder

ROWS: Final = 4


def _model(hidden: int) -> nn.Sequential:
    return nn.Sequential(MLP(hidden), nn.Linear(WIDTH, WIDTH), MLP(hidden))


def _sharded(verb: Callable[..., Any], model: nn.Module, mesh: DeviceMesh) -> None:
    for layer in model.children():
        if isinstance(layer, MLP):
            parallelize_mlp(layer, mesh["tp"])
            verb(layer, mesh=mesh["dp"])
    verb(model, mesh=mesh["dp"])


# Who trains, and over which numbers of ranks: (copies of the same training, dp, tp). None: one
# process.
_TARGETS: Final[dict[str, Any]] = {
    "dp 2 x tp 2": (fully_shard, (1, 2, 2)),
    "dp 4": (fully_shard, (1, 4, 1)),
    "tp 4": (fully_shard, (1, 1, 4)),
    "dp 2 x tp 1": (fully_shard, (2, 2, 1)),
    "FSDP2, dp 2 x tp 2": (fsdp2, (1, 2, 2)),
    "one process": None,
}


class _Training:
    def __init__(self, target: Any, hidden: int) -> None:
        self.model, self.rows = made(lambda: _model(hidden)), slice(None)
        if target is not None:
            verb, shape = target
            mesh = mesh_of(*shape, names=("copies", "dp", "tp"))
            _sharded(verb, self.model, mesh)
            each, rank = ROWS // mesh["dp"].size(), mesh["dp"].get_local_rank()
            self.rows = slice(each * rank, each * (rank + 1))
        self.optimizer = OPTIMIZERS["AdamW"](self.model.parameters())

    def run(self, steps: range) -> list[Tensor]:
        """Losses over all rows."""
        losses = []
        for number in steps:
            generator = torch.Generator().manual_seed(number)
            batch = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)[self.rows]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # FSDP2 warns of a view
                loss = (full(self.model(batch)) - batch.sin()).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=number % 2 == 0)
            loss = loss.detach()
            dist.all_reduce(loss)  # ranks with other rows are equally many
            losses.append(loss / dist.get_world_size())
        return losses

    def states(self) -> Any:
        return get_state_dict(self.model, self.optimizer)

    def save(self, folder: str) -> None:
        model, optimizer = self.states()
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)

    def load(self, folder: str) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.zero_()
        model, optimizer = self.states()
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        set_state_dict(
            self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer
        )


@pytest.mark.unsampled
@pytest.mark.skipif(
    torch.__version__ < "2.13",
    reason="torch 2.11's redistribution looks for dimensions of the mesh in another order",
)
@pytest.mark.parametrize("source", ["dp 2 x tp 2", "FSDP2, dp 2 x tp 2"])
@spmd(ranks=4)
def test_training_goes_on_with_other_numbers_of_ranks(source: str) -> None:
    hidden, folder = 7, _folder()
    alone = _Training(None, hidden)
    expected = alone.run(range(4))
    first = _Training(_TARGETS[source], hidden)
    torch.testing.assert_close(first.run(range(2)), expected[:2])
    first.save(folder)
    for name, target in _TARGETS.items():
        if source.startswith("FSDP2") and name.startswith("FSDP2"):
            continue
        other = _Training(target, hidden)
        other.load(folder)
        losses = other.run(range(2, 4))
        torch.testing.assert_close(losses, expected[2:], msg=lambda m, n=name: f"{n}: {m}")
        assert_same_parameters(other.model, alone.model)
