"""How much memory whole parameters take while they are initialised, edited and exported."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from composable import (
    full_state_dict,
    fully_shard,
    load,
    materialize,
    stream_full,
    summon_full_params,
)
from tests.helpers.world import spmd

WIDTH, UNITS = 64, 16
UNIT = 4 * WIDTH * WIDTH  # bytes
# An all-gather of torch's holds its input, its output and a copy; the backend's thread may let go
# of the last ones a little later.
FEW = 6 * UNIT


class Peak(TorchDispatchMode):
    """The most bytes that were alive at a time, of tensors made inside the scope."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0
        self._live: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {
            _storage(leaf)._cdata
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if (
                isinstance(leaf, Tensor)
                and not leaf.is_meta
                and (storage := _storage(leaf))._cdata not in before
            ):
                self._live[storage._cdata] = weakref.ref(storage)
        alive = [
            storage for reference in self._live.values() if (storage := reference()) is not None
        ]
        self.bytes = max(self.bytes, sum(storage.nbytes() for storage in alive))
        return result


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()


def _model() -> nn.Module:
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(UNITS)])
    fully_shard(model, policy={nn.Linear})
    return model


@spmd(ranks=[2, 4])
def test_whole_parameters_come_one_unit_at_a_time() -> None:
    model, shards = _model(), UNITS * UNIT // dist.get_world_size()
    torch.manual_seed(0)
    with Peak() as peak:
        materialize(model)
    # Memory that the shards come from is given back when units are built around it.
    assert shards + UNIT <= peak.bytes <= 2 * shards + 1.5 * UNIT
    with Peak() as peak, torch.no_grad(), summon_full_params(model, rank0_only=True):
        if dist.get_rank() == 0:
            for parameter in model.parameters():
                parameter.mul_(2)
    if dist.get_rank() == 0:
        assert peak.bytes >= UNITS * UNIT
    else:
        assert peak.bytes <= FEW, "edits come one parameter at a time"
    with Peak() as peak:
        for _ in stream_full(model):
            pass
    assert UNIT <= peak.bytes <= FEW
    with Peak() as peak:
        full_state_dict(model)
    assert peak.bytes <= (UNITS * UNIT if dist.get_rank() == 0 else 0) + FEW


@spmd(ranks=[2, 4])
def test_a_folder_is_read_into_the_shards(tmp_path: Path) -> None:
    model, shards = _model(), UNITS * UNIT // dist.get_world_size()
    if dist.get_rank() == 0:
        tensors = {f"{number}.weight": torch.ones(WIDTH, WIDTH) for number in range(UNITS)}
        save_file(tensors, tmp_path / "model.safetensors")
    dist.barrier()
    with Peak() as peak:
        load(model, tmp_path)
    # Memory that the shards come from is given back when units are built around it.
    assert shards <= peak.bytes <= 2 * shards + UNIT
    assert all(bool((each.to_local() == 1).all()) for each in model.parameters())  # type: ignore[attr-defined]


@spmd(ranks=2)
def test_the_measure_sees_what_is_whole_at_once() -> None:
    model = _model()
    torch.manual_seed(0)
    materialize(model)
    with Peak() as peak:
        everything = [parameter.full_tensor() for parameter in model.parameters()]  # type: ignore[attr-defined]
    assert len(everything) * UNIT <= peak.bytes
